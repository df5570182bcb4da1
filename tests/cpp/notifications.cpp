// Messages between engines and events of links: order, limits, messages with transfers, lost peers, and a program that has no
// memory for an event. Not for: C++ and Python (test_cpp.py), and the pointers of the C interface (crates/capi/src/tests).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>
#include <type_traits>

#include "peer.h"

using namespace llm_datadist;

namespace {

static_assert(std::is_nothrow_move_constructible<Event>::value, "moving events cannot lose one");

// Number of allocations of this thread until one fails; negative for never.
thread_local int64_t allocations_left = -1;

}  // namespace

void *operator new(size_t size) {
  if (allocations_left == 0) {
    throw std::bad_alloc();
  }
  allocations_left -= allocations_left > 0 ? 1 : 0;
  void *memory = std::malloc(std::max<size_t>(size, 1U));
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

// Not inline: GCC would warn that memory of `new` goes to `free`.
__attribute__((noinline)) void operator delete(void *memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void *memory, size_t) noexcept { std::free(memory); }

namespace {

using Messages = std::vector<std::string>;

// Clusters 1 and 2 in this process, linked, with a cache of id 1 each.
struct Engines {
  explicit Engines(bool link = true) {
    for (LlmDataDist *engine : {&one, &two}) {
      Cache &cache = engine == &one ? own : theirs;
      CHECK_STATUS(engine->Initialize(PeerOptions("127.0.0.1:0")), LLM_SUCCESS);
      CHECK_STATUS(engine->AllocateCache(Int32Desc(2, {kRows, kRowValues}), cache), LLM_SUCCESS);
      Fill(cache, kRows * kRowValues, engine == &one ? 1 : 2);
    }
    if (link) {
      Link();
    }
  }

  void Link() {
    std::vector<Status> rets;
    CHECK_STATUS(one.LinkLlmClusters({Cluster2(two.ListeningPort())}, rets, kLong), LLM_SUCCESS);
  }

  // Pulls row 0 of cluster 2. Its message arrives behind all that cluster 1 has sent.
  Status Pull(const std::string *message) {
    Transfer transfer;
    const Status status =
        one.PullKvBlocksAsync(CacheIndex{2, 1, 0}, own, {0}, {0}, transfer, KvCacheExtParam{}, 0, message);
    return status == LLM_SUCCESS ? transfer.Wait(kLong) : status;
  }

  LlmDataDist one{1, LlmRole::kPrompt};
  LlmDataDist two{2, LlmRole::kPrompt};
  Cache own{};
  Cache theirs{};
};

void Await(LlmDataDist &engine) {
  int descriptor = -1;
  CHECK_STATUS(engine.EventDescriptor(descriptor), LLM_SUCCESS);
  CHECK(Readable(descriptor, kLong));
}

// The peer reports what it has polled a little later.
void NotifyOnceThereIsRoom(LlmDataDist &engine, const std::string &message) {
  Status status = LLM_LINK_BUSY;
  for (int32_t waited = 0; status == LLM_LINK_BUSY && waited < kLong; ++waited) {
    status = engine.Notify(2, message);
    if (status == LLM_LINK_BUSY) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  CHECK_STATUS(status, LLM_SUCCESS);
}

// Waits for `count` messages of a cluster, and takes at most `most` events at a time.
Messages Received(LlmDataDist &engine, uint64_t cluster, size_t count, size_t most) {
  Messages messages;
  std::vector<Event> events;
  while (messages.size() < count) {
    Await(engine);
    CHECK_STATUS(engine.Poll(most, events), LLM_SUCCESS);
    CHECK(!events.empty() && events.size() <= most);
    for (const Event &event : events) {
      CHECK(event.kind == EventKind::kNotification && event.cluster_id == cluster && event.status == LLM_SUCCESS);
      CHECK(event.transfer == 0 && event.address.empty() && event.transport.empty() && event.reason.empty());
      messages.push_back(event.payload);
    }
  }
  CHECK(messages.size() == count);
  return messages;
}

// Messages of many lengths, with every byte.
Messages Numbered(size_t count) {
  Messages messages;
  for (size_t number = 0; number < count; ++number) {
    messages.push_back(std::to_string(number) + std::string(number, static_cast<char>(number)));
  }
  return messages;
}

// Every message arrives once, in order, whatever Poll may return at a time.
void TestOrder() {
  const Messages messages = Numbered(400);
  for (const size_t most : {1U, 7U, 64U, 65U, 1000U}) {
    Engines engines;
    for (const std::string &message : messages) {
      CHECK_STATUS(engines.one.Notify(2, message), LLM_SUCCESS);
      CHECK_STATUS(engines.two.Notify(1, message), LLM_SUCCESS);
    }
    CHECK(Received(engines.two, 1, messages.size(), most) == messages);
    CHECK(Received(engines.one, 2, messages.size(), most) == messages);
    std::vector<Event> events(3);
    CHECK_STATUS(engines.two.Poll(most, events), LLM_SUCCESS);
    CHECK(events.empty());
  }
}

// 1,024 messages that the peer has not polled refuse more, and calls that carry one. Polling makes room.
void TestWindow() {
  Engines engines;
  for (size_t number = 0; number < 1024; ++number) {
    CHECK_STATUS(engines.one.Notify(2, std::to_string(number)), LLM_SUCCESS);
  }
  CHECK_STATUS(engines.one.Notify(2, "one more"), LLM_LINK_BUSY);
  CHECK(LastErrorMessage().find("1024 messages") != std::string::npos);
  const std::string message = "refused";
  CHECK_STATUS(engines.Pull(&message), LLM_LINK_BUSY);
  CHECK(Values(engines.own, 0)[0] == Pattern(1, 0, 0));  // nothing has moved
  CHECK_STATUS(engines.Pull(nullptr), LLM_SUCCESS);
  const Messages all = Received(engines.two, 1, 1024, 100);
  for (size_t number = 0; number < all.size(); ++number) {
    CHECK(all[number] == std::to_string(number));
  }
  NotifyOnceThereIsRoom(engines.one, "again");
  CHECK(Received(engines.two, 1, 1, 100) == Messages{"again"});
}

void TestLimits() {
  Engines engines;
  const std::string most(65536, 'm');
  const std::string large(65537, 'l');
  CHECK_STATUS(engines.one.Notify(2, large), LLM_PARAM_INVALID);
  CHECK(LastErrorMessage().find("65537") != std::string::npos);
  CHECK_STATUS(engines.Pull(&large), LLM_PARAM_INVALID);
  CHECK_STATUS(engines.one.Notify(1, "x"), LLM_PARAM_INVALID);
  CHECK_STATUS(engines.one.Notify(9, "x"), LLM_NOT_YET_LINK);
  CHECK_STATUS(engines.one.Notify(2, most), LLM_SUCCESS);
  CHECK_STATUS(engines.one.Notify(2, std::string()), LLM_SUCCESS);
  CHECK(Received(engines.two, 1, 2, 9) == (Messages{most, ""}));
}

// A message that comes with a transfer is the last one, and its bytes are in place.
void TestTransfers() {
  Engines engines;
  for (const std::string &message : Numbered(50)) {
    CHECK_STATUS(engines.one.Notify(2, message), LLM_SUCCESS);
  }
  const KvCacheExtParam ext{};
  const CacheIndex index{2, 1, 0};
  const std::string texts[] = {"pull", "", "push", "blocks"};
  Transfer transfers[4];
  LlmDataDist &one = engines.one;
  CHECK_STATUS(one.PullKvCacheAsync(index, engines.own, transfers[0], 1, -1, ext, kLong, &texts[0]), LLM_SUCCESS);
  CHECK_STATUS(transfers[0].Wait(kLong), LLM_SUCCESS);
  CHECK(Values(engines.own, 1)[kRowValues] == Pattern(2, 1, 0));
  CHECK_STATUS(engines.Pull(&texts[1]), LLM_SUCCESS);
  Messages expected = Numbered(50);
  expected.insert(expected.end(), {texts[0], texts[1]});
  std::vector<Event> events;
  CHECK_STATUS(engines.two.Poll(100, events), LLM_SUCCESS);  // they are there, without waiting
  CHECK(events.size() == expected.size());
  for (size_t at = 0; at < events.size(); ++at) {
    CHECK(events[at].payload == expected[at]);
  }
  CHECK_STATUS(one.PushKvCacheAsync(engines.own, index, transfers[2], 3, -1, ext, 0, &texts[2]), LLM_SUCCESS);
  CHECK(Received(engines.two, 1, 1, 9) == Messages{texts[2]});
  CHECK(Values(engines.theirs, 1)[0] == Pattern(1, 1, 3 * kRowValues));
  CHECK_STATUS(one.PushKvBlocksAsync(engines.own, index, {4}, {5}, transfers[3], ext, 0, &texts[3]), LLM_SUCCESS);
  CHECK(Received(engines.two, 1, 1, 9) == Messages{texts[3]});
  CHECK(Values(engines.theirs, 0)[5 * kRowValues] == Pattern(1, 0, 4 * kRowValues));
  CHECK_STATUS(transfers[2].Wait(kLong), LLM_SUCCESS);
  CHECK_STATUS(transfers[3].Wait(kLong), LLM_SUCCESS);
}

void TestLinks() {
  Engines engines(false);
  std::vector<Event> events;
  for (LlmDataDist *engine : {&engines.one, &engines.two}) {
    CHECK_STATUS(engine->Poll(9, events), LLM_SUCCESS);  // events of links are kept from now on
    CHECK(events.empty());
  }
  for (int round = 0; round < 2; ++round) {
    engines.Link();
    for (LlmDataDist *engine : {&engines.one, &engines.two}) {
      Await(*engine);
      CHECK_STATUS(engine->Poll(9, events), LLM_SUCCESS);
      CHECK(events.size() == 1 && events[0].kind == EventKind::kLinkUp);
      CHECK(events[0].cluster_id == (engine == &engines.one ? 2 : 1) && events[0].incarnation != 0);
      CHECK(events[0].address.find("127.0.0.1:") == 0 && events[0].transport == "tcp");
      CHECK(events[0].reason.empty() && events[0].payload.empty());
    }
    const Event up = events[0];
    std::vector<Status> rets;
    const ClusterInfo peer = Cluster2(engines.two.ListeningPort());
    CHECK_STATUS(engines.one.UnlinkLlmClusters({peer}, rets, kLong), LLM_SUCCESS);
    for (LlmDataDist *engine : {&engines.one, &engines.two}) {
      Await(*engine);
      CHECK_STATUS(engine->Poll(9, events), LLM_SUCCESS);
      CHECK(events.size() == 1 && events[0].kind == EventKind::kLinkDown);
      CHECK(!events[0].reason.empty() && events[0].unacknowledged == 0);
    }
    CHECK(events[0].incarnation == up.incarnation && events[0].address == up.address);
    CHECK_STATUS(engines.one.Notify(2, "x"), LLM_NOT_YET_LINK);
  }
}

// A peer that dies leaves its messages, and the number of those that it has not confirmed. Its successor is another one.
void TestLostPeer(Peer &peer, const Peer &successor) {
  LlmDataDist engine(1, LlmRole::kPrompt);
  std::vector<Event> events;
  CHECK_STATUS(engine.Initialize(PeerOptions("")), LLM_SUCCESS);
  CHECK_STATUS(engine.Poll(9, events), LLM_SUCCESS);
  peer.Link(engine);
  CHECK_STATUS(engine.Poll(9, events), LLM_SUCCESS);
  CHECK(events.size() == 1 && events[0].kind == EventKind::kLinkUp);
  const Event up = events[0];
  peer.Stop();
  for (size_t number = 0; number < 5; ++number) {
    CHECK_STATUS(engine.Notify(2, std::to_string(number)), LLM_SUCCESS);
  }
  peer.Kill();
  Await(engine);
  CHECK_STATUS(engine.Poll(9, events), LLM_SUCCESS);
  CHECK(events.size() == 1 && events[0].kind == EventKind::kLinkDown && events[0].unacknowledged == 5);
  CHECK(events[0].incarnation == up.incarnation && events[0].cluster_id == 2 && !events[0].reason.empty());
  CHECK_STATUS(engine.Notify(2, "x"), LLM_NOT_YET_LINK);
  successor.Link(engine);
  CHECK_STATUS(engine.Poll(9, events), LLM_SUCCESS);
  CHECK(events.size() == 1 && events[0].kind == EventKind::kLinkUp && events[0].incarnation != up.incarnation);
}

// Threads that poll the same object get each message once.
void TestThreads() {
  constexpr size_t kThreads = 3;
  Engines engines;
  Messages sent = Numbered(300);
  std::atomic<size_t> taken{0};
  std::vector<Messages> received(kThreads);
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::vector<Event> events;
      while (taken < 300) {
        CHECK_STATUS(engines.two.Poll(5, events), LLM_SUCCESS);
        taken += events.size();
        for (const Event &event : events) {
          received[thread].push_back(event.payload);
        }
        std::this_thread::yield();
      }
    });
  }
  for (const std::string &message : sent) {
    CHECK_STATUS(engines.one.Notify(2, message), LLM_SUCCESS);
  }
  Messages all;
  for (size_t thread = 0; thread < kThreads; ++thread) {
    threads[thread].join();
    all.insert(all.end(), received[thread].begin(), received[thread].end());
  }
  std::sort(all.begin(), all.end());
  std::sort(sent.begin(), sent.end());
  CHECK(all == sent);
}

// Whichever allocation of Poll fails: the program gets all events, in order, each once.
void TestNoMemory() {
  Engines engines;
  const Messages sent = Numbered(130);  // more than Poll gets from the library at a time
  bool failed = true;
  for (int64_t allocations = 0; failed; ++allocations) {
    for (const std::string &message : sent) {
      NotifyOnceThereIsRoom(engines.one, message);
    }
    const std::string last = "last";
    CHECK_STATUS(engines.Pull(&last), LLM_SUCCESS);  // all messages are there now
    Messages received;
    std::vector<Event> events;
    failed = false;
    allocations_left = allocations;
    try {
      CHECK_STATUS(engines.two.Poll(1000, events), LLM_SUCCESS);
    } catch (const std::bad_alloc &) {
      failed = true;
    }
    allocations_left = -1;
    for (int again = 0; again < 2; ++again) {
      for (const Event &event : events) {
        received.push_back(event.payload);
      }
      CHECK_STATUS(engines.two.Poll(1000, events), LLM_SUCCESS);
    }
    CHECK(events.empty() && received.size() == sent.size() + 1 && received.back() == last);
    received.pop_back();
    CHECK(received == sent);
    CHECK(failed || allocations > 100);  // it has failed at every message before
  }
}

}  // namespace

int main() {
  // Forked before this process has an engine.
  Peer peer;
  const Peer successor;
  TestOrder();
  TestWindow();
  TestLimits();
  TestTransfers();
  TestLinks();
  TestLostPeer(peer, successor);
  TestThreads();
  TestNoMemory();
  std::cout << "done" << std::endl;
  return 0;
}
