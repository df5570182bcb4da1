//! Unsafe room 4: the functions C calls. Each converts, enters through the door, and writes what it was asked for.
//!
//! Every function that returns a number gives a status (`LLM_SUCCESS` is 0). After any other, the calling thread may ask
//! `llm_datadist_last_error` for the reason. Null where a value is needed, handles that were freed, and panics are
//! statuses too, never a crash; pointers that are neither null nor valid are the caller's business, as everywhere in C.
//! Not for: pointers (`raw`), layouts (`types`), calls that move bytes (`transfers`), the log (`log`), or any decision.

mod log;
mod raw;
mod transfers;
mod types;

use std::ffi::c_char;
use std::sync::Once;

use llm_datadist_core::bindings::cpp;
use llm_datadist_core::{CacheId, CacheKind, ClusterId, Result, StatusCode};

pub use log::{
    LLM_DATADIST_LOG_DEBUG, LLM_DATADIST_LOG_ERROR, LLM_DATADIST_LOG_INFO, LLM_DATADIST_LOG_WARNING,
    LlmDatadistLogCallback, llm_datadist_set_log_callback,
};
pub use transfers::{
    llm_datadist_copy_blocks, llm_datadist_copy_cache, llm_datadist_pull_blocks, llm_datadist_pull_cache,
    llm_datadist_push_blocks, llm_datadist_push_cache,
};
pub use types::{
    LLM_DATADIST_ABI_VERSION, LlmDatadistBlocks, LlmDatadistCache, LlmDatadistCacheDesc,
    LlmDatadistCacheIndex, LlmDatadistCluster, LlmDatadistExtParam, LlmDatadistIp, LlmDatadistOption,
    LlmDatadistRegisterCfg,
};

use crate::calls;
use crate::door::{self, Open, caught, enter, guarded, guarded_as};

/// Registers what a forked child does first, once in the life of the process.
fn watch_forks() {
    static WATCHED: Once = Once::new();
    extern "C" fn child() {
        door::forked();
    }
    WATCHED.call_once(|| {
        // SAFETY: the handler lives for ever, and does in a child of several threads only what is allowed there: an
        // atomic addition, and the closing of descriptors under a lock that is tried and never waited for.
        let registered = unsafe { libc::pthread_atfork(None, None, Some(child)) };
        debug_assert_eq!(registered, 0, "only a lack of memory is refused");
    });
}

/// The `LLM_DATADIST_ABI_VERSION` that the library was built with: a program compiled with a higher one must not go on.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_abi_version() -> u32 {
    LLM_DATADIST_ABI_VERSION
}

/// A new object, not yet initialised: its handle, never used again; 0 if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_new(cluster_id: u64, role: i32) -> u64 {
    let mut handle = 0;
    guarded(|| {
        watch_forks();
        crate::log::install();
        handle = door::make(ClusterId(cluster_id), role)?;
        Ok(())
    });
    handle
}

/// Ends an object, and its engine if it is open.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_free(handle: u64) -> u32 {
    guarded(|| door::free(handle))
}

/// Why the last call of this thread that failed did: text that stays valid until its next call that fails.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_last_error() -> *const c_char {
    door::reason()
}

/// Opens the engine; without effect while it is open.
///
/// # Safety
/// `num_options` options lie at `options`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_initialize(
    handle: u64,
    options: *const LlmDatadistOption,
    num_options: usize,
) -> u32 {
    guarded_as(StatusCode::of_cpp_open, || {
        // SAFETY: the caller's promise.
        calls::initialize(&*door::door(handle)?, || unsafe { raw::options(options, num_options) })
    })
}

/// Closes the engine; without effect when it is not open.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_finalize(handle: u64) -> u32 {
    guarded(|| {
        door::door(handle)?.close();
        Ok(())
    })
}

/// Takes another role, and listens as `options` say.
///
/// # Safety
/// `num_options` options lie at `options`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_set_role(
    handle: u64,
    role: i32,
    options: *const LlmDatadistOption,
    num_options: usize,
) -> u32 {
    guarded(|| {
        let door = door::door(handle)?;
        door.engine()?;
        // SAFETY: the caller's promise.
        let given = unsafe { raw::options(options, num_options) }?;
        calls::set_role(&door, role, &given)
    })
}

/// The port peers are listened for at, or 0. Never a failure: the reason of the last one stays.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_listening(handle: u64) -> u16 {
    let listening = caught(|| enter(handle, |open| Ok(open.engine.listening())));
    listening.ok().flatten().map_or(0, |address| address.port())
}

/// Links to every cluster. The status of each goes to `rets`; the reasons of all that failed are one text. Arguments
/// without meaning fail the whole call, and nothing is written: then `num_rets` is 0, else `num_clusters`.
///
/// # Safety
/// `num_clusters` clusters lie at `clusters`, and as many statuses may be written at `rets`.
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

/// Ends the links to every cluster; with `force` only this side's half. Statuses as for linking.
///
/// # Safety
/// As `llm_datadist_link_clusters`.
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

/// The arguments of both, in their order.
type Clusters = (*const LlmDatadistCluster, usize, i32, *mut u32, *mut usize);

/// # Safety
/// As `llm_datadist_link_clusters`.
unsafe fn each_cluster(
    handle: u64,
    (clusters, count, millis, rets, num_rets): Clusters,
    call: impl FnOnce(&Open, &[llm_datadist_core::PeerAddress], std::time::Duration) -> calls::Outcome,
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

/// Takes device memory for a cache. Its id goes to `cache_id`, the address of every tensor to `addrs`, which
/// has room for `num_tensors` at least.
///
/// # Safety
/// `desc` is whole; an id may be written at `cache_id`, and `num_addrs` addresses at `addrs`.
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
        let places = unsafe { raw::Out::new("addrs", addrs, num_addrs) }?;
        let cache = open.engine.allocate(&desc, CacheKind::Batch, &[])?;
        id.put(&[cache.id().0]);
        places.put(cache.addrs());
        Ok(())
    })
}

/// Lets go of an allocated cache. One that is not there is no failure.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_deallocate_cache(handle: u64, cache_id: i64) -> u32 {
    entered(handle, |open| open.engine.deallocate(CacheId(cache_id)))
}

/// Enters the caller's memory as a cache. Its id goes to `cache_id`.
///
/// # Safety
/// `desc` is whole, `cfg` too or null for the defaults, `num_addrs` addresses lie at `addrs`, and from each of them on one tensor of `desc` stays readable
/// and writable until the cache is unregistered.
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
        id.put(&[calls::register(&open.engine, adopted)?.0]);
        Ok(())
    })
}

/// Removes a registered cache, once nothing of this process uses it. One that is not there is no failure. After
/// `LLM_TIMEOUT` no new call finds it, and its memory may still be in use: the same call waits again.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_unregister_cache(handle: u64, cache_id: i64) -> u32 {
    entered(handle, |open| open.engine.unregister(CacheId(cache_id)))
}

fn entered(handle: u64, call: impl FnOnce(&Open) -> Result<()>) -> u32 {
    guarded(|| enter(handle, call))
}
