// The example of the page CopyKvCache.md as a program: device to device, and device to host by address.
//
// The line of the page lacks its semicolon; seed_copy.inc adds it. Not for: other calls (end.cpp).
#include "check.h"

using namespace llm_datadist;

size_t DefaultsOfTheStructures();  // second.cpp

int main() {
  CHECK(DefaultsOfTheStructures() == 1);
  LlmDataDist llm_datadist(1, LlmRole::kPrompt);
  CHECK_STATUS(llm_datadist.CopyKvCache(Cache{}, Cache{}), LLM_FAILED);  // not initialized
  CHECK_STATUS(llm_datadist.Initialize({{OPTION_DEVICE_ID, "0"}}), LLM_SUCCESS);
  Cache src_cache{};
  Cache dst_cache{};
  CHECK_STATUS(llm_datadist.AllocateCache(Int32Desc(2, {4, 16}), src_cache), LLM_SUCCESS);
  CHECK_STATUS(llm_datadist.AllocateCache(Int32Desc(2, {4, 16}), dst_cache), LLM_SUCCESS);
  Fill(src_cache, 64, 1);
  Fill(dst_cache, 64, 2);
  {
#include "seed_copy.inc"
    CHECK_STATUS(ret, LLM_SUCCESS);
  }
  for (size_t tensor = 0; tensor < 2; ++tensor) {
    for (size_t at = 0; at < 64; ++at) {
      CHECK(Values(dst_cache, tensor)[at] == Pattern(at < 16 ? 1 : 2, tensor, at));
    }
  }
  // As in the tests of the original: slot 0 to slot 1 of one cache, slot 2 to slot 3 of the caller's host memory.
  CHECK_STATUS(llm_datadist.CopyKvCache(src_cache, src_cache, 0, 1), LLM_SUCCESS);
  std::vector<std::vector<int32_t>> memory(2, std::vector<int32_t>(64, -7));
  Cache host{};
  host.cache_desc = Int32Desc(2, {4, 16}, CachePlacement::kHost);
  for (auto &tensor : memory) {
    host.tensor_addrs.push_back(reinterpret_cast<uintptr_t>(tensor.data()));
  }
  CHECK_STATUS(llm_datadist.CopyKvCache(src_cache, host, 2, 3), LLM_SUCCESS);
  for (size_t tensor = 0; tensor < 2; ++tensor) {
    for (size_t at = 0; at < 64; ++at) {
      const size_t from = at >= 16 && at < 32 ? at - 16 : at;
      CHECK(Values(src_cache, tensor)[at] == Pattern(1, tensor, from));
      CHECK(memory[tensor][at] == (at < 48 ? -7 : Pattern(1, tensor, at - 16)));
    }
  }
  CHECK_STATUS(llm_datadist.CopyKvCache(host, src_cache, 0, 0), LLM_PARAM_INVALID);
  CHECK(LastErrorMessage().find("host memory") != std::string::npos);
  CHECK_STATUS(llm_datadist.DeallocateCache(src_cache.cache_id), LLM_SUCCESS);
  CHECK_STATUS(llm_datadist.DeallocateCache(src_cache.cache_id), LLM_SUCCESS);
  CHECK_STATUS(llm_datadist.CopyKvCache(src_cache, dst_cache), LLM_KV_CACHE_NOT_EXIST);
  llm_datadist.Finalize();
  CHECK_STATUS(llm_datadist.CopyKvCache(dst_cache, dst_cache), LLM_FAILED);
  std::cout << "copied" << std::endl;
  return 0;
}
