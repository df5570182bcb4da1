//! The events of one engine, until the program polls for them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::readable::{new_eventfd, signal, silence};
use super::transfer::{Reports, Transfer};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::sync::Mutex;

/// Name of the list in out-of-memory errors.
const EVENTS: &str = "the events of an engine";

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

#[derive(Debug, Default)]
struct State {
    /// Transfers that have ended, in order. Some may have been taken since.
    ended: VecDeque<Arc<Transfer>>,
    /// Number of entries of `ended` that were not taken.
    untaken: usize,
    /// Number of transfers that run or were not taken.
    open: usize,
    /// Readable while `untaken` is above 0. `None` until somebody asks for it.
    readable: Option<Arc<OwnedFd>>,
    closed: bool,
}

impl EventQueue {
    /// Creates a queue for at most `limit` transfers at a time.
    pub fn new(limit: usize) -> Self {
        EventQueue { limit, state: Mutex::default() }
    }

    /// Creates the record of a transfer that starts now. Returns `Err(Busy)` if the queue has no place for it,
    /// `Err(OutOfMemory)` if its list cannot grow, and `Err(Closed)` once it is closed.
    pub(crate) fn start(self: &Arc<Self>) -> Result<Arc<Transfer>> {
        self.reserve()?;
        Ok(Transfer::new(self.clone()))
    }

    fn reserve(&self) -> Result<()> {
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
        // For every outcome, and for as many that were taken, so that the end of a transfer needs no memory.
        let places = 2 * state.open + 3;
        let more = places.saturating_sub(state.ended.len());
        let room = state.ended.try_reserve(more);
        room.map_err(|_| fallible::out_of_memory(EVENTS, places * size_of::<Arc<Transfer>>()))?;
        state.open += 1;
        Ok(())
    }

    /// Returns at most `most` events, and removes them. Never waits. Returns `Err(Closed)` once the queue is closed.
    pub fn poll(&self, most: usize) -> Result<Vec<Event>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        if state.untaken == 0 {
            return Ok(Vec::new());
        }
        let count = most.min(state.untaken);
        let mut events = fallible::with_capacity(EVENTS, count)?;
        while events.len() < count {
            let Some(transfer) = state.ended.pop_front() else { break };
            if transfer.take() {
                state.untaken -= 1;
                state.open -= 1;
                events.push(Event::Completed(transfer));
            }
        }
        state.silence_if_empty();
        Ok(events)
    }

    /// Puts events back that [`poll`](Self::poll) has returned and that could not be delivered.
    pub fn put_back(&self, events: impl DoubleEndedIterator<Item = Event>) {
        let mut state = self.state.lock();
        for Event::Completed(transfer) in events.rev() {
            transfer.untake();
            state.ended.push_front(transfer);
            state.untaken += 1;
            state.open += 1;
        }
        if state.untaken > 0 {
            state.signal();
        }
    }

    /// Returns the descriptor that is readable while [`poll`](Self::poll) has something to return. The caller must not
    /// read from it. It is always the same one, until the queue is closed.
    pub fn descriptor(&self) -> Result<Arc<OwnedFd>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        if let Some(readable) = &state.readable {
            return Ok(readable.clone());
        }
        let readable = Arc::new(new_eventfd()?);
        if state.untaken > 0 {
            signal(&readable);
        }
        state.readable = Some(readable.clone());
        Ok(readable)
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

impl Reports for EventQueue {
    fn give_back(&self) {
        self.state.lock().open -= 1;
    }

    fn ended(&self, transfer: &Arc<Transfer>) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        if state.ended.len() > 2 * state.untaken {
            state.ended.retain(|ended| !ended.is_taken());
        }
        state.ended.push_back(transfer.clone());
        state.untaken += 1;
        if state.untaken == 1 {
            state.signal();
        }
    }

    fn taken(&self) {
        let mut state = self.state.lock();
        if !state.closed {
            state.untaken -= 1;
            state.open -= 1;
            state.silence_if_empty();
        }
    }
}

impl State {
    fn signal(&self) {
        self.readable.iter().for_each(|readable| signal(readable));
    }

    fn silence_if_empty(&self) {
        if self.untaken == 0 {
            self.readable.iter().for_each(|readable| silence(readable));
        }
    }
}
