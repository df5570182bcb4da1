//! The functions that ask, cancel and free one transfer. They need no engine.

use std::sync::Arc;

use llm_datadist_core::{Result, Transfer};

use super::{process, raw};
use crate::calls;
use crate::failure::{caught, guarded, guarded_outcome};

/// Returns whether the transfer has ended, so that nothing of it touches memory any more. Does not take its outcome.
///
/// Also returns true for an invalid handle, of which `llm_datadist_transfer_result` says why it is invalid. It never fails, so
/// the reason of the last failure stays. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_done(transfer: u64) -> bool {
    caught(|| Ok(found(transfer)?.done())).unwrap_or(true)
}

/// Waits until the transfer has ended, at most `timeout_ms` milliseconds, and returns its outcome like
/// `llm_datadist_transfer_result`. 0 does not wait. Any thread may call it, and several may wait for the same transfer.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_wait(transfer: u64, timeout_ms: i32) -> u32 {
    guarded_outcome(|| calls::wait(&*found(transfer)?, timeout_ms))
}

/// Returns the status with which the transfer has ended, or `LLM_WAIT_PROC_TIMEOUT` while it runs. Never waits.
///
/// No transfer ends with `LLM_WAIT_PROC_TIMEOUT`. A transfer whose time limit has passed ends with `LLM_TIMEOUT`. One that was
/// cancelled, or that the end of its engine has ended, ends with `LLM_FAILED`. After a failure, the contents of the rows that
/// it writes are undefined, and `llm_datadist_last_error` has the reason. An invalid handle is `LLM_FAILED` too.
///
/// The function takes the outcome: `llm_datadist_poll` no longer returns it. The transfer keeps it, so that the function may be
/// called again. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_result(transfer: u64) -> u32 {
    guarded_outcome(|| calls::outcome(&*found(transfer)?))
}

/// Cancels the transfer. Never waits: a transfer that has begun ends a little later, and its event reports this. Returns true
/// if it will end with `LLM_FAILED`, and false if its outcome can no longer change or the handle is invalid. It never fails, so
/// the reason of the last failure stays. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_cancel(transfer: u64) -> bool {
    caught(|| Ok(found(transfer)?.cancel())).unwrap_or(false)
}

/// Returns whether `llm_datadist_transfer_cancel` has ended the transfer, or will end it. It never fails, so the reason of the
/// last failure stays. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_cancelled(transfer: u64) -> bool {
    caught(|| Ok(found(transfer)?.cancelled())).unwrap_or(false)
}

/// Writes the number of bytes that are known to be in place to `done`, and the number of bytes of the whole transfer to
/// `total`, which is 0 until the transfer is planned. Both are final once the transfer has ended. A push learns only at its end
/// how many bytes are in place. An invalid handle is `LLM_FAILED`. Any thread may call it.
///
/// # Safety
/// Both pointers refer to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_transfer_progress(
    transfer: u64,
    done: *mut u64,
    total: *mut u64,
) -> u32 {
    guarded(|| {
        // SAFETY: the caller's promise.
        let done = unsafe { raw::Out::new("done", done, 1) }?;
        // SAFETY: the caller's promise.
        let total = unsafe { raw::Out::new("total", total, 1) }?;
        let progress = found(transfer)?.progress();
        done.put(&[progress.done]);
        total.put(&[progress.total]);
        Ok(())
    })
}

/// Returns the nanoseconds from the start of the transfer to its end, or until now while it runs; 0 for an invalid handle. It
/// never fails, so the reason of the last failure stays. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_nanos(transfer: u64) -> u64 {
    caught(|| Ok(found(transfer)?.nanos())).unwrap_or(0)
}

/// Frees the handle of a transfer, which it neither cancels nor waits for. The event of the transfer is still returned. Any
/// thread may call it, also before the transfer has ended and after its engine was closed.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_free(transfer: u64) -> u32 {
    guarded(|| process::current().transfers.free(transfer))
}

fn found(handle: u64) -> Result<Arc<Transfer>> {
    process::current().transfers.get(handle)
}
