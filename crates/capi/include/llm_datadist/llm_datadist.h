// The C++ class LlmDataDist, with its structures, options and status values, over the C interface of
// libllm_datadist.
//
// It needs C++14, throws no exceptions, and links with -lllm_datadist alone. All rules are in the library.
#ifndef LLM_DATADIST_LLM_DATADIST_H_
#define LLM_DATADIST_LLM_DATADIST_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "llm_datadist/llm_datadist_types.h"

namespace llm_datadist {

// One cluster with its caches, links and transfers. Any thread may call it; Finalize and the destructor must run
// alone. Calls return LLM_FAILED before Initialize has succeeded.
class LlmDataDist {
 public:
  // cluster_id is unique among the clusters that link with each other.
  LlmDataDist(uint64_t cluster_id, LlmRole role)
      : handle_(view::Understood() ? llm_datadist_new(cluster_id, static_cast<int32_t>(role)) : 0U) {}

  // Calls Finalize, unless it was called.
  ~LlmDataDist() { (void)llm_datadist_free(handle_); }

  LlmDataDist(const LlmDataDist &) = delete;
  LlmDataDist &operator=(const LlmDataDist &) = delete;

  // Sends lines of max_level and more severe ones to callback, for all objects of the process. An empty
  // callback removes it. The callback also runs on threads of the engine, and on several threads at a time.
  // It must return soon, must not throw an exception, and must not call this library. When this call returns,
  // the previous callback is not running and is not called again. Without a callback, errors go to standard
  // error, unless the environment variable LLM_DATADIST_LOG is "off".
  static Status SetLogCallback(LogCallback callback, LogLevel max_level = LogLevel::kInfo) {
    if (!view::Understood()) {
      return LLM_FAILED;
    }
    static std::mutex mutex;
    static LogCallback *kept = nullptr;  // not destroyed at exit, when threads of an engine may still log
    const std::lock_guard<std::mutex> guard(mutex);
    LogCallback *given = callback ? new LogCallback(std::move(callback)) : nullptr;
    const Status status = llm_datadist_set_log_callback(given == nullptr ? nullptr : view::Log, given,
                                                        static_cast<int32_t>(max_level));
    if (status == LLM_SUCCESS) {
      std::swap(kept, given);
    }
    delete given;
    return status;
  }

  // Opens the engine. OPTION_DEVICE_ID is required. While the engine is open, the call returns LLM_SUCCESS
  // and does nothing.
  Status Initialize(const std::map<std::string, std::string> &options) {
    const auto list = view::Of(options);
    return llm_datadist_initialize(handle_, list.data(), list.size());
  }

  // Closes the engine. Do not call it while other calls are running.
  void Finalize() { (void)llm_datadist_finalize(handle_); }

  // Changes the role. OPTION_LISTEN_IP_INFO names the address to listen at, and is required for the role
  // prompt. Fails while links exist.
  Status SetRole(LlmRole role, const std::map<std::string, std::string> &options = {}) {
    const auto list = view::Of(options);
    return llm_datadist_set_role(handle_, static_cast<int32_t>(role), list.data(), list.size());
  }

  // Links to peers that listen. rets receives one status for each.
  Status LinkLlmClusters(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets,
                         int32_t timeout_in_millis = 1000) {
    const view::Clusters list(clusters);
    std::vector<Status> statuses(clusters.size());
    size_t count = 0U;
    const Status status = llm_datadist_link_clusters(handle_, list.List().data(), list.List().size(),
                                                     timeout_in_millis, statuses.data(), &count);
    statuses.resize(count);
    rets.swap(statuses);
    return status;
  }

  // Ends links. With force_flag, only this side ends them, without asking the peers.
  Status UnlinkLlmClusters(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets,
                           int32_t timeout_in_millis = 1000, bool force_flag = false) {
    const view::Clusters list(clusters);
    std::vector<Status> statuses(clusters.size());
    size_t count = 0U;
    const Status status = llm_datadist_unlink_clusters(handle_, list.List().data(), list.List().size(),
                                                       timeout_in_millis, force_flag, statuses.data(), &count);
    statuses.resize(count);
    rets.swap(statuses);
    return status;
  }

  // Allocates a cache in device memory, and sets its id, addresses and description.
  Status AllocateCache(const CacheDesc &cache_desc, Cache &cache) {
    Cache made;
    made.cache_desc = cache_desc;
    uint32_t room = cache_desc.num_tensors;
    if (room > kMaxTensors) {
      room = kMaxTensors;
    }
    made.tensor_addrs.resize(room);
    const auto desc = view::Of(cache_desc);
    const Status status = llm_datadist_allocate_cache(handle_, &desc, &made.cache_id, made.tensor_addrs.data(),
                                                      made.tensor_addrs.size());
    if (status == LLM_SUCCESS) {
      cache = std::move(made);
    }
    return status;
  }

  // Deallocates an allocated cache. Returns LLM_SUCCESS if there is no cache with this id.
  Status DeallocateCache(int64_t cache_id) { return llm_datadist_deallocate_cache(handle_, cache_id); }

  // Registers memory of the caller as a cache, with one address for each tensor.
  Status RegisterKvCache(const CacheDesc &cache_desc, const std::vector<uint64_t> &addrs, const RegisterCfg &cfg,
                         int64_t &cache_id) {
    const auto desc = view::Of(cache_desc);
    const auto how = view::Of(cfg);
    return llm_datadist_register_cache(handle_, &desc, addrs.data(), addrs.size(), &how, &cache_id);
  }

  // Unregisters a cache, and waits until nothing in this process uses it. Returns LLM_SUCCESS if there is no
  // cache with this id. After LLM_TIMEOUT the memory may still be in use; call it again.
  Status UnregisterKvCache(int64_t cache_id) { return llm_datadist_unregister_cache(handle_, cache_id); }

  // Pulls one batch slot of a peer. Of dst_cache, only the id is used.
  Status PullKvCache(const CacheIndex &src_cache_index, const Cache &dst_cache, uint32_t batch_index = 0U,
                     int64_t size = -1, const KvCacheExtParam &ext_param = {}) {
    const auto src = view::Of(src_cache_index);
    const auto dst = view::Of(dst_cache);
    const auto ext = view::Of(ext_param);
    return llm_datadist_pull_cache(handle_, &src, &dst, batch_index, size, &ext);
  }

  // Pulls blocks of a peer: src_blocks[i] to dst_blocks[i].
  Status PullKvBlocks(const CacheIndex &src_cache_index, const Cache &dst_cache,
                      const std::vector<uint64_t> &src_blocks, const std::vector<uint64_t> &dst_blocks,
                      const KvCacheExtParam &ext_param = {}) {
    const auto src = view::Of(src_cache_index);
    const auto dst = view::Of(dst_cache);
    const auto ext = view::Of(ext_param);
    return llm_datadist_pull_blocks(handle_, &src, &dst, view::Of(src_blocks), view::Of(dst_blocks), &ext);
  }

  // Copies a range of one batch slot, the same in every tensor, from device to device or from device to host.
  Status CopyKvCache(const Cache &src_cache, const Cache &dst_cache, uint32_t src_batch_index = 0U,
                     uint32_t dst_batch_index = 0U, uint64_t offset = 0U, int64_t size = -1) {
    const auto src = view::Of(src_cache);
    const auto dst = view::Of(dst_cache);
    return llm_datadist_copy_cache(handle_, &src, &dst, src_batch_index, dst_batch_index, offset, size);
  }

  // Copies src_blocks[i] to list[i] of every list. Fails from host to host.
  Status CopyKvBlocks(const Cache &src_cache, const Cache &dst_cache, const std::vector<uint64_t> &src_blocks,
                      const std::vector<std::vector<uint64_t>> &dst_blocks_list) {
    const auto lists = view::Of(dst_blocks_list);
    const auto src = view::Of(src_cache);
    const auto dst = view::Of(dst_cache);
    return llm_datadist_copy_blocks(handle_, &src, &dst, view::Of(src_blocks), lists.data(), lists.size());
  }

  // Pushes one whole batch slot to a peer. Fails with the role decoder, and from host memory. Of src_cache,
  // only the id and the placement are used.
  Status PushKvCache(const Cache &src_cache, const CacheIndex &dst_cache_index, uint32_t src_batch_index = 0U,
                     int64_t size = -1, const KvCacheExtParam &ext_param = {}) {
    const auto src = view::Of(src_cache);
    const auto dst = view::Of(dst_cache_index);
    const auto ext = view::Of(ext_param);
    return llm_datadist_push_cache(handle_, &src, &dst, src_batch_index, size, &ext);
  }

  // Pushes blocks to a peer: src_blocks[i] to dst_blocks[i]. Fails with the role decoder.
  Status PushKvBlocks(const Cache &src_cache, const CacheIndex &dst_cache_index,
                      const std::vector<uint64_t> &src_blocks, const std::vector<uint64_t> &dst_blocks,
                      const KvCacheExtParam &ext_param = {}) {
    const auto src = view::Of(src_cache);
    const auto dst = view::Of(dst_cache_index);
    const auto ext = view::Of(ext_param);
    return llm_datadist_push_blocks(handle_, &src, &dst, view::Of(src_blocks), view::Of(dst_blocks), &ext);
  }

  // An addition to the original: returns the port at which the engine listens for peers, also if port 0 asked
  // for any port. Returns 0 without a listener.
  uint16_t ListeningPort() const { return llm_datadist_listening(handle_); }

 private:
  // Larger numbers of tensors are refused, so their addresses need no space.
  static constexpr uint32_t kMaxTensors = 1U << 24U;

  const uint64_t handle_;
};

}  // namespace llm_datadist

#endif  // LLM_DATADIST_LLM_DATADIST_H_
