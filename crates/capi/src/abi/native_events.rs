//! The functions of the native API that say what has happened, and who is linked.

use std::ffi::{CStr, c_char};
use std::ptr::null;
use std::sync::Arc;

use llm_datadist_core::{ErrorWords, Event, EventQueue, PeerInfo, Result, Transfer};

use super::native_engines::entered;
use super::native_types::{
    LLM_DATADIST_COMPLETED, LLM_DATADIST_GRANT_CLOSED, LLM_DATADIST_MESSAGE, LLM_DATADIST_PEER_DOWN,
    LLM_DATADIST_PEER_UP, LLM_DATADIST_SUCCESS, LLM_DATADIST_TOKEN_SIZE, LlmDatadistEvent, LlmDatadistPeer,
};
use super::raw;
use crate::failure;
use crate::handles::TRANSFERS;
use crate::native::HeldEngine;
use crate::polled_events::{self, PointedTo};

/// Maximum number of texts of an event, and of a peer.
const TEXTS_OF_EVENT: usize = 3;
const TEXTS_OF_PEER: usize = 2;

/// Writes at most `max_events` events to `events`, oldest first, and their number to `num_events`. Never waits: without events it
/// succeeds, and writes 0.
///
/// What the events point to is valid until the next call of `llm_datadist_events` or `llm_datadist_peers` in this thread, for any
/// engine, and at most until the thread ends. The program does not free it.
///
/// An event is returned once, to one caller. Functions that take the outcome of a transfer remove its event. After a failure no event
/// is lost.
///
/// # Safety
/// `events` points to space for `max_events` events, or is null if that is 0, and `num_events` to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_events(
    engine: u64,
    max_events: usize,
    events: *mut LlmDatadistEvent,
    num_events: *mut usize,
) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let count = unsafe { raw::Out::new("num_events", num_events, 1) }?;
        // SAFETY: the caller's promise.
        let outs = unsafe { raw::Out::of_list("events", events, max_events) }?;
        let queue = held.engine.event_queue()?;
        let polled = held.engine.events(max_events)?;
        held.wait_for_handles();
        // From here on without the engine, which may close: what was polled must be returned.
        count.put(&[written(held, &queue, polled, &outs)?]);
        Ok(())
    })
}

/// Writes events of an engine, and keeps what they point to. Returns their number.
fn written(
    held: &HeldEngine,
    queue: &Arc<EventQueue>,
    polled: Vec<Event>,
    outs: &raw::Out<LlmDatadistEvent>,
) -> Result<usize> {
    let mut pointed_to = match PointedTo::with_room(polled.len().saturating_mul(TEXTS_OF_EVENT)) {
        Ok(room) => room,
        Err(error) => {
            queue.put_back(polled.into_iter());
            return Err(error);
        }
    };
    let token = |event: &Event| match event {
        // Zeros if the engine has closed meanwhile: nobody can use its tokens any more.
        Event::GrantEnded(grant, _) => {
            held.engine.run_until_closed(|open| Ok(open.grant_token(grant).to_bytes())).ok()
        }
        _ => None,
    };
    let nothing = [0; LLM_DATADIST_TOKEN_SIZE];
    let described = polled.iter().map(|event| LlmDatadistEvent {
        token: token(event).unwrap_or(nothing),
        ..described(event, &mut pointed_to)
    });
    let written = outs.put_each(described);
    pointed_to.events = polled;
    polled_events::keep(queue, pointed_to)?;
    Ok(written)
}

/// Writes at most `max_peers` of the peers that are linked now to `peers`, and the number of all of them to `num_peers`. What the
/// structures point to is valid as for `llm_datadist_events`.
///
/// # Safety
/// `peers` points to space for `max_peers` structures, or is null if that is 0, and `num_peers` to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_peers(
    engine: u64,
    max_peers: usize,
    peers: *mut LlmDatadistPeer,
    num_peers: *mut usize,
) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let count = unsafe { raw::Out::new("num_peers", num_peers, 1) }?;
        // SAFETY: the caller's promise.
        let outs = unsafe { raw::Out::of_list("peers", peers, max_peers) }?;
        let linked = held.engine.peers()?;
        let all = linked.len();
        let mut pointed_to = PointedTo::with_room(all.min(max_peers).saturating_mul(TEXTS_OF_PEER))?;
        outs.put_each(linked.iter().map(|info| peer(info, &mut pointed_to)));
        pointed_to.peers = linked;
        polled_events::keep(&held.engine.event_queue()?, pointed_to)?;
        count.put(&[all]);
        Ok(())
    })
}

/// Returns an event as C sees it. What it points to belongs to `event` and `pointed_to`.
fn described(event: &Event, pointed_to: &mut PointedTo) -> LlmDatadistEvent {
    match event {
        Event::Completed(transfer) => LlmDatadistEvent {
            status: ended(transfer),
            transfer: TRANSFERS.handle(transfer.number()),
            ..nothing(LLM_DATADIST_COMPLETED)
        },
        Event::Notification(message) => LlmDatadistEvent {
            peer: peer(&message.peer, pointed_to),
            message: message.payload.as_ptr(),
            message_size: message.payload.len(),
            ..nothing(LLM_DATADIST_MESSAGE)
        },
        Event::LinkUp(info) => {
            LlmDatadistEvent { peer: peer(info, pointed_to), ..nothing(LLM_DATADIST_PEER_UP) }
        }
        Event::LinkDown(end) => LlmDatadistEvent {
            peer: peer(&end.peer, pointed_to),
            reason: pointed_to.text(&end.reason),
            unconfirmed: end.unacknowledged,
            ..nothing(LLM_DATADIST_PEER_DOWN)
        },
        Event::GrantEnded(_, why) => {
            LlmDatadistEvent { reason: pointed_to.text(why.name()), ..nothing(LLM_DATADIST_GRANT_CLOSED) }
        }
        // A kind that the core has and this interface lacks. It is counted, so that the descriptor keeps its meaning.
        _ => nothing(0),
    }
}

/// Returns the status with which a transfer has ended.
fn ended(transfer: &Transfer) -> u32 {
    let failure = transfer.peek().and_then(Result::err);
    failure.map_or(LLM_DATADIST_SUCCESS, |error| failure::class_status(ErrorWords(&error).class()))
}

fn peer(info: &PeerInfo, pointed_to: &mut PointedTo) -> LlmDatadistPeer {
    LlmDatadistPeer {
        peer: info.cluster.0,
        name: pointed_to.text(&info.name),
        address: pointed_to.text(&info.address),
        transport: transport(info.transport),
        metadata: info.metadata.as_ptr(),
        metadata_size: info.metadata.len(),
        reserved: [0; 2],
    }
}

/// Returns an event without facts.
fn nothing(kind: u32) -> LlmDatadistEvent {
    let peer = LlmDatadistPeer {
        peer: 0,
        name: null(),
        address: null(),
        transport: null(),
        metadata: null(),
        metadata_size: 0,
        reserved: [0; 2],
    };
    LlmDatadistEvent {
        kind,
        status: 0,
        transfer: 0,
        peer,
        message: null(),
        message_size: 0,
        reason: null(),
        unconfirmed: 0,
        token: [0; LLM_DATADIST_TOKEN_SIZE],
        reserved: [0; 4],
    }
}

fn transport(name: &str) -> *const c_char {
    let name: &'static CStr = match name {
        "shm" => c"shm",
        "tcp" => c"tcp",
        "local" => c"local",
        _ => c"other",
    };
    name.as_ptr()
}
