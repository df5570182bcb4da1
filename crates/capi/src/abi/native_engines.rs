//! The functions of the native API that open and close engines.

use std::ffi::{c_char, c_int};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use llm_datadist_core::{Error, Result};

use super::types::LlmDatadistOption;
use super::{log, native_raw, process, raw};
use crate::failure::native;
use crate::native::HeldEngine;
use crate::polled_events;

/// Opens an engine, and writes its handle to `engine`. `llm_datadist_engine_close` closes it. Both texts of an option end in a null
/// byte.
///
/// The options are those of the Python class `Engine`, as texts: `pool`, `host_pool`, `page`, `listen`, `name`, `metadata`, `token`,
/// `token_file`, `accept_remote`, `timeout`, `verify`, and what `llm-datadist options` lists. A size is `"64MiB"` or a number of
/// bytes, a time is a number of seconds, and a flag is `true` or `false`. `metadata` is text without null bytes. Unknown names are
/// refused, and so is an option that is given twice.
///
/// A process may have several engines. Any thread may call the functions for an engine. A forked child has none of the engines,
/// caches and transfers of its parent, and may open its own.
///
/// # Safety
/// `options` points to `num_options` options, and `engine` to space for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_engine_open(
    options: *const LlmDatadistOption,
    num_options: usize,
    engine: *mut u64,
) -> u32 {
    native(|| {
        crate::log::install(log::current);
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("engine", engine, 1) }?;
        // SAFETY: the caller's promise.
        let options = unsafe { raw::options(options, num_options) }?;
        out.put(&[process::current().engines.add(HeldEngine::open(options)?)]);
        Ok(())
    })
}

/// Closes an engine: ends its transfers, links and grants, frees its caches and their handles, and releases the pools. The handle is
/// invalid from the start of the call.
///
/// Transfers that still run after `timeout` seconds, 0 or above, end with `LLM_DATADIST_CLOSED`. Their handles answer until they are
/// freed. Events that nobody took are dropped. The event descriptor is closed: first remove it from what waits for it.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_engine_close(engine: u64, timeout: f64) -> u32 {
    native(|| {
        let limit = native_raw::seconds("timeout", timeout)?;
        let process = process::current();
        let held = process.engines.remove(engine)?;
        held.engine.close(limit);
        process.caches.retain(|cache| !Arc::ptr_eq(&cache.engine, &held));
        Ok(())
    })
}

/// Writes the address at which the engine listens to `address`, with the port that was taken, as a text that ends in a null byte. It
/// is empty without the option `listen`. `LLM_DATADIST_ADDRESS_SIZE` bytes are enough.
///
/// # Safety
/// `address` points to space for `size` characters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_engine_address(engine: u64, address: *mut c_char, size: usize) -> u32 {
    entered(engine, |held| {
        let text = held.engine.address()?.map_or_else(String::new, |address| address.to_string());
        if size <= text.len() {
            return Err(Error::argument("size", size, format_args!("at least {}", text.len() + 1)));
        }
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("address", address, size) }?;
        let characters: Vec<c_char> =
            text.bytes().chain([0]).map(|byte| c_char::from_ne_bytes([byte])).collect();
        out.put(&characters);
        Ok(())
    })
}

/// Writes a file descriptor to `descriptor`. It is readable while `llm_datadist_events` has something to return, so that `poll`,
/// `select` or `epoll` can wait for it.
///
/// The descriptor belongs to the engine, and is the same for every call. The program must not read from it, write to it or
/// close it. A program that `exec` starts does not inherit it.
///
/// # Safety
/// `descriptor` points to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_event_descriptor(engine: u64, descriptor: *mut c_int) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("descriptor", descriptor, 1) }?;
        out.put(&[held.engine.event_queue()?.descriptor()?.as_fd().as_raw_fd()]);
        Ok(())
    })
}

/// Writes the counters of the engine, and the state of its pools, caches and links, to `json`: a text of JSON that ends in a null
/// byte, with the names that `Engine.stats()` has in Python, except `engine`. The program does not free it: it is valid until the
/// next call of this function in this thread, for any engine, and at most until the thread ends.
///
/// # Safety
/// `json` points to space for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_stats(engine: u64, json: *mut *const c_char) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("json", json, 1) }?;
        out.put(&[polled_events::keep_stats(&held.engine.stats()?.to_json())?]);
        Ok(())
    })
}

/// Runs `call` on the engine of a handle, and returns the status.
pub(super) fn entered(engine: u64, call: impl FnOnce(&Arc<HeldEngine>) -> Result<()>) -> u32 {
    native(|| call(&process::current().engines.get(engine)?))
}
