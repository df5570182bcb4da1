//! The structures and numbers of the native API in C. The rules for lists and reserved words are those of `types`.
//!
//! A structure that a program sets to zeros, as `{0}` does, has the default for every field.

use std::ffi::c_char;

use super::types::Reserved;

/// The status of a call of the native API: the call succeeded.
pub const LLM_DATADIST_SUCCESS: u32 = 0;
/// A value that is not allowed, or rows that do not fit the other cache. Correct the program.
pub const LLM_DATADIST_INVALID_ARGUMENT: u32 = 1;
/// The cache was freed, or the peer has none of this name.
pub const LLM_DATADIST_NOT_FOUND: u32 = 2;
/// There is no room in a pool, or no memory.
pub const LLM_DATADIST_OUT_OF_MEMORY: u32 = 3;
/// The time limit has passed.
pub const LLM_DATADIST_TIMEOUT: u32 = 4;
/// There is no link, it has ended, or it was not made. Link again, ask again.
pub const LLM_DATADIST_PEER_LOST: u32 = 5;
/// Too many transfers, grants or messages. Take events, and try again.
pub const LLM_DATADIST_BUSY: u32 = 6;
/// The grant has ended.
pub const LLM_DATADIST_GRANT_ENDED: u32 = 7;
/// Bytes that have moved differ from their source.
pub const LLM_DATADIST_VERIFY_FAILED: u32 = 8;
/// The engine was closed, or a handle is not valid any more.
pub const LLM_DATADIST_CLOSED: u32 = 9;
/// The program has cancelled the transfer.
pub const LLM_DATADIST_CANCELLED: u32 = 10;
/// Every other failure.
pub const LLM_DATADIST_ERROR: u32 = 11;
/// The transfer still runs. No transfer ends with this status.
pub const LLM_DATADIST_RUNNING: u32 = 12;

/// Maximum number of bytes of a message for a peer.
pub const LLM_DATADIST_MAX_MESSAGE: usize = 64 << 10;
/// Number of bytes of the token of a grant.
pub const LLM_DATADIST_TOKEN_SIZE: usize = 48;
/// Number of bytes that every address of an engine fits into, with its null byte.
pub const LLM_DATADIST_ADDRESS_SIZE: usize = 64;

/// Flag of a cache: its tensors follow each other without gaps.
pub const LLM_DATADIST_CONTIGUOUS: u32 = 1;
/// Flag of a registered cache: peers cannot find it.
pub const LLM_DATADIST_NOT_SHARED: u32 = 2;

/// Flag of a push: `llm_datadist_transfer_ready` reports each layer.
pub const LLM_DATADIST_LAYERWISE: u32 = 1;
/// Flag of a pull: it is not the last one of this engine under its grants.
pub const LLM_DATADIST_MORE_PULLS: u32 = 2;

/// The kind of an event: a transfer has ended, and nobody has taken its outcome.
pub const LLM_DATADIST_COMPLETED: u32 = 1;
/// The kind of an event: the program at a peer has sent a message.
pub const LLM_DATADIST_MESSAGE: u32 = 2;
/// The kind of an event: a link was made, by either end.
pub const LLM_DATADIST_PEER_UP: u32 = 3;
/// The kind of an event: a link has ended, for whatever reason.
pub const LLM_DATADIST_PEER_DOWN: u32 = 4;
/// The kind of an event: a grant of this engine has ended. Its blocks may be written again.
pub const LLM_DATADIST_GRANT_CLOSED: u32 = 5;

reserved!(LlmDatadistKvLayout, LlmDatadistForm, LlmDatadistRows, LlmDatadistPair, LlmDatadistCall);

/// A range from `first` to before `end`. If both are 0, it stands for all.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistRange {
    /// The first one.
    pub first: u64,
    /// The one after the last one.
    pub end: u64,
}

/// What the bytes of a block mean: one or two tensors for each layer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistKvLayout {
    /// The layers of the model that the cache holds, at least one. Here both 0 does not stand for all: it is refused.
    pub layers: LlmDatadistRange,
    /// The key-value heads that the cache holds. All of them: those of `total_heads`.
    pub heads: LlmDatadistRange,
    /// Number of key-value heads of the model; 0: as many as `heads` has.
    pub total_heads: u32,
    /// Number of tokens in a block.
    pub block_tokens: u32,
    /// Number of elements of one head of one token.
    pub head_dim: u32,
    /// Order of the dimensions of a block: `"NHD"` (tokens, heads, elements), the default, or `"HND"`.
    pub order: *const c_char,
    /// Where keys and values are: `"separate"` (two tensors for each layer), the default, `"k_then_v"`, `"latent"` or `"single"`.
    pub kv: *const c_char,
    /// Name or version of the model. Both ends of a transfer must have the same. By default none.
    pub model: *const c_char,
    /// Must be 0.
    pub reserved: [u64; 4],
}

/// What a cache is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistForm {
    /// Number of blocks. A block is one row of every tensor.
    pub blocks: u64,
    /// What the blocks mean, or null. Then `shape` and `tensors` describe them.
    pub layout: *const LlmDatadistKvLayout,
    /// Element type: `"float16"`, `"bfloat16"`, `"float32"`, `"float64"`, `"int8"` to `"int64"`, `"uint8"` to `"uint64"`, `"bool"`.
    pub dtype: *const c_char,
    /// Dimensions of one block of one tensor.
    pub shape: *const i64,
    /// Number of dimensions in `shape`.
    pub num_dims: usize,
    /// Number of tensors. 0 if there is a layout, and for registered memory, whose addresses are counted.
    pub tensors: u32,
    /// Number of consecutive tensors that form a layer, 1 by default. 0 if there is a layout.
    pub tensors_per_layer: u32,
    /// Pool: `"device"`, the default, or `"host"`.
    pub pool: *const c_char,
    /// Bytes from one block to the next in each tensor of registered memory. By default there are no gaps.
    pub stride: u64,
    /// `LLM_DATADIST_CONTIGUOUS` for `llm_datadist_allocate`, `LLM_DATADIST_NOT_SHARED` for `llm_datadist_register`, or 0.
    pub flags: u32,
    /// Must be 0.
    pub reserved: [u64; 4],
}

/// Blocks of a cache of this engine, or of a peer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistRows {
    /// A cache of this engine, or 0.
    pub cache: u64,
    /// The peer, if `cache` is 0.
    pub peer: u64,
    /// The name of the peer's cache, or null if it is of this engine.
    pub name: *const c_char,
    /// Blocks, in order.
    pub blocks: *const u32,
    /// Number of blocks.
    pub num_blocks: usize,
    /// Layers of the cache, counted from 0.
    pub layers: LlmDatadistRange,
    /// Tokens of the sequence that the blocks hold. Both caches need a layout.
    pub tokens: LlmDatadistRange,
    /// Bytes of every block in each tensor. Not together with `tokens`.
    pub bytes: LlmDatadistRange,
    /// Must be 0.
    pub reserved: [u64; 2],
}

/// Rows that are written, and rows that are read: block `i` of `src` goes to block `i` of `dst`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistPair {
    /// The rows that are written.
    pub dst: LlmDatadistRows,
    /// The rows that are read.
    pub src: LlmDatadistRows,
    /// Pull: the token of the grant that lends `src`, or null.
    pub token: *const u8,
    /// Must be 0.
    pub reserved: [u64; 2],
}

/// What a copy, pull or push does beside moving bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistCall {
    /// Pull and push: the message that the peer's program gets when the bytes are in place, or null. All pairs then name one peer.
    pub message: *const u8,
    /// Number of bytes of `message`.
    pub message_size: usize,
    /// How the bytes are compared: `"off"`, `"sample"` or `"full"`. By default as the engine does.
    pub verify: *const c_char,
    /// Time limit in seconds, of a layer-wise push for each layer. 0: that of the engine.
    pub timeout: f64,
    /// `LLM_DATADIST_LAYERWISE` for a push, `LLM_DATADIST_MORE_PULLS` for a pull, or 0.
    pub flags: u32,
    /// Must be 0.
    pub reserved: [u64; 4],
}

/// Blocks of one tensor that a failed transfer has written completely.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistArrived {
    /// Number of the tensor in the cache that was written, counted from 0.
    pub tensor: u32,
    /// 0 in this version.
    pub reserved: u32,
    /// Blocks of it.
    pub blocks: LlmDatadistRange,
}

/// Another engine, as long as it runs. A program that restarts is another peer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistPeer {
    /// The random number that the engine drew when it was opened. Calls name the peer by it.
    pub peer: u64,
    /// The name that the peer's program has given to its engine.
    pub name: *const c_char,
    /// The address of the peer.
    pub address: *const c_char,
    /// How bytes move: `"shm"` or `"tcp"`.
    pub transport: *const c_char,
    /// The option `metadata` of the peer's engine. That of a Python engine may contain null bytes.
    pub metadata: *const u8,
    /// Number of bytes of `metadata`.
    pub metadata_size: usize,
    /// 0 in this version.
    pub reserved: [u64; 2],
}

/// Something that has happened. Fields that do not belong to the kind are 0 or null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistEvent {
    /// `LLM_DATADIST_COMPLETED` or another kind. A program ignores kinds that it does not know.
    pub kind: u32,
    /// Completed: the status with which the transfer has ended. `llm_datadist_transfer_result` has the reason.
    pub status: u32,
    /// Completed: the transfer. The program may have freed its handle.
    pub transfer: u64,
    /// Message, peer up and peer down: the peer.
    pub peer: LlmDatadistPeer,
    /// Message: its bytes.
    pub message: *const u8,
    /// Number of bytes of `message`.
    pub message_size: usize,
    /// Peer down: why, for people. Grant closed: `"done"`, `"expired"`, `"revoked"` or `"released"`.
    pub reason: *const c_char,
    /// Peer down: number of messages to the peer whose arrival it has not confirmed. Each may have arrived or not.
    pub unconfirmed: u64,
    /// Grant closed: its token.
    pub token: [u8; LLM_DATADIST_TOKEN_SIZE],
    /// 0 in this version.
    pub reserved: [u64; 4],
}
