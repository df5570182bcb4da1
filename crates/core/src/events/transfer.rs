//! The record of one asynchronous call: whether it still runs, how it ended, and who waits for it.
//!
//! A transfer ends exactly once, and only after nothing of it touches memory. The code that runs it says so by
//! [`finish`](Transfer::finish); dropping that duty is a failure of its own (`transfer::asynchronous`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use super::await_queue::AwaitQueue;
use super::queue::EventQueue;
use crate::copy::Progress;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::sync::{Condvar, Mutex};

/// How many bytes of a transfer are in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferProgress {
    /// Bytes in place, as far as they are known to be.
    pub done: u64,
    /// Bytes of the whole transfer; 0 until it is planned.
    pub total: u64,
}

/// One asynchronous call.
#[derive(Debug)]
pub struct Transfer {
    number: u64,
    queue: Arc<EventQueue>,
    started: Instant,
    /// Whether the outcome was taken. No lock: the event queue looks at it under its own.
    taken: AtomicBool,
    state: Mutex<State>,
    /// Notified when the transfer has ended.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    progress: Option<(Arc<Progress>, u64)>,
    /// Why it must end early, if it must.
    stopped: Option<ErrorKind>,
    /// Whether it can no longer be stopped.
    committed: bool,
    /// Ends the transfer if it has not begun.
    stop: Option<Box<dyn FnOnce(Error) + Send>>,
    /// The number of bytes moved, or the failure.
    outcome: Option<Result<u64>>,
    nanos: u64,
    loops: Vec<Arc<AwaitQueue>>,
}

/// Counts the transfers of this process.
static STARTED: AtomicU64 = AtomicU64::new(1);

impl Transfer {
    /// Creates the record of a call that starts now. Returns `Err(Busy)` if `queue` has no place for it.
    pub(crate) fn start(queue: &Arc<EventQueue>) -> Result<Arc<Self>> {
        queue.open()?;
        Ok(Arc::new(Transfer {
            number: STARTED.fetch_add(1, Ordering::Relaxed),
            queue: queue.clone(),
            started: Instant::now(),
            taken: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Returns a number that no other transfer of this process has.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Gives back the place of a transfer that could not be started.
    pub(crate) fn abandon(&self) {
        self.state.lock().stop = None;
        self.queue.abandon();
    }

    /// Sets what ends the transfer early, with the given error, if it has not begun. It is called at most once, without
    /// a lock.
    pub(crate) fn stop_with(&self, stop: impl FnOnce(Error) + Send + 'static) {
        self.state.lock().stop = Some(Box::new(stop));
    }

    /// Records where the progress of a copy of `total` bytes is found.
    pub(crate) fn copies(&self, progress: Arc<Progress>, total: u64) {
        self.state.lock().progress = Some((progress, total));
    }

    /// Returns `Err` if the transfer must end early.
    pub(crate) fn proceed(&self) -> Result<()> {
        self.state.lock().stopped.map_or(Ok(()), |kind| Err(stopped(kind)))
    }

    /// Rules out a cancellation from now on, because somebody is about to learn that the transfer succeeded. Returns
    /// `Err` if it must end early.
    pub(crate) fn commit(&self) -> Result<()> {
        let mut state = self.state.lock();
        if let Some(kind) = state.stopped {
            return Err(stopped(kind));
        }
        state.committed = true;
        Ok(())
    }

    /// Whether a cancellation was accepted.
    pub fn cancelled(&self) -> bool {
        self.state.lock().stopped == Some(ErrorKind::Cancelled)
    }

    /// Cancels the transfer. Never waits: a transfer that has begun ends later. Returns `false` if its outcome can no
    /// longer change.
    pub fn cancel(&self) -> bool {
        self.stop_because(ErrorKind::Cancelled)
    }

    /// Cancels the transfer because the engine closes.
    pub(crate) fn close(&self) {
        self.stop_because(ErrorKind::Closed);
    }

    fn stop_because(&self, kind: ErrorKind) -> bool {
        let mut state = self.state.lock();
        if state.outcome.is_some() || state.committed {
            return false;
        }
        let kind = *state.stopped.get_or_insert(kind);
        let stop = state.stop.take();
        drop(state);
        if let Some(stop) = stop {
            stop(stopped(kind));
        }
        true
    }

    /// Ends the transfer, once. The caller must have released everything that it used. Returns whether it succeeded.
    pub(crate) fn finish(self: &Arc<Self>, outcome: Result<u64>) -> bool {
        let mut state = self.state.lock();
        let stopped_before = state.stopped.filter(|_| !state.committed);
        let outcome = stopped_before.map_or(outcome, |kind| Err(stopped(kind)));
        let succeeded = outcome.is_ok();
        state.outcome = Some(outcome);
        state.nanos = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let (stop, loops) = (state.stop.take(), std::mem::take(&mut state.loops));
        // Queued under the lock, so that whoever sees the outcome can take it out of the queue.
        self.queue.push(self);
        self.changed.notify_all();
        drop(state);
        drop(stop);
        for queue in loops {
            queue.push(self.number);
        }
        succeeded
    }

    /// Whether the transfer has ended.
    pub fn done(&self) -> bool {
        self.state.lock().outcome.is_some()
    }

    /// Waits until the transfer has ended. Returns `Ok(false)` once `deadline` has passed, and `Err` only if
    /// interrupted.
    pub fn wait(&self, deadline: Deadline) -> Result<bool> {
        let mut state = self.state.lock();
        while state.outcome.is_none() {
            if deadline.passed() {
                return Ok(false);
            }
            drop(self.changed.wait_timeout(state, deadline.nap()));
            deadline.interruption("waiting for a transfer")?;
            state = self.state.lock();
        }
        Ok(true)
    }

    /// Returns the number of bytes moved, or the failure; `None` while the transfer runs. The outcome is taken out of
    /// the event queue, and stays here.
    pub fn outcome(&self) -> Option<Result<u64>> {
        let outcome = self.peek()?;
        if self.take() {
            self.queue.taken();
        }
        Some(outcome)
    }

    /// Returns the outcome as [`outcome`](Self::outcome) does, and leaves the event in the queue.
    pub fn peek(&self) -> Option<Result<u64>> {
        self.state.lock().outcome.clone()
    }

    /// Returns how many bytes are in place.
    pub fn progress(&self) -> TransferProgress {
        let state = self.state.lock();
        let total = state.progress.as_ref().map_or(0, |(_, total)| *total);
        match (&state.outcome, &state.progress) {
            (Some(Ok(bytes)), _) => TransferProgress { done: *bytes, total: *bytes },
            (_, Some((progress, _))) => TransferProgress { done: progress.bytes().min(total), total },
            _ => TransferProgress::default(),
        }
    }

    /// Returns how many nanoseconds the transfer took, or has taken so far.
    pub fn nanos(&self) -> u64 {
        let state = self.state.lock();
        if state.outcome.is_some() {
            return state.nanos;
        }
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Has `queue` informed of the end of the transfer. Returns `false` if it has ended already.
    pub fn wake(&self, queue: &Arc<AwaitQueue>) -> bool {
        let mut state = self.state.lock();
        if state.outcome.is_some() {
            return false;
        }
        state.loops.push(queue.clone());
        true
    }

    /// Whether the outcome was taken.
    pub(super) fn taken(&self) -> bool {
        self.taken.load(Ordering::SeqCst)
    }

    /// Takes the outcome. Returns `false` if it was taken before.
    pub(super) fn take(&self) -> bool {
        !self.taken.swap(true, Ordering::SeqCst)
    }
}

fn stopped(kind: ErrorKind) -> Error {
    if kind == ErrorKind::Closed { Error::closed() } else { Error::new(kind, "the transfer was cancelled") }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}
