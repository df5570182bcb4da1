//! The functions by which a program learns what has happened: which transfers have ended, what peers have sent, and which
//! links were made or ended.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::null;

use llm_datadist_core::{Event, PeerInfo, Transfer};

use super::types::{
    LLM_DATADIST_EVENT_COMPLETED, LLM_DATADIST_EVENT_LINK_DOWN, LLM_DATADIST_EVENT_LINK_UP,
    LLM_DATADIST_EVENT_NOTIFICATION, LlmDatadistEvent,
};
use super::{entered, raw};
use crate::{calls, polled_events};

/// Writes at most `max_events` events to `events`, in the order in which they happened, and their number to `num_events`.
/// Never waits. Without events it succeeds, and writes 0.
///
/// The message and the texts of the events are valid until the next call of `llm_datadist_poll` or `llm_datadist_unpoll` in
/// this thread, for any object, and at most until the thread ends. The program does not free them.
///
/// An event is returned once, to one caller. Functions that take the outcome of a transfer remove its event. Events of links are
/// kept only after the first call of this function or of `llm_datadist_event_descriptor`, and only the latest ones of each peer.
/// After a failure no event is lost. Any thread may call it.
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
        let outs = unsafe { raw::Out::new("events", events, max_events) }?;
        let mut polled = open.engine.poll(max_events)?;
        let written = outs.put_each(polled.iter_mut().map(described));
        polled_events::keep(open.engine.events(), polled)?;
        count.put(&[written]);
        Ok(())
    })
}

/// Puts the last `num_events` events of the last `llm_datadist_poll` of this thread back, in front of the queue, because the
/// program had no memory for them. The next `llm_datadist_poll` of any thread returns them again.
///
/// `LLM_PARAM_INVALID` if that call has returned fewer events, or was for another object. Then nothing has changed.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_unpoll(handle: u64, num_events: usize) -> u32 {
    entered(handle, |open| polled_events::put_back(open.engine.events(), num_events))
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
        let out = unsafe { raw::Out::new("descriptor", descriptor, 1) }?;
        out.put(&[open.engine.events().descriptor()?.as_fd().as_raw_fd()]);
        Ok(())
    })
}

/// Waits until no transfer of the engine runs, at most `timeout_ms` milliseconds; 0 does not wait. `LLM_TIMEOUT` if one still
/// runs then. Events stay in the queue. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_drain(handle: u64, timeout_ms: i32) -> u32 {
    entered(handle, |open| calls::drain(&open.engine, timeout_ms))
}

/// Returns an event as C sees it. What it points to belongs to `event`.
fn described(event: &mut Event) -> LlmDatadistEvent {
    match event {
        Event::Completed(transfer) => completed(transfer),
        Event::Notification(message) => LlmDatadistEvent {
            cluster_id: message.peer.cluster.0,
            payload: message.payload.as_ptr(),
            payload_size: message.payload.len(),
            ..nothing(LLM_DATADIST_EVENT_NOTIFICATION)
        },
        Event::LinkUp(peer) => of_link(LLM_DATADIST_EVENT_LINK_UP, peer),
        Event::LinkDown(end) => LlmDatadistEvent {
            reason: text(&mut end.reason),
            unacknowledged: end.unacknowledged,
            ..of_link(LLM_DATADIST_EVENT_LINK_DOWN, &mut end.peer)
        },
        // A kind that the core has and this interface lacks. It is counted, so that the descriptor keeps its meaning.
        _ => nothing(0),
    }
}

fn completed(transfer: &Transfer) -> LlmDatadistEvent {
    LlmDatadistEvent {
        status: calls::ended(transfer),
        transfer: transfer.number(),
        bytes: transfer.progress().done,
        nanos: transfer.nanos(),
        ..nothing(LLM_DATADIST_EVENT_COMPLETED)
    }
}

fn of_link(kind: u32, peer: &mut PeerInfo) -> LlmDatadistEvent {
    LlmDatadistEvent {
        cluster_id: peer.cluster.0,
        incarnation: peer.incarnation,
        address: text(&mut peer.address),
        transport: transport(peer.transport).as_ptr(),
        ..nothing(kind)
    }
}

/// Returns an event without facts.
fn nothing(kind: u32) -> LlmDatadistEvent {
    LlmDatadistEvent {
        kind,
        status: 0,
        transfer: 0,
        bytes: 0,
        nanos: 0,
        cluster_id: 0,
        payload: null(),
        payload_size: 0,
        incarnation: 0,
        address: null(),
        transport: null(),
        reason: null(),
        unacknowledged: 0,
        reserved: [0; 4],
    }
}

fn transport(name: &str) -> &'static CStr {
    match name {
        "shm" => c"shm",
        "tcp" => c"tcp",
        "local" => c"local",
        _ => c"other",
    }
}

/// Returns a text as C sees it. Gives it a null byte at its end, unless it has one already because the event was put back.
fn text(text: &mut String) -> *const c_char {
    if !text.ends_with('\0') {
        *text = text.replace('\0', "\u{fffd}");
        text.push('\0');
    }
    text.as_ptr().cast()
}
