//! The status of a call, and the reason of the last failure of each thread. A panic becomes a failure.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{self, AssertUnwindSafe};

use llm_datadist_core::{Error, ErrorKind, Result, StatusCode};

thread_local! {
    /// The reason of the last failure of this thread.
    static REASON: RefCell<CString> = RefCell::default();
}

/// Runs `call`. A panic becomes an error (`no_panic_leaves_the_library`).
pub(crate) fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    // Unwind safe: what outlives a call is behind locks, whose data is whole or is released by drop. What the call
    // borrowed from here is not used again.
    panic::catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|cause| {
        let text =
            cause.downcast_ref::<&str>().copied().or(cause.downcast_ref::<String>().map(String::as_str));
        let text = format!("the engine panicked: {}", text.unwrap_or("no reason given"));
        // The payload of the panic may panic again when it is dropped.
        std::mem::forget(cause);
        Err(Error::new(ErrorKind::System, text))
    })
}

/// Runs `call` and returns its status. Keeps the reason of a failure for [`reason`]. A panic is `LLM_FAILED`.
pub(crate) fn guarded(call: impl FnOnce() -> Result<()>) -> u32 {
    guarded_as(StatusCode::of_cpp, call)
}

/// Like [`guarded`], with the status that `code` gives to each kind of failure.
pub(crate) fn guarded_as(code: fn(ErrorKind) -> StatusCode, call: impl FnOnce() -> Result<()>) -> u32 {
    match caught(call) {
        Ok(()) => status(StatusCode::Success),
        Err(error) => {
            keep(&error.to_string());
            status(code(error.kind()))
        }
    }
}

/// Like [`guarded`], for a call that asks a transfer for its outcome. `None` is `LLM_WAIT_PROC_TIMEOUT`: the transfer
/// still runs. No outcome has that status.
pub(crate) fn guarded_outcome(call: impl FnOnce() -> Result<Option<()>>) -> u32 {
    let mut running = false;
    let outcome = guarded(|| {
        running = call()?.is_none();
        Ok(())
    });
    if running {
        keep("the transfer still runs");
        return status(StatusCode::WaitProcessTimeout);
    }
    outcome
}

/// Returns the number that C compares.
pub(crate) fn status(code: StatusCode) -> u32 {
    u32::try_from(code.value()).unwrap_or(u32::MAX)
}

/// Keeps the reason of a failure.
pub(crate) fn keep(text: &str) {
    let text = CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
    // Fails only while the thread ends.
    let _ = REASON.try_with(|reason| reason.replace(text));
}

/// Returns the reason of the last failure of this thread. It is valid until the next failure.
pub(crate) fn reason() -> *const c_char {
    // Fails only while the thread ends.
    REASON.try_with(|reason| reason.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
