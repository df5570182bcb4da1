//! The functions that start pulls, pushes and copies without waiting for them.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::{CopyArgs, DataDist, Result, Transfer};

use super::types::{LlmDatadistBlocks, LlmDatadistCache, LlmDatadistCacheIndex, LlmDatadistExtParam};
use super::{arguments, entered, process, raw};
use crate::calls;

/// Starts what `llm_datadist_pull_cache` does, without waiting for it. Writes the handle of the transfer to `transfer`;
/// `llm_datadist_transfer_free` frees it. An addition to the original, as all functions for transfers and events.
///
/// The transfer ends within `timeout_ms` milliseconds from this call; 0 stands for the time limit of the synchronous call.
/// The structures and lists of the call may be freed when it returns.
///
/// What the arguments and the caches of this engine decide is returned at once, with the codes of the synchronous call.
/// `LLM_LINK_BUSY`: too many transfers run, or wait for their outcome to be taken. After any failure, nothing has started and
/// nothing is written. Every other failure, a missing link too, is the outcome of the transfer, which `llm_datadist_poll` and
/// `llm_datadist_transfer_result` return.
///
/// If `ext_param` has a message, the program of the peer gets it after the bytes are in place, before the transfer succeeds, and
/// behind all messages that `llm_datadist_notify` accepted before. A transfer that succeeds has delivered it once. One that fails
/// has not, unless the link broke or the time limit passed before the peer had confirmed it; then the reason of the failure says
/// so. If the peer has too many messages that it has not polled, the transfer ends with `LLM_LINK_BUSY` and has moved nothing.
///
/// Any thread may call it. Calls that meet in a row of a cache take turns in the order in which they were started.
///
/// # Safety
/// The pointers refer to valid structures, and `transfer` to space for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_pull_cache_async(
    handle: u64,
    src: *const LlmDatadistCacheIndex,
    dst: *const LlmDatadistCache,
    batch_index: u32,
    size: i64,
    ext_param: *const LlmDatadistExtParam,
    timeout_ms: i32,
    transfer: *mut u64,
) -> u32 {
    let start = |engine: &DataDist, limit| {
        // SAFETY: the caller's promise.
        let (src, dst, ext) = unsafe { arguments::pulled(src, dst, ext_param) }?;
        engine.pull_kv_cache(src, dst, batch_index, size, ext.layers, ext.notify)?.within(limit).start()
    };
    // SAFETY: the caller's promise.
    unsafe { started(handle, timeout_ms, transfer, start) }
}

/// Starts what `llm_datadist_pull_blocks` does; otherwise like `llm_datadist_pull_cache_async`.
///
/// # Safety
/// See `llm_datadist_pull_cache_async`. The lists are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_pull_blocks_async(
    handle: u64,
    src: *const LlmDatadistCacheIndex,
    dst: *const LlmDatadistCache,
    src_blocks: LlmDatadistBlocks,
    dst_blocks: LlmDatadistBlocks,
    ext_param: *const LlmDatadistExtParam,
    timeout_ms: i32,
    transfer: *mut u64,
) -> u32 {
    let start = |engine: &DataDist, limit| {
        // SAFETY: the caller's promise.
        let (src, dst, ext) = unsafe { arguments::pulled(src, dst, ext_param) }?;
        // SAFETY: the caller's promise.
        let blocks = unsafe { raw::two_lists(src_blocks, dst_blocks) }?;
        engine.pull_kv_blocks(src, dst, blocks, ext.layers, ext.notify)?.within(limit).start()
    };
    // SAFETY: the caller's promise.
    unsafe { started(handle, timeout_ms, transfer, start) }
}

/// Starts what `llm_datadist_push_cache` does; otherwise like `llm_datadist_pull_cache_async`.
///
/// # Safety
/// See `llm_datadist_pull_cache_async`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_push_cache_async(
    handle: u64,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCacheIndex,
    src_batch_index: u32,
    size: i64,
    ext_param: *const LlmDatadistExtParam,
    timeout_ms: i32,
    transfer: *mut u64,
) -> u32 {
    let start = |engine: &DataDist, limit| {
        // SAFETY: the caller's promise.
        let (src, dst, ext) = unsafe { arguments::pushed(src, dst, ext_param) }?;
        engine.push_kv_cache(src, dst, src_batch_index, size, ext.layers, ext.notify)?.within(limit).start()
    };
    // SAFETY: the caller's promise.
    unsafe { started(handle, timeout_ms, transfer, start) }
}

/// Starts what `llm_datadist_push_blocks` does; otherwise like `llm_datadist_pull_cache_async`.
///
/// # Safety
/// See `llm_datadist_pull_cache_async`. The lists are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_push_blocks_async(
    handle: u64,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCacheIndex,
    src_blocks: LlmDatadistBlocks,
    dst_blocks: LlmDatadistBlocks,
    ext_param: *const LlmDatadistExtParam,
    timeout_ms: i32,
    transfer: *mut u64,
) -> u32 {
    let start = |engine: &DataDist, limit| {
        // SAFETY: the caller's promise.
        let (src, dst, ext) = unsafe { arguments::pushed(src, dst, ext_param) }?;
        // SAFETY: the caller's promise.
        let blocks = unsafe { raw::two_lists(src_blocks, dst_blocks) }?;
        engine.push_kv_blocks(src, dst, blocks, ext.layers, ext.notify)?.within(limit).start()
    };
    // SAFETY: the caller's promise.
    unsafe { started(handle, timeout_ms, transfer, start) }
}

/// Starts what `llm_datadist_copy_cache` does; otherwise like `llm_datadist_pull_cache_async`.
///
/// # Safety
/// See `llm_datadist_pull_cache_async`. Where the id of a structure is -1, one tensor stays readable and writable at each
/// address until the transfer has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_copy_cache_async(
    handle: u64,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCache,
    src_batch_index: u32,
    dst_batch_index: u32,
    offset: u64,
    size: i64,
    timeout_ms: i32,
    transfer: *mut u64,
) -> u32 {
    let start = |engine: &DataDist, limit| {
        let args = CopyArgs { dst_batch_index, src_batch_index, offset, size };
        // SAFETY: the caller's promise.
        unsafe { arguments::copied(engine, src, dst, args) }?.within(limit).start()
    };
    // SAFETY: the caller's promise.
    unsafe { started(handle, timeout_ms, transfer, start) }
}

/// Starts what `llm_datadist_copy_blocks` does; otherwise like `llm_datadist_pull_cache_async`.
///
/// # Safety
/// See `llm_datadist_copy_cache_async`. The lists are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_copy_blocks_async(
    handle: u64,
    src: *const LlmDatadistCache,
    dst: *const LlmDatadistCache,
    src_blocks: LlmDatadistBlocks,
    dst_blocks_list: *const LlmDatadistBlocks,
    num_lists: usize,
    timeout_ms: i32,
    transfer: *mut u64,
) -> u32 {
    let start = |engine: &DataDist, limit| {
        let (caches, lists) = ((src, dst), (dst_blocks_list, num_lists));
        // SAFETY: the caller's promise.
        unsafe { arguments::copied_blocks(engine, caches, src_blocks, lists) }?.within(limit).start()
    };
    // SAFETY: the caller's promise.
    unsafe { started(handle, timeout_ms, transfer, start) }
}

/// Starts a transfer, and writes its handle to `transfer`.
///
/// # Safety
/// `transfer` is null, or points to space for a handle.
unsafe fn started(
    handle: u64,
    timeout_ms: i32,
    transfer: *mut u64,
    start: impl FnOnce(&DataDist, Option<Duration>) -> Result<Arc<Transfer>>,
) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("transfer", transfer, 1) }?;
        let limit = calls::transfer_limit(timeout_ms)?;
        let started = start(&open.engine, limit)?;
        out.put(&[process::current().transfers.add(started)]);
        Ok(())
    })
}
