//! The functions that move bytes: pulls, pushes and copies.

use llm_datadist_core::bindings::cpp;
use llm_datadist_core::{CopyArgs, ErrorKind};

use super::types::{LlmDatadistBlocks, LlmDatadistCache, LlmDatadistCacheIndex, LlmDatadistExtParam};
use super::{entered, raw};

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
        let src = unsafe { raw::index("src_cache_index", src) }?;
        // SAFETY: the caller's promise.
        let dst = unsafe { raw::id("dst_cache", dst) }?;
        // SAFETY: the caller's promise.
        let ext = unsafe { raw::ext_param(ext_param) }?;
        open.engine.pull_kv_cache(src, dst, batch_index, size, ext)
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
        let src = unsafe { raw::index("src_cache_index", src) }?;
        // SAFETY: the caller's promise.
        let dst = unsafe { raw::id("dst_cache", dst) }?;
        // SAFETY: the caller's promise.
        let blocks = unsafe { raw::two_lists(src_blocks, dst_blocks) }?;
        // SAFETY: the caller's promise.
        let ext = unsafe { raw::ext_param(ext_param) }?;
        open.engine.pull_kv_blocks(src, dst, blocks, ext)
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
        let src = unsafe { raw::pushed(src) }?;
        // SAFETY: the caller's promise.
        let dst = unsafe { raw::index("dst_cache_index", dst) }?;
        // SAFETY: the caller's promise.
        let ext = unsafe { raw::ext_param(ext_param) }?;
        open.engine.push_kv_cache(src, dst, src_batch_index, size, ext)
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
        let src = unsafe { raw::pushed(src) }?;
        // SAFETY: the caller's promise.
        let dst = unsafe { raw::index("dst_cache_index", dst) }?;
        // SAFETY: the caller's promise.
        let blocks = unsafe { raw::two_lists(src_blocks, dst_blocks) }?;
        // SAFETY: the caller's promise.
        let ext = unsafe { raw::ext_param(ext_param) }?;
        open.engine.push_kv_blocks(src, dst, blocks, ext)
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
        // SAFETY: the caller's promise.
        let stated = unsafe { raw::cache("src_cache", src) }?;
        cpp::copied(stated.desc.placement, size)?;
        // SAFETY: the caller's promise.
        let from = unsafe { raw::end(&open.engine, "src_cache", src) }?;
        // SAFETY: the caller's promise.
        let to = unsafe { raw::end(&open.engine, "dst_cache", dst) }?;
        let args = CopyArgs { dst_batch_index, src_batch_index, offset, size };
        open.engine.copy_kv_cache(&from, &to, args)
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
        // SAFETY: the caller's promise.
        let sources = unsafe { raw::list("src_blocks", src_blocks.blocks, src_blocks.count) }?;
        // SAFETY: the caller's promise.
        let lists = unsafe { raw::block_lists(dst_blocks_list, num_lists) }?;
        // SAFETY: the caller's promise.
        let end = |name, at| unsafe { raw::end(&open.engine, name, at) };
        let ends = end("src_cache", src).and_then(|from| Ok((from, end("dst_cache", dst)?)));
        let (from, to) = ends.or_else(|error| match error.kind() {
            // Lists that are invalid with any cache are refused before the caches are searched.
            ErrorKind::CacheNotFound => cpp::block_lists(sources, &lists).and(Err(error)),
            _ => Err(error),
        })?;
        open.engine.copy_kv_blocks(&from, &to, sources, &lists)
    })
}
