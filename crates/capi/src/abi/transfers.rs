//! The functions of the C++ class that move bytes: pulls, pushes and copies.

use llm_datadist_core::bindings::CopyArgs;

use super::types::{LlmDatadistBlocks, LlmDatadistCache, LlmDatadistCacheIndex, LlmDatadistExtParam};
use super::{arguments, entered, raw};

/// Pulls one batch slot of a peer.
///
/// # Safety
/// The pointers refer to valid structures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_pull_cache(
    handle: u64,
    src: *const LlmDatadistCacheIndex,
    dst: *const LlmDatadistCache,
    batch_index: u32,
    size: i64,
    ext_param: *const LlmDatadistExtParam,
) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        let (src, dst, ext) = unsafe { arguments::pulled(src, dst, ext_param) }?;
        open.engine.pull_kv_cache(src, dst, batch_index, size, ext)?.run()
    })
}

/// Pulls blocks of a peer, pair by pair.
///
/// # Safety
/// The pointers refer to valid structures and lists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_pull_blocks(
    handle: u64,
    src: *const LlmDatadistCacheIndex,
    dst: *const LlmDatadistCache,
    src_blocks: LlmDatadistBlocks,
    dst_blocks: LlmDatadistBlocks,
    ext_param: *const LlmDatadistExtParam,
) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        let (src, dst, ext) = unsafe { arguments::pulled(src, dst, ext_param) }?;
        // SAFETY: the caller's promise.
        let blocks = unsafe { raw::two_lists(src_blocks, dst_blocks) }?;
        open.engine.pull_kv_blocks(src, dst, blocks, ext)?.run()
    })
}

/// Pushes one batch slot to a peer.
///
/// # Safety
/// The pointers refer to valid structures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_push_cache(
    handle: u64,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCacheIndex,
    src_batch_index: u32,
    size: i64,
    ext_param: *const LlmDatadistExtParam,
) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        let (src, dst, ext) = unsafe { arguments::pushed(src, dst, ext_param) }?;
        open.engine.push_kv_cache(src, dst, src_batch_index, size, ext)?.run()
    })
}

/// Pushes blocks to a peer, pair by pair.
///
/// # Safety
/// The pointers refer to valid structures and lists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_push_blocks(
    handle: u64,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCacheIndex,
    src_blocks: LlmDatadistBlocks,
    dst_blocks: LlmDatadistBlocks,
    ext_param: *const LlmDatadistExtParam,
) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        let (src, dst, ext) = unsafe { arguments::pushed(src, dst, ext_param) }?;
        // SAFETY: the caller's promise.
        let blocks = unsafe { raw::two_lists(src_blocks, dst_blocks) }?;
        open.engine.push_kv_blocks(src, dst, blocks, ext)?.run()
    })
}

/// Copies one range of one batch slot, the same in every tensor, from device to device or from device to host.
///
/// # Safety
/// The pointers refer to valid structures. Where the id of a structure is -1, one tensor is readable and
/// writable at each address during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_copy_cache(
    handle: u64,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCache,
    src_batch_index: u32,
    dst_batch_index: u32,
    offset: u64,
    size: i64,
) -> u32 {
    entered(handle, |open| {
        let args = CopyArgs { dst_batch_index, src_batch_index, offset, size };
        // SAFETY: the caller's promise.
        unsafe { arguments::copied(&open.engine, src, dst, args) }?.run()
    })
}

/// Copies every block of `src_blocks` to the block at the same position of each list.
///
/// # Safety
/// See `llm_datadist_copy_cache`. The lists are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_copy_blocks(
    handle: u64,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCache,
    src_blocks: LlmDatadistBlocks,
    dst_blocks_list: *const LlmDatadistBlocks,
    num_lists: usize,
) -> u32 {
    entered(handle, |open| {
        let (caches, lists) = ((src, dst), (dst_blocks_list, num_lists));
        // SAFETY: the caller's promise.
        unsafe { arguments::copied_blocks(&open.engine, caches, src_blocks, lists) }?.run()
    })
}
