// The status values, options and structures of the class LlmDataDist. Include llm_datadist.h instead.
//
// Structures end in reserved bytes, so that they can grow without changing their layout.
#ifndef LLM_DATADIST_LLM_DATADIST_TYPES_H_
#define LLM_DATADIST_LLM_DATADIST_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "llm_datadist/llm_datadist_c.h"

namespace llm_datadist {

// The status that every call returns. LastErrorMessage() returns the reason of a failure.
using Status = uint32_t;

constexpr Status LLM_SUCCESS = 0x0U;
constexpr Status LLM_FAILED = 0xFFFFFFFFU;
constexpr Status LLM_WAIT_PROC_TIMEOUT = 0x5010B001U;
constexpr Status LLM_KV_CACHE_NOT_EXIST = 0x5010B002U;
constexpr Status LLM_PARAM_INVALID = 0x5010B005U;
constexpr Status LLM_NOT_YET_LINK = 0x5010B007U;
constexpr Status LLM_ALREADY_LINK = 0x5010B008U;
constexpr Status LLM_LINK_FAILED = 0x5010B009U;
constexpr Status LLM_UNLINK_FAILED = 0x5010B00AU;
constexpr Status LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00BU;
constexpr Status LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00CU;
constexpr Status LLM_PROCESSING_LINK = 0x5010B00DU;
constexpr Status LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00EU;
constexpr Status LLM_EXIST_LINK = 0x5010B018U;
constexpr Status LLM_FEATURE_NOT_ENABLED = 0x5010B019U;
constexpr Status LLM_TIMEOUT = 0x5010B01AU;
constexpr Status LLM_LINK_BUSY = 0x5010B01BU;
constexpr Status LLM_OUT_OF_MEMORY = 0x5010B01CU;
// Bytes of a transfer differ from those of its source (option "llm.Verify").
constexpr Status LLM_VERIFY_FAILED = 0x4C440002U;

// Keys of the options of Initialize and SetRole. Keys and values are texts.
constexpr const char *OPTION_LISTEN_IP_INFO = "llm.ListenIpInfo";
constexpr const char *OPTION_DEVICE_ID = "llm.DeviceId";
constexpr const char *OPTION_SYNC_CACHE_WAIT_TIME = "llm.SyncKvCacheWaitTime";
constexpr const char *OPTION_BUF_POOL_CFG = "llm.BufPoolCfg";
constexpr const char *OPTION_ENABLE_SET_ROLE = "llm.EnableSwitchRole";
constexpr const char *OPTION_LOCAL_COMM_RES = "llm.LocalCommRes";
constexpr const char *OPTION_TRANSFER_BACKEND = "llm.TransferBackend";
constexpr const char *OPTION_GLOBAL_RESOURCE_CONFIG = "llm.GlobalResourceConfig";

// The role of a cluster.
enum class LlmRole : int32_t { kPrompt = 1, kDecoder = 2, kMix = 3, kEnd };

// The kind of memory of a cache.
enum class CachePlacement : uint32_t { kHost = 0, kDevice = 1 };

// Element types. Types whose elements are not whole bytes are refused.
enum DataType : int32_t {
  DT_FLOAT = 0,
  DT_FLOAT16 = 1,
  DT_INT8 = 2,
  DT_INT32 = 3,
  DT_UINT8 = 4,
  DT_INT16 = 6,
  DT_UINT16 = 7,
  DT_UINT32 = 8,
  DT_INT64 = 9,
  DT_UINT64 = 10,
  DT_DOUBLE = 11,
  DT_BOOL = 12,
  DT_STRING = 13,
  DT_COMPLEX64 = 16,
  DT_COMPLEX128 = 17,
  DT_QINT8 = 18,
  DT_QINT16 = 19,
  DT_QINT32 = 20,
  DT_QUINT8 = 21,
  DT_QUINT16 = 22,
  DT_RESOURCE = 23,
  DT_VARIANT = 26,
  DT_BF16 = 27,
  DT_UNDEFINED = 28,
  DT_INT4 = 29,
  DT_UINT1 = 30,
  DT_INT2 = 31,
  DT_UINT2 = 32,
  DT_COMPLEX32 = 33,
  DT_HIFLOAT8 = 34,
  DT_FLOAT8_E5M2 = 35,
  DT_FLOAT8_E4M3FN = 36,
  DT_FLOAT8_E8M0 = 37,
  DT_FLOAT6_E3M2 = 38,
  DT_FLOAT6_E2M3 = 39,
  DT_FLOAT4_E2M1 = 40,
  DT_FLOAT4_E1M2 = 41
};

// The description of a cache: its tensors are all alike, and their dimension 0 counts batch slots or blocks.
struct CacheDesc {
  CachePlacement placement = CachePlacement::kDevice;
  uint32_t num_tensors = 0U;
  DataType data_type = DT_UNDEFINED;
  std::vector<int64_t> shape;
  uint8_t reserved[128] = {};
};

// A cache of this engine, or memory of the caller, with cache_id -1.
struct Cache {
  int64_t cache_id = -1;
  std::vector<uintptr_t> tensor_addrs;
  CacheDesc cache_desc;
  uint8_t reserved[128] = {};
};

// One batch slot of a peer's cache.
struct CacheIndex {
  uint64_t cluster_id;
  int64_t cache_id;
  uint32_t batch_index;
  uint8_t reserved[128] = {};
};

// Layers to read and to write. Both ends of a range are included; (-1, -1) stands for all layers.
struct KvCacheExtParam {
  std::pair<int32_t, int32_t> src_layer_range = {-1, -1};
  std::pair<int32_t, int32_t> dst_layer_range = {-1, -1};
  uint8_t tensor_num_per_layer = 2U;
  uint8_t reserved[127] = {};
};

// How memory is registered. There are no settings yet.
struct RegisterCfg {
  uint8_t reserved[128] = {};
};

// A numeric IPv4 address and a port.
struct IpInfo {
  std::string ip;
  uint16_t port = 0U;
  uint8_t reserved[128] = {};
};

// A peer and its addresses.
struct ClusterInfo {
  uint64_t remote_cluster_id = 0U;
  int32_t remote_role_type = 0;  // 0 prompt, 1 decoder
  std::vector<IpInfo> local_ip_infos;
  std::vector<IpInfo> remote_ip_infos;
  uint8_t reserved[128] = {};
};

// Levels of the log, from the most severe one.
enum class LogLevel : int32_t {
  kError = LLM_DATADIST_LOG_ERROR,
  kWarning = LLM_DATADIST_LOG_WARNING,
  kInfo = LLM_DATADIST_LOG_INFO,
  kDebug = LLM_DATADIST_LOG_DEBUG
};

// Receives one line of the log: its level, the part of the engine that it comes from, and its text.
using LogCallback = std::function<void(LogLevel level, const char *target, const char *text)>;

// Layouts that programs and libraries of different versions share.
namespace layout {
constexpr size_t Rounded(size_t bytes, size_t align) { return (bytes + align - 1U) / align * align; }
constexpr size_t kList = sizeof(std::vector<int64_t>);
static_assert(std::is_same<uintptr_t, uint64_t>::value, "addresses are numbers of 64 bits");
static_assert(sizeof(CacheDesc) == 16U + kList + 128U, "layout of CacheDesc");
static_assert(sizeof(Cache) == 8U + kList + sizeof(CacheDesc) + 128U, "layout of Cache");
static_assert(sizeof(CacheIndex) == Rounded(20U + 128U, 8U), "layout of CacheIndex");
static_assert(sizeof(KvCacheExtParam) == 144U, "layout of KvCacheExtParam");
static_assert(sizeof(RegisterCfg) == 128U, "layout of RegisterCfg");
static_assert(sizeof(IpInfo) == Rounded(sizeof(std::string) + 2U + 128U, 8U), "layout of IpInfo");
static_assert(sizeof(ClusterInfo) == 16U + 2U * kList + 128U, "layout of ClusterInfo");
}  // namespace layout

// Structures of the C interface. They are views, valid while the structures that they were made of do not
// change.
namespace view {

// Whether the library knows everything that this header uses. If not, no object is created, and every call
// returns LLM_FAILED.
inline bool Understood() { return llm_datadist_abi_version() >= LLM_DATADIST_ABI_VERSION; }

inline LlmDatadistCacheDesc Of(const CacheDesc &desc) {
  return {static_cast<uint32_t>(desc.placement), desc.num_tensors, static_cast<int32_t>(desc.data_type),
          static_cast<uint32_t>(desc.shape.size()), desc.shape.data(), {}};
}

inline LlmDatadistCache Of(const Cache &cache) {
  return {cache.cache_id, cache.tensor_addrs.data(), cache.tensor_addrs.size(), Of(cache.cache_desc), {}};
}

inline LlmDatadistCacheIndex Of(const CacheIndex &index) {
  return {index.cluster_id, index.cache_id, index.batch_index, {}};
}

inline LlmDatadistExtParam Of(const KvCacheExtParam &ext) {
  return {ext.src_layer_range.first, ext.src_layer_range.second, ext.dst_layer_range.first,
          ext.dst_layer_range.second, ext.tensor_num_per_layer, {}};
}

inline LlmDatadistRegisterCfg Of(const RegisterCfg &) { return {}; }

inline LlmDatadistBlocks Of(const std::vector<uint64_t> &blocks) { return {blocks.data(), blocks.size()}; }

inline std::vector<LlmDatadistBlocks> Of(const std::vector<std::vector<uint64_t>> &lists) {
  std::vector<LlmDatadistBlocks> list;
  list.reserve(lists.size());
  for (const auto &blocks : lists) {
    list.push_back(Of(blocks));
  }
  return list;
}

inline std::vector<LlmDatadistOption> Of(const std::map<std::string, std::string> &options) {
  std::vector<LlmDatadistOption> list;
  list.reserve(options.size());
  for (const auto &option : options) {
    list.push_back({option.first.c_str(), option.second.c_str()});
  }
  return list;
}

inline std::vector<LlmDatadistIp> Of(const std::vector<IpInfo> &infos) {
  std::vector<LlmDatadistIp> list;
  list.reserve(infos.size());
  for (const auto &info : infos) {
    list.push_back({info.ip.c_str(), info.port, {}});
  }
  return list;
}

// The library calls it for every line. An exception of the callback ends the program.
inline void Log(int32_t level, const char *target, const char *text, void *callback) noexcept {
  (*static_cast<const LogCallback *>(callback))(static_cast<LogLevel>(level), target, text);
}

// Clusters, and the lists that they point into.
class Clusters {
 public:
  explicit Clusters(const std::vector<ClusterInfo> &clusters) {
    ips_.reserve(2U * clusters.size());
    list_.reserve(clusters.size());
    for (const auto &cluster : clusters) {
      ips_.push_back(Of(cluster.local_ip_infos));
      const auto &local = ips_.back();
      ips_.push_back(Of(cluster.remote_ip_infos));
      const auto &remote = ips_.back();
      list_.push_back({cluster.remote_cluster_id, local.data(), local.size(), remote.data(), remote.size(), {}});
    }
  }

  const std::vector<LlmDatadistCluster> &List() const { return list_; }

 private:
  std::vector<std::vector<LlmDatadistIp>> ips_;
  std::vector<LlmDatadistCluster> list_;
};

}  // namespace view

// Returns the reason of the last call of this thread that failed. For an argument it names the argument, its
// value and the allowed values.
inline std::string LastErrorMessage() {
  if (!view::Understood()) {
    return "the program was compiled for version " + std::to_string(LLM_DATADIST_ABI_VERSION) +
           " of the C interface, and this library has version " + std::to_string(llm_datadist_abi_version());
  }
  return llm_datadist_last_error();
}

}  // namespace llm_datadist

#endif  // LLM_DATADIST_LLM_DATADIST_TYPES_H_
