/* The C interface of llm_datadist. Generated from crates/capi/src/abi; `make header` writes it. */

#ifndef LLM_DATADIST_LLM_DATADIST_C_H_
#define LLM_DATADIST_LLM_DATADIST_C_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The version of this interface; 5 is the first one that was published. It grows when a function is added or a reserved word is
 * used. A library serves programs of the versions from 5 to its own. A library that cannot do so has another name
 * (`libllm_datadist.so.1`).
 */
#define LLM_DATADIST_ABI_VERSION 5

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
 * The status of a call of the native API: the call succeeded.
 */
#define LLM_DATADIST_SUCCESS 0

/**
 * A value that is not allowed, or rows that do not fit the other cache. Correct the program.
 */
#define LLM_DATADIST_INVALID_ARGUMENT 1

/**
 * The cache was freed, or the peer has none of this name.
 */
#define LLM_DATADIST_NOT_FOUND 2

/**
 * There is no room in a pool, or no memory.
 */
#define LLM_DATADIST_OUT_OF_MEMORY 3

/**
 * The time limit has passed.
 */
#define LLM_DATADIST_TIMEOUT 4

/**
 * There is no link, it has ended, or it was not made. Link again, ask again.
 */
#define LLM_DATADIST_PEER_LOST 5

/**
 * Too many transfers, grants or messages. Take events, and try again.
 */
#define LLM_DATADIST_BUSY 6

/**
 * The grant has ended.
 */
#define LLM_DATADIST_GRANT_ENDED 7

/**
 * Bytes that have moved differ from their source.
 */
#define LLM_DATADIST_VERIFY_FAILED 8

/**
 * The engine was closed, or a handle is not valid any more.
 */
#define LLM_DATADIST_CLOSED 9

/**
 * The program has cancelled the transfer.
 */
#define LLM_DATADIST_CANCELLED 10

/**
 * Every other failure.
 */
#define LLM_DATADIST_ERROR 11

/**
 * The transfer still runs. No transfer ends with this status.
 */
#define LLM_DATADIST_RUNNING 12

/**
 * Maximum number of bytes of a message for a peer.
 */
#define LLM_DATADIST_MAX_MESSAGE (64 << 10)

/**
 * Number of bytes of the token of a grant.
 */
#define LLM_DATADIST_TOKEN_SIZE 48

/**
 * Number of bytes that every address of an engine fits into, with its null byte.
 */
#define LLM_DATADIST_ADDRESS_SIZE 64

/**
 * Flag of a cache: its tensors follow each other without gaps.
 */
#define LLM_DATADIST_CONTIGUOUS 1

/**
 * Flag of a registered cache: peers cannot find it.
 */
#define LLM_DATADIST_NOT_SHARED 2

/**
 * Flag of a push: `llm_datadist_transfer_ready` reports each layer.
 */
#define LLM_DATADIST_LAYERWISE 1

/**
 * Flag of a pull: it is not the last one of this engine under its grants.
 */
#define LLM_DATADIST_MORE_PULLS 2

/**
 * The kind of an event: a transfer has ended, and nobody has taken its outcome.
 */
#define LLM_DATADIST_COMPLETED 1

/**
 * The kind of an event: the program at a peer has sent a message.
 */
#define LLM_DATADIST_MESSAGE 2

/**
 * The kind of an event: a link was made, by either end.
 */
#define LLM_DATADIST_PEER_UP 3

/**
 * The kind of an event: a link has ended, for whatever reason.
 */
#define LLM_DATADIST_PEER_DOWN 4

/**
 * The kind of an event: a grant of this engine has ended. Its blocks may be written again.
 */
#define LLM_DATADIST_GRANT_CLOSED 5

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
 * A text, which need not end in a null byte and may have some.
 */
typedef struct {
  /**
   * Its bytes. Null if there are none.
   */
  const char *bytes;
  /**
   * Number of bytes.
   */
  size_t size;
} LlmDatadistText;

/**
 * An option of `llm_datadist_hixl_initialize`.
 */
typedef struct {
  /**
   * Key.
   */
  LlmDatadistText key;
  /**
   * Value.
   */
  LlmDatadistText value;
} LlmDatadistHixlOption;

/**
 * The state of an asynchronous connection.
 */
typedef struct {
  /**
   * The other engine.
   */
  LlmDatadistText remote_engine;
  /**
   * Its state, a number of `hixl::AsyncConnectStatus`.
   */
  uint32_t state;
} LlmDatadistHixlConnection;

/**
 * One operation of a transfer.
 */
typedef struct {
  /**
   * Address in this process.
   */
  uint64_t local_addr;
  /**
   * Address at the other engine.
   */
  uint64_t remote_addr;
  /**
   * Number of bytes.
   */
  uint64_t len;
} LlmDatadistHixlOp;

/**
 * The state of an asynchronous transfer.
 */
typedef struct {
  /**
   * The number of the request.
   */
  uint64_t request;
  /**
   * What the program has given with it.
   */
  uint64_t user_data;
  /**
   * Its state, a number of `hixl::TransferStatus`.
   */
  uint32_t state;
} LlmDatadistHixlResult;

/**
 * A notification.
 */
typedef struct {
  /**
   * Its name.
   */
  LlmDatadistText name;
  /**
   * Its text.
   */
  LlmDatadistText message;
} LlmDatadistHixlNotice;

/**
 * Receives one line of the log: its level, the part of the engine that it comes from, its text, and `user_data`. The texts
 * end in a null byte and are valid during the call.
 */
typedef void (*LlmDatadistLogCallback)(int32_t level, const char *target, const char *text, void *user_data);

/**
 * A range from `first` to before `end`. If both are 0, it stands for all.
 */
typedef struct {
  /**
   * The first one.
   */
  uint64_t first;
  /**
   * The one after the last one.
   */
  uint64_t end;
} LlmDatadistRange;

/**
 * What the bytes of a block mean: one or two tensors for each layer.
 */
typedef struct {
  /**
   * The layers of the model that the cache holds, at least one. Here both 0 does not stand for all: it is refused.
   */
  LlmDatadistRange layers;
  /**
   * The key-value heads that the cache holds. All of them: those of `total_heads`.
   */
  LlmDatadistRange heads;
  /**
   * Number of key-value heads of the model; 0: as many as `heads` has.
   */
  uint32_t total_heads;
  /**
   * Number of tokens in a block.
   */
  uint32_t block_tokens;
  /**
   * Number of elements of one head of one token.
   */
  uint32_t head_dim;
  /**
   * Order of the dimensions of a block: `"NHD"` (tokens, heads, elements), the default, or `"HND"`.
   */
  const char *order;
  /**
   * Where keys and values are: `"separate"` (two tensors for each layer), the default, `"k_then_v"`, `"latent"` or `"single"`.
   */
  const char *kv;
  /**
   * Name or version of the model. Both ends of a transfer must have the same. By default none.
   */
  const char *model;
  /**
   * Must be 0.
   */
  uint64_t reserved[4];
} LlmDatadistKvLayout;

/**
 * What a cache is.
 */
typedef struct {
  /**
   * Number of blocks. A block is one row of every tensor.
   */
  uint64_t blocks;
  /**
   * What the blocks mean, or null. Then `shape` and `tensors` describe them.
   */
  const LlmDatadistKvLayout *layout;
  /**
   * Element type: `"float16"`, `"bfloat16"`, `"float32"`, `"float64"`, `"int8"` to `"int64"`, `"uint8"` to `"uint64"`, `"bool"`.
   */
  const char *dtype;
  /**
   * Dimensions of one block of one tensor.
   */
  const int64_t *shape;
  /**
   * Number of dimensions in `shape`.
   */
  size_t num_dims;
  /**
   * Number of tensors. 0 if there is a layout, and for registered memory, whose addresses are counted.
   */
  uint32_t tensors;
  /**
   * Number of consecutive tensors that form a layer, 1 by default. 0 if there is a layout.
   */
  uint32_t tensors_per_layer;
  /**
   * Pool: `"device"`, the default, or `"host"`.
   */
  const char *pool;
  /**
   * Bytes from one block to the next in each tensor of registered memory. By default there are no gaps.
   */
  uint64_t stride;
  /**
   * `LLM_DATADIST_CONTIGUOUS` for `llm_datadist_allocate`, `LLM_DATADIST_NOT_SHARED` for `llm_datadist_register`, or 0.
   */
  uint32_t flags;
  /**
   * Must be 0.
   */
  uint64_t reserved[4];
} LlmDatadistForm;

/**
 * Blocks of a cache of this engine, or of a peer.
 */
typedef struct {
  /**
   * A cache of this engine, or 0.
   */
  uint64_t cache;
  /**
   * The peer, if `cache` is 0.
   */
  uint64_t peer;
  /**
   * The name of the peer's cache, or null if it is of this engine.
   */
  const char *name;
  /**
   * Blocks, in order.
   */
  const uint32_t *blocks;
  /**
   * Number of blocks.
   */
  size_t num_blocks;
  /**
   * Layers of the cache, counted from 0.
   */
  LlmDatadistRange layers;
  /**
   * Tokens of the sequence that the blocks hold. Both caches need a layout.
   */
  LlmDatadistRange tokens;
  /**
   * Bytes of every block in each tensor. Not together with `tokens`.
   */
  LlmDatadistRange bytes;
  /**
   * Must be 0.
   */
  uint64_t reserved[2];
} LlmDatadistRows;

/**
 * Rows that are written, and rows that are read: block `i` of `src` goes to block `i` of `dst`.
 */
typedef struct {
  /**
   * The rows that are written.
   */
  LlmDatadistRows dst;
  /**
   * The rows that are read.
   */
  LlmDatadistRows src;
  /**
   * Pull: the token of the grant that lends `src`, or null.
   */
  const uint8_t *token;
  /**
   * Must be 0.
   */
  uint64_t reserved[2];
} LlmDatadistPair;

/**
 * What a copy, pull or push does beside moving bytes.
 */
typedef struct {
  /**
   * Pull and push: the message that the peer's program gets when the bytes are in place, or null. All pairs then name one peer.
   */
  const uint8_t *message;
  /**
   * Number of bytes of `message`.
   */
  size_t message_size;
  /**
   * How the bytes are compared: `"off"`, `"sample"` or `"full"`. By default as the engine does.
   */
  const char *verify;
  /**
   * Time limit in seconds, of a layer-wise push for each layer. 0: that of the engine.
   */
  double timeout;
  /**
   * `LLM_DATADIST_LAYERWISE` for a push, `LLM_DATADIST_MORE_PULLS` for a pull, or 0.
   */
  uint32_t flags;
  /**
   * Must be 0.
   */
  uint64_t reserved[4];
} LlmDatadistCall;

/**
 * Another engine, as long as it runs. A program that restarts is another peer.
 */
typedef struct {
  /**
   * The random number that the engine drew when it was opened. Calls name the peer by it.
   */
  uint64_t peer;
  /**
   * The name that the peer's program has given to its engine.
   */
  const char *name;
  /**
   * The address of the peer.
   */
  const char *address;
  /**
   * How bytes move: `"shm"` or `"tcp"`.
   */
  const char *transport;
  /**
   * The option `metadata` of the peer's engine. That of a Python engine may contain null bytes.
   */
  const uint8_t *metadata;
  /**
   * Number of bytes of `metadata`.
   */
  size_t metadata_size;
  /**
   * 0 in this version.
   */
  uint64_t reserved[2];
} LlmDatadistPeer;

/**
 * Something that has happened. Fields that do not belong to the kind are 0 or null.
 */
typedef struct {
  /**
   * `LLM_DATADIST_COMPLETED` or another kind. A program ignores kinds that it does not know.
   */
  uint32_t kind;
  /**
   * Completed: the status with which the transfer has ended. `llm_datadist_transfer_result` has the reason.
   */
  uint32_t status;
  /**
   * Completed: the transfer. The program may have freed its handle.
   */
  uint64_t transfer;
  /**
   * Message, peer up and peer down: the peer.
   */
  LlmDatadistPeer peer;
  /**
   * Message: its bytes.
   */
  const uint8_t *message;
  /**
   * Number of bytes of `message`.
   */
  size_t message_size;
  /**
   * Peer down: why, for people. Grant closed: `"done"`, `"expired"`, `"revoked"` or `"released"`.
   */
  const char *reason;
  /**
   * Peer down: number of messages to the peer whose arrival it has not confirmed. Each may have arrived or not.
   */
  uint64_t unconfirmed;
  /**
   * Grant closed: its token.
   */
  uint8_t token[LLM_DATADIST_TOKEN_SIZE];
  /**
   * 0 in this version.
   */
  uint64_t reserved[4];
} LlmDatadistEvent;

/**
 * Blocks of one tensor that a failed transfer has written completely.
 */
typedef struct {
  /**
   * Number of the tensor in the cache that was written, counted from 0.
   */
  uint32_t tensor;
  /**
   * 0 in this version.
   */
  uint32_t reserved;
  /**
   * Blocks of it.
   */
  LlmDatadistRange blocks;
} LlmDatadistArrived;

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
 * Layers to read and to write. Both ends of a range are included; -1 and -1 stand for all layers.
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
   * Must be 0.
   */
  uint64_t reserved[4];
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
 * Returns the word that tells the failures of one status of the native API apart, such as `name_taken`; otherwise like
 * `llm_datadist_last_error`.
 */
const char *llm_datadist_last_error_code(void);

/**
 * Returns the argument that the last failure of the native API is about, such as `dst`, or an empty text; otherwise like
 * `llm_datadist_last_error`.
 */
const char *llm_datadist_last_error_argument(void);

/**
 * Opens the engine. Has no effect while it is open.
 *
 * # Safety
 * `options` points to `num_options` options.
 */
uint32_t llm_datadist_initialize(uint64_t handle, const LlmDatadistOption *options, size_t num_options);

/**
 * Closes the engine. Has no effect unless it is open.
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
 * Creates an engine of `hixl`, which is not initialized yet. Returns its handle, or 0 on failure. A handle is never used again.
 */
uint64_t llm_datadist_hixl_new(void);

/**
 * Finalizes an engine, and frees its handle.
 */
uint32_t llm_datadist_hixl_free(uint64_t hixl);

/**
 * Opens the engine. If it is open, only checks the options.
 *
 * # Safety
 * `options` points to `num_options` options. Each text has as many bytes as it says.
 */
uint32_t llm_datadist_hixl_initialize(uint64_t hixl,
                                      LlmDatadistText local_engine,
                                      const LlmDatadistHixlOption *options,
                                      size_t num_options);

/**
 * Waits for the calls that run, which end by their limits, and closes the engine. Afterwards, this process touches no memory of the
 * program for it. Has no effect unless it is open.
 */
uint32_t llm_datadist_hixl_finalize(uint64_t hixl);

/**
 * Registers memory, and writes its handle to `mem_handle`. With `local_only`, peers cannot use it. `mem_type` is a number of
 * `hixl::MemType`.
 *
 * # Safety
 * `mem_handle` points to space for a handle. The memory is readable and writable until it is deregistered or the engine is closed.
 */
uint32_t llm_datadist_hixl_register_mem(uint64_t hixl,
                                        uint64_t addr,
                                        uint64_t len,
                                        bool local_only,
                                        int32_t mem_type,
                                        uint64_t *mem_handle);

/**
 * Ends registered memory, and waits until no transfer uses it, at most 10 s. After `TIMEOUT`, transfers still use the memory, and the
 * same call waits again. An unknown handle is a success, and 0 is refused.
 */
uint32_t llm_datadist_hixl_deregister_mem(uint64_t hixl,
                                          uint64_t mem_handle);

/**
 * Connects to another engine.
 *
 * # Safety
 * `remote_engine` has as many bytes as it says.
 */
uint32_t llm_datadist_hixl_connect(uint64_t hixl, LlmDatadistText remote_engine, int32_t timeout_in_millis);

/**
 * Ends the connection to another engine, with all transfers over it.
 *
 * # Safety
 * See `llm_datadist_hixl_connect`.
 */
uint32_t llm_datadist_hixl_disconnect(uint64_t hixl,
                                      LlmDatadistText remote_engine,
                                      int32_t timeout_in_millis);

/**
 * Has a thread of the engine connect.
 *
 * # Safety
 * See `llm_datadist_hixl_connect`.
 */
uint32_t llm_datadist_hixl_connect_async(uint64_t hixl,
                                         LlmDatadistText remote_engine,
                                         int32_t timeout_in_millis);

/**
 * Has a thread of the engine disconnect.
 *
 * # Safety
 * See `llm_datadist_hixl_connect`.
 */
uint32_t llm_datadist_hixl_disconnect_async(uint64_t hixl,
                                            LlmDatadistText remote_engine,
                                            int32_t timeout_in_millis);

/**
 * Writes the state of the latest asynchronous call for an engine to `state`, a number of `hixl::AsyncConnectStatus`.
 *
 * # Safety
 * See `llm_datadist_hixl_connect`. `state` points to space for a number.
 */
uint32_t llm_datadist_hixl_connect_state(uint64_t hixl,
                                         LlmDatadistText remote_engine,
                                         uint32_t *state);

/**
 * Writes the states of all asynchronous connections to `connections`, and their number to `num_connections`.
 *
 * The list and its texts are valid until the next function of `hixl` that returns a list in this thread, for any engine, and at most
 * until the thread ends. The program does not free them.
 *
 * # Safety
 * `connections` points to space for a pointer, and `num_connections` to space for a number.
 */
uint32_t llm_datadist_hixl_connect_states(uint64_t hixl,
                                          const LlmDatadistHixlConnection **connections,
                                          size_t *num_connections);

/**
 * Writes 1 to `value` if a feature is supported, and otherwise 0. Needs no engine. `feature` is a number of `hixl::FeatureType`.
 *
 * # Safety
 * `value` points to space for a number.
 */
uint32_t llm_datadist_hixl_capability(int32_t feature,
                                      int32_t *value);

/**
 * Reads memory of another engine, or writes it, and returns when all bytes are in place. `operation` is a number of
 * `hixl::TransferOp`.
 *
 * # Safety
 * `ops` points to `num_ops` operations. `remote_engine` has as many bytes as it says.
 */
uint32_t llm_datadist_hixl_transfer_sync(uint64_t hixl,
                                         LlmDatadistText remote_engine,
                                         int32_t operation,
                                         const LlmDatadistHixlOp *ops,
                                         size_t num_ops,
                                         int32_t timeout_in_millis);

/**
 * Starts to read or write, and writes the number of the request to `request`. `llm_datadist_hixl_transfer_state` and
 * `llm_datadist_hixl_transfer_states` report its end once, the latter with `user_data`. The list may be freed when the call returns.
 *
 * # Safety
 * See `llm_datadist_hixl_transfer_sync`. `request` points to space for a number.
 */
uint32_t llm_datadist_hixl_transfer_async(uint64_t hixl,
                                          LlmDatadistText remote_engine,
                                          int32_t operation,
                                          const LlmDatadistHixlOp *ops,
                                          size_t num_ops,
                                          uint64_t user_data,
                                          uint64_t *request);

/**
 * Writes the state of a request to `state`, a number of `hixl::TransferStatus`, also if the status is not 0.
 *
 * # Safety
 * `state` points to space for a number.
 */
uint32_t llm_datadist_hixl_transfer_state(uint64_t hixl, uint64_t request, uint32_t *state);

/**
 * Writes the states of at most `max_results` requests to `results`, in the order of their start, and their number to `num_results`.
 * With `skip_waiting`, those that run are left out. The list is valid as for `llm_datadist_hixl_connect_states`.
 *
 * # Safety
 * `results` points to space for a pointer, and `num_results` to space for a number.
 */
uint32_t llm_datadist_hixl_transfer_states(uint64_t hixl,
                                           uint32_t max_results,
                                           bool skip_waiting,
                                           const LlmDatadistHixlResult **results,
                                           size_t *num_results);

/**
 * Sends a notification, and returns when the other engine has it.
 *
 * # Safety
 * Each text has as many bytes as it says.
 */
uint32_t llm_datadist_hixl_send_notify(uint64_t hixl,
                                       LlmDatadistText remote_engine,
                                       LlmDatadistHixlNotice notice,
                                       int32_t timeout_in_millis);

/**
 * Writes all notifications that were not read to `notices`, and their number to `num_notices`. The list is valid as for
 * `llm_datadist_hixl_connect_states`.
 *
 * # Safety
 * `notices` points to space for a pointer, and `num_notices` to space for a number.
 */
uint32_t llm_datadist_hixl_notifies(uint64_t hixl,
                                    const LlmDatadistHixlNotice **notices,
                                    size_t *num_notices);

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
 * Allocates a cache from a pool, and writes its handle to `cache`. Peers find it by `name`: 1 to 128 bytes of printable text that no
 * other cache of the engine has. The contents are undefined.
 *
 * # Safety
 * `name` ends in a null byte, `form` points to a valid structure, and `cache` to space for a handle.
 */
uint32_t llm_datadist_allocate(uint64_t engine,
                               const char *name,
                               const LlmDatadistForm *form,
                               uint64_t *cache);

/**
 * Makes a cache of memory of the program: `tensors` has the address of each tensor. Otherwise like `llm_datadist_allocate`.
 *
 * # Safety
 * See `llm_datadist_allocate`. `tensors` points to `num_tensors` addresses. At each of them, one tensor stays readable and writable
 * until the transfer of `llm_datadist_cache_free` has succeeded, or the engine is closed.
 */
uint32_t llm_datadist_register(uint64_t engine,
                               const char *name,
                               void *const *tensors,
                               size_t num_tensors,
                               const LlmDatadistForm *form,
                               uint64_t *cache);

/**
 * Writes the address of every tensor of a cache to `tensors`. Block `i` begins at `i` times the bytes of a block, or the stride.
 *
 * # Safety
 * `tensors` points to space for `num_tensors` addresses.
 */
uint32_t llm_datadist_cache_tensors(uint64_t cache,
                                    void **tensors,
                                    size_t num_tensors);

/**
 * Ends a cache, and writes the handle of a transfer to `transfer`. Its name can be used again at once, and new transfers that name it
 * fail with `LLM_DATADIST_NOT_FOUND`. Grants of the cache end.
 *
 * The transfer ends when no transfer of this engine, and no request of a peer that it serves, uses registered memory any more. With
 * `LLM_DATADIST_TIMEOUT`, it is still in use: keep it, and call the function again. `LLM_DATADIST_BUSY`: the cache is freed; call
 * the function again to learn when its memory may be used. The handle is invalid once the transfer has succeeded.
 *
 * # Safety
 * `transfer` points to space for a handle.
 */
uint32_t llm_datadist_cache_free(uint64_t cache,
                                 uint64_t *transfer);

/**
 * Starts to copy blocks inside an engine, within a cache or between two, and writes the handle of the transfer to `transfer`;
 * `llm_datadist_transfer_free` frees it. The pairs are copied in their order.
 *
 * What the arguments and the caches of this engine decide is returned at once; nothing has started then. `LLM_DATADIST_BUSY`: too
 * many transfers run, or have an outcome that nobody took. Every other failure is the outcome of the transfer. The structures and
 * lists of the call may be freed when it returns.
 *
 * # Safety
 * `pairs` points to `num_pairs` valid structures, `call` to one or is null for the defaults, and `transfer` to space for a handle.
 */
uint32_t llm_datadist_copy(uint64_t engine,
                           const LlmDatadistPair *pairs,
                           size_t num_pairs,
                           const LlmDatadistCall *call,
                           uint64_t *transfer);

/**
 * Starts to read blocks of peers into blocks of this engine; otherwise like `llm_datadist_copy`. The pairs succeed or fail together.
 *
 * If both caches of a pair have a layout, elements go where the layout of `dst` has them. If all pairs have the same `dst` and all
 * caches have layouts, each layer and head is read from one pair whose cache holds it. Until the transfer has ended, the blocks of
 * `dst` must not be used; if it fails, they are undefined. With a token, the pull fails with `LLM_DATADIST_GRANT_ENDED` if the grant
 * ended before all bytes were read.
 *
 * # Safety
 * See `llm_datadist_copy`.
 */
uint32_t llm_datadist_pull(uint64_t engine,
                           const LlmDatadistPair *pairs,
                           size_t num_pairs,
                           const LlmDatadistCall *call,
                           uint64_t *transfer);

/**
 * Starts to write blocks of this engine into blocks of peers, under the rules of `llm_datadist_pull`. The blocks of `src` must not be
 * written until the transfer has ended.
 *
 * With `LLM_DATADIST_LAYERWISE`, a layer moves when `llm_datadist_transfer_ready` is called for it. All pairs then have one local
 * cache, and rows of whole blocks.
 *
 * # Safety
 * See `llm_datadist_copy`.
 */
uint32_t llm_datadist_push(uint64_t engine,
                           const LlmDatadistPair *pairs,
                           size_t num_pairs,
                           const LlmDatadistCall *call,
                           uint64_t *transfer);

/**
 * Opens an engine, and writes its handle to `engine`. `llm_datadist_engine_close` closes it. Both texts of an option end in a null
 * byte.
 *
 * The options are those of the Python class `Engine`, as texts: `pool`, `host_pool`, `page`, `listen`, `name`, `metadata`, `token`,
 * `token_file`, `accept_remote`, `timeout`, `verify`, and what `llm-datadist options` lists. A size is `"64MiB"` or a number of
 * bytes, a time is a number of seconds, and a flag is `true` or `false`. `metadata` is text without null bytes. Unknown names are
 * refused, and so is an option that is given twice.
 *
 * A process may have several engines. Any thread may call the functions for an engine. A forked child has none of the engines,
 * caches and transfers of its parent, and may open its own.
 *
 * # Safety
 * `options` points to `num_options` options, and `engine` to space for a handle.
 */
uint32_t llm_datadist_engine_open(const LlmDatadistOption *options,
                                  size_t num_options,
                                  uint64_t *engine);

/**
 * Closes an engine: ends its transfers, links and grants, frees its caches and their handles, and releases the pools. The handle is
 * invalid from the start of the call.
 *
 * Transfers that still run after `timeout` seconds, 0 or above, end with `LLM_DATADIST_CLOSED`. Their handles answer until they are
 * freed. Events that nobody took are dropped. The event descriptor is closed: first remove it from what waits for it.
 */
uint32_t llm_datadist_engine_close(uint64_t engine,
                                   double timeout);

/**
 * Writes the address at which the engine listens to `address`, with the port that was taken, as a text that ends in a null byte. It
 * is empty without the option `listen`. `LLM_DATADIST_ADDRESS_SIZE` bytes are enough.
 *
 * # Safety
 * `address` points to space for `size` characters.
 */
uint32_t llm_datadist_engine_address(uint64_t engine,
                                     char *address,
                                     size_t size);

/**
 * Writes a file descriptor to `descriptor`. It is readable while `llm_datadist_events` has something to return, so that `poll`,
 * `select` or `epoll` can wait for it.
 *
 * The descriptor belongs to the engine, and is the same for every call. The program must not read from it, write to it or
 * close it. A program that `exec` starts does not inherit it.
 *
 * # Safety
 * `descriptor` points to space for a number.
 */
uint32_t llm_datadist_event_descriptor(uint64_t engine,
                                       int *descriptor);

/**
 * Writes the counters of the engine, and the state of its pools, caches and links, to `json`: a text of JSON that ends in a null
 * byte, with the names that `Engine.stats()` has in Python, except `engine`. The program does not free it: it is valid until the
 * next call of this function in this thread, for any engine, and at most until the thread ends.
 *
 * # Safety
 * `json` points to space for a pointer.
 */
uint32_t llm_datadist_stats(uint64_t engine,
                            const char **json);

/**
 * Writes at most `max_events` events to `events`, oldest first, and their number to `num_events`. Never waits: without events it
 * succeeds, and writes 0.
 *
 * What the events point to is valid until the next call of `llm_datadist_events` or `llm_datadist_peers` in this thread, for any
 * engine, and at most until the thread ends. The program does not free it.
 *
 * An event is returned once, to one caller. Functions that take the outcome of a transfer remove its event. After a failure no event
 * is lost.
 *
 * # Safety
 * `events` points to space for `max_events` events, or is null if that is 0, and `num_events` to space for a number.
 */
uint32_t llm_datadist_events(uint64_t engine,
                             size_t max_events,
                             LlmDatadistEvent *events,
                             size_t *num_events);

/**
 * Writes at most `max_peers` of the peers that are linked now to `peers`, and the number of all of them to `num_peers`. What the
 * structures point to is valid as for `llm_datadist_events`.
 *
 * # Safety
 * `peers` points to space for `max_peers` structures, or is null if that is 0, and `num_peers` to space for a number.
 */
uint32_t llm_datadist_peers(uint64_t engine,
                            size_t max_peers,
                            LlmDatadistPeer *peers,
                            size_t *num_peers);

/**
 * Starts to link with the engine that listens at an address, `ip:port` or `[ipv6]:port`, unless a link to it exists. Writes the handle
 * of a transfer to `transfer`; `llm_datadist_transfer_peer` returns its peer.
 *
 * Both ends may call it. While no engine listens, this engine tries again until `timeout` seconds have passed; 0 stands for the time limit
 * of the engine. If `name` is not null, the peer must have it.
 *
 * # Safety
 * The texts end in a null byte, and `transfer` points to space for a handle.
 */
uint32_t llm_datadist_link(uint64_t engine,
                           const char *address,
                           const char *name,
                           double timeout,
                           uint64_t *transfer);

/**
 * Starts to end the link to a peer, and writes the handle of a transfer to `transfer`. Transfers that run are finished first. This end
 * has dropped the link when the transfer ends, whatever its outcome. A peer that is not linked is no error.
 *
 * # Safety
 * `transfer` points to space for a handle.
 */
uint32_t llm_datadist_peer_close(uint64_t engine,
                                 uint64_t peer,
                                 double timeout,
                                 uint64_t *transfer);

/**
 * Sends a message of at most `LLM_DATADIST_MAX_MESSAGE` bytes to the program of a peer, whose `llm_datadist_events` returns it. Never
 * waits.
 *
 * Messages of one peer arrive in order, each at most once. `LLM_DATADIST_BUSY`: the peer's program has not taken 1,024 messages or
 * 4 MiB. `LLM_DATADIST_PEER_LOST`: there is no link to this peer. Nothing was sent then.
 *
 * # Safety
 * `message` points to `size` bytes. Null is an empty message.
 */
uint32_t llm_datadist_send(uint64_t engine,
                           uint64_t peer,
                           const uint8_t *message,
                           size_t size);

/**
 * Lends blocks of a cache of this engine to readers for `ttl` seconds, and writes the token of the grant to `token`, which has space
 * for `LLM_DATADIST_TOKEN_SIZE` bytes. Sends nothing: the program gives the token to the readers, which pass it to
 * `llm_datadist_pull`.
 *
 * While the grant lasts, the program must not write to the blocks. It ends when its time has passed, when `readers` readers have
 * finished their last pull, by `llm_datadist_revoke`, or when the cache is freed. Then comes the event `LLM_DATADIST_GRANT_CLOSED`.
 * `readers` is 1 to 4,096. A grant does not keep others out: a peer can pull the blocks without it.
 *
 * # Safety
 * `rows` points to a valid structure, and `token` to its space.
 */
uint32_t llm_datadist_lend(uint64_t engine,
                           const LlmDatadistRows *rows,
                           double ttl,
                           uint32_t readers,
                           uint8_t *token);

/**
 * Lets a grant of this engine last at least until `ttl` seconds from now. `LLM_DATADIST_GRANT_ENDED` if it has ended.
 *
 * # Safety
 * `token` points to a token.
 */
uint32_t llm_datadist_renew(uint64_t engine,
                            const uint8_t *token,
                            double ttl);

/**
 * Ends a grant of this engine. When the call returns, no pull under it succeeds any more, so the blocks may be written. Writes the
 * handle of a transfer to `transfer`, which ends when the reads that this engine serves have ended. `LLM_DATADIST_GRANT_ENDED` if the
 * grant has ended before.
 *
 * # Safety
 * `token` points to a token, and `transfer` to space for a handle.
 */
uint32_t llm_datadist_revoke(uint64_t engine,
                             const uint8_t *token,
                             uint64_t *transfer);

/**
 * Returns whether the transfer has ended, so that nothing of it touches memory any more. Does not take its outcome.
 *
 * Also returns true for an invalid handle, of which `llm_datadist_transfer_result` says why it is invalid. It never fails, so
 * the last failure stays.
 */
bool llm_datadist_transfer_done(uint64_t transfer);

/**
 * Waits until the transfer has ended, at most `timeout` seconds, 0 or above, and returns its outcome like
 * `llm_datadist_transfer_result`. Several threads may wait for the same transfer.
 */
uint32_t llm_datadist_transfer_wait(uint64_t transfer, double timeout);

/**
 * Returns the status with which the transfer has ended, or `LLM_DATADIST_RUNNING` while it runs. Never waits.
 *
 * After a failure, the contents of the rows that it writes are undefined, and `llm_datadist_last_error` has the reason. The function
 * takes the outcome: `llm_datadist_events` no longer returns it. The transfer keeps it, so that the function may be called again.
 */
uint32_t llm_datadist_transfer_result(uint64_t transfer);

/**
 * Writes at most `max_ranges` ranges of the blocks that a failed transfer has written completely to `ranges`, and the number of all of
 * them to `num_ranges`. The other blocks that it should write are undefined. The ranges of a tensor are ascending and disjoint. There
 * are none while the transfer runs, after a success, and between caches with different layouts. Does not take the outcome.
 *
 * # Safety
 * `ranges` points to space for `max_ranges` structures, or is null if that is 0, and `num_ranges` to space for a number.
 */
uint32_t llm_datadist_transfer_arrived(uint64_t transfer,
                                       size_t max_ranges,
                                       LlmDatadistArrived *ranges,
                                       size_t *num_ranges);

/**
 * Cancels the transfer. Never waits: a transfer that has begun ends a little later. Returns true if it will end with
 * `LLM_DATADIST_CANCELLED`, and false if its outcome can no longer change or the handle is invalid. It never fails, so the last
 * failure stays.
 */
bool llm_datadist_transfer_cancel(uint64_t transfer);

/**
 * Reports that a layer is computed, and starts to send it. Never waits. Only for a push with `LLM_DATADIST_LAYERWISE`.
 *
 * Layers are counted from 0, and may come in any order and from any thread. From now on the layer must not be written until the
 * transfer has ended. It succeeds when all layers of its rows were reported and are in place. Reporting a layer after the transfer
 * has failed does nothing.
 */
uint32_t llm_datadist_transfer_ready(uint64_t transfer,
                                     uint32_t layer);

/**
 * Writes the peer of a transfer of `llm_datadist_link` that has succeeded to `peer`.
 *
 * # Safety
 * `peer` points to space for a number.
 */
uint32_t llm_datadist_transfer_peer(uint64_t transfer, uint64_t *peer);

/**
 * Writes the number of bytes that are known to be in place to `done`, and the number of bytes of the whole transfer to
 * `total`, which is 0 until it is known. Both are final once the transfer has ended. A push learns only at its end how many bytes
 * are in place.
 *
 * # Safety
 * Both pointers refer to space for a number.
 */
uint32_t llm_datadist_transfer_progress(uint64_t transfer,
                                        uint64_t *done,
                                        uint64_t *total);

/**
 * Returns the nanoseconds from the start of the transfer to its end, or until now while it runs; 0 for an invalid handle. It
 * never fails, so the last failure stays.
 */
uint64_t llm_datadist_transfer_nanos(uint64_t transfer);

/**
 * Frees the handle of a transfer, which it neither cancels nor waits for. The event of the transfer is still returned. A layer-wise
 * push whose layers were not all reported is cancelled, because nobody could report them any more. May be called before the transfer
 * has ended, and after its engine was closed.
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
