//! The arguments that several calls of the C++ class share.

use llm_datadist_core::bindings::cpp;
use llm_datadist_core::bindings::{CacheIndex, CopyArgs, DataDist, End, ExtParam, Operation};
use llm_datadist_core::{CacheId, ErrorKind, Result};

use super::raw;
use super::types::{LlmDatadistBlocks, LlmDatadistCache, LlmDatadistCacheIndex, LlmDatadistExtParam};

/// Returns the arguments that both pulls share.
///
/// # Safety
/// See [`raw::value`], and [`raw::ext_param`].
pub(super) unsafe fn pulled(
    src: *const LlmDatadistCacheIndex,
    dst: *const LlmDatadistCache,
    ext: *const LlmDatadistExtParam,
) -> Result<(CacheIndex, CacheId, ExtParam)> {
    // SAFETY: the caller's promise.
    let src = unsafe { raw::index("src_cache_index", src) }?;
    // SAFETY: the caller's promise.
    let dst = unsafe { raw::id("dst_cache", dst) }?;
    // SAFETY: the caller's promise.
    let ext = unsafe { raw::ext_param(ext) }?;
    Ok((src, dst, ext))
}

/// Returns the arguments that both pushes share.
///
/// # Safety
/// See [`raw::value`], and [`raw::ext_param`].
pub(super) unsafe fn pushed(
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCacheIndex,
    ext: *const LlmDatadistExtParam,
) -> Result<(CacheId, CacheIndex, ExtParam)> {
    // SAFETY: the caller's promise.
    let src = unsafe { raw::push_source(src) }?;
    // SAFETY: the caller's promise.
    let dst = unsafe { raw::index("dst_cache_index", dst) }?;
    // SAFETY: the caller's promise.
    let ext = unsafe { raw::ext_param(ext) }?;
    Ok((src, dst, ext))
}

/// Returns the operation `CopyKvCache`. Its other arguments are checked first as far as they do not depend on the caches.
///
/// # Safety
/// See [`raw::end`].
pub(super) unsafe fn copied(
    engine: &DataDist,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCache,
    args: CopyArgs,
) -> Result<Operation<'_>> {
    // SAFETY: the caller's promise.
    let stated = unsafe { raw::cache("src_cache", src) }?;
    cpp::copied(stated.desc.placement, args.size)?;
    // SAFETY: the caller's promise.
    let (from, to) = unsafe { ends(engine, src, dst) }?;
    Ok(engine.copy_kv_cache(&from, &to, args))
}

/// Returns the operation `CopyKvBlocks`.
///
/// # Safety
/// See [`raw::end`], and [`raw::list`] for every list.
pub(super) unsafe fn copied_blocks(
    engine: &DataDist,
    (src, dst): (*const LlmDatadistCache, *const LlmDatadistCache),
    src_blocks: LlmDatadistBlocks,
    (first, count): (*const LlmDatadistBlocks, usize),
) -> Result<Operation<'_>> {
    // SAFETY: the caller's promise.
    let sources = unsafe { raw::list("src_blocks", src_blocks.blocks, src_blocks.count) }?;
    // SAFETY: the caller's promise.
    let lists = unsafe { raw::block_lists(first, count) }?;
    // SAFETY: the caller's promise.
    let found = unsafe { ends(engine, src, dst) };
    let (from, to) = found.or_else(|error| match error.kind() {
        // Lists that are invalid with any cache are refused before the caches are searched.
        ErrorKind::CacheNotFound => cpp::block_lists(sources, &lists).and(Err(error)),
        _ => Err(error),
    })?;
    Ok(engine.copy_kv_blocks(&from, &to, sources, &lists))
}

/// # Safety
/// See [`raw::end`] for both.
unsafe fn ends(
    engine: &DataDist,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCache,
) -> Result<(End, End)> {
    // SAFETY: the caller's promise.
    let from = unsafe { raw::end(engine, "src_cache", src) }?;
    // SAFETY: the caller's promise.
    let to = unsafe { raw::end(engine, "dst_cache", dst) }?;
    Ok((from, to))
}
