//! The structures of the C interface. Lists are a pointer and a count; a null pointer is an empty list.
//!
//! Structures end in reserved words, so that what they will say in later versions changes neither their size nor the
//! stride of a list of them. The words are 0 in this version; others are refused, because whoever set them asks for
//! something that this library does not know (`crates/capi/src/tests/layout.rs`). An option and a list of blocks are all they
//! can be, and have none.
//!
//! Not for: the public C++ structures, which these are views of (`llm_datadist.h`).

use std::ffi::c_char;

/// The version of this interface. It grows when a function is added, or a reserved word comes into use; a library serves
/// programs of its own version and of all below. One that cannot has another name (`libllm_datadist.so.1`).
pub const LLM_DATADIST_ABI_VERSION: u32 = 2;

/// A structure that may say more one day.
pub(super) trait Reserved {
    /// What is 0 in this version.
    fn reserved(&self) -> &[u64];
}

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

/// One option: both texts end in a null byte.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistOption {
    /// Its key.
    pub key: *const c_char,
    /// Its value.
    pub value: *const c_char,
}

/// What a cache looks like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistCacheDesc {
    /// 0 host, 1 device.
    pub placement: u32,
    /// How many equal tensors.
    pub num_tensors: u32,
    /// Element type.
    pub data_type: i32,
    /// How many dimensions `shape` has.
    pub num_dims: u32,
    /// Dimensions, outermost first.
    pub shape: *const i64,
    /// 0.
    pub reserved: [u64; 4],
}

/// A cache: one of this engine by its id, or the caller's memory with id -1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistCache {
    /// Its id, or -1.
    pub cache_id: i64,
    /// The address of every tensor.
    pub addrs: *const u64,
    /// How many.
    pub num_addrs: usize,
    /// What it looks like.
    pub desc: LlmDatadistCacheDesc,
    /// 0.
    pub reserved: [u64; 4],
}

/// One batch slot of a peer's cache.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistCacheIndex {
    /// Who owns it.
    pub cluster_id: u64,
    /// Its id there.
    pub cache_id: i64,
    /// The batch slot.
    pub batch_index: u32,
    /// 0.
    pub reserved: [u64; 4],
}

/// Layers read and written, both ends included; -1 and -1 for all.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistExtParam {
    /// First layer read.
    pub src_first: i32,
    /// Last layer read.
    pub src_last: i32,
    /// First layer written.
    pub dst_first: i32,
    /// Last layer written.
    pub dst_last: i32,
    /// Tensors of one layer.
    pub tensor_num_per_layer: u8,
    /// 0.
    pub reserved: [u64; 4],
}

/// How memory is registered: nothing to say yet.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistRegisterCfg {
    /// 0.
    pub reserved: [u64; 16],
}

/// An address.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistIp {
    /// IPv4, in digits.
    pub ip: *const c_char,
    /// Port.
    pub port: u16,
    /// 0.
    pub reserved: [u64; 4],
}

/// Where a peer is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistCluster {
    /// Its cluster id.
    pub remote_cluster_id: u64,
    /// Addresses of this side.
    pub local: *const LlmDatadistIp,
    /// How many.
    pub num_local: usize,
    /// Its addresses.
    pub remote: *const LlmDatadistIp,
    /// How many.
    pub num_remote: usize,
    /// 0.
    pub reserved: [u64; 4],
}

/// A list of blocks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistBlocks {
    /// The blocks.
    pub blocks: *const u64,
    /// How many.
    pub count: usize,
}
