//! The functions of `hixl` for engines, memory and connections. The C++ classes `hixl::Hixl` and `adxl::AdxlEngine` call them.
//!
//! They return the status numbers of `hixl`. A null pointer and an invalid list are `PARAM_INVALID`; an invalid handle and a panic are
//! `FAILED`.

use std::ffi::c_char;
use std::sync::Arc;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::{Adopted, CacheKind, Result};
use llm_datadist_hixl::{Hixl, MemKind, MemRange, NO_TEXT, Outcome, Status};

use super::hixl_types::{LlmDatadistHixlConnection, LlmDatadistHixlOption, LlmDatadistText};
use super::{log, process, raw};
use crate::{failure, hixl_lists};

/// Creates an engine of `hixl`, which is not initialized yet. Returns its handle, or 0 on failure. A handle is never used again.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_hixl_new() -> u64 {
    let mut handle = 0;
    failure::hixl(|| {
        crate::log::install(log::current);
        handle = process::current().hixl.add(Arc::default());
        Ok(Ok(()))
    });
    handle
}

/// Finalizes an engine, and frees its handle.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_hixl_free(hixl: u64) -> u32 {
    failure::hixl(|| {
        process::current().hixl.remove(hixl)?.finalize();
        Ok(Ok(()))
    })
}

/// Opens the engine. If it is open, only checks the options.
///
/// # Safety
/// `options` points to `num_options` options. Each text has as many bytes as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_initialize(
    hixl: u64,
    local_engine: LlmDatadistText,
    options: *const LlmDatadistHixlOption,
    num_options: usize,
) -> u32 {
    entered(hixl, |engine| {
        // SAFETY: the caller's promise.
        let local_engine = unsafe { text("local_engine", local_engine) }?;
        // SAFETY: the caller's promise.
        let given = unsafe { raw::list("options", options, num_options) }?;
        let mut texts = fallible::with_capacity("the options of an engine", given.len())?;
        for option in given {
            // SAFETY: the caller's promise.
            let key = unsafe { text("the key of an option", option.key) }?;
            // SAFETY: the caller's promise.
            let value = unsafe { text("the value of an option", option.value) }?;
            texts.push((key, value));
        }
        Ok(match Hixl::check_options(&texts) {
            Status::Success => outcome(engine.initialize(local_engine, &texts)),
            wrong => Err(wrong),
        })
    })
}

/// Waits for the calls that run, which end by their limits, and closes the engine. Afterwards, this process touches no memory of the
/// program for it. Has no effect unless it is open.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_hixl_finalize(hixl: u64) -> u32 {
    entered(hixl, |engine| {
        engine.finalize();
        Ok(Ok(()))
    })
}

/// Registers memory, and writes its handle to `mem_handle`. With `local_only`, peers cannot use it. `mem_type` is a number of
/// `hixl::MemType`.
///
/// # Safety
/// `mem_handle` points to space for a handle. The memory is readable and writable until it is deregistered or the engine is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_register_mem(
    hixl: u64,
    addr: u64,
    len: u64,
    local_only: bool,
    mem_type: i32,
    mem_handle: *mut u64,
) -> u32 {
    entered(hixl, |engine| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("mem_handle", mem_handle, 1) }?;
        let range = MemRange { addr, len, local_only };
        let registered = engine.register_mem(range, MemKind::of(mem_type.into()), |desc, addrs| {
            // SAFETY: the caller's promise. `new` checks the numbers.
            unsafe { Adopted::new(desc, CacheKind::Blocks, addrs) }
        });
        Ok(registered.map(|handle| out.put(&[handle])))
    })
}

/// Ends registered memory, and waits until no transfer uses it, at most 10 s. After `TIMEOUT`, transfers still use the memory, and the
/// same call waits again. An unknown handle is a success, and 0 is refused.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_hixl_deregister_mem(hixl: u64, mem_handle: u64) -> u32 {
    entered(hixl, |engine| Ok(engine.deregister_mem(mem_handle)))
}

/// Connects to another engine.
///
/// # Safety
/// `remote_engine` has as many bytes as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_connect(
    hixl: u64,
    remote_engine: LlmDatadistText,
    timeout_in_millis: i32,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { about_remote(hixl, remote_engine, |engine, remote| engine.connect(remote, timeout_in_millis)) }
}

/// Ends the connection to another engine, with all transfers over it.
///
/// # Safety
/// See `llm_datadist_hixl_connect`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_disconnect(
    hixl: u64,
    remote_engine: LlmDatadistText,
    timeout_in_millis: i32,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        about_remote(hixl, remote_engine, |engine, remote| engine.disconnect(remote, timeout_in_millis))
    }
}

/// Has a thread of the engine connect.
///
/// # Safety
/// See `llm_datadist_hixl_connect`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_connect_async(
    hixl: u64,
    remote_engine: LlmDatadistText,
    timeout_in_millis: i32,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        about_remote(hixl, remote_engine, |engine, remote| engine.connect_async(remote, timeout_in_millis))
    }
}

/// Has a thread of the engine disconnect.
///
/// # Safety
/// See `llm_datadist_hixl_connect`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_disconnect_async(
    hixl: u64,
    remote_engine: LlmDatadistText,
    timeout_in_millis: i32,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        about_remote(hixl, remote_engine, |engine, remote| engine.disconnect_async(remote, timeout_in_millis))
    }
}

/// Writes the state of the latest asynchronous call for an engine to `state`, a number of `hixl::AsyncConnectStatus`.
///
/// # Safety
/// See `llm_datadist_hixl_connect`. `state` points to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_connect_state(
    hixl: u64,
    remote_engine: LlmDatadistText,
    state: *mut u32,
) -> u32 {
    entered(hixl, |engine| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("state", state, 1) }?;
        // SAFETY: the caller's promise.
        let remote = unsafe { text("remote_engine", remote_engine) }?;
        Ok(engine.connect_state(remote).map(|state| out.put(&[state as u32])))
    })
}

/// Writes the states of all asynchronous connections to `connections`, and their number to `num_connections`.
///
/// The list and its texts are valid until the next function of `hixl` that returns a list in this thread, for any engine, and at most
/// until the thread ends. The program does not free them.
///
/// # Safety
/// `connections` points to space for a pointer, and `num_connections` to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_connect_states(
    hixl: u64,
    connections: *mut *const LlmDatadistHixlConnection,
    num_connections: *mut usize,
) -> u32 {
    let take = |engine: &Hixl| {
        engine.connect_states().map(|states| {
            let one = |(engine, state): &(String, _)| LlmDatadistHixlConnection {
                remote_engine: shown(engine),
                state: *state as u32,
            };
            (states.iter().map(one).collect(), states)
        })
    };
    // SAFETY: the caller's promise.
    unsafe { list(hixl, ("connections", connections), ("num_connections", num_connections), take) }
}

/// Writes 1 to `value` if a feature is supported, and otherwise 0. Needs no engine. `feature` is a number of `hixl::FeatureType`.
///
/// # Safety
/// `value` points to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_capability(feature: i32, value: *mut i32) -> u32 {
    failure::hixl(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("value", value, 1) }?;
        Ok(Hixl::capability(feature).map(|value| out.put(&[value])))
    })
}

/// Runs `call` on the engine of a handle, and returns the status.
pub(super) fn entered(hixl: u64, call: impl FnOnce(&Hixl) -> Result<Outcome<()>>) -> u32 {
    failure::hixl(|| call(&*process::current().hixl.get(hixl)?))
}

fn outcome(status: Status) -> Outcome<()> {
    if status == Status::Success { Ok(()) } else { Err(status) }
}

/// # Safety
/// See `llm_datadist_hixl_connect`.
unsafe fn about_remote(
    hixl: u64,
    remote_engine: LlmDatadistText,
    call: impl FnOnce(&Hixl, &str) -> Outcome<()>,
) -> u32 {
    // SAFETY: the caller's promise.
    entered(hixl, |engine| Ok(call(engine, unsafe { text("remote_engine", remote_engine) }?)))
}

/// Writes a list that `take` returns, with what owns its texts, and keeps both for the thread.
///
/// # Safety
/// Both pointers are null, or point to space for a value.
pub(super) unsafe fn list<T: 'static, O: 'static>(
    hixl: u64,
    (name, first): (&str, *mut *const T),
    (name_of_count, count): (&str, *mut usize),
    take: impl FnOnce(&Hixl) -> Outcome<(Vec<T>, O)>,
) -> u32 {
    entered(hixl, |engine| {
        // SAFETY: the caller's promise.
        let first = unsafe { raw::Out::new(name, first, 1) }?;
        // SAFETY: the caller's promise.
        let count = unsafe { raw::Out::new(name_of_count, count, 1) }?;
        hixl_lists::can_keep()?;
        Ok(take(engine).map(|list| {
            first.put(&[list.0.as_ptr()]);
            count.put(&[list.0.len()]);
            hixl_lists::keep(list);
        }))
    })
}

/// Returns a text as C sees it.
pub(super) fn shown(text: &str) -> LlmDatadistText {
    LlmDatadistText { bytes: text.as_ptr().cast::<c_char>(), size: text.len() }
}

/// Returns a text, or [`NO_TEXT`] if it is not UTF-8.
///
/// # Safety
/// See [`raw::list`].
pub(super) unsafe fn text<'a>(name: &str, text: LlmDatadistText) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    Ok(unsafe { utf8(name, text) }?.unwrap_or(NO_TEXT))
}

/// Returns a text; `None` if it is not UTF-8.
///
/// # Safety
/// See [`raw::list`].
pub(super) unsafe fn utf8<'a>(name: &str, text: LlmDatadistText) -> Result<Option<&'a str>> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { raw::list(name, text.bytes.cast::<u8>(), text.size) }?;
    Ok(std::str::from_utf8(bytes).ok())
}
