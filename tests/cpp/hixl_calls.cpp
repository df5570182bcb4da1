// The class hixl::Hixl: every status that can be provoked in one process, bad input, and bytes, and a peer in another
// process. Each command is one test. Not for: peers that stop or die (tests/test_hixl_*.py).
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "adxl/adxl_engine.h"
#include "check.h"
#include "hixl/hixl.h"

#if defined(__has_feature)  // Clang
#define HAS_FEATURE(name) __has_feature(name)
#else
#define HAS_FEATURE(name) 0
#endif

bool TypesOfHixlAreRight();

namespace {

#if defined(__SANITIZE_ADDRESS__) || HAS_FEATURE(address_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

using namespace hixl;

constexpr int32_t kLimit = 20000;
constexpr uint64_t kMax = UINT64_MAX;
constexpr size_t kPage = 4096;

// A socket at a free port of the loopback interface. Without Listen, its port is free again when it is closed.
class Socket {
 public:
  Socket() : descriptor_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    CHECK(bind(descriptor_, reinterpret_cast<sockaddr *>(&at), size) == 0);
    CHECK(getsockname(descriptor_, reinterpret_cast<sockaddr *>(&at), &size) == 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
  }
  Socket(const Socket &) = delete;
  Socket &operator=(const Socket &) = delete;
  ~Socket() { close(descriptor_); }

  // Accepts connections, and never answers.
  void Listen() const { CHECK(listen(descriptor_, 64) == 0); }

  AscendString Address() const { return address_.c_str(); }

 private:
  int descriptor_;
  std::string address_;
};

AscendString FreeAddress() { return Socket().Address(); }

// An engine with one page, or more memory, that it has registered.
class End {
 public:
  explicit End(const AscendString &address, uint8_t fill = 0, const std::map<AscendString, AscendString> &options = {},
               size_t size = kPage)
      : page(size, fill), address_(address) {
    CHECK_STATUS(engine.Initialize(address, options), SUCCESS);
    CHECK_STATUS(engine.RegisterMem({At(0), size}, MEM_DEVICE, handle), SUCCESS);
    CHECK(handle != nullptr);
  }

  const AscendString &Address() const { return address_; }
  uintptr_t At(size_t offset) const { return reinterpret_cast<uintptr_t>(page.data()) + offset; }

  Hixl engine;
  std::vector<uint8_t> page;
  MemHandle handle = nullptr;

 private:
  AscendString address_;
};

// Checks every call on an object that is not initialized: FAILED comes before any other check.
void CheckNotInitialized(Hixl &engine) {
  auto *const junk = reinterpret_cast<void *>(uintptr_t{77});
  MemHandle handle = junk;
  CHECK_STATUS(engine.RegisterMem({0, 0}, MEM_HOST, handle), FAILED);
  CHECK(handle == nullptr);
  CHECK_STATUS(engine.DeregisterMem(nullptr), FAILED);
  for (const int32_t limit : {1000, 0, -1}) {
    CHECK_STATUS(engine.Connect("x", limit), FAILED);
    CHECK_STATUS(engine.Disconnect("x", limit), FAILED);
    CHECK_STATUS(engine.ConnectAsync("x", limit), FAILED);
    CHECK_STATUS(engine.DisconnectAsync("x", limit), FAILED);
    CHECK_STATUS(engine.TransferSync("x", READ, {}, limit), FAILED);
    CHECK_STATUS(engine.SendNotify("x", {"", ""}, limit), FAILED);
  }
  auto state = AsyncConnectStatus::CONNECTED;
  CHECK_STATUS(engine.GetAsyncConnectStatus("x", state), FAILED);
  CHECK(state == AsyncConnectStatus::NOT_CONNECT);
  std::map<AscendString, AsyncConnectStatus> states{{"x", state}};
  CHECK_STATUS(engine.GetAsyncConnectStatus(states), FAILED);
  CHECK(states.empty());
  TransferReq request = junk;
  CHECK_STATUS(engine.TransferAsync("x", WRITE, {}, TransferArgs{}, request), FAILED);
  CHECK(request == nullptr);
  auto transfer = TransferStatus::WAITING;
  CHECK_STATUS(engine.GetTransferStatus(junk, transfer), FAILED);
  CHECK(transfer == TransferStatus::FAILED);
  std::vector<TransferResult> results(1);
  CHECK_STATUS(engine.GetTransferStatus(GetTransferStatusArgs{}, results), FAILED);
  CHECK(results.empty());
  std::vector<NotifyDesc> notifies;
  CHECK_STATUS(engine.GetNotifies(notifies), FAILED);
  CHECK(notifies.empty());
}

void State() {
  CHECK(TypesOfHixlAreRight());
  Hixl engine;
  const AscendString address = FreeAddress();
  for (int round = 0; round < 2; ++round) {
    CheckNotInitialized(engine);
    engine.Finalize();
    CHECK_STATUS(engine.Initialize(address, {{OPTION_AUTO_CONNECT, "2"}}), PARAM_INVALID);
    CheckNotInitialized(engine);
    CHECK_STATUS(engine.Initialize(address, {{OPTION_AUTO_CONNECT, "1"}}), SUCCESS);
    // Options are checked again; otherwise a second call has no effect, whatever its address.
    CHECK_STATUS(engine.Initialize("nowhere", {}), SUCCESS);
    CHECK_STATUS(engine.Initialize(address, {{OPTION_AUTO_CONNECT, "2"}}), PARAM_INVALID);
    {
      Hixl second;
      CHECK_STATUS(second.Initialize(address, {}), FAILED);
      CHECK_STATUS(second.Initialize("127.0.0.1", {}), SUCCESS);
      CHECK_STATUS(second.Connect(address, kLimit), SUCCESS);
    }
    engine.Finalize();
    engine.Finalize();
  }
  for (const int32_t feature : {0, 1, 2, INT32_MAX, -1, INT32_MIN}) {
    int32_t value = 7;
    const Status expected = feature < 0 ? PARAM_INVALID : SUCCESS;
    CHECK_STATUS(Hixl::GetCapability(static_cast<FeatureType>(feature), value), expected);
    CHECK(value == (feature == 0 || feature == 1 ? FEATURE_SUPPORTED : FEATURE_NOT_SUPPORTED));
  }
}

void Options() {
  Hixl engine;
  for (const char *address : {"", "localhost:1", "1.2.3", "ad.0.0.1:26200", "127.0.0.1:65536", "::1", "127.0.0.1:\xE4"}) {
    CHECK_STATUS(engine.Initialize(address, {}), PARAM_INVALID);
  }
  CHECK_STATUS(engine.Initialize(AscendString("127.0.0.1:0\0", 12), {}), PARAM_INVALID);
  CHECK_STATUS(engine.Initialize("192.0.2.1:26000", {}), FAILED);
  const std::string file(1U << 20U, ' ');
  const std::map<AscendString, AscendString> wrong[] = {
      {{"Unknown", "1"}},
      {{AscendString("AutoConnect\0", 12), "1"}},
      {{OPTION_AUTO_CONNECT, AscendString("1\0", 2)}},
      {{OPTION_AUTO_CONNECT, "\xFF"}},
      {{"\xFF", "1"}},
      {{"", ""}},
      {{OPTION_AUTO_CONNECT, ""}},
      {{OPTION_ENABLE_USE_FABRIC_MEM, "1"}, {OPTION_BUFFER_POOL, "4:8"}},
      {{OPTION_RDMA_TRAFFIC_CLASS, "256"}},
      {{OPTION_RDMA_SERVICE_LEVEL, "8"}},
      {{OPTION_BUFFER_POOL, "4"}},
      {{OPTION_LOCAL_COMM_RES, "[]"}},
      {{OPTION_GLOBAL_RESOURCE_CONFIG, "{\"connect_pool.thread_num\":65}"}},
      {{OPTION_GLOBAL_RESOURCE_CONFIG, file.c_str()}},
  };
  for (const auto &options : wrong) {
    CHECK_STATUS(engine.Initialize("127.0.0.1", options), PARAM_INVALID);
  }
  const std::map<AscendString, AscendString> right{
      {OPTION_ENABLE_USE_FABRIC_MEM, "0"}, {OPTION_RDMA_TRAFFIC_CLASS, "252"}, {OPTION_RDMA_SERVICE_LEVEL, "7"},
      {OPTION_BUFFER_POOL, "0:0"}, {OPTION_AUTO_CONNECT, "0"}, {OPTION_LOCAL_COMM_RES, "{\"version\":\"1.3\"}"},
      {OPTION_GLOBAL_RESOURCE_CONFIG, "{\"connect_pool\":{\"thread_num\":\"64\",\"task_queue_capacity\":65535}}"}};
  CHECK_STATUS(engine.Initialize("127.0.0.1:0", right), SUCCESS);
}

void Registration() {
  End end("127.0.0.1:0");
  const MemHandle junk = view::Pointer(kMax);
  const auto refused = [&](uint64_t addr, uint64_t len) {
    MemHandle handle = junk;
    CHECK_STATUS(end.engine.RegisterMem({addr, len}, MEM_DEVICE, handle), PARAM_INVALID);
    CHECK(handle == nullptr);
  };
  MemHandle again = nullptr;
  CHECK_STATUS(end.engine.RegisterMem({end.At(0), kPage}, MEM_DEVICE, again), SUCCESS);
  CHECK(again == end.handle);
  MemDesc hidden{end.At(0), kPage};
  hidden.local_only = true;
  CHECK_STATUS(end.engine.RegisterMem(hidden, MEM_DEVICE, again), PARAM_INVALID);
  refused(end.At(1), kPage);
  refused(end.At(1), 10);
  refused(end.At(0), kPage - 1);
  for (const uint64_t most : {kMax, kMax - 1, uint64_t{1} << 63U}) {
    refused(most, most);
    refused(end.At(0), most);
  }
  refused(kMax, kPage);
  refused(kMax - 1, kPage);
  refused(kMax, 1);
  refused(0, 0);
  refused(0, kPage);
  refused(end.At(0), 0);
  MemHandle handle = junk;
  CHECK_STATUS(end.engine.DeregisterMem(nullptr), PARAM_INVALID);
  CHECK_STATUS(end.engine.DeregisterMem(junk), SUCCESS);
  CHECK_STATUS(end.engine.DeregisterMem(end.handle), SUCCESS);
  CHECK_STATUS(end.engine.DeregisterMem(end.handle), SUCCESS);
  CHECK_STATUS(end.engine.RegisterMem({end.At(1), 10}, MEM_HOST, handle), SUCCESS);
  CHECK(handle != nullptr && handle != end.handle);
  CHECK_STATUS(end.engine.RegisterMem({end.At(11), 10}, MEM_HOST, handle), SUCCESS);
}

void Links() {
  const Socket silent;
  silent.Listen();
  End a(FreeAddress());
  End b(FreeAddress());
  CHECK_STATUS(a.engine.Connect(b.Address()), SUCCESS);
  CHECK_STATUS(a.engine.Connect(b.Address()), ALREADY_CONNECTED);
  const std::vector<TransferOpDesc> back{{b.At(0), a.At(0), 1}};
  CHECK_STATUS(b.engine.TransferSync(a.Address(), READ, back), NOT_CONNECTED);
  CHECK_STATUS(b.engine.SendNotify(a.Address(), {"", ""}), NOT_CONNECTED);
  CHECK_STATUS(b.engine.Disconnect(a.Address()), NOT_CONNECTED);
  CHECK_STATUS(b.engine.Connect(a.Address()), SUCCESS);
  CHECK_STATUS(a.engine.Disconnect(b.Address()), SUCCESS);
  CHECK_STATUS(a.engine.Disconnect(b.Address()), NOT_CONNECTED);
  CHECK_STATUS(b.engine.TransferSync(a.Address(), READ, back, kLimit), SUCCESS);
  CHECK_STATUS(a.engine.Connect(a.Address()), PARAM_INVALID);
  CHECK_STATUS(a.engine.Connect(FreeAddress()), FAILED);
  CHECK_STATUS(a.engine.Connect(silent.Address(), 200), TIMEOUT);
  for (const AscendString &wrong : {AscendString(), AscendString("x"), AscendString("\xFF"),
                                    AscendString((std::string(b.Address().GetString()) + '\0').c_str(),
                                                 b.Address().GetLength() + 1)}) {
    CHECK_STATUS(a.engine.Connect(wrong), PARAM_INVALID);
    CHECK_STATUS(a.engine.Disconnect(wrong), NOT_CONNECTED);
    CHECK_STATUS(a.engine.TransferSync(wrong, READ, {{a.At(0), b.At(0), 1}}), NOT_CONNECTED);
    auto state = AsyncConnectStatus::CONNECTED;
    CHECK_STATUS(a.engine.GetAsyncConnectStatus(wrong, state), SUCCESS);
    CHECK(state == AsyncConnectStatus::NOT_CONNECT);
  }
  for (const int32_t limit : {0, -1, INT32_MIN}) {
    CHECK_STATUS(a.engine.Connect(b.Address(), limit), PARAM_INVALID);
    CHECK_STATUS(a.engine.Disconnect(b.Address(), limit), PARAM_INVALID);
    CHECK_STATUS(a.engine.ConnectAsync(b.Address(), limit), PARAM_INVALID);
    CHECK_STATUS(a.engine.DisconnectAsync(b.Address(), limit), PARAM_INVALID);
    CHECK_STATUS(b.engine.TransferSync(a.Address(), READ, back, limit), PARAM_INVALID);
    CHECK_STATUS(b.engine.SendNotify(a.Address(), {"", ""}, limit), PARAM_INVALID);
  }
}

void Ranges() {
  End a("127.0.0.1", 1);
  End b(FreeAddress(), 2);
  CHECK_STATUS(a.engine.Connect(b.Address(), kLimit), SUCCESS);
  std::vector<uint8_t> hidden(64, 3);
  MemDesc desc{reinterpret_cast<uintptr_t>(hidden.data()), hidden.size()};
  desc.local_only = true;
  MemHandle handle = nullptr;
  CHECK_STATUS(b.engine.RegisterMem(desc, MEM_HOST, handle), SUCCESS);
  const TransferOpDesc good{a.At(0), b.At(0), 1};
  std::vector<std::vector<TransferOpDesc>> wrong{{}};
  for (const TransferOpDesc &op : std::vector<TransferOpDesc>{{a.At(0), b.At(0), 0},
                                                              {a.At(0), b.At(1), kPage},
                                                              {a.At(1), b.At(0), kPage},
                                                              {a.At(0), kMax, 1},
                                                              {a.At(0), 0, 1},
                                                              {kMax, b.At(0), 1},
                                                              {a.At(0), b.At(0), kMax},
                                                              {kMax, kMax, kMax},
                                                              {a.At(0), desc.addr, 1}}) {
    wrong.push_back({op});
    wrong.push_back({good, op});
  }
  const std::vector<uint8_t> before_a = a.page;
  const std::vector<uint8_t> before_b = b.page;
  for (const auto &ops : wrong) {
    for (const TransferOp operation : {READ, WRITE}) {
      CHECK_STATUS(a.engine.TransferSync(b.Address(), operation, ops, kLimit), PARAM_INVALID);
      TransferReq request = view::Pointer(kMax);
      CHECK_STATUS(a.engine.TransferAsync(b.Address(), operation, ops, TransferArgs{}, request), PARAM_INVALID);
      CHECK(request == nullptr);
    }
  }
  CHECK(a.page == before_a && b.page == before_b && hidden == std::vector<uint8_t>(64, 3));
  CHECK_STATUS(a.engine.TransferSync(b.Address(), READ, {good}, kLimit), SUCCESS);
  CHECK(a.page[0] == 2 && a.page[1] == 1);
  // A range that has ended is never reached again.
  CHECK_STATUS(b.engine.DeregisterMem(b.handle), SUCCESS);
  CHECK_STATUS(a.engine.TransferSync(b.Address(), READ, {{a.At(1), b.At(0), 1}}, kLimit), PARAM_INVALID);
  CHECK(a.page[1] == 1);
}

void Requests() {
  End a("127.0.0.1", 1);
  End b(FreeAddress(), 2);
  CHECK_STATUS(a.engine.Connect(b.Address(), kLimit), SUCCESS);
  constexpr size_t kRequests = 64;
  std::vector<TransferReq> requests(kRequests);
  std::map<TransferReq, const void *> expected;
  for (size_t i = 0; i < kRequests; ++i) {
    const std::vector<TransferOpDesc> ops{{a.At(i * 16), b.At(i * 16), 8}, {a.At(i * 16 + 8), b.At(i * 16 + 8), 4}};
    TransferArgs args;
    args.user_data = view::Pointer(kMax - i);
    CHECK_STATUS(a.engine.TransferAsync(b.Address(), i % 2 == 0 ? READ : WRITE, ops, args, requests[i]), SUCCESS);
    CHECK(requests[i] != nullptr);
    expected[requests[i]] = args.user_data;
  }
  CHECK(expected.size() == kRequests);
  auto state = TransferStatus::WAITING;
  while (state == TransferStatus::WAITING) {
    CHECK_STATUS(a.engine.GetTransferStatus(requests[5], state), SUCCESS);
  }
  CHECK(state == TransferStatus::COMPLETED);
  CHECK_STATUS(a.engine.GetTransferStatus(requests[5], state), PARAM_INVALID);
  CHECK(state == TransferStatus::FAILED);
  CHECK_STATUS(a.engine.GetTransferStatus(nullptr, state), FAILED);
  CHECK_STATUS(a.engine.GetTransferStatus(view::Pointer(kMax), state), PARAM_INVALID);
  CHECK(state == TransferStatus::FAILED);
  expected.erase(requests[5]);
  GetTransferStatusArgs query;
  query.max_query_count = 0;
  std::vector<TransferResult> results(9);
  CHECK_STATUS(a.engine.GetTransferStatus(query, results), SUCCESS);
  CHECK(results.empty());
  query.max_query_count = 3;
  query.skip_waiting = true;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kLimit);
  while (!expected.empty()) {
    CHECK(std::chrono::steady_clock::now() < end);
    CHECK_STATUS(a.engine.GetTransferStatus(query, results), SUCCESS);
    CHECK(results.size() <= 3);
    for (const auto &result : results) {
      CHECK(result.status == TransferStatus::COMPLETED);
      CHECK(expected.count(result.req) == 1 && expected[result.req] == result.user_data);
      expected.erase(result.req);
    }
  }
  CHECK_STATUS(a.engine.GetTransferStatus(GetTransferStatusArgs{}, results), SUCCESS);
  CHECK(results.empty());
  for (size_t at = 0; at < kPage; ++at) {
    const bool moved = at < kRequests * 16 && at % 16 < 12;
    const bool is_read = at / 16 % 2 == 0;
    CHECK(a.page[at] == (moved && is_read ? 2 : 1));
    CHECK(b.page[at] == (moved && !is_read ? 1 : 2));
  }
}

void Notifications() {
  End a("127.0.0.1");
  End b(FreeAddress());
  CHECK_STATUS(a.engine.Connect(b.Address(), kLimit), SUCCESS);
  const std::string longest(1024, 'x');
  const std::string longer(1025, 'x');
  const AscendString with_null("a\0b", 3);
  CHECK_STATUS(a.engine.SendNotify(b.Address(), {longest.c_str(), ""}, kLimit), SUCCESS);
  CHECK_STATUS(a.engine.SendNotify(b.Address(), {with_null, longest.c_str()}, kLimit), SUCCESS);
  CHECK_STATUS(a.engine.SendNotify(b.Address(), {longer.c_str(), ""}), PARAM_INVALID);
  CHECK_STATUS(a.engine.SendNotify(b.Address(), {"", longer.c_str()}), PARAM_INVALID);
  CHECK_STATUS(a.engine.SendNotify(b.Address(), {"\xFF", ""}), PARAM_INVALID);
  CHECK_STATUS(a.engine.SendNotify(b.Address(), {"", "\xFF"}), PARAM_INVALID);
  std::vector<NotifyDesc> notifies{{"kept", ""}};
  CHECK_STATUS(b.engine.GetNotifies(notifies), SUCCESS);
  CHECK(notifies.size() == 3 && notifies[0].name == "kept");
  CHECK(notifies[1].name == longest.c_str() && notifies[1].notify_msg == "");
  CHECK(notifies[2].name == with_null && notifies[2].notify_msg == longest.c_str());
  notifies.clear();
  CHECK_STATUS(b.engine.GetNotifies(notifies), SUCCESS);
  CHECK(notifies.empty());
  for (int i = 0; i < 4096; ++i) {
    CHECK_STATUS(a.engine.SendNotify(b.Address(), {std::to_string(i).c_str(), ""}, kLimit), SUCCESS);
  }
  CHECK_STATUS(a.engine.SendNotify(b.Address(), {"one too many", ""}, kLimit), RESOURCE_EXHAUSTED);
  CHECK_STATUS(b.engine.GetNotifies(notifies), SUCCESS);
  CHECK(notifies.size() == 4096);
  for (size_t i = 0; i < notifies.size(); ++i) {
    CHECK(notifies[i].name == std::to_string(i).c_str());
  }
  CHECK_STATUS(a.engine.SendNotify(b.Address(), {"room again", ""}, kLimit), SUCCESS);
}

AsyncConnectStatus Wait(Hixl &engine, const AscendString &address) {
  auto state = AsyncConnectStatus::CONNECTING;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kLimit);
  while (state == AsyncConnectStatus::CONNECT_PENDING || state == AsyncConnectStatus::CONNECTING ||
         state == AsyncConnectStatus::DISCONNECT_PENDING || state == AsyncConnectStatus::DISCONNECTING) {
    CHECK(std::chrono::steady_clock::now() < end);
    CHECK_STATUS(engine.GetAsyncConnectStatus(address, state), SUCCESS);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return state;
}

void Connections() {
  const Socket silent;
  silent.Listen();
  const AscendString free = FreeAddress();
  const char *pool = "{\"connect_pool\":{\"thread_num\":1,\"task_queue_capacity\":1}}";
  End a("127.0.0.1", 1, {{OPTION_GLOBAL_RESOURCE_CONFIG, pool}});
  End b(FreeAddress(), 2);
  CHECK_STATUS(a.engine.ConnectAsync(b.Address(), kLimit), SUCCESS);
  CHECK(Wait(a.engine, b.Address()) == AsyncConnectStatus::CONNECTED);
  CHECK_STATUS(a.engine.TransferSync(b.Address(), READ, {{a.At(0), b.At(0), 1}}, kLimit), SUCCESS);
  CHECK(a.page[0] == 2);
  CHECK_STATUS(a.engine.ConnectAsync(free, kLimit), SUCCESS);
  CHECK(Wait(a.engine, free) == AsyncConnectStatus::CONNECT_FAILED);
  std::map<AscendString, AsyncConnectStatus> states{{"old", AsyncConnectStatus::CONNECTED}};
  CHECK_STATUS(a.engine.GetAsyncConnectStatus(states), SUCCESS);
  CHECK(states.size() == 2 && states[b.Address()] == AsyncConnectStatus::CONNECTED);
  CHECK(states[free] == AsyncConnectStatus::CONNECT_FAILED);
  CHECK_STATUS(a.engine.DisconnectAsync(b.Address(), kLimit), SUCCESS);
  CHECK(Wait(a.engine, b.Address()) == AsyncConnectStatus::NOT_CONNECT);
  CHECK_STATUS(a.engine.GetAsyncConnectStatus(states), SUCCESS);
  CHECK(states.size() == 1 && states.count(free) == 1);
  CHECK_STATUS(a.engine.TransferSync(b.Address(), READ, {{a.At(0), b.At(0), 1}}, kLimit), NOT_CONNECTED);
  std::vector<Status> codes;
  for (int i = 0; i < 10; ++i) {
    codes.push_back(a.engine.ConnectAsync(silent.Address(), 3000));
  }
  CHECK(codes[0] == SUCCESS && std::count(codes.begin(), codes.end(), RESOURCE_EXHAUSTED) >= 7);
  // With AutoConnect, a transfer connects by itself.
  End c("127.0.0.1", 3, {{OPTION_AUTO_CONNECT, "1"}});
  CHECK_STATUS(c.engine.TransferSync(b.Address(), WRITE, {{c.At(0), b.At(9), 1}}, kLimit), SUCCESS);
  CHECK(b.page[9] == 3);
  CHECK_STATUS(c.engine.Connect(b.Address(), kLimit), ALREADY_CONNECTED);
}

// Several threads use two objects, also while one of them is finalized.
void Threads() {
  End a("127.0.0.1", 1);
  End b(FreeAddress(), 2);
  CHECK_STATUS(a.engine.Connect(b.Address(), kLimit), SUCCESS);
  constexpr size_t kThreads = 4;
  std::atomic<size_t> through{0};
  const auto work = [&](size_t thread) {
    const TransferOpDesc op{a.At(thread * 64), b.At(thread * 64), 64};
    std::vector<TransferResult> results;
    std::vector<NotifyDesc> notifies;
    std::map<AscendString, AsyncConnectStatus> states;
    for (size_t round = 0;; ++round) {
      const Status status = a.engine.TransferSync(b.Address(), round % 2 == 0 ? READ : WRITE, {op}, kLimit);
      TransferReq request = nullptr;
      if (status == FAILED) {
        CHECK_STATUS(a.engine.TransferAsync(b.Address(), READ, {op}, TransferArgs{}, request), FAILED);
        CHECK_STATUS(a.engine.GetTransferStatus(GetTransferStatusArgs{}, results), FAILED);
        CHECK(results.empty());
        return;
      }
      CHECK_STATUS(status, SUCCESS);
      a.engine.TransferAsync(b.Address(), READ, {op}, TransferArgs{}, request);
      a.engine.GetTransferStatus(GetTransferStatusArgs{}, results);
      for (const auto &result : results) {
        CHECK(result.req != nullptr);
      }
      a.engine.SendNotify(b.Address(), {std::to_string(thread).c_str(), "text"}, kLimit);
      CHECK_STATUS(b.engine.GetNotifies(notifies), SUCCESS);
      a.engine.GetAsyncConnectStatus(states);
      through += round == 20 ? 1U : 0U;
    }
  };
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back(work, thread);
  }
  while (through < kThreads) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  a.engine.Finalize();
  // Nothing uses the memory any more.
  a.page = std::vector<uint8_t>();
  for (auto &thread : threads) {
    thread.join();
  }
}

void Adxl() {
  adxl::AdxlEngine a;
  adxl::AdxlEngine b;
  const AscendString address = FreeAddress();
  void *own = nullptr;
  void *theirs = nullptr;
  CHECK_STATUS(adxl::AdxlEngine::MallocMem(adxl::MEM_DEVICE, kPage, &own), adxl::SUCCESS);
  CHECK_STATUS(adxl::AdxlEngine::MallocMem(adxl::MEM_HOST, kPage, &theirs), adxl::SUCCESS);
  CHECK(own != nullptr && theirs != nullptr);
  void *none = own;
  if (!kSanitized) {  // the allocator of the sanitizer ends the program
    CHECK_STATUS(adxl::AdxlEngine::MallocMem(adxl::MEM_HOST, SIZE_MAX / 2, &none), adxl::RESOURCE_EXHAUSTED);
    CHECK(none == nullptr);
  }
  CHECK_STATUS(adxl::AdxlEngine::MallocMem(adxl::MEM_HOST, 0, &none), adxl::PARAM_INVALID);
  CHECK_STATUS(adxl::AdxlEngine::MallocMem(adxl::MEM_HOST, 1, nullptr), adxl::PARAM_INVALID);
  CHECK_STATUS(adxl::AdxlEngine::FreeMem(nullptr), adxl::PARAM_INVALID);
  std::memset(own, 1, kPage);
  std::memset(theirs, 2, kPage);
  int32_t value = 0;
  CHECK_STATUS(adxl::AdxlEngine::GetCapability(adxl::AUTO_CONNECT, value), adxl::SUCCESS);
  CHECK(value == adxl::FEATURE_SUPPORTED);
  CHECK_STATUS(a.Initialize("127.0.0.1", {{adxl::OPTION_BUFFER_POOL, "0:0"}, {adxl::OPTION_AUTO_CONNECT, "1"}}),
               adxl::SUCCESS);
  CHECK_STATUS(b.Initialize(address, {{adxl::OPTION_RDMA_TRAFFIC_CLASS, "132"}, {adxl::OPTION_RDMA_SERVICE_LEVEL, "4"}}),
               adxl::SUCCESS);
  const auto at = reinterpret_cast<uintptr_t>(own);
  const auto remote = reinterpret_cast<uintptr_t>(theirs);
  adxl::MemHandle handle_a = nullptr;
  adxl::MemHandle handle_b = nullptr;
  CHECK_STATUS(a.RegisterMem({at, kPage}, adxl::MEM_DEVICE, handle_a), adxl::SUCCESS);
  CHECK_STATUS(b.RegisterMem({remote, kPage}, adxl::MEM_DEVICE, handle_b), adxl::SUCCESS);
  CHECK_STATUS(a.TransferSync(address, adxl::READ, {{at, remote, 8}}, kLimit), adxl::SUCCESS);
  CHECK_STATUS(a.Connect(address), adxl::ALREADY_CONNECTED);
  adxl::TransferReq request = nullptr;
  CHECK_STATUS(a.TransferAsync(address, adxl::WRITE, {{at + 8, remote + 8, 8}}, adxl::TransferArgs{}, request),
               adxl::SUCCESS);
  auto state = adxl::TransferStatus::WAITING;
  while (state == adxl::TransferStatus::WAITING) {
    CHECK_STATUS(a.GetTransferStatus(request, state), adxl::SUCCESS);
  }
  CHECK(state == adxl::TransferStatus::COMPLETED);
  for (size_t i = 0; i < kPage; ++i) {
    CHECK(static_cast<uint8_t *>(own)[i] == (i < 8 ? 2 : 1));
    CHECK(static_cast<uint8_t *>(theirs)[i] == (i >= 8 && i < 16 ? 1 : 2));
  }
  CHECK_STATUS(a.SendNotify(address, {"name", "text"}, kLimit), adxl::SUCCESS);
  std::vector<adxl::NotifyDesc> notifies;
  CHECK_STATUS(b.GetNotifies(notifies), adxl::SUCCESS);
  CHECK(notifies.size() == 1 && notifies[0].name == "name" && notifies[0].notify_msg == "text");
  CHECK_STATUS(a.Disconnect(address, 10), adxl::SUCCESS);
  CHECK_STATUS(a.DeregisterMem(handle_a), adxl::SUCCESS);
  CHECK_STATUS(b.DeregisterMem(handle_b), adxl::SUCCESS);
  a.Finalize();
  b.Finalize();
  CHECK_STATUS(a.Connect(address), adxl::FAILED);
  CHECK_STATUS(adxl::AdxlEngine::FreeMem(own), adxl::SUCCESS);
  CHECK_STATUS(adxl::AdxlEngine::FreeMem(theirs), adxl::SUCCESS);
}

// Reads from and writes to an engine of another process, which does so with this one when this one has printed a line.
// Until there is a line of input, this process makes no call.
void Peer(const AscendString &address, uintptr_t remote) {
  constexpr size_t kHalf = size_t{4} << 20U;  // above what rings carry
  End a(FreeAddress(), 7, {}, 2 * kHalf);
  const std::vector<TransferOpDesc> read{{a.At(0), remote, kHalf}};
  CHECK_STATUS(a.engine.TransferSync(address, READ, read, kLimit), NOT_CONNECTED);
  CHECK_STATUS(a.engine.Connect(address, kLimit), SUCCESS);
  CHECK_STATUS(a.engine.TransferSync(address, WRITE, {{a.At(kHalf), remote + kHalf, kHalf}}, kLimit), SUCCESS);
  TransferReq request = nullptr;
  CHECK_STATUS(a.engine.TransferAsync(address, READ, read, TransferArgs{}, request), SUCCESS);
  auto state = TransferStatus::WAITING;
  while (state == TransferStatus::WAITING) {
    CHECK_STATUS(a.engine.GetTransferStatus(request, state), SUCCESS);
  }
  CHECK(state == TransferStatus::COMPLETED);
  CHECK_STATUS(a.engine.SendNotify(address, {"moved", AscendString("\0\xC3\xA9", 3)}, kLimit), SUCCESS);
  std::cout << a.Address().GetString() << " " << a.At(0) << std::endl;
  CHECK(std::cin.get() == '\n');
  CHECK(a.page == std::vector<uint8_t>(2 * kHalf, 5));
  std::vector<NotifyDesc> notifies;
  CHECK_STATUS(a.engine.GetNotifies(notifies), SUCCESS);
  CHECK(notifies.size() == 1 && notifies[0].name == "moved" && notifies[0].notify_msg == "back");
  CHECK_STATUS(a.engine.Disconnect(address, kLimit), SUCCESS);
}

}  // namespace

int main(int argc, char **argv) {
  const std::map<std::string, void (*)()> tests{{"state", State},         {"options", Options},
                                                {"registration", Registration}, {"links", Links},
                                                {"ranges", Ranges},       {"requests", Requests},
                                                {"notifications", Notifications}, {"connections", Connections},
                                                {"threads", Threads},     {"adxl", Adxl}};
  if (argc == 4 && std::string(argv[1]) == "peer") {
    Peer(argv[2], std::stoull(argv[3]));
  } else {
    CHECK(argc == 2 && tests.count(argv[1]) == 1);
    tests.at(argv[1])();
  }
  std::cout << "done" << std::endl;
  return 0;
}
