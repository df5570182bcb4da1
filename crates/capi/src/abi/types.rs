//! The structures that the C++ class uses. A list is a pointer and a count; a null pointer is an empty list.
//!
//! Structures end in reserved words, so that a later version can add fields without changing the size of a structure or the
//! stride of a list. The words are 0 in this version. Other values are refused, because they ask for something that this
//! library does not know (`crates/capi/src/tests/layout.rs`). Options and lists of blocks will not grow, and have no such
//! words.
//!
//! The public C++ structures, which these are views of, are in `llm_datadist.h`.

use std::ffi::c_char;

/// The version of this interface; 5 is the first one that was published. It grows when a function is added or a reserved word is
/// used. A library serves programs of the versions from 5 to its own. A library that cannot do so has another name
/// (`libllm_datadist.so.1`).
pub const LLM_DATADIST_ABI_VERSION: u32 = 5;

/// A structure that a later version may extend.
pub(super) trait Reserved {
    /// Returns the words that are 0 in this version.
    fn reserved(&self) -> &[u64];
}

/// Makes structures that a later version may extend.
macro_rules! reserved {
    ($($structure:ty),*) => {
        $(impl Reserved for $structure {
            fn reserved(&self) -> &[u64] {
                &self.reserved
            }
        })*
    };
}

reserved!(
    LlmDatadistCacheDesc,
    LlmDatadistCache,
    LlmDatadistCacheIndex,
    LlmDatadistExtParam,
    LlmDatadistRegisterCfg,
    LlmDatadistIp,
    LlmDatadistCluster
);

/// One option. Both texts end in a null byte.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistOption {
    /// Key.
    pub key: *const c_char,
    /// Value.
    pub value: *const c_char,
}

/// The description of a cache.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistCacheDesc {
    /// 0 for host memory, 1 for device memory.
    pub placement: u32,
    /// Number of tensors, which are all alike.
    pub num_tensors: u32,
    /// Element type.
    pub data_type: i32,
    /// Number of dimensions in `shape`.
    pub num_dims: u32,
    /// Dimensions, the outermost first.
    pub shape: *const i64,
    /// Must be 0.
    pub reserved: [u64; 4],
}

/// A cache of this engine, named by its id, or memory of the caller, with the id -1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistCache {
    /// Id of the cache, or -1.
    pub cache_id: i64,
    /// Address of every tensor.
    pub addrs: *const u64,
    /// Number of addresses.
    pub num_addrs: usize,
    /// Description of the cache.
    pub desc: LlmDatadistCacheDesc,
    /// Must be 0.
    pub reserved: [u64; 4],
}

/// One batch slot of a peer's cache.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistCacheIndex {
    /// Cluster id of its owner.
    pub cluster_id: u64,
    /// Id of the cache at its owner.
    pub cache_id: i64,
    /// Batch slot.
    pub batch_index: u32,
    /// Must be 0.
    pub reserved: [u64; 4],
}

/// Layers to read and to write. Both ends of a range are included; -1 and -1 stand for all layers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistExtParam {
    /// First layer to read.
    pub src_first: i32,
    /// Last layer to read.
    pub src_last: i32,
    /// First layer to write.
    pub dst_first: i32,
    /// Last layer to write.
    pub dst_last: i32,
    /// Number of tensors of one layer.
    pub tensor_num_per_layer: u8,
    /// Must be 0.
    pub reserved: [u64; 4],
}

/// How memory is registered. There are no settings yet.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistRegisterCfg {
    /// Must be 0.
    pub reserved: [u64; 16],
}

/// An address.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistIp {
    /// Numeric IPv4 address.
    pub ip: *const c_char,
    /// Port.
    pub port: u16,
    /// Must be 0.
    pub reserved: [u64; 4],
}

/// A peer and its addresses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistCluster {
    /// Cluster id of the peer.
    pub remote_cluster_id: u64,
    /// Addresses of this side.
    pub local: *const LlmDatadistIp,
    /// Number of addresses in `local`.
    pub num_local: usize,
    /// Addresses of the peer.
    pub remote: *const LlmDatadistIp,
    /// Number of addresses in `remote`.
    pub num_remote: usize,
    /// Must be 0.
    pub reserved: [u64; 4],
}

/// A list of blocks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistBlocks {
    /// Blocks.
    pub blocks: *const u64,
    /// Number of blocks.
    pub count: usize,
}
