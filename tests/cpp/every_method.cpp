// Every method of the class once, with the types and the order of arguments of contract, C++ §4. The file must compile in
// every dialect and without exceptions, and link without optimisation. Not for: what the calls do (end.cpp).
#include <cstdlib>

#include "llm_datadist/llm_datadist.h"

using namespace llm_datadist;

int main() {
  LlmDataDist engine(uint64_t{1}, LlmRole::kPrompt);
  const std::map<std::string, std::string> options{{OPTION_DEVICE_ID, "0"}, {OPTION_BUF_POOL_CFG, "{\"buf_pool_size\":65536}"}};
  if (engine.Initialize(options) != LLM_SUCCESS) {
    return 1;
  }
  CacheDesc desc{};
  desc.num_tensors = 1U;
  desc.data_type = DT_INT32;
  desc.shape = {4, 16};
  Cache cache{};
  if (engine.AllocateCache(desc, cache) != LLM_SUCCESS) {
    return 2;
  }
  std::vector<int32_t> own(64);
  const std::vector<uint64_t> addrs{reinterpret_cast<uintptr_t>(own.data())};
  int64_t id = -1;
  if (engine.RegisterKvCache(desc, addrs, RegisterCfg{}, id) != LLM_SUCCESS) {
    return 3;
  }
  const CacheIndex remote{7U, 1, 0U};
  std::vector<Status> rets;
  ClusterInfo peer{};
  const Status failed[] = {
      engine.SetRole(LlmRole::kEnd),
      engine.SetRole(LlmRole::kEnd, options),
      engine.LinkLlmClusters({}, rets),
      engine.LinkLlmClusters({peer}, rets, int32_t{0}),
      engine.UnlinkLlmClusters({}, rets),
      engine.UnlinkLlmClusters({}, rets, int32_t{1}, true),
      engine.PullKvCache(remote, cache),
      engine.PullKvCache(remote, cache, 0U, int64_t{-1}, KvCacheExtParam{}),
      engine.PullKvBlocks(remote, cache, {0U}, {1U}),
      engine.PullKvBlocks(remote, cache, {0U}, {1U}, KvCacheExtParam{}),
      engine.CopyKvCache(cache, cache, 0U, 9U, uint64_t{0}, int64_t{-1}),
      engine.CopyKvBlocks(cache, cache, {0U}, {}),
      engine.PushKvCache(cache, remote),
      engine.PushKvCache(cache, remote, 0U, int64_t{-1}, KvCacheExtParam{}),
      engine.PushKvBlocks(cache, remote, {0U}, {1U}),
      engine.PushKvBlocks(cache, remote, {0U}, {1U}, KvCacheExtParam{}),
  };
  for (const Status status : failed) {
    if (status == LLM_SUCCESS || LastErrorMessage().empty()) {
      return 4;
    }
  }
  const Status good[] = {
      engine.CopyKvCache(cache, cache),
      engine.CopyKvBlocks(cache, cache, {0U}, {{1U}, {2U}}),
      engine.UnregisterKvCache(id),
      engine.DeallocateCache(cache.cache_id),
  };
  for (const Status status : good) {
    if (status != LLM_SUCCESS) {
      return 5;
    }
  }
  const uint16_t port = engine.ListeningPort();
  engine.Finalize();
  return port == 0U ? 0 : 6;
}
