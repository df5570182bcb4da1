//! The functions of `hixl` for transfers and notifications.

use llm_datadist_core::Result;
use llm_datadist_core::bindings::fallible;
use llm_datadist_hixl::{Direction, Hixl, Notice, OpDesc, RequestResult, Status};

use super::hixl::{entered, list, shown, text, utf8};
use super::hixl_types::{LlmDatadistHixlNotice, LlmDatadistHixlOp, LlmDatadistHixlResult, LlmDatadistText};
use super::raw;

/// Reads memory of another engine, or writes it, and returns when all bytes are in place. `operation` is a number of
/// `hixl::TransferOp`.
///
/// # Safety
/// `ops` points to `num_ops` operations. `remote_engine` has as many bytes as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_transfer_sync(
    hixl: u64,
    remote_engine: LlmDatadistText,
    operation: i32,
    ops: *const LlmDatadistHixlOp,
    num_ops: usize,
    timeout_in_millis: i32,
) -> u32 {
    entered(hixl, |engine| {
        // SAFETY: the caller's promise.
        let remote = unsafe { text("remote_engine", remote_engine) }?;
        // SAFETY: the caller's promise.
        let ops = unsafe { self::ops(ops, num_ops) }?;
        Ok(engine.transfer_sync(remote, Direction::of(operation.into()), &ops, timeout_in_millis))
    })
}

/// Starts to read or write, and writes the number of the request to `request`. `llm_datadist_hixl_transfer_state` and
/// `llm_datadist_hixl_transfer_states` report its end once, the latter with `user_data`. The list may be freed when the call returns.
///
/// # Safety
/// See `llm_datadist_hixl_transfer_sync`. `request` points to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_transfer_async(
    hixl: u64,
    remote_engine: LlmDatadistText,
    operation: i32,
    ops: *const LlmDatadistHixlOp,
    num_ops: usize,
    user_data: u64,
    request: *mut u64,
) -> u32 {
    entered(hixl, |engine| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("request", request, 1) }?;
        // SAFETY: the caller's promise.
        let remote = unsafe { text("remote_engine", remote_engine) }?;
        // SAFETY: the caller's promise.
        let ops = unsafe { self::ops(ops, num_ops) }?;
        let started = engine.transfer_async(remote, Direction::of(operation.into()), &ops, user_data);
        Ok(started.map(|number| out.put(&[number])))
    })
}

/// Writes the state of a request to `state`, a number of `hixl::TransferStatus`, also if the status is not 0.
///
/// # Safety
/// `state` points to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_transfer_state(hixl: u64, request: u64, state: *mut u32) -> u32 {
    entered(hixl, |engine| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("state", state, 1) }?;
        let (status, state) = engine.transfer_state(request);
        out.put(&[state as u32]);
        Ok(if status == Status::Success { Ok(()) } else { Err(status) })
    })
}

/// Writes the states of at most `max_results` requests to `results`, in the order of their start, and their number to `num_results`.
/// With `skip_waiting`, those that run are left out. The list is valid as for `llm_datadist_hixl_connect_states`.
///
/// # Safety
/// `results` points to space for a pointer, and `num_results` to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_transfer_states(
    hixl: u64,
    max_results: u32,
    skip_waiting: bool,
    results: *mut *const LlmDatadistHixlResult,
    num_results: *mut usize,
) -> u32 {
    let one = |of: RequestResult| LlmDatadistHixlResult {
        request: of.request,
        user_data: of.user_data,
        state: of.state as u32,
    };
    let take = |engine: &Hixl| {
        let states = engine.transfer_states(max_results, skip_waiting)?;
        Ok((states.into_iter().map(one).collect(), ()))
    };
    // SAFETY: the caller's promise.
    unsafe { list(hixl, ("results", results), ("num_results", num_results), take) }
}

/// Sends a notification, and returns when the other engine has it.
///
/// # Safety
/// Each text has as many bytes as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_send_notify(
    hixl: u64,
    remote_engine: LlmDatadistText,
    notice: LlmDatadistHixlNotice,
    timeout_in_millis: i32,
) -> u32 {
    entered(hixl, |engine| {
        // SAFETY: the caller's promise.
        let remote = unsafe { text("remote_engine", remote_engine) }?;
        // SAFETY: the caller's promise.
        let name = unsafe { utf8("name", notice.name) }?;
        // SAFETY: the caller's promise.
        let message = unsafe { utf8("message", notice.message) }?;
        Ok(engine.send_notify(remote, name.zip(message), timeout_in_millis))
    })
}

/// Writes all notifications that were not read to `notices`, and their number to `num_notices`. The list is valid as for
/// `llm_datadist_hixl_connect_states`.
///
/// # Safety
/// `notices` points to space for a pointer, and `num_notices` to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_hixl_notifies(
    hixl: u64,
    notices: *mut *const LlmDatadistHixlNotice,
    num_notices: *mut usize,
) -> u32 {
    let one = |of: &Notice| LlmDatadistHixlNotice { name: shown(&of.name), message: shown(&of.text) };
    let take = |engine: &Hixl| engine.notifies().map(|taken| (taken.iter().map(one).collect(), taken));
    // SAFETY: the caller's promise.
    unsafe { list(hixl, ("notices", notices), ("num_notices", num_notices), take) }
}

/// # Safety
/// See [`raw::list`].
unsafe fn ops(first: *const LlmDatadistHixlOp, count: usize) -> Result<Vec<OpDesc>> {
    // SAFETY: the caller's promise.
    let given = unsafe { raw::list("ops", first, count) }?;
    let one = |op: &LlmDatadistHixlOp| OpDesc { local: op.local_addr, remote: op.remote_addr, len: op.len };
    fallible::collect("the operations of a transfer", given.iter().map(one))
}
