//! The functions that tell a program which of its transfers have ended.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use llm_datadist_core::Event;

use super::types::{LLM_DATADIST_EVENT_COMPLETED, LlmDatadistEvent};
use super::{entered, raw};
use crate::calls;

/// Writes at most `max_events` events to `events`, in the order in which they happened, and their number to `num_events`.
/// Never waits. Without events it succeeds, and writes 0.
///
/// An event is returned once, to one caller. Functions that take the outcome of a transfer remove its event. After a failure
/// no event is lost. Any thread may call it.
///
/// # Safety
/// `events` points to space for `max_events` events, and `num_events` to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_poll(
    handle: u64,
    max_events: usize,
    events: *mut LlmDatadistEvent,
    num_events: *mut usize,
) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        let count = unsafe { raw::Out::new("num_events", num_events, 1) }?;
        count.put(&[0]);
        // SAFETY: the caller's promise.
        let places = unsafe { raw::Out::new("events", events, max_events) }?;
        let polled = open.engine.poll(max_events)?;
        // Nothing fails from here on: these events are no longer in the queue.
        count.put(&[places.put_each(polled.into_iter().filter_map(event))]);
        Ok(())
    })
}

/// Writes a file descriptor to `descriptor`. It is readable while `llm_datadist_poll` has something to return, so that
/// `poll`, `select` or `epoll` can wait for it.
///
/// The descriptor belongs to the engine, and is the same for every call. The program must not read from it, write to it or
/// close it. Closing the engine closes it: first remove it from what waits for it. A program that `exec` starts does not
/// inherit it. Any thread may call the function. It fails with `LLM_FAILED` if the process has no descriptor left.
///
/// # Safety
/// `descriptor` points to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_event_descriptor(handle: u64, descriptor: *mut c_int) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        let place = unsafe { raw::Out::new("descriptor", descriptor, 1) }?;
        place.put(&[open.engine.events().descriptor()?.as_raw_fd()]);
        Ok(())
    })
}

/// Waits until no transfer of the engine runs, at most `timeout_ms` milliseconds; 0 does not wait. `LLM_TIMEOUT` if one still
/// runs then. Events stay in the queue. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_drain(handle: u64, timeout_ms: i32) -> u32 {
    entered(handle, |open| calls::drain(&open.engine, timeout_ms))
}

/// Returns an event as C sees it. Kinds of later versions of the engine have no number here.
fn event(of: Event) -> Option<LlmDatadistEvent> {
    match of {
        Event::Completed(transfer) => Some(LlmDatadistEvent {
            kind: LLM_DATADIST_EVENT_COMPLETED,
            status: calls::ended(&transfer),
            transfer: transfer.number(),
            bytes: transfer.progress().done,
            nanos: transfer.nanos(),
            reserved: [0; 12],
        }),
        _ => None,
    }
}
