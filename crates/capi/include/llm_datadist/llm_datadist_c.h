/* The C interface of llm_datadist. Generated from crates/capi/src/abi; `make header` writes it. */

#ifndef LLM_DATADIST_LLM_DATADIST_C_H_
#define LLM_DATADIST_LLM_DATADIST_C_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Level of errors, the most severe one.
 */
#define LLM_DATADIST_LOG_ERROR 1

/**
 * Level of warnings: something is probably wrong.
 */
#define LLM_DATADIST_LOG_WARNING 2

/**
 * Level of information: links that were made or ended.
 */
#define LLM_DATADIST_LOG_INFO 3

/**
 * Level of details.
 */
#define LLM_DATADIST_LOG_DEBUG 4

/**
 * The version of this interface. It grows when a function is added or a reserved word is used. A library serves programs of
 * its own version and of all lower ones. A library that cannot do so has another name (`libllm_datadist.so.1`).
 */
#define LLM_DATADIST_ABI_VERSION 4

/**
 * Maximum number of bytes of a message for a peer.
 */
#define LLM_DATADIST_MAX_NOTIFICATION (64 << 10)

/**
 * The kind of an event: a transfer has ended.
 */
#define LLM_DATADIST_EVENT_COMPLETED 1

/**
 * The kind of an event: a peer has sent a message.
 */
#define LLM_DATADIST_EVENT_NOTIFICATION 2

/**
 * The kind of an event: a link was made, by either side.
 */
#define LLM_DATADIST_EVENT_LINK_UP 3

/**
 * The kind of an event: a link has ended, for whatever reason.
 */
#define LLM_DATADIST_EVENT_LINK_DOWN 4

/**
 * One option. Both texts end in a null byte.
 */
typedef struct {
  /**
   * Key.
   */
  const char *key;
  /**
   * Value.
   */
  const char *value;
} LlmDatadistOption;

/**
 * An address.
 */
typedef struct {
  /**
   * Numeric IPv4 address.
   */
  const char *ip;
  /**
   * Port.
   */
  uint16_t port;
  /**
   * Must be 0.
   */
  uint64_t reserved[4];
} LlmDatadistIp;

/**
 * A peer and its addresses.
 */
typedef struct {
  /**
   * Cluster id of the peer.
   */
  uint64_t remote_cluster_id;
  /**
   * Addresses of this side.
   */
  const LlmDatadistIp *local;
  /**
   * Number of addresses in `local`.
   */
  size_t num_local;
  /**
   * Addresses of the peer.
   */
  const LlmDatadistIp *remote;
  /**
   * Number of addresses in `remote`.
   */
  size_t num_remote;
  /**
   * Must be 0.
   */
  uint64_t reserved[4];
} LlmDatadistCluster;

/**
 * The description of a cache.
 */
typedef struct {
  /**
   * 0 for host memory, 1 for device memory.
   */
  uint32_t placement;
  /**
   * Number of tensors, which are all alike.
   */
  uint32_t num_tensors;
  /**
   * Element type.
   */
  int32_t data_type;
  /**
   * Number of dimensions in `shape`.
   */
  uint32_t num_dims;
  /**
   * Dimensions, the outermost first.
   */
  const int64_t *shape;
  /**
   * Must be 0.
   */
  uint64_t reserved[4];
} LlmDatadistCacheDesc;

/**
 * How memory is registered. There are no settings yet.
 */
typedef struct {
  /**
   * Must be 0.
   */
  uint64_t reserved[16];
} LlmDatadistRegisterCfg;

/**
 * One batch slot of a peer's cache.
 */
typedef struct {
  /**
   * Cluster id of its owner.
   */
  uint64_t cluster_id;
  /**
   * Id of the cache at its owner.
   */
  int64_t cache_id;
  /**
   * Batch slot.
   */
  uint32_t batch_index;
  /**
   * Must be 0.
   */
  uint64_t reserved[4];
} LlmDatadistCacheIndex;

/**
 * A cache of this engine, named by its id, or memory of the caller, with the id -1.
 */
typedef struct {
  /**
   * Id of the cache, or -1.
   */
  int64_t cache_id;
  /**
   * Address of every tensor.
   */
  const uint64_t *addrs;
  /**
   * Number of addresses.
   */
  size_t num_addrs;
  /**
   * Description of the cache.
   */
  LlmDatadistCacheDesc desc;
  /**
   * Must be 0.
   */
  uint64_t reserved[4];
} LlmDatadistCache;

/**
 * Layers to read and to write, and a message for the peer. Both ends of a range are included; -1 and -1 stand for all layers.
 */
typedef struct {
  /**
   * First layer to read.
   */
  int32_t src_first;
  /**
   * Last layer to read.
   */
  int32_t src_last;
  /**
   * First layer to write.
   */
  int32_t dst_first;
  /**
   * Last layer to write.
   */
  int32_t dst_last;
  /**
   * Number of tensors of one layer.
   */
  uint8_t tensor_num_per_layer;
  /**
   * Message that the program of the peer gets once the bytes are in place; null for none. Must be null for functions that
   * wait.
   */
  const uint8_t *notify;
  /**
   * Number of bytes of `notify`, at most `LLM_DATADIST_MAX_NOTIFICATION`.
   */
  size_t notify_size;
  /**
   * Must be 0.
   */
  uint64_t reserved[2];
} LlmDatadistExtParam;

/**
 * A list of blocks.
 */
typedef struct {
  /**
   * Blocks.
   */
  const uint64_t *blocks;
  /**
   * Number of blocks.
   */
  size_t count;
} LlmDatadistBlocks;

/**
 * An event of an engine, which the library writes. Fields that do not belong to the kind of the event are 0 or null. Texts
 * end in a null byte. The library owns the message and the texts, and `llm_datadist_poll` says how long they are valid.
 */
typedef struct {
  /**
   * One of `LLM_DATADIST_EVENT_COMPLETED` and the other kinds. A program ignores kinds that it does not know.
   */
  uint32_t kind;
  /**
   * Completed: status with which the transfer ended.
   */
  uint32_t status;
  /**
   * Completed: handle of the transfer. The program may have freed it.
   */
  uint64_t transfer;
  /**
   * Completed: number of bytes that are known to be in place.
   */
  uint64_t bytes;
  /**
   * Completed: nanoseconds from the start of the transfer to its end.
   */
  uint64_t nanos;
  /**
   * All kinds but completed: cluster id of the peer.
   */
  uint64_t cluster_id;
  /**
   * Notification: the message.
   */
  const uint8_t *payload;
  /**
   * Notification: number of bytes of the message.
   */
  size_t payload_size;
  /**
   * Link up and down: a number that the engine of the peer has drawn when it was opened. A restarted peer has another one.
   */
  uint64_t incarnation;
  /**
   * Link up and down: address of the peer, as in the log.
   */
  const char *address;
  /**
   * Link up and down: how bytes move, `shm` or `tcp`.
   */
  const char *transport;
  /**
   * Link down: why the link ended.
   */
  const char *reason;
  /**
   * Link down: number of messages of `llm_datadist_notify` that the peer has not confirmed. It may have got the first of
   * them.
   */
  uint64_t unacknowledged;
  /**
   * 0 in this version.
   */
  uint64_t reserved[4];
} LlmDatadistEvent;

/**
 * Receives one line of the log: its level, the part of the engine that it comes from, its text, and `user_data`. The texts
 * end in a null byte and are valid during the call.
 */
typedef void (*LlmDatadistLogCallback)(int32_t level, const char *target, const char *text, void *user_data);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the `LLM_DATADIST_ABI_VERSION` of the library. A program that was compiled with a higher version must not use
 * the library.
 */
uint32_t llm_datadist_abi_version(void);

/**
 * Creates an object, which is not initialized yet. Returns its handle, or 0 on failure. A handle is never used again.
 */
uint64_t llm_datadist_new(uint64_t cluster_id,
                          int32_t role);

/**
 * Frees an object, and closes its engine if it is open, as `llm_datadist_finalize` does.
 */
uint32_t llm_datadist_free(uint64_t handle);

/**
 * Returns the reason of the last call of this thread that failed. The text is valid until the next call of this thread
 * that fails.
 */
const char *llm_datadist_last_error(void);

/**
 * Opens the engine. Has no effect while it is open.
 *
 * # Safety
 * `options` points to `num_options` options.
 */
uint32_t llm_datadist_initialize(uint64_t handle, const LlmDatadistOption *options, size_t num_options);

/**
 * Closes the engine. Has no effect unless it is open. First ends all transfers, with `LLM_FAILED`. Their handles still answer
 * afterwards; events that were not polled are dropped.
 */
uint32_t llm_datadist_finalize(uint64_t handle);

/**
 * Changes the role, and listens at the address that `options` name.
 *
 * # Safety
 * `options` points to `num_options` options.
 */
uint32_t llm_datadist_set_role(uint64_t handle,
                               int32_t role,
                               const LlmDatadistOption *options,
                               size_t num_options);

/**
 * Returns the port at which the engine listens for peers, or 0. It never fails, so the reason of the last failure stays.
 */
uint16_t llm_datadist_listening(uint64_t handle);

/**
 * Links to every cluster. Writes the status of each to `rets`; the reasons of all failures are joined in one text. Invalid
 * arguments fail the whole call. Then `num_rets` is set to 0 and no status is written; otherwise it is set to
 * `num_clusters`.
 *
 * # Safety
 * `clusters` points to `num_clusters` clusters, and `rets` to space for as many statuses.
 */
uint32_t llm_datadist_link_clusters(uint64_t handle,
                                    const LlmDatadistCluster *clusters,
                                    size_t num_clusters,
                                    int32_t timeout_in_millis,
                                    uint32_t *rets,
                                    size_t *num_rets);

/**
 * Ends the links to every cluster. With `force`, only this side ends them. Writes statuses like
 * `llm_datadist_link_clusters`.
 *
 * # Safety
 * See `llm_datadist_link_clusters`.
 */
uint32_t llm_datadist_unlink_clusters(uint64_t handle,
                                      const LlmDatadistCluster *clusters,
                                      size_t num_clusters,
                                      int32_t timeout_in_millis,
                                      bool force,
                                      uint32_t *rets,
                                      size_t *num_rets);

/**
 * Allocates a cache in device memory. Writes its id to `cache_id`, and the address of every tensor to `addrs`, which has
 * space for at least `num_tensors`.
 *
 * # Safety
 * `desc` points to a valid structure, `cache_id` to space for an id, and `addrs` to space for `num_addrs` addresses.
 */
uint32_t llm_datadist_allocate_cache(uint64_t handle,
                                     const LlmDatadistCacheDesc *desc,
                                     int64_t *cache_id,
                                     uint64_t *addrs,
                                     size_t num_addrs);

/**
 * Deallocates an allocated cache. Succeeds if there is no such cache.
 */
uint32_t llm_datadist_deallocate_cache(uint64_t handle, int64_t cache_id);

/**
 * Registers memory of the caller as a cache. Writes its id to `cache_id`.
 *
 * # Safety
 * `desc` points to a valid structure, and so does `cfg`, unless it is null for the defaults. `addrs` points to `num_addrs`
 * addresses. At each of them, one tensor of `desc` stays readable and writable until the cache is unregistered.
 */
uint32_t llm_datadist_register_cache(uint64_t handle,
                                     const LlmDatadistCacheDesc *desc,
                                     const uint64_t *addrs,
                                     size_t num_addrs,
                                     const LlmDatadistRegisterCfg *cfg,
                                     int64_t *cache_id);

/**
 * Unregisters a cache, once nothing in this process uses it. Succeeds if there is no such cache. After `LLM_TIMEOUT`, no
 * new call finds the cache, but its memory may still be in use; call the function again to wait again.
 */
uint32_t llm_datadist_unregister_cache(uint64_t handle,
                                       int64_t cache_id);

/**
 * Starts what `llm_datadist_pull_cache` does, without waiting for it. Writes the handle of the transfer to `transfer`;
 * `llm_datadist_transfer_free` frees it. An addition to the original, as all functions for transfers and events.
 *
 * The transfer ends within `timeout_ms` milliseconds from this call; 0 stands for the time limit of the synchronous call.
 * The structures and lists of the call may be freed when it returns.
 *
 * What the arguments and the caches of this engine decide is returned at once, with the codes of the synchronous call.
 * `LLM_LINK_BUSY`: too many transfers run, or wait for their outcome to be taken. After any failure, nothing has started and
 * nothing is written. Every other failure, a missing link too, is the outcome of the transfer, which `llm_datadist_poll` and
 * `llm_datadist_transfer_result` return.
 *
 * If `ext_param` has a message, the program of the peer gets it after the bytes are in place, before the transfer succeeds, and
 * behind all messages that `llm_datadist_notify` accepted before. A transfer that succeeds has delivered it once. One that fails
 * has not, unless the link broke or the time limit passed before the peer had confirmed it; then the reason of the failure says
 * so. If the peer has too many messages that it has not polled, the transfer ends with `LLM_LINK_BUSY` and has moved nothing.
 *
 * Any thread may call it. Calls that meet in a row of a cache take turns in the order in which they were started.
 *
 * # Safety
 * The pointers refer to valid structures, and `transfer` to space for a handle.
 */
uint32_t llm_datadist_pull_cache_async(uint64_t handle,
                                       const LlmDatadistCacheIndex *src,
                                       const LlmDatadistCache *dst,
                                       uint32_t batch_index,
                                       int64_t size,
                                       const LlmDatadistExtParam *ext_param,
                                       int32_t timeout_ms,
                                       uint64_t *transfer);

/**
 * Starts what `llm_datadist_pull_blocks` does; otherwise like `llm_datadist_pull_cache_async`.
 *
 * # Safety
 * See `llm_datadist_pull_cache_async`. The lists are valid.
 */
uint32_t llm_datadist_pull_blocks_async(uint64_t handle,
                                        const LlmDatadistCacheIndex *src,
                                        const LlmDatadistCache *dst,
                                        LlmDatadistBlocks src_blocks,
                                        LlmDatadistBlocks dst_blocks,
                                        const LlmDatadistExtParam *ext_param,
                                        int32_t timeout_ms,
                                        uint64_t *transfer);

/**
 * Starts what `llm_datadist_push_cache` does; otherwise like `llm_datadist_pull_cache_async`.
 *
 * # Safety
 * See `llm_datadist_pull_cache_async`.
 */
uint32_t llm_datadist_push_cache_async(uint64_t handle,
                                       const LlmDatadistCache *src,
                                       const LlmDatadistCacheIndex *dst,
                                       uint32_t src_batch_index,
                                       int64_t size,
                                       const LlmDatadistExtParam *ext_param,
                                       int32_t timeout_ms,
                                       uint64_t *transfer);

/**
 * Starts what `llm_datadist_push_blocks` does; otherwise like `llm_datadist_pull_cache_async`.
 *
 * # Safety
 * See `llm_datadist_pull_cache_async`. The lists are valid.
 */
uint32_t llm_datadist_push_blocks_async(uint64_t handle,
                                        const LlmDatadistCache *src,
                                        const LlmDatadistCacheIndex *dst,
                                        LlmDatadistBlocks src_blocks,
                                        LlmDatadistBlocks dst_blocks,
                                        const LlmDatadistExtParam *ext_param,
                                        int32_t timeout_ms,
                                        uint64_t *transfer);

/**
 * Starts what `llm_datadist_copy_cache` does; otherwise like `llm_datadist_pull_cache_async`.
 *
 * # Safety
 * See `llm_datadist_pull_cache_async`. Where the id of a structure is -1, one tensor stays readable and writable at each
 * address until the transfer has ended.
 */
uint32_t llm_datadist_copy_cache_async(uint64_t handle,
                                       const LlmDatadistCache *src,
                                       const LlmDatadistCache *dst,
                                       uint32_t src_batch_index,
                                       uint32_t dst_batch_index,
                                       uint64_t offset,
                                       int64_t size,
                                       int32_t timeout_ms,
                                       uint64_t *transfer);

/**
 * Starts what `llm_datadist_copy_blocks` does; otherwise like `llm_datadist_pull_cache_async`.
 *
 * # Safety
 * See `llm_datadist_copy_cache_async`. The lists are valid.
 */
uint32_t llm_datadist_copy_blocks_async(uint64_t handle,
                                        const LlmDatadistCache *src,
                                        const LlmDatadistCache *dst,
                                        LlmDatadistBlocks src_blocks,
                                        const LlmDatadistBlocks *dst_blocks_list,
                                        size_t num_lists,
                                        int32_t timeout_ms,
                                        uint64_t *transfer);

/**
 * Writes at most `max_events` events to `events`, in the order in which they happened, and their number to `num_events`.
 * Never waits. Without events it succeeds, and writes 0.
 *
 * The message and the texts of the events are valid until the next call of `llm_datadist_poll` or `llm_datadist_unpoll` in
 * this thread, for any object, and at most until the thread ends. The program does not free them.
 *
 * An event is returned once, to one caller. Functions that take the outcome of a transfer remove its event. Events of links are
 * kept only after the first call of this function or of `llm_datadist_event_descriptor`, and only the latest ones of each peer.
 * After a failure no event is lost. Any thread may call it.
 *
 * # Safety
 * `events` points to space for `max_events` events, and `num_events` to space for a number.
 */
uint32_t llm_datadist_poll(uint64_t handle,
                           size_t max_events,
                           LlmDatadistEvent *events,
                           size_t *num_events);

/**
 * Puts the last `num_events` events of the last `llm_datadist_poll` of this thread back, in front of the queue, because the
 * program had no memory for them. The next `llm_datadist_poll` of any thread returns them again.
 *
 * `LLM_PARAM_INVALID` if that call has returned fewer events, or was for another object. Then nothing has changed.
 */
uint32_t llm_datadist_unpoll(uint64_t handle,
                             size_t num_events);

/**
 * Writes a file descriptor to `descriptor`. It is readable while `llm_datadist_poll` has something to return, so that
 * `poll`, `select` or `epoll` can wait for it.
 *
 * The descriptor belongs to the engine, and is the same for every call. The program must not read from it, write to it or
 * close it. Closing the engine closes it: first remove it from what waits for it. A program that `exec` starts does not
 * inherit it. Any thread may call the function. It fails with `LLM_FAILED` if the process has no descriptor left.
 *
 * # Safety
 * `descriptor` points to space for a number.
 */
uint32_t llm_datadist_event_descriptor(uint64_t handle,
                                       int *descriptor);

/**
 * Waits until no transfer of the engine runs, at most `timeout_ms` milliseconds; 0 does not wait. `LLM_TIMEOUT` if one still
 * runs then. Events stay in the queue. Any thread may call it.
 */
uint32_t llm_datadist_drain(uint64_t handle,
                            int32_t timeout_ms);

/**
 * Sends lines of `max_level` and more severe ones to `callback`. Null removes the callback. A process has one callback for
 * all objects.
 *
 * The callback runs on the thread that caused the line, which may be a thread of the engine, and on several threads at a
 * time. It must return soon, must not throw an exception or jump out, and must not call this library: inside the callback,
 * log lines are dropped and this function fails. When this function returns, the old callback is not running and is never
 * called again, so its `user_data` may be freed. Therefore the caller must not hold a lock that the callback takes.
 *
 * Without a callback, errors go to standard error, unless the environment variable `LLM_DATADIST_LOG` is `off` when the
 * first object is created. A forked child starts without a callback.
 *
 * # Safety
 * `callback` may be called with `user_data` on any thread until it is replaced.
 */
uint32_t llm_datadist_set_log_callback(LlmDatadistLogCallback callback,
                                       void *user_data,
                                       int32_t max_level);

/**
 * Sends a message of at most `LLM_DATADIST_MAX_NOTIFICATION` bytes to the program of a linked cluster, whose
 * `llm_datadist_poll` returns it. An addition to the original.
 *
 * Does not wait for the peer: it returns when the message is in the window of the link. Messages over one link arrive in order,
 * each at most once. If the link breaks, its event counts the messages that the peer has not confirmed. The message may be freed
 * when the function returns.
 *
 * `LLM_LINK_BUSY` if the peer has not polled 1,024 messages, or 4 MiB of them; `LLM_NOT_YET_LINK` if there is no link, or it
 * broke; `LLM_PARAM_INVALID` if the message is too long, or `cluster_id` is that of this object. Then nothing is sent. Any thread
 * may call it.
 *
 * # Safety
 * `payload` points to `size` bytes. Null is an empty message.
 */
uint32_t llm_datadist_notify(uint64_t handle,
                             uint64_t cluster_id,
                             const uint8_t *payload,
                             size_t size);

/**
 * Returns whether the transfer has ended, so that nothing of it touches memory any more. Does not take its outcome.
 *
 * Also returns true for an invalid handle, of which `llm_datadist_transfer_result` says why it is invalid. It never fails, so
 * the reason of the last failure stays. Any thread may call it.
 */
bool llm_datadist_transfer_done(uint64_t transfer);

/**
 * Waits until the transfer has ended, at most `timeout_ms` milliseconds, and returns its outcome like
 * `llm_datadist_transfer_result`. 0 does not wait. Any thread may call it, and several may wait for the same transfer.
 */
uint32_t llm_datadist_transfer_wait(uint64_t transfer,
                                    int32_t timeout_ms);

/**
 * Returns the status with which the transfer has ended, or `LLM_WAIT_PROC_TIMEOUT` while it runs. Never waits.
 *
 * No transfer ends with `LLM_WAIT_PROC_TIMEOUT`. A transfer whose time limit has passed ends with `LLM_TIMEOUT`. One that was
 * cancelled, or that the end of its engine has ended, ends with `LLM_FAILED`. After a failure, the contents of the rows that
 * it writes are undefined, and `llm_datadist_last_error` has the reason. An invalid handle is `LLM_FAILED` too.
 *
 * The function takes the outcome: `llm_datadist_poll` no longer returns it. The transfer keeps it, so that the function may be
 * called again. Any thread may call it.
 */
uint32_t llm_datadist_transfer_result(uint64_t transfer);

/**
 * Cancels the transfer. Never waits: a transfer that has begun ends a little later, and its event reports this. Returns true
 * if it will end with `LLM_FAILED`, and false if its outcome can no longer change or the handle is invalid. It never fails, so
 * the reason of the last failure stays. Any thread may call it.
 */
bool llm_datadist_transfer_cancel(uint64_t transfer);

/**
 * Returns whether `llm_datadist_transfer_cancel` has ended the transfer, or will end it. It never fails, so the reason of the
 * last failure stays. Any thread may call it.
 */
bool llm_datadist_transfer_cancelled(uint64_t transfer);

/**
 * Writes the number of bytes that are known to be in place to `done`, and the number of bytes of the whole transfer to
 * `total`, which is 0 until the transfer is planned. Both are final once the transfer has ended. A push learns only at its end
 * how many bytes are in place. An invalid handle is `LLM_FAILED`. Any thread may call it.
 *
 * # Safety
 * Both pointers refer to space for a number.
 */
uint32_t llm_datadist_transfer_progress(uint64_t transfer,
                                        uint64_t *done,
                                        uint64_t *total);

/**
 * Returns the nanoseconds from the start of the transfer to its end, or until now while it runs; 0 for an invalid handle. It
 * never fails, so the reason of the last failure stays. Any thread may call it.
 */
uint64_t llm_datadist_transfer_nanos(uint64_t transfer);

/**
 * Frees the handle of a transfer, which it neither cancels nor waits for. The event of the transfer is still returned. Any
 * thread may call it, also before the transfer has ended and after its engine was closed.
 */
uint32_t llm_datadist_transfer_free(uint64_t transfer);

/**
 * Pulls one batch slot of a peer.
 *
 * # Safety
 * The pointers refer to valid structures.
 */
uint32_t llm_datadist_pull_cache(uint64_t handle,
                                 const LlmDatadistCacheIndex *src,
                                 const LlmDatadistCache *dst,
                                 uint32_t batch_index,
                                 int64_t size,
                                 const LlmDatadistExtParam *ext_param);

/**
 * Pulls blocks of a peer, pair by pair.
 *
 * # Safety
 * The pointers refer to valid structures and lists.
 */
uint32_t llm_datadist_pull_blocks(uint64_t handle,
                                  const LlmDatadistCacheIndex *src,
                                  const LlmDatadistCache *dst,
                                  LlmDatadistBlocks src_blocks,
                                  LlmDatadistBlocks dst_blocks,
                                  const LlmDatadistExtParam *ext_param);

/**
 * Pushes one batch slot to a peer.
 *
 * # Safety
 * The pointers refer to valid structures.
 */
uint32_t llm_datadist_push_cache(uint64_t handle,
                                 const LlmDatadistCache *src,
                                 const LlmDatadistCacheIndex *dst,
                                 uint32_t src_batch_index,
                                 int64_t size,
                                 const LlmDatadistExtParam *ext_param);

/**
 * Pushes blocks to a peer, pair by pair.
 *
 * # Safety
 * The pointers refer to valid structures and lists.
 */
uint32_t llm_datadist_push_blocks(uint64_t handle,
                                  const LlmDatadistCache *src,
                                  const LlmDatadistCacheIndex *dst,
                                  LlmDatadistBlocks src_blocks,
                                  LlmDatadistBlocks dst_blocks,
                                  const LlmDatadistExtParam *ext_param);

/**
 * Copies one range of one batch slot, the same in every tensor, from device to device or from device to host.
 *
 * # Safety
 * The pointers refer to valid structures. Where the id of a structure is -1, one tensor is readable and
 * writable at each address during the call.
 */
uint32_t llm_datadist_copy_cache(uint64_t handle,
                                 const LlmDatadistCache *src,
                                 const LlmDatadistCache *dst,
                                 uint32_t src_batch_index,
                                 uint32_t dst_batch_index,
                                 uint64_t offset,
                                 int64_t size);

/**
 * Copies every block of `src_blocks` to the block at the same position of each list.
 *
 * # Safety
 * See `llm_datadist_copy_cache`. The lists are valid.
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
