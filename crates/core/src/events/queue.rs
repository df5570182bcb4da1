//! The events of one engine, until the program polls for them.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use super::transfer::Transfer;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Mutex;

/// Something that happened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A transfer has ended.
    Completed(Arc<Transfer>),
}

/// The events of one engine that were not polled yet, and the number of its transfers.
#[derive(Debug)]
pub struct EventQueue {
    /// Maximum number of transfers that run or whose outcome nobody has taken.
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Transfers that have ended, in order. Some may have been taken since.
    ended: VecDeque<Arc<Transfer>>,
    /// Number of entries of `ended` that were not taken.
    untaken: usize,
    /// Number of transfers that run or were not taken.
    open: usize,
    /// Readable while `untaken` is above 0. `None` until somebody asks for it.
    readable: Option<OwnedFd>,
    closed: bool,
}

impl EventQueue {
    /// Creates a queue for at most `limit` transfers at a time.
    pub fn new(limit: usize) -> Self {
        let state = State { ended: VecDeque::new(), untaken: 0, open: 0, readable: None, closed: false };
        EventQueue { limit, state: Mutex::new(state) }
    }

    /// Reserves the place of a transfer. Returns `Err(Busy)` if the queue is full, `Err(OutOfMemory)` if its list
    /// cannot grow, and `Err(Closed)` once it is closed.
    pub(super) fn open(&self) -> Result<()> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        if state.open >= self.limit {
            let text = "too many transfers run or wait for their outcome to be taken";
            return Err(Error::new(ErrorKind::Busy, text)
                .with("open_transfers", state.open)
                .with("limit", self.limit));
        }
        // Room for every outcome, and for as many that were taken, so that the end of a transfer needs no memory.
        let room = (2 * state.open + 3).saturating_sub(state.ended.len());
        state
            .ended
            .try_reserve(room)
            .map_err(|_| Error::new(ErrorKind::OutOfMemory, "no memory for the outcome of a transfer"))?;
        state.open += 1;
        Ok(())
    }

    /// Gives back a place that was reserved.
    pub(super) fn abandon(&self) {
        self.state.lock().open -= 1;
    }

    /// Queues the outcome of a transfer whose place was reserved.
    pub(super) fn push(&self, transfer: &Arc<Transfer>) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        if state.ended.len() > 2 * state.untaken {
            state.ended.retain(|ended| !ended.taken());
        }
        state.ended.push_back(transfer.clone());
        state.untaken += 1;
        if state.untaken == 1 {
            state.signal();
        }
    }

    /// Notes that the outcome of a queued transfer was taken.
    pub(super) fn taken(&self) {
        let mut state = self.state.lock();
        if !state.closed {
            state.untaken -= 1;
            state.open -= 1;
            state.quiet();
        }
    }

    /// Returns at most `most` events, and removes them. Never waits. Returns `Err(Closed)` once the queue is closed.
    pub fn poll(&self, most: usize) -> Result<Vec<Event>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        let mut events = Vec::new();
        if state.untaken == 0 {
            return Ok(events);
        }
        let count = most.min(state.untaken);
        events
            .try_reserve_exact(count)
            .map_err(|_| Error::new(ErrorKind::OutOfMemory, "no memory for the events of a poll"))?;
        while events.len() < count {
            let Some(transfer) = state.ended.pop_front() else { break };
            if transfer.take() {
                state.untaken -= 1;
                state.open -= 1;
                events.push(Event::Completed(transfer));
            }
        }
        state.quiet();
        Ok(events)
    }

    /// Returns the descriptor that is readable while [`poll`](Self::poll) has something to return. The queue owns it.
    pub fn descriptor(&self) -> Result<RawFd> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        if state.readable.is_none() {
            let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            state.readable = Some(made.map_err(|errno| {
                Error::new(ErrorKind::System, "cannot create the event descriptor of an engine").errno(errno)
            })?);
            if state.untaken > 0 {
                state.signal();
            }
        }
        Ok(state.readable.as_ref().map_or(-1, AsRawFd::as_raw_fd))
    }

    /// Returns the number of transfers that run or whose outcome nobody has taken.
    pub fn open_transfers(&self) -> usize {
        self.state.lock().open
    }

    /// Drops all events and closes the descriptor.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let dropped = (std::mem::take(&mut state.ended), state.readable.take());
        drop(state);
        drop(dropped);
    }
}

impl State {
    fn signal(&self) {
        if let Some(readable) = &self.readable {
            // Fails only if the counter is full, and it is at most 1.
            let _ = rustix::io::write(readable, &1u64.to_ne_bytes());
        }
    }

    /// Makes the descriptor unreadable if nothing is left.
    fn quiet(&self) {
        if self.untaken == 0
            && let Some(readable) = &self.readable
        {
            // The descriptor does not block.
            let _ = rustix::io::read(readable, &mut [0; 8]);
        }
    }
}
