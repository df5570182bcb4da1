// The header in a second source file: nothing in it is defined twice. Also every number, key, default, size and offset of
// the contract, written by hand.
//
// Not for: what calls do with them (the other programs).
#include "llm_datadist/llm_datadist.h"

namespace {

using namespace llm_datadist;

// Contract, C++ §1.
static_assert(std::is_same<Status, uint32_t>::value, "a status is a number of 32 bits");
static_assert(LLM_SUCCESS == 0x00000000U, "status");
static_assert(LLM_FAILED == 0xFFFFFFFFU, "status");
static_assert(LLM_WAIT_PROC_TIMEOUT == 0x5010B001U, "status");
static_assert(LLM_KV_CACHE_NOT_EXIST == 0x5010B002U, "status");
static_assert(LLM_PARAM_INVALID == 0x5010B005U, "status");
static_assert(LLM_NOT_YET_LINK == 0x5010B007U, "status");
static_assert(LLM_ALREADY_LINK == 0x5010B008U, "status");
static_assert(LLM_LINK_FAILED == 0x5010B009U, "status");
static_assert(LLM_UNLINK_FAILED == 0x5010B00AU, "status");
static_assert(LLM_NOTIFY_PROMPT_UNLINK_FAILED == 0x5010B00BU, "status");
static_assert(LLM_CLUSTER_NUM_EXCEED_LIMIT == 0x5010B00CU, "status");
static_assert(LLM_PROCESSING_LINK == 0x5010B00DU, "status");
static_assert(LLM_DEVICE_OUT_OF_MEMORY == 0x5010B00EU, "status");
static_assert(LLM_EXIST_LINK == 0x5010B018U, "status");
static_assert(LLM_FEATURE_NOT_ENABLED == 0x5010B019U, "status");
static_assert(LLM_TIMEOUT == 0x5010B01AU, "status");
static_assert(LLM_LINK_BUSY == 0x5010B01BU, "status");
static_assert(LLM_OUT_OF_MEMORY == 0x5010B01CU, "status");

// Contract, C++ §2.
constexpr bool Same(const char *left, const char *right) {
  return *left == *right && (*left == '\0' || Same(left + 1, right + 1));
}
static_assert(!Same("llm.DeviceId", "llm.DeviceI") && !Same("llm.DeviceI", "llm.DeviceId"), "the comparison");
static_assert(Same(OPTION_LISTEN_IP_INFO, "llm.ListenIpInfo"), "option");
static_assert(Same(OPTION_DEVICE_ID, "llm.DeviceId"), "option");
static_assert(Same(OPTION_SYNC_CACHE_WAIT_TIME, "llm.SyncKvCacheWaitTime"), "option");
static_assert(Same(OPTION_BUF_POOL_CFG, "llm.BufPoolCfg"), "option");
static_assert(Same(OPTION_ENABLE_SET_ROLE, "llm.EnableSwitchRole"), "option");
static_assert(Same(OPTION_LOCAL_COMM_RES, "llm.LocalCommRes"), "option");
static_assert(Same(OPTION_TRANSFER_BACKEND, "llm.TransferBackend"), "option");
static_assert(Same(OPTION_GLOBAL_RESOURCE_CONFIG, "llm.GlobalResourceConfig"), "option");

// Contract, C++ §3.
template <typename Enum, typename Number>
constexpr bool Is(Enum value, Number number) {
  return std::is_same<typename std::underlying_type<Enum>::type, Number>::value && static_cast<Number>(value) == number;
}
static_assert(Is(LlmRole::kPrompt, int32_t{1}) && Is(LlmRole::kDecoder, int32_t{2}), "role");
static_assert(Is(LlmRole::kMix, int32_t{3}) && Is(LlmRole::kEnd, int32_t{4}), "role");
static_assert(Is(CachePlacement::kHost, uint32_t{0}) && Is(CachePlacement::kDevice, uint32_t{1}), "placement");
static_assert(DT_FLOAT == 0 && DT_FLOAT16 == 1 && DT_INT8 == 2 && DT_INT32 == 3 && DT_UINT8 == 4, "type");
static_assert(DT_INT16 == 6 && DT_UINT16 == 7 && DT_UINT32 == 8 && DT_INT64 == 9 && DT_UINT64 == 10, "type");
static_assert(DT_DOUBLE == 11 && DT_BOOL == 12 && DT_STRING == 13, "type");
static_assert(DT_COMPLEX64 == 16 && DT_COMPLEX128 == 17, "type");
static_assert(DT_QINT8 == 18 && DT_QINT16 == 19 && DT_QINT32 == 20 && DT_QUINT8 == 21 && DT_QUINT16 == 22, "type");
static_assert(DT_RESOURCE == 23 && DT_VARIANT == 26 && DT_BF16 == 27 && DT_UNDEFINED == 28, "type");
static_assert(DT_INT4 == 29 && DT_UINT1 == 30 && DT_INT2 == 31 && DT_UINT2 == 32 && DT_COMPLEX32 == 33, "type");
static_assert(DT_HIFLOAT8 == 34, "type");
static_assert(DT_FLOAT8_E5M2 == 35 && DT_FLOAT8_E4M3FN == 36 && DT_FLOAT8_E8M0 == 37, "type");
static_assert(DT_FLOAT6_E3M2 == 38 && DT_FLOAT6_E2M3 == 39, "type");
static_assert(DT_FLOAT4_E2M1 == 40 && DT_FLOAT4_E1M2 == 41, "type");

static_assert(sizeof(CacheDesc::reserved) == 128 && sizeof(Cache::reserved) == 128, "reserved bytes");
static_assert(sizeof(CacheIndex::reserved) == 128 && sizeof(KvCacheExtParam::reserved) == 127, "reserved bytes");
static_assert(sizeof(RegisterCfg::reserved) == 128 && sizeof(IpInfo::reserved) == 128, "reserved bytes");
static_assert(sizeof(ClusterInfo::reserved) == 128, "reserved bytes");
static_assert(!std::is_copy_constructible<LlmDataDist>::value, "an engine is one");
static_assert(!std::is_copy_assignable<LlmDataDist>::value, "an engine is one");

#if defined(__x86_64__) && defined(__GLIBCXX__) && _GLIBCXX_USE_CXX11_ABI
static_assert(sizeof(CacheDesc) == 168 && sizeof(Cache) == 328 && sizeof(CacheIndex) == 152, "size on this machine");
static_assert(sizeof(KvCacheExtParam) == 144 && sizeof(RegisterCfg) == 128, "size on this machine");
static_assert(sizeof(IpInfo) == 168 && sizeof(ClusterInfo) == 192 && sizeof(LlmDataDist) == 8, "size on this machine");
static_assert(offsetof(CacheDesc, placement) == 0 && offsetof(CacheDesc, num_tensors) == 4, "offset");
static_assert(offsetof(CacheDesc, data_type) == 8 && offsetof(CacheDesc, shape) == 16, "offset");
static_assert(offsetof(CacheDesc, reserved) == 40, "offset");
static_assert(offsetof(Cache, cache_id) == 0 && offsetof(Cache, tensor_addrs) == 8, "offset");
static_assert(offsetof(Cache, cache_desc) == 32 && offsetof(Cache, reserved) == 200, "offset");
static_assert(offsetof(CacheIndex, cluster_id) == 0 && offsetof(CacheIndex, cache_id) == 8, "offset");
static_assert(offsetof(CacheIndex, batch_index) == 16 && offsetof(CacheIndex, reserved) == 20, "offset");
static_assert(offsetof(KvCacheExtParam, src_layer_range) == 0, "offset");
static_assert(offsetof(KvCacheExtParam, dst_layer_range) == 8, "offset");
static_assert(offsetof(KvCacheExtParam, tensor_num_per_layer) == 16, "offset");
static_assert(offsetof(KvCacheExtParam, reserved) == 17, "offset");
static_assert(offsetof(IpInfo, ip) == 0 && offsetof(IpInfo, port) == 32 && offsetof(IpInfo, reserved) == 34, "offset");
static_assert(offsetof(ClusterInfo, remote_cluster_id) == 0, "offset");
static_assert(offsetof(ClusterInfo, remote_role_type) == 8, "offset");
static_assert(offsetof(ClusterInfo, local_ip_infos) == 16, "offset");
static_assert(offsetof(ClusterInfo, remote_ip_infos) == 40 && offsetof(ClusterInfo, reserved) == 64, "offset");
#endif

template <size_t size>
bool Zero(const uint8_t (&bytes)[size]) {
  for (const uint8_t byte : bytes) {
    if (byte != 0U) {
      return false;
    }
  }
  return true;
}

}  // namespace

size_t DefaultsOfTheStructures();

size_t DefaultsOfTheStructures() {
  const CacheDesc desc{};
  const Cache cache{};
  const KvCacheExtParam ext{};
  const RegisterCfg cfg{};
  const IpInfo ip{};
  const ClusterInfo info{};
  const CacheIndex index{5, 6, 7};
  const bool right = desc.placement == CachePlacement::kDevice && desc.num_tensors == 0 &&
                     desc.data_type == DT_UNDEFINED && desc.shape.empty() && cache.cache_id == -1 &&
                     cache.tensor_addrs.empty() && ext.tensor_num_per_layer == 2 &&
                     ext.src_layer_range == std::make_pair(-1, -1) && ext.dst_layer_range == std::make_pair(-1, -1) &&
                     ip.ip.empty() && ip.port == 0 && info.remote_cluster_id == 0 && info.remote_role_type == 0 &&
                     info.local_ip_infos.empty() && info.remote_ip_infos.empty() && index.cluster_id == 5 &&
                     index.cache_id == 6 && index.batch_index == 7;
  const bool zero = Zero(desc.reserved) && Zero(cache.reserved) && Zero(index.reserved) && Zero(ext.reserved) &&
                    Zero(cfg.reserved) && Zero(ip.reserved) && Zero(info.reserved);
  return right && zero ? 1 : 0;
}
