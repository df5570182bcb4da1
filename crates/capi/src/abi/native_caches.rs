//! The functions of the native API for caches of an engine.

use std::ffi::{c_char, c_void};
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;

use llm_datadist_core::bindings::DataDist;
use llm_datadist_core::bindings::fallible;
use llm_datadist_core::{Adopted, CacheKind, Error, OwnCache, Result};

use super::native_engines::entered;
use super::native_transfers::kept;
use super::native_types::{LLM_DATADIST_CONTIGUOUS, LLM_DATADIST_NOT_SHARED, LlmDatadistForm};
use super::{native_raw, process, raw};
use crate::failure::native;
use crate::native::{HeldCache, HeldEngine};

/// Allocates a cache from a pool, and writes its handle to `cache`. Peers find it by `name`: 1 to 128 bytes of printable text that no
/// other cache of the engine has. The contents are undefined.
///
/// # Safety
/// `name` ends in a null byte, `form` points to a valid structure, and `cache` to space for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_allocate(
    engine: u64,
    name: *const c_char,
    form: *const LlmDatadistForm,
    cache: *mut u64,
) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("cache", cache, 1) }?;
        // SAFETY: the caller's promise.
        let name = unsafe { raw::text("name", name) }?;
        // SAFETY: the caller's promise.
        let (mut form, flags) = unsafe { native_raw::form(form, LLM_DATADIST_CONTIGUOUS, None) }?;
        form.contiguous = flags & LLM_DATADIST_CONTIGUOUS != 0;
        out.put(&[added(held, |open| OwnCache::allocate(held.engine.name(), open, name, &form))?]);
        Ok(())
    })
}

/// Makes a cache of memory of the program: `tensors` has the address of each tensor. Otherwise like `llm_datadist_allocate`.
///
/// # Safety
/// See `llm_datadist_allocate`. `tensors` points to `num_tensors` addresses. At each of them, one tensor stays readable and writable
/// until the transfer of `llm_datadist_cache_free` has succeeded, or the engine is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_register(
    engine: u64,
    name: *const c_char,
    tensors: *const *mut c_void,
    num_tensors: usize,
    form: *const LlmDatadistForm,
    cache: *mut u64,
) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("cache", cache, 1) }?;
        // SAFETY: the caller's promise.
        let name = unsafe { raw::text("name", name) }?;
        // SAFETY: the caller's promise.
        let tensors = unsafe { raw::list("tensors", tensors, num_tensors) }?;
        // SAFETY: the caller's promise.
        let (form, flags) = unsafe { native_raw::form(form, LLM_DATADIST_NOT_SHARED, Some(tensors.len())) }?;
        let addresses = tensors.iter().map(|tensor| tensor.expose_provenance() as u64);
        let addresses = fallible::collect("the addresses of tensors", addresses)?;
        if let Some(at) = addresses.iter().position(|&address| address == 0) {
            return Err(raw::refused(&format!("tensors[{at}]"), "null"));
        }
        form.check_addresses(&addresses)?;
        // SAFETY: the caller's promise. `new` checks the numbers.
        let adopted = unsafe { Adopted::new(form.desc(), CacheKind::Blocks, &addresses) }?;
        let adopted = (adopted, flags & LLM_DATADIST_NOT_SHARED == 0);
        out.put(&[added(held, |open| OwnCache::register(held.engine.name(), open, name, &form, adopted))?]);
        Ok(())
    })
}

/// Makes a cache, and returns a handle for it. A close waits until both exist, so that it frees them, or the call makes neither.
fn added(held: &Arc<HeldEngine>, make: impl FnOnce(&DataDist) -> Result<Arc<OwnCache>>) -> Result<u64> {
    let add = |own| process::current().add_cache(HeldCache::new(held.clone(), own));
    held.engine.run(|open| make(open).map(add))
}

/// Writes the address of every tensor of a cache to `tensors`. Block `i` begins at `i` times the bytes of a block, or the stride.
///
/// # Safety
/// `tensors` points to space for `num_tensors` addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_cache_tensors(
    cache: u64,
    tensors: *mut *mut c_void,
    num_tensors: usize,
) -> u32 {
    native(|| {
        let held = process::current().cache(cache)?;
        if num_tensors < held.own.tensors as usize {
            let required = format!("at least {}, the number of tensors", held.own.tensors);
            return Err(Error::argument("num_tensors", num_tensors, required));
        }
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("tensors", tensors, num_tensors) }?;
        let address = |address: u64| with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        out.put_each(held.engine.engine.tensors(&held.own)?.into_iter().map(address));
        Ok(())
    })
}

/// Ends a cache, and writes the handle of a transfer to `transfer`. Its name can be used again at once, and new transfers that name it
/// fail with `LLM_DATADIST_NOT_FOUND`. Grants of the cache end.
///
/// The transfer ends when no transfer of this engine, and no request of a peer that it serves, uses registered memory any more. With
/// `LLM_DATADIST_TIMEOUT`, it is still in use: keep it, and call the function again. `LLM_DATADIST_BUSY`: the cache is freed; call
/// the function again to learn when its memory may be used. The handle is invalid once the transfer has succeeded.
///
/// # Safety
/// `transfer` points to space for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_cache_free(cache: u64, transfer: *mut u64) -> u32 {
    native(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("transfer", transfer, 1) }?;
        let held = process::current().cache(cache)?;
        out.put(&[kept(&held.engine, || held.free())?]);
        Ok(())
    })
}
