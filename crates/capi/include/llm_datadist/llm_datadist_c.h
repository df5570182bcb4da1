/* The C interface of llm_datadist. Generated from crates/capi/src/abi; `make header` writes it. */

#ifndef LLM_DATADIST_LLM_DATADIST_C_H_
#define LLM_DATADIST_LLM_DATADIST_C_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Levels of the log, the most severe first.
 */
#define LLM_DATADIST_LOG_ERROR 1

/**
 * Something that is likely to be a mistake.
 */
#define LLM_DATADIST_LOG_WARNING 2

/**
 * What became of links.
 */
#define LLM_DATADIST_LOG_INFO 3

/**
 * Details.
 */
#define LLM_DATADIST_LOG_DEBUG 4

/**
 * The version of this interface. It grows when a function is added, or a reserved word comes into use; a library serves
 * programs of its own version and of all below. One that cannot has another name (`libllm_datadist.so.1`).
 */
#define LLM_DATADIST_ABI_VERSION 2

/**
 * One option: both texts end in a null byte.
 */
typedef struct {
  /**
   * Its key.
   */
  const char *key;
  /**
   * Its value.
   */
  const char *value;
} LlmDatadistOption;

/**
 * An address.
 */
typedef struct {
  /**
   * IPv4, in digits.
   */
  const char *ip;
  /**
   * Port.
   */
  uint16_t port;
  /**
   * 0.
   */
  uint64_t reserved[4];
} LlmDatadistIp;

/**
 * Where a peer is.
 */
typedef struct {
  /**
   * Its cluster id.
   */
  uint64_t remote_cluster_id;
  /**
   * Addresses of this side.
   */
  const LlmDatadistIp *local;
  /**
   * How many.
   */
  size_t num_local;
  /**
   * Its addresses.
   */
  const LlmDatadistIp *remote;
  /**
   * How many.
   */
  size_t num_remote;
  /**
   * 0.
   */
  uint64_t reserved[4];
} LlmDatadistCluster;

/**
 * What a cache looks like.
 */
typedef struct {
  /**
   * 0 host, 1 device.
   */
  uint32_t placement;
  /**
   * How many equal tensors.
   */
  uint32_t num_tensors;
  /**
   * Element type.
   */
  int32_t data_type;
  /**
   * How many dimensions `shape` has.
   */
  uint32_t num_dims;
  /**
   * Dimensions, outermost first.
   */
  const int64_t *shape;
  /**
   * 0.
   */
  uint64_t reserved[4];
} LlmDatadistCacheDesc;

/**
 * How memory is registered: nothing to say yet.
 */
typedef struct {
  /**
   * 0.
   */
  uint64_t reserved[16];
} LlmDatadistRegisterCfg;

/**
 * Takes one line of the log: its level, which part of the engine it comes from, its text, and the `user_data` that was
 * given. The texts end in a null byte and are valid during the call.
 */
typedef void (*LlmDatadistLogCallback)(int32_t level, const char *target, const char *text, void *user_data);

/**
 * One batch slot of a peer's cache.
 */
typedef struct {
  /**
   * Who owns it.
   */
  uint64_t cluster_id;
  /**
   * Its id there.
   */
  int64_t cache_id;
  /**
   * The batch slot.
   */
  uint32_t batch_index;
  /**
   * 0.
   */
  uint64_t reserved[4];
} LlmDatadistCacheIndex;

/**
 * A cache: one of this engine by its id, or the caller's memory with id -1.
 */
typedef struct {
  /**
   * Its id, or -1.
   */
  int64_t cache_id;
  /**
   * The address of every tensor.
   */
  const uint64_t *addrs;
  /**
   * How many.
   */
  size_t num_addrs;
  /**
   * What it looks like.
   */
  LlmDatadistCacheDesc desc;
  /**
   * 0.
   */
  uint64_t reserved[4];
} LlmDatadistCache;

/**
 * Layers read and written, both ends included; -1 and -1 for all.
 */
typedef struct {
  /**
   * First layer read.
   */
  int32_t src_first;
  /**
   * Last layer read.
   */
  int32_t src_last;
  /**
   * First layer written.
   */
  int32_t dst_first;
  /**
   * Last layer written.
   */
  int32_t dst_last;
  /**
   * Tensors of one layer.
   */
  uint8_t tensor_num_per_layer;
  /**
   * 0.
   */
  uint64_t reserved[4];
} LlmDatadistExtParam;

/**
 * A list of blocks.
 */
typedef struct {
  /**
   * The blocks.
   */
  const uint64_t *blocks;
  /**
   * How many.
   */
  size_t count;
} LlmDatadistBlocks;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The `LLM_DATADIST_ABI_VERSION` that the library was built with: a program compiled with a higher one must not go on.
 */
uint32_t llm_datadist_abi_version(void);

/**
 * A new object, not yet initialised: its handle, never used again; 0 if there is none.
 */
uint64_t llm_datadist_new(uint64_t cluster_id, int32_t role);

/**
 * Ends an object, and its engine if it is open.
 */
uint32_t llm_datadist_free(uint64_t handle);

/**
 * Why the last call of this thread that failed did: text that stays valid until its next call that fails.
 */
const char *llm_datadist_last_error(void);

/**
 * Opens the engine; without effect while it is open.
 *
 * # Safety
 * `num_options` options lie at `options`.
 */
uint32_t llm_datadist_initialize(uint64_t handle, const LlmDatadistOption *options, size_t num_options);

/**
 * Closes the engine; without effect when it is not open.
 */
uint32_t llm_datadist_finalize(uint64_t handle);

/**
 * Takes another role, and listens as `options` say.
 *
 * # Safety
 * `num_options` options lie at `options`.
 */
uint32_t llm_datadist_set_role(uint64_t handle,
                               int32_t role,
                               const LlmDatadistOption *options,
                               size_t num_options);

/**
 * The port peers are listened for at, or 0. Never a failure: the reason of the last one stays.
 */
uint16_t llm_datadist_listening(uint64_t handle);

/**
 * Links to every cluster. The status of each goes to `rets`; the reasons of all that failed are one text. Arguments
 * without meaning fail the whole call, and nothing is written: then `num_rets` is 0, else `num_clusters`.
 *
 * # Safety
 * `num_clusters` clusters lie at `clusters`, and as many statuses may be written at `rets`.
 */
uint32_t llm_datadist_link_clusters(uint64_t handle,
                                    const LlmDatadistCluster *clusters,
                                    size_t num_clusters,
                                    int32_t timeout_in_millis,
                                    uint32_t *rets,
                                    size_t *num_rets);

/**
 * Ends the links to every cluster; with `force` only this side's half. Statuses as for linking.
 *
 * # Safety
 * As `llm_datadist_link_clusters`.
 */
uint32_t llm_datadist_unlink_clusters(uint64_t handle,
                                      const LlmDatadistCluster *clusters,
                                      size_t num_clusters,
                                      int32_t timeout_in_millis,
                                      bool force,
                                      uint32_t *rets,
                                      size_t *num_rets);

/**
 * Takes device memory for a cache. Its id goes to `cache_id`, the address of every tensor to `addrs`, which
 * has room for `num_tensors` at least.
 *
 * # Safety
 * `desc` is whole; an id may be written at `cache_id`, and `num_addrs` addresses at `addrs`.
 */
uint32_t llm_datadist_allocate_cache(uint64_t handle,
                                     const LlmDatadistCacheDesc *desc,
                                     int64_t *cache_id,
                                     uint64_t *addrs,
                                     size_t num_addrs);

/**
 * Lets go of an allocated cache. One that is not there is no failure.
 */
uint32_t llm_datadist_deallocate_cache(uint64_t handle, int64_t cache_id);

/**
 * Enters the caller's memory as a cache. Its id goes to `cache_id`.
 *
 * # Safety
 * `desc` is whole, `cfg` too or null for the defaults, `num_addrs` addresses lie at `addrs`, and from each of them on one tensor of `desc` stays readable
 * and writable until the cache is unregistered.
 */
uint32_t llm_datadist_register_cache(uint64_t handle,
                                     const LlmDatadistCacheDesc *desc,
                                     const uint64_t *addrs,
                                     size_t num_addrs,
                                     const LlmDatadistRegisterCfg *cfg,
                                     int64_t *cache_id);

/**
 * Removes a registered cache, once nothing of this process uses it. One that is not there is no failure. After
 * `LLM_TIMEOUT` no new call finds it, and its memory may still be in use: the same call waits again.
 */
uint32_t llm_datadist_unregister_cache(uint64_t handle,
                                       int64_t cache_id);

/**
 * Sends lines of `max_level` and more severe ones to `callback`; null removes it. There is one callback in a process,
 * for all objects.
 *
 * The callback runs on the thread that caused the line, which may be a thread of the engine, and on several threads at a
 * time. It must return soon, must not throw or jump out, and must not call this library: a line that it causes is
 * dropped, and this function fails. When this function returns, the old callback is not running and is never called
 * again, so its `user_data` may go; whoever calls this must therefore hold no lock that the callback takes.
 *
 * Without a callback, errors go to standard error, unless the environment variable `LLM_DATADIST_LOG` is `off` when the
 * first object is made. A forked child starts without a callback.
 *
 * # Safety
 * `callback` may be called with `user_data` on any thread until it is replaced.
 */
uint32_t llm_datadist_set_log_callback(LlmDatadistLogCallback callback,
                                       void *user_data,
                                       int32_t max_level);

/**
 * Brings one batch slot of a peer here.
 *
 * # Safety
 * The structures are whole.
 */
uint32_t llm_datadist_pull_cache(uint64_t handle,
                                 const LlmDatadistCacheIndex *src,
                                 const LlmDatadistCache *dst,
                                 uint32_t batch_index,
                                 int64_t size,
                                 const LlmDatadistExtParam *ext_param);

/**
 * Brings blocks of a peer here, pair by pair.
 *
 * # Safety
 * The structures and lists are whole.
 */
uint32_t llm_datadist_pull_blocks(uint64_t handle,
                                  const LlmDatadistCacheIndex *src,
                                  const LlmDatadistCache *dst,
                                  LlmDatadistBlocks src_blocks,
                                  LlmDatadistBlocks dst_blocks,
                                  const LlmDatadistExtParam *ext_param);

/**
 * Brings one batch slot to a peer.
 *
 * # Safety
 * The structures are whole.
 */
uint32_t llm_datadist_push_cache(uint64_t handle,
                                 const LlmDatadistCache *src,
                                 const LlmDatadistCacheIndex *dst,
                                 uint32_t src_batch_index,
                                 int64_t size,
                                 const LlmDatadistExtParam *ext_param);

/**
 * Brings blocks to a peer, pair by pair.
 *
 * # Safety
 * The structures and lists are whole.
 */
uint32_t llm_datadist_push_blocks(uint64_t handle,
                                  const LlmDatadistCache *src,
                                  const LlmDatadistCacheIndex *dst,
                                  LlmDatadistBlocks src_blocks,
                                  LlmDatadistBlocks dst_blocks,
                                  const LlmDatadistExtParam *ext_param);

/**
 * Copies one range of one batch slot, the same in every tensor: device to device, or device to host.
 *
 * # Safety
 * The structures are whole; where their id is -1, from each address on one tensor is readable and writable
 * during the call.
 */
uint32_t llm_datadist_copy_cache(uint64_t handle,
                                 const LlmDatadistCache *src,
                                 const LlmDatadistCache *dst,
                                 uint32_t src_batch_index,
                                 uint32_t dst_batch_index,
                                 uint64_t offset,
                                 int64_t size);

/**
 * Copies every block of `src_blocks` to its place in each of the lists.
 *
 * # Safety
 * As `llm_datadist_copy_cache`; the lists are whole.
 */
uint32_t llm_datadist_copy_blocks(uint64_t handle,
                                  const LlmDatadistCache *src,
                                  const LlmDatadistCache *dst,
                                  LlmDatadistBlocks src_blocks,
                                  const LlmDatadistBlocks *dst_blocks_list,
                                  size_t num_lists);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* LLM_DATADIST_LLM_DATADIST_C_H_ */
