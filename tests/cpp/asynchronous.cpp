// Transfers and events: polling, the descriptor, a peer that does not answer, cancelling, and the end of the engine.
// Not for: the bytes and refusals of each asynchronous call, which are those of its twin (end.cpp, `calls async`).
#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <type_traits>

#include "peer.h"

using namespace llm_datadist;

namespace {

static_assert(std::is_nothrow_move_constructible<Transfer>::value, "handles live in containers");
static_assert(!std::is_copy_constructible<Transfer>::value, "a handle frees its transfer once");

// An engine, cluster 1, that is linked to the peer, and its cache.
struct Local {
  explicit Local(const Peer &peer) {
    CHECK_STATUS(engine.Initialize(PeerOptions("")), LLM_SUCCESS);
    CHECK_STATUS(engine.AllocateCache(Int32Desc(2, {kRows, kRowValues}), cache), LLM_SUCCESS);
    Fill(cache, kRows * kRowValues, 1);
    peer.Link(engine);
  }

  // Starts to pull row `row` of the peer to the same row.
  Transfer Pull(uint64_t row, int32_t timeout_ms = 0) {
    Transfer transfer;
    CHECK_STATUS(engine.PullKvBlocksAsync(CacheIndex{2, 1, 0}, cache, {row}, {row}, transfer, {}, timeout_ms),
                 LLM_SUCCESS);
    return transfer;
  }

  // Whether a row has the values of `seed`.
  bool Has(size_t row, int32_t seed) const {
    for (size_t tensor = 0; tensor < 2; ++tensor) {
      for (size_t at = row * kRowValues; at < (row + 1) * kRowValues; ++at) {
        if (Values(cache, tensor)[at] != Pattern(seed, tensor, at)) {
          return false;
        }
      }
    }
    return true;
  }

  LlmDataDist engine{1, LlmRole::kDecoder};
  Cache cache{};
};

// A program that waits for the descriptor gets every event once, in order, and the bytes are in place.
void TestPolling(const Peer &peer) {
  Local local(peer);
  std::vector<Event> events(3);
  CHECK_STATUS(local.engine.Poll(100, events), LLM_SUCCESS);
  CHECK(events.empty());
  int descriptor = -1;
  int again = -1;
  CHECK_STATUS(local.engine.EventDescriptor(descriptor), LLM_SUCCESS);
  CHECK_STATUS(local.engine.EventDescriptor(again), LLM_SUCCESS);
  CHECK(descriptor == again && !Readable(descriptor, 0));
  std::map<uint64_t, Transfer> running;
  for (uint64_t row = 0; row < 4; ++row) {
    Transfer transfer = local.Pull(row);
    const uint64_t number = transfer.Number();
    CHECK(number != 0 && running.emplace(number, std::move(transfer)).second);
    CHECK(transfer.Number() == 0);
  }
  while (!running.empty()) {
    CHECK(Readable(descriptor, kLong));
    CHECK_STATUS(local.engine.Poll(1, events), LLM_SUCCESS);
    CHECK(events.size() == 1 && events[0].kind == EventKind::kCompleted && events[0].status == LLM_SUCCESS);
    CHECK(events[0].bytes == 2 * kRowValues * sizeof(int32_t));
    const auto found = running.find(events[0].transfer);
    CHECK(found != running.end() && found->second.Done());
    CHECK(found->second.Bytes() == events[0].bytes && found->second.Nanos() == events[0].nanos);
    CHECK_STATUS(found->second.Result(), LLM_SUCCESS);
    running.erase(found);
  }
  CHECK(!Readable(descriptor, 0));
  for (size_t row = 0; row < kRows; ++row) {
    CHECK(local.Has(row, row < 4 ? 7 : 1));
  }
  // An outcome that was taken is no event. The other one is, although its handle is gone.
  CHECK_STATUS(local.Pull(4).Wait(kLong), LLM_SUCCESS);
  const uint64_t number = local.Pull(5).Number();
  CHECK_STATUS(local.engine.Drain(kLong), LLM_SUCCESS);
  CHECK_STATUS(local.engine.Poll(100, events), LLM_SUCCESS);
  CHECK(events.size() == 1 && events[0].transfer == number && local.Has(5, 7));
}

// More events than Poll gets from the library at a time.
void TestManyEvents(const Peer &peer) {
  Local local(peer);
  std::vector<uint64_t> started;
  for (size_t index = 0; index < 300; ++index) {
    Transfer transfer;
    CHECK_STATUS(local.engine.CopyKvBlocksAsync(local.cache, local.cache, {0}, {{1}}, transfer), LLM_SUCCESS);
    started.push_back(transfer.Number());
  }
  CHECK_STATUS(local.engine.Drain(kLong), LLM_SUCCESS);
  std::vector<Event> events;
  std::vector<uint64_t> ended;
  for (const size_t most : {0U, 1U, 130U, 1000U, 1000U}) {
    CHECK_STATUS(local.engine.Poll(most, events), LLM_SUCCESS);
    CHECK(events.size() == std::min<size_t>(most, 300 - ended.size()));
    for (const Event &event : events) {
      ended.push_back(event.transfer);
    }
  }
  // A copy that starts at the moment another one ends may be reported first.
  std::sort(ended.begin(), ended.end());
  std::sort(started.begin(), started.end());
  CHECK(ended == started);
}

// Threads that start transfers and threads that poll share one object: each event goes to one of them.
void TestThreads(const Peer &peer) {
  constexpr size_t kThreads = 3;
  constexpr size_t kEach = 60;
  Local local(peer);
  std::vector<std::multiset<uint64_t>> started(kThreads);
  std::vector<std::multiset<uint64_t>> ended(kThreads);
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::vector<Event> events;
      for (size_t index = 0; index < kEach; ++index) {
        started[thread].insert(local.Pull(index % kRows).Number());
        CHECK_STATUS(local.engine.Poll(2, events), LLM_SUCCESS);
        for (const Event &event : events) {
          ended[thread].insert(event.transfer);
        }
      }
    });
  }
  for (auto &thread : threads) {
    thread.join();
  }
  CHECK_STATUS(local.engine.Drain(kLong), LLM_SUCCESS);
  std::vector<Event> rest;
  CHECK_STATUS(local.engine.Poll(kThreads * kEach, rest), LLM_SUCCESS);
  for (const Event &event : rest) {
    ended[0].insert(event.transfer);
  }
  for (size_t thread = 1; thread < kThreads; ++thread) {
    started[0].insert(started[thread].begin(), started[thread].end());
    ended[0].insert(ended[thread].begin(), ended[thread].end());
  }
  CHECK(started[0].size() == kThreads * kEach && started[0] == ended[0]);
}

// A transfer from a peer that does not answer runs until its own limit, or until it is cancelled.
void TestStoppedPeer(const Peer &peer) {
  Local local(peer);
  peer.Stop();
  Transfer cancelled = local.Pull(0);
  Transfer late = local.Pull(1, 50);
  CHECK(!cancelled.Done() && !cancelled.Cancelled());
  CHECK_STATUS(cancelled.Result(), LLM_WAIT_PROC_TIMEOUT);
  CHECK_STATUS(cancelled.Wait(1), LLM_WAIT_PROC_TIMEOUT);
  CHECK(LastErrorMessage() == "the transfer still runs");
  CHECK_STATUS(local.engine.Drain(0), LLM_TIMEOUT);
  CHECK_STATUS(late.Wait(kLong), LLM_TIMEOUT);
  CHECK(LastErrorMessage().find("limit_ms=50") != std::string::npos);
  CHECK(late.Done() && !late.Cancel() && !late.Cancelled());
  std::vector<Event> events;
  CHECK_STATUS(local.engine.Poll(100, events), LLM_SUCCESS);
  CHECK(events.empty());

  CHECK(cancelled.Cancel() && cancelled.Cancelled());
  CHECK_STATUS(local.engine.Drain(kLong), LLM_SUCCESS);
  CHECK_STATUS(local.engine.Poll(100, events), LLM_SUCCESS);
  CHECK(events.size() == 1 && events[0].transfer == cancelled.Number() && events[0].status == LLM_FAILED);
  CHECK_STATUS(cancelled.Result(), LLM_FAILED);
  CHECK(LastErrorMessage().find("cancelled") != std::string::npos && !cancelled.Cancel());
  // The rows are free again, and the link works.
  CHECK_STATUS(local.engine.CopyKvBlocks(local.cache, local.cache, {5}, {{0}, {1}}), LLM_SUCCESS);
  peer.Continue();
  CHECK_STATUS(local.Pull(2).Wait(kLong), LLM_SUCCESS);
  CHECK(local.Has(2, 7));
}

// Finalize and the destructor end transfers that run. Their handles, and those of ended ones, still answer.
void TestEnd(const Peer &peer) {
  for (const bool finalize : {true, false}) {
    Transfer ended;
    Transfer ran;
    {
      Local local(peer);
      ended = local.Pull(0);
      CHECK_STATUS(ended.Wait(kLong), LLM_SUCCESS);
      peer.Stop();
      ran = local.Pull(1);
      CHECK(!ran.Done());
      if (finalize) {
        local.engine.Finalize();
        CHECK(ran.Done());
        std::vector<Event> events;
        int descriptor = -1;
        CHECK_STATUS(local.engine.Poll(1, events), LLM_FAILED);
        CHECK_STATUS(local.engine.EventDescriptor(descriptor), LLM_FAILED);
        CHECK_STATUS(local.engine.Drain(0), LLM_FAILED);
      }
    }
    CHECK(ran.Done() && !ran.Cancel() && !ran.Cancelled());
    CHECK_STATUS(ran.Result(), LLM_FAILED);
    CHECK(LastErrorMessage().find("finalized") != std::string::npos);
    CHECK_STATUS(ended.Result(), LLM_SUCCESS);
    CHECK(ended.Bytes() == 2 * kRowValues * sizeof(int32_t));
    peer.Continue();
  }
}

// A call of another thread that waits for transfers does not keep them from ending with the engine.
void TestEndBesideDrain(const Peer &peer) {
  Local local(peer);
  peer.Stop();
  const Transfer ran = local.Pull(1);
  std::atomic<bool> begins{false};
  std::thread waiting([&] {
    begins = true;
    const Status status = local.engine.Drain(kLong);
    CHECK(status == LLM_SUCCESS || status == LLM_FAILED);  // FAILED if Finalize came first
  });
  while (!begins) {
    std::this_thread::yield();
  }
  local.engine.Finalize();
  waiting.join();
  CHECK_STATUS(ran.Result(), LLM_FAILED);
  peer.Continue();
}

// Moving a handle frees the one that it replaces, and leaves an empty one.
void TestHandles(const Peer &peer) {
  Local local(peer);
  Transfer first = local.Pull(0);
  Transfer second = local.Pull(1);
  const uint64_t number = second.Number();
  CHECK_STATUS(second.Wait(kLong), LLM_SUCCESS);
  first = std::move(second);
  CHECK(first.Number() == number && second.Number() == 0 && second.Done());
  CHECK_STATUS(first.Result(), LLM_SUCCESS);
  CHECK_STATUS(second.Result(), LLM_FAILED);
  // A call that is refused leaves the handle as it is.
  CHECK_STATUS(local.engine.PullKvBlocksAsync(CacheIndex{2, 1, 0}, local.cache, {0}, {kRows}, first),
               LLM_PARAM_INVALID);
  CHECK(first.Number() == number);
}

}  // namespace

int main() {
  const Peer peer;
  TestPolling(peer);
  TestManyEvents(peer);
  TestThreads(peer);
  TestStoppedPeer(peer);
  TestEnd(peer);
  TestEndBesideDrain(peer);
  TestHandles(peer);
  std::cout << "done" << std::endl;
  return 0;
}
