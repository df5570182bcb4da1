// One object of the class and many threads. Each thread copies within its own caches, pulls from and pushes to a peer,
// allocates and registers. It gets its own bytes and its own error texts. Not for: one call at a time (end.cpp).
#include <atomic>
#include <thread>

#include "check.h"

using namespace llm_datadist;

namespace {

constexpr size_t kThreads = 6;
constexpr size_t kRounds = 40;
constexpr size_t kValues = 64;

std::atomic<size_t> initialized{0};

void Work(LlmDataDist &engine, const Cache &remote, uint16_t port, uint32_t thread) {
  if (engine.Initialize({{OPTION_DEVICE_ID, "0"}, {OPTION_BUF_POOL_CFG, "{\"buf_pool_size\":1048576}"}}) == LLM_SUCCESS) {
    ++initialized;
  }
  // One thread makes the link; the others get LLM_ALREADY_LINK.
  std::vector<Status> rets;
  ClusterInfo peer{};
  peer.remote_cluster_id = 2;
  peer.local_ip_infos.resize(1);
  peer.local_ip_infos[0].ip = "127.0.0.1";
  peer.remote_ip_infos.resize(1);
  peer.remote_ip_infos[0].ip = "127.0.0.1";
  peer.remote_ip_infos[0].port = port;
  const Status linked = engine.LinkLlmClusters({peer}, rets, 20000);
  CHECK(linked == LLM_SUCCESS || linked == LLM_ALREADY_LINK);
  for (size_t round = 0; round < kRounds; ++round) {
    const auto seed = static_cast<int32_t>(1 + thread * kRounds + round);
    Cache cache{};
    CHECK_STATUS(engine.AllocateCache(Int32Desc(1, {4, 16}), cache), LLM_SUCCESS);
    Fill(cache, kValues, seed);
    CHECK_STATUS(engine.CopyKvCache(cache, cache, 0, 3), LLM_SUCCESS);
    std::vector<int32_t> own(kValues);
    int64_t id = -1;
    const std::vector<uint64_t> addrs{reinterpret_cast<uintptr_t>(own.data())};
    CHECK_STATUS(engine.RegisterKvCache(Int32Desc(1, {4, 16}), addrs, RegisterCfg{}, id), LLM_SUCCESS);
    Cache mine{};
    mine.cache_id = id;
    CHECK_STATUS(engine.CopyKvBlocks(cache, mine, {3}, {{1}, {2}}), LLM_SUCCESS);
    // Slot `thread` of the peer is this thread's.
    const CacheIndex theirs{2, remote.cache_id, thread};
    CHECK_STATUS(engine.PushKvCache(mine, theirs, 1), LLM_SUCCESS);
    CHECK_STATUS(engine.PullKvCache(theirs, cache, 2), LLM_SUCCESS);
    CHECK_STATUS(engine.UnregisterKvCache(id), LLM_SUCCESS);
    for (size_t at = 0; at < 16; ++at) {
      CHECK(own[16 + at] == Pattern(seed, 0, at) && own[32 + at] == Pattern(seed, 0, at));
      CHECK(Values(cache, 0)[32 + at] == Pattern(seed, 0, at));
    }
    // LastErrorMessage returns the reason of the last failure of the calling thread.
    CHECK_STATUS(engine.CopyKvCache(cache, cache, 0, 1000 + thread), LLM_PARAM_INVALID);
    CHECK(LastErrorMessage().find("dst_batch_index=" + std::to_string(1000 + thread)) != std::string::npos);
    CHECK_STATUS(engine.DeallocateCache(cache.cache_id), LLM_SUCCESS);
  }
}

}  // namespace

int main() {
  LlmDataDist peer(2, LlmRole::kPrompt);
  CHECK_STATUS(peer.Initialize({{OPTION_DEVICE_ID, "0"}, {OPTION_LISTEN_IP_INFO, "127.0.0.1:0"}}), LLM_SUCCESS);
  Cache remote{};
  CHECK_STATUS(peer.AllocateCache(Int32Desc(1, {static_cast<int64_t>(kThreads), 16}), remote), LLM_SUCCESS);
  Fill(remote, kThreads * 16, 9);
  LlmDataDist engine(1, LlmRole::kMix);
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back(Work, std::ref(engine), std::cref(remote), peer.ListeningPort(), thread);
  }
  for (auto &thread : threads) {
    thread.join();
  }
  CHECK(initialized == kThreads);
  for (size_t thread = 0; thread < kThreads; ++thread) {
    for (size_t at = 0; at < 16; ++at) {
      const auto seed = static_cast<int32_t>((thread + 1) * kRounds);
      CHECK(Values(remote, 0)[thread * 16 + at] == Pattern(seed, 0, at));
    }
  }
  engine.Finalize();
  std::cout << "done" << std::endl;
  return 0;
}
