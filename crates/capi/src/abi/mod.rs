//! The functions that C calls. Each converts its arguments, makes one call, and writes the results.
//!
//! Every function that returns `uint32_t` returns a status, and 0 is a success. After any other status, the calling thread
//! can get the reason from `llm_datadist_last_error`. A null pointer for a required argument, a handle that was freed, and
//! a panic are statuses as well, never a crash. A pointer that is neither null nor valid is undefined behaviour, as
//! everywhere in C.
//!
//! The files `native_*` have the native API, `hixl*` the calls of `hixl`, and the other files what the C++ class of LLM-DataDist calls. Pointers are converted in `raw` and
//! `native_raw`; `types` and `native_types` have the structures, and `log` the log of both.

#[macro_use]
mod types;

mod arguments;
mod hixl;
mod hixl_transfers;
mod hixl_types;
mod log;
mod native_caches;
mod native_calls;
mod native_engines;
mod native_events;
mod native_links;
mod native_raw;
mod native_transfers;
mod native_types;
pub(crate) mod process;
mod raw;
mod transfers;

use std::ffi::c_char;

use llm_datadist_core::bindings::StatusCode;
use llm_datadist_core::bindings::cpp;
use llm_datadist_core::{CacheId, CacheKind, ClusterId, Result};

pub use hixl::*;
pub use hixl_transfers::*;
pub use hixl_types::*;
pub use log::*;
pub use native_caches::*;
pub use native_calls::*;
pub use native_engines::*;
pub use native_events::*;
pub use native_links::*;
pub use native_transfers::*;
pub use native_types::*;
pub use transfers::{
    llm_datadist_copy_blocks, llm_datadist_copy_cache, llm_datadist_pull_blocks, llm_datadist_pull_cache,
    llm_datadist_push_blocks, llm_datadist_push_cache,
};
pub use types::*;

use crate::calls;
use crate::failure::{self, FailureText, caught, guarded, guarded_as};
use crate::objects::{Object, OpenEngine};

/// Returns the `LLM_DATADIST_ABI_VERSION` of the library. A program that was compiled with a higher version must not use
/// the library.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_abi_version() -> u32 {
    LLM_DATADIST_ABI_VERSION
}

/// Creates an object, which is not initialized yet. Returns its handle, or 0 on failure. A handle is never used again.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_new(cluster_id: u64, role: i32) -> u64 {
    let mut handle = 0;
    guarded(|| {
        crate::log::install(log::current);
        handle = process::current().objects.add(Object::new(ClusterId(cluster_id), role));
        Ok(())
    });
    handle
}

/// Frees an object, and closes its engine if it is open, as `llm_datadist_finalize` does.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_free(handle: u64) -> u32 {
    guarded(|| process::current().objects.remove(handle).map(|object| object.close()))
}

/// Returns the reason of the last call of this thread that failed. The text is valid until the next call of this thread
/// that fails.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_last_error() -> *const c_char {
    failure::last(FailureText::Reason)
}

/// Returns the word that tells the failures of one status of the native API apart, such as `name_taken`; otherwise like
/// `llm_datadist_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_last_error_code() -> *const c_char {
    failure::last(FailureText::Code)
}

/// Returns the argument that the last failure of the native API is about, such as `dst`, or an empty text; otherwise like
/// `llm_datadist_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_last_error_argument() -> *const c_char {
    failure::last(FailureText::Argument)
}

/// Opens the engine. Has no effect while it is open.
///
/// # Safety
/// `options` points to `num_options` options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_initialize(
    handle: u64,
    options: *const LlmDatadistOption,
    num_options: usize,
) -> u32 {
    guarded_as(StatusCode::of_cpp_open, || {
        // SAFETY: the caller's promise.
        calls::initialize(&*process::current().objects.get(handle)?, || unsafe {
            raw::options(options, num_options)
        })
    })
}

/// Closes the engine. Has no effect unless it is open.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_finalize(handle: u64) -> u32 {
    guarded(|| {
        process::current().objects.get(handle)?.close();
        Ok(())
    })
}

/// Changes the role, and listens at the address that `options` name.
///
/// # Safety
/// `options` points to `num_options` options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_set_role(
    handle: u64,
    role: i32,
    options: *const LlmDatadistOption,
    num_options: usize,
) -> u32 {
    guarded(|| {
        let object = process::current().objects.get(handle)?;
        object.engine()?;
        // SAFETY: the caller's promise.
        let given = unsafe { raw::options(options, num_options) }?;
        calls::set_role(&object, role, &given)
    })
}

/// Returns the port at which the engine listens for peers, or 0. It never fails, so the reason of the last failure stays.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_listening(handle: u64) -> u16 {
    let listening = caught(|| enter(handle, |open| Ok(open.engine.listening())));
    listening.ok().flatten().map_or(0, |address| address.port())
}

/// Links to every cluster. Writes the status of each to `rets`; the reasons of all failures are joined in one text. Invalid
/// arguments fail the whole call. Then `num_rets` is set to 0 and no status is written; otherwise it is set to
/// `num_clusters`.
///
/// # Safety
/// `clusters` points to `num_clusters` clusters, and `rets` to space for as many statuses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_link_clusters(
    handle: u64,
    clusters: *const LlmDatadistCluster,
    num_clusters: usize,
    timeout_in_millis: i32,
    rets: *mut u32,
    num_rets: *mut usize,
) -> u32 {
    let given = (clusters, num_clusters, timeout_in_millis, rets, num_rets);
    // SAFETY: the caller's promise.
    unsafe { each_cluster(handle, given, calls::link) }
}

/// Ends the links to every cluster. With `force`, only this side ends them. Writes statuses like
/// `llm_datadist_link_clusters`.
///
/// # Safety
/// See `llm_datadist_link_clusters`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_unlink_clusters(
    handle: u64,
    clusters: *const LlmDatadistCluster,
    num_clusters: usize,
    timeout_in_millis: i32,
    force: bool,
    rets: *mut u32,
    num_rets: *mut usize,
) -> u32 {
    let given = (clusters, num_clusters, timeout_in_millis, rets, num_rets);
    // SAFETY: the caller's promise.
    unsafe { each_cluster(handle, given, |open, peers, limit| calls::unlink(open, peers, limit, force)) }
}

/// The arguments that both calls share, in their order.
type Clusters = (*const LlmDatadistCluster, usize, i32, *mut u32, *mut usize);

/// # Safety
/// See `llm_datadist_link_clusters`.
unsafe fn each_cluster(
    handle: u64,
    (clusters, count, millis, rets, num_rets): Clusters,
    call: impl FnOnce(
        &OpenEngine,
        &[llm_datadist_core::bindings::PeerAddress],
        std::time::Duration,
    ) -> calls::ClusterResults,
) -> u32 {
    let mut whole = None;
    let status = guarded(|| {
        enter(handle, |open| {
            // SAFETY: the caller's promise.
            let written = unsafe { raw::Out::new("num_rets", num_rets, 1) }?;
            written.put(&[0]);
            let limit = cpp::link_timeout(millis)?;
            // SAFETY: the caller's promise.
            let peers = unsafe { raw::peers(clusters, count) }?;
            // SAFETY: the caller's promise.
            let rets = unsafe { raw::Out::new("rets", rets, count) }?;
            let outcome = call(open, &peers, limit);
            rets.put(&outcome.statuses);
            written.put(&[outcome.statuses.len()]);
            whole = Some(outcome.whole);
            Ok(())
        })
    });
    whole.unwrap_or(status)
}

/// Allocates a cache in device memory. Writes its id to `cache_id`, and the address of every tensor to `addrs`, which has
/// space for at least `num_tensors`.
///
/// # Safety
/// `desc` points to a valid structure, `cache_id` to space for an id, and `addrs` to space for `num_addrs` addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_allocate_cache(
    handle: u64,
    desc: *const LlmDatadistCacheDesc,
    cache_id: *mut i64,
    addrs: *mut u64,
    num_addrs: usize,
) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        let given = unsafe { raw::value("cache_desc", desc) }?;
        // SAFETY: the caller's promise.
        let desc = unsafe { raw::desc(&given) }?;
        cpp::allocate(&desc, num_addrs)?;
        // SAFETY: the caller's promise.
        let id = unsafe { raw::Out::new("cache_id", cache_id, 1) }?;
        // SAFETY: the caller's promise.
        let outs = unsafe { raw::Out::new("addrs", addrs, num_addrs) }?;
        let cache = open.engine.allocate(&desc, CacheKind::Batch, &[])?;
        id.put(&[cache.id().0]);
        outs.put(cache.addrs());
        Ok(())
    })
}

/// Deallocates an allocated cache. Succeeds if there is no such cache.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_deallocate_cache(handle: u64, cache_id: i64) -> u32 {
    entered(handle, |open| open.engine.deallocate(CacheId(cache_id)))
}

/// Registers memory of the caller as a cache. Writes its id to `cache_id`.
///
/// # Safety
/// `desc` points to a valid structure, and so does `cfg`, unless it is null for the defaults. `addrs` points to `num_addrs`
/// addresses. At each of them, one tensor of `desc` stays readable and writable until the cache is unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_register_cache(
    handle: u64,
    desc: *const LlmDatadistCacheDesc,
    addrs: *const u64,
    num_addrs: usize,
    cfg: *const LlmDatadistRegisterCfg,
    cache_id: *mut i64,
) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        unsafe { raw::register_cfg(cfg) }?;
        // SAFETY: the caller's promise.
        let given = unsafe { raw::value("cache_desc", desc) }?;
        // SAFETY: the caller's promise.
        let desc = unsafe { raw::desc(&given) }?;
        // SAFETY: the caller's promise.
        let addrs = unsafe { raw::list("addrs", addrs, num_addrs) }?;
        // SAFETY: the caller's promise.
        let id = unsafe { raw::Out::new("cache_id", cache_id, 1) }?;
        // SAFETY: the caller's promise.
        let adopted = unsafe { raw::adopt(&desc, addrs) }?;
        // Peers may reach the cache, because the class has no other use for it.
        id.put(&[open.engine.register(adopted, &[], Some(true))?.id().0]);
        Ok(())
    })
}

/// Unregisters a cache, once nothing in this process uses it. Succeeds if there is no such cache. After `LLM_TIMEOUT`, no
/// new call finds the cache, but its memory may still be in use; call the function again to wait again.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_unregister_cache(handle: u64, cache_id: i64) -> u32 {
    entered(handle, |open| open.engine.unregister(CacheId(cache_id)))
}

/// Runs `call` on the engine of `handle`.
fn enter<T>(handle: u64, call: impl FnOnce(&OpenEngine) -> Result<T>) -> Result<T> {
    call(&*process::current().objects.get(handle)?.engine()?)
}

/// Runs `call` on the engine of `handle`, and returns its status.
fn entered(handle: u64, call: impl FnOnce(&OpenEngine) -> Result<()>) -> u32 {
    guarded(|| enter(handle, call))
}
