//! The status of a call, and the last failure of each thread. A panic becomes a failure.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{self, AssertUnwindSafe};

use llm_datadist_core::bindings::StatusCode;
use llm_datadist_core::{Error, ErrorClass, ErrorKind, ErrorWords, Result};
use llm_datadist_hixl::{Outcome, Status};

use crate::polled_events::c_text;

/// Why a call failed.
#[derive(Default)]
struct Failure {
    reason: CString,
    code: CString,
    argument: CString,
}

thread_local! {
    /// The last failure of this thread.
    static LAST: RefCell<Failure> = RefCell::default();
}

/// A text about the last failure of a thread.
#[derive(Clone, Copy)]
pub(crate) enum FailureText {
    /// The whole text.
    Reason,
    /// The word that tells kinds of one status apart. Empty after a call of the C++ class.
    Code,
    /// The argument that the failure is about, or nothing.
    Argument,
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

/// Runs `call` of the C++ class and returns its status. Keeps the reason of a failure. A panic is `LLM_FAILED`.
pub(crate) fn guarded(call: impl FnOnce() -> Result<()>) -> u32 {
    guarded_as(StatusCode::of_cpp, call)
}

/// Like [`guarded`], with the status that `code` gives to each kind of failure.
pub(crate) fn guarded_as(code: fn(ErrorKind) -> StatusCode, call: impl FnOnce() -> Result<()>) -> u32 {
    match caught(call) {
        Ok(()) => status(StatusCode::Success),
        Err(error) => {
            keep(&error.original().to_string());
            status(code(error.kind()))
        }
    }
}

/// Runs `call` of the native API and returns its status, which is 0 for a success. Keeps what the failure is about.
pub(crate) fn native(call: impl FnOnce() -> Result<()>) -> u32 {
    caught(call).err().map_or(0, |error| {
        let words = ErrorWords(&error);
        let (reason, argument) = (error.to_string(), words.argument().unwrap_or_default());
        replace(Failure { reason: c_text(&reason), code: c_text(words.code()), argument: c_text(argument) });
        class_status(words.class())
    })
}

/// Runs `call` of `hixl` and returns its status. The outer failures are invalid pointers, invalid handles and panics.
pub(crate) fn hixl(call: impl FnOnce() -> Result<Outcome<()>>) -> u32 {
    let outcome = match caught(call) {
        Ok(Ok(())) => return Status::Success.code(),
        Ok(Err(status)) => {
            let name = Status::ALL.iter().find(|(_, one)| *one == status).map_or("", |(name, _)| name);
            keep(&format!(
                "the call of hixl returned {} ({name}); the log at the level of information has more",
                status.code()
            ));
            status
        }
        Err(error) => {
            keep(&error.original().to_string());
            Status::from_error("a call from C", &error)
        }
    };
    outcome.code()
}

/// Returns the status of a failure of the native API. `abi` has the names of the numbers.
pub(crate) fn class_status(class: ErrorClass) -> u32 {
    match class {
        ErrorClass::InvalidArgument => 1,
        ErrorClass::NotFound => 2,
        ErrorClass::OutOfMemory => 3,
        ErrorClass::Timeout => 4,
        ErrorClass::PeerLost => 5,
        ErrorClass::Busy => 6,
        ErrorClass::GrantEnded => 7,
        ErrorClass::VerifyFailed => 8,
        ErrorClass::Closed => 9,
        ErrorClass::Cancelled => 10,
        ErrorClass::Error => 11,
    }
}

/// Returns the number that C compares.
pub(crate) fn status(code: StatusCode) -> u32 {
    u32::try_from(code.value()).unwrap_or(u32::MAX)
}

/// Keeps the reason of a failure.
pub(crate) fn keep(reason: &str) {
    replace(Failure { reason: c_text(reason), ..Failure::default() });
}

fn replace(failure: Failure) {
    // Fails only while the thread ends.
    let _ = LAST.try_with(|last| last.replace(failure));
}

/// Returns a text about the last failure of this thread. It is valid until the next failure.
pub(crate) fn last(which: FailureText) -> *const c_char {
    let of = |failure: &Failure| match which {
        FailureText::Reason => failure.reason.as_ptr(),
        FailureText::Code => failure.code.as_ptr(),
        FailureText::Argument => failure.argument.as_ptr(),
    };
    // Fails only while the thread ends.
    LAST.try_with(|last| of(&last.borrow())).unwrap_or(c"".as_ptr())
}
