// The header in a second file of a program: nothing in it is defined twice, and the numbers are those of the contract.
#include "llm_datadist/llm_datadist.h"

namespace {

using namespace llm_datadist;

static_assert(LLM_SUCCESS == 0U && LLM_FAILED == 0xFFFFFFFFU, "status");
static_assert(static_cast<int32_t>(LlmRole::kPrompt) == 1 && static_cast<int32_t>(LlmRole::kMix) == 3, "roles");
static_assert(static_cast<uint32_t>(CachePlacement::kHost) == 0U, "placements");
static_assert(DT_FLOAT == 0 && DT_BF16 == 27 && DT_INT32 == 3, "types");
static_assert(!std::is_copy_constructible<LlmDataDist>::value, "an engine is one");
#if defined(__x86_64__) && defined(__GLIBCXX__)
static_assert(sizeof(CacheDesc) == 168 && sizeof(Cache) == 328 && sizeof(CacheIndex) == 152, "layout on this machine");
static_assert(sizeof(IpInfo) == 168 && sizeof(ClusterInfo) == 192 && sizeof(LlmDataDist) == 8, "layout on this machine");
#endif

}  // namespace

size_t DefaultsOfTheStructures();

size_t DefaultsOfTheStructures() {
  const CacheDesc desc{};
  const Cache cache{};
  const KvCacheExtParam ext{};
  const ClusterInfo info{};
  const bool right = desc.placement == CachePlacement::kDevice && desc.num_tensors == 0 &&
                     desc.data_type == DT_UNDEFINED && cache.cache_id == -1 && ext.tensor_num_per_layer == 2 &&
                     ext.src_layer_range == std::make_pair(-1, -1) && ext.dst_layer_range == std::make_pair(-1, -1) &&
                     info.remote_cluster_id == 0 && info.remote_role_type == 0;
  return right ? 1 : 0;
}
