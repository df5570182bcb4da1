//! The record of one asynchronous call: whether it still runs, how it ended, and who waits for it.
//!
//! A transfer ends exactly once, and only after nothing of it touches memory. The code that runs it reports this with
//! [`finish`](Transfer::finish); `transfer::async_call` ensures that it does.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;
use std::time::Instant;

use super::await_queue::AwaitQueue;
use super::link_ends::HeldEnd;
use super::notification::PeerInfo;
use crate::copy::Progress;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering, SPIN_BEFORE_PARK, guarded, poll};

/// How many bytes of a transfer are in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferProgress {
    /// Bytes that are known to be in place. A push learns this only from the peer, at its end.
    pub done: u64,
    /// Bytes of the whole transfer; 0 until it is planned. For a group, those of the parts that have begun. For layers,
    /// those of all layers of the destination, once it was found.
    pub total: u64,
}

/// Where a transfer reports its end: the event queue, which has room for it.
pub(super) trait Reports: Send + Sync + std::fmt::Debug {
    /// Queues the outcome.
    fn ended(&self, transfer: &Arc<Transfer>);

    /// Notes that somebody has taken the outcome, which was queued.
    fn taken(&self);

    /// Gives back the room of a transfer that was not started.
    fn give_back(&self);
}

/// One asynchronous call.
#[derive(Debug)]
pub struct Transfer {
    number: u64,
    /// `None` if its end is no event.
    queue: Option<Arc<dyn Reports>>,
    started: Instant,
    /// Whether the outcome was taken. No lock: the event queue reads it under its own.
    taken: AtomicBool,
    /// Whether there is an outcome. Changes under the lock.
    ended: AtomicBool,
    /// The peer of the link that the call has made or found.
    /// In a box, because few calls have one.
    peer: OnceLock<Box<PeerInfo>>,
    state: Mutex<State>,
    /// Notified when the transfer has ended.
    changed: Condvar,
}

/// What runs a transfer, if it can end the transfer before it has begun.
pub(crate) trait Stops: Send + Sync {
    /// Ends the transfer with the error `why`, unless it has begun.
    fn stop(&self, why: Error);
}

/// Why a transfer ends early.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EndsEarly {
    /// A cancellation was accepted.
    Cancelled,
    /// The engine closes.
    Closing,
    /// A part has failed, and the others end.
    PartFailed,
}

#[derive(Default)]
struct State {
    /// Where the progress of the current attempt is found, and the bytes of the whole transfer.
    progress: Option<(Arc<Progress>, u64)>,
    /// Bytes of the parts of a group, or of the layers of a layer-wise transfer, that are in place.
    parts_done: u64,
    /// Bytes of the parts that are known before they begin.
    parts_total: u64,
    early: Option<EndsEarly>,
    /// Whether a cancellation is refused from now on.
    committed: bool,
    stop: Option<Weak<dyn Stops>>,
    /// The number of bytes moved, or the failure.
    outcome: Option<Result<u64>>,
    nanos: u64,
    /// In a box, because few calls are awaited while they run.
    at_end: Option<Box<AtEnd>>,
}

/// What learns of the end of a transfer, after the event queue.
#[derive(Default)]
struct AtEnd {
    /// The event loops that await it. A loop that was closed has dropped its queue, with the descriptor.
    loops: Vec<Weak<AwaitQueue>>,
    /// The ends of links that are reported afterwards.
    links: Vec<Arc<HeldEnd>>,
    /// The tasks that await it, by the number of their future.
    tasks: Vec<(u64, Waker)>,
    /// The number of the last of these futures.
    last_task: u64,
}

/// Counts the transfers of this process.
static STARTED: AtomicU64 = AtomicU64::new(1);

impl State {
    /// Returns why the transfer must end early, if it must.
    fn stopped(&self) -> Option<Error> {
        match self.early? {
            EndsEarly::Closing => Some(Error::closed()),
            EndsEarly::Cancelled => Some(Error::new(ErrorKind::Cancelled, "the transfer was cancelled")),
            EndsEarly::PartFailed => None,
        }
    }

    /// Returns the outcome to report. A stopped transfer keeps the facts of its failure and the rows that arrived.
    fn reported(&self, outcome: Result<u64>) -> Result<u64> {
        let Some(stopped) = self.stopped() else { return outcome };
        match outcome {
            // Somebody has learnt of the success already.
            Ok(bytes) if self.committed && self.early != Some(EndsEarly::Closing) => Ok(bytes),
            Ok(_) => Err(stopped),
            Err(error) => Err(error.replaced_by(stopped)),
        }
    }
}

impl Transfer {
    /// Creates the record of a call that starts now, and that has room in `queue`.
    pub(super) fn new(queue: Option<Arc<dyn Reports>>) -> Arc<Self> {
        Arc::new(Transfer {
            number: STARTED.fetch_add(1, Ordering::Relaxed),
            taken: AtomicBool::new(queue.is_none()),
            queue,
            started: Instant::now(),
            ended: AtomicBool::new(false),
            peer: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Creates the record of a call whose end is no event.
    pub(crate) fn unreported() -> Arc<Self> {
        Transfer::new(None)
    }

    /// Creates the record of an operation that had nothing to wait for. It has succeeded, and its end is no event.
    pub(crate) fn succeeded() -> Arc<Self> {
        let transfer = Transfer::unreported();
        transfer.finish(Ok(0));
        transfer
    }

    /// Whether the end is or will be an event, unless somebody takes the outcome first.
    pub fn has_event(&self) -> bool {
        !self.is_taken()
    }

    /// Returns a number that no other transfer of this process has.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Gives back the room of a transfer that could not be started.
    pub(crate) fn abandon(&self) {
        let mut state = self.state.lock();
        state.stop = None;
        // A transfer that has ended, because the engine closes, gives its room back with its event.
        if let Some(queue) = self.queue.as_ref().filter(|_| state.outcome.is_none()) {
            queue.give_back();
        }
    }

    /// Sets what ends the transfer while it has not begun. It is called at most once, without a lock.
    pub(crate) fn stop_with(&self, stop: Weak<dyn Stops>) {
        self.state.lock().stop = Some(stop);
    }

    /// Sets the peer of the link that the call has made or found.
    pub(crate) fn set_peer(&self, peer: PeerInfo) {
        // A call has one work, which sets it once.
        let _ = self.peer.set(Box::new(peer));
    }

    /// Returns the peer of the link if this is a call of `ensure_link` that has succeeded.
    pub fn peer(&self) -> Option<&PeerInfo> {
        self.peer.get().map(Box::as_ref).filter(|_| matches!(self.state.lock().outcome, Some(Ok(_))))
    }

    /// Creates the progress of an attempt to move `total` bytes, and reports it from now on.
    pub(crate) fn new_progress(&self, total: u64) -> Arc<Progress> {
        let progress = Arc::new(Progress::default());
        self.state.lock().progress = Some((progress.clone(), total));
        progress
    }

    /// Notes that one more part has `bytes` bytes.
    pub(crate) fn expect(&self, bytes: u64) {
        self.state.lock().parts_total += bytes;
    }

    /// Notes that `bytes` bytes of a part of a group, or of a layer, are in place.
    pub(crate) fn part_done(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.parts_done += bytes;
        state.progress = None;
    }

    /// Returns `Err` if the transfer must end early.
    pub(crate) fn proceed(&self) -> Result<()> {
        let state = self.state.lock();
        match (state.stopped(), state.early) {
            (Some(stopped), _) => Err(stopped),
            (None, Some(_)) => Err(Error::new(ErrorKind::Cancelled, "another part has failed")),
            (None, None) => Ok(()),
        }
    }

    /// Has what still runs for the transfer end early, because a part has failed.
    pub(crate) fn interrupt(&self) {
        self.state.lock().early.get_or_insert(EndsEarly::PartFailed);
    }

    /// Refuses a cancellation from now on, because somebody is about to learn that the transfer succeeded. Returns
    /// `Err` if it must end early.
    pub(crate) fn commit(&self) -> Result<()> {
        let mut state = self.state.lock();
        state.stopped().map_or(Ok(()), Err)?;
        state.committed = true;
        Ok(())
    }

    /// Cancels the transfer. Never waits: a transfer that has begun ends later. Returns `false` if its outcome can no
    /// longer change.
    pub fn cancel(&self) -> bool {
        let mut state = self.state.lock();
        let closing = state.early == Some(EndsEarly::Closing);
        if state.outcome.is_some() || state.committed || closing {
            return false;
        }
        state.early = Some(EndsEarly::Cancelled);
        stop(state);
        true
    }

    /// Ends the transfer early because the engine closes.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        if state.outcome.is_none() && state.early != Some(EndsEarly::Cancelled) {
            state.early = Some(EndsEarly::Closing);
            stop(state);
        }
    }

    /// Ends the transfer, once. The caller has released everything that it used.
    pub(crate) fn finish(self: &Arc<Self>, outcome: Result<u64>) {
        let mut state = self.state.lock();
        if state.outcome.is_some() {
            return;
        }
        let outcome = state.reported(outcome);
        state.outcome = Some(outcome);
        state.nanos = self.elapsed();
        let (stop, at_end) = (state.stop.take(), state.at_end.take());
        // Queued under the lock, so that a thread that sees the outcome can take it out of the queue.
        self.queue.iter().for_each(|queue| queue.ended(self));
        self.ended.store(true, Ordering::Release);
        self.changed.notify_all();
        drop(state);
        drop(stop);
        let Some(mut at_end) = at_end else { return };
        for queue in at_end.loops.iter().filter_map(Weak::upgrade) {
            queue.push(self.number);
        }
        for (_, task) in at_end.tasks.drain(..) {
            // It runs code of the program.
            guarded("waking a task", || task.wake());
        }
    }

    /// Keeps the end of a link until the end of this transfer was reported. Returns `false` if it was.
    pub(crate) fn hold(&self, end: &Arc<HeldEnd>) -> bool {
        let mut state = self.state.lock();
        if state.outcome.is_some() {
            return false;
        }
        let links = &mut state.at_end.get_or_insert_default().links;
        crate::fallible::push("the ends of links", links, end.clone()).is_ok()
    }

    /// Whether the transfer has ended.
    pub fn done(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Waits until the transfer has ended. Returns `Ok(false)` once `deadline` has passed, and `Err` only if
    /// interrupted.
    pub fn wait(&self, deadline: Deadline) -> Result<bool> {
        // A thread that sleeps takes longer to wake than a short call takes.
        if poll(SPIN_BEFORE_PARK.min(deadline.left()), || self.done()) {
            return Ok(true);
        }
        let mut state = self.state.lock();
        while state.outcome.is_none() {
            if deadline.passed() {
                return Ok(false);
            }
            state = self.changed.wait_timeout(state, deadline.wait_limit()).0;
            // Asked only while the transfer runs, because the answer may take long: Python's is behind its GIL.
            if state.outcome.is_none() {
                drop(state);
                deadline.interruption("waiting for a transfer")?;
                state = self.state.lock();
            }
        }
        Ok(true)
    }

    /// Waits until the transfer has ended, and takes its outcome. An interruption of this wait cancels the transfer, and is
    /// the error once the transfer has ended. Returns `Err(Timeout)` if the transfer still runs when `deadline` passes.
    pub fn join(&self, deadline: Deadline) -> Result<()> {
        let waited = self.wait(deadline);
        if waited.is_err() {
            self.cancel();
            // Another interruption ends this wait as well, and the transfer may still run then. The Python binding raises the
            // exception of the last interruption.
            let _ = self.wait(deadline);
        }
        let outcome = self.outcome();
        waited?;
        outcome.unwrap_or_else(|| Err(deadline.error("waiting for a transfer"))).map(drop)
    }

    /// Returns the number of bytes moved, or the failure; `None` while the transfer runs. The outcome leaves the event
    /// queue, and stays here.
    pub fn outcome(&self) -> Option<Result<u64>> {
        let outcome = self.peek()?;
        if let Some(queue) = self.queue.as_ref().filter(|_| self.take()) {
            queue.taken();
        }
        Some(outcome)
    }

    /// Returns the outcome as [`outcome`](Self::outcome) does, but leaves the event in the queue.
    pub fn peek(&self) -> Option<Result<u64>> {
        self.state.lock().outcome.clone()
    }

    /// Returns how many bytes are in place.
    pub fn progress(&self) -> TransferProgress {
        let state = self.state.lock();
        match (&state.outcome, &state.progress) {
            (Some(Ok(bytes)), _) => TransferProgress { done: *bytes, total: *bytes },
            (_, progress) => {
                let (done, total) =
                    progress.as_ref().map_or((0, 0), |(part, total)| (part.bytes().min(*total), *total));
                let (done, begun) = (state.parts_done + done, state.parts_done + total);
                TransferProgress { done, total: begun.max(state.parts_total) }
            }
        }
    }

    /// Returns how many nanoseconds the transfer took, or has taken so far.
    pub fn nanos(&self) -> u64 {
        let state = self.state.lock();
        if state.outcome.is_some() { state.nanos } else { self.elapsed() }
    }

    /// Returns how many nanoseconds have passed since it was started.
    pub(crate) fn elapsed(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Has `queue` informed of the end of the transfer. Returns `Ok(false)` if it has ended already.
    pub fn wake(&self, queue: &Arc<AwaitQueue>) -> Result<bool> {
        let mut state = self.state.lock();
        if state.outcome.is_some() {
            return Ok(false);
        }
        let loops = &mut state.at_end.get_or_insert_default().loops;
        loops.retain(|known| known.strong_count() > 0);
        let queue = Arc::downgrade(queue);
        if !loops.iter().any(|known| known.ptr_eq(&queue)) {
            crate::fallible::push("the event loops that await a transfer", loops, queue)?;
        }
        Ok(true)
    }

    /// Registers `task` to be woken at the end of the transfer, in place of the one with the number `known`. Returns its number,
    /// or `None` if the transfer has ended.
    pub(super) fn wake_task(&self, known: Option<u64>, task: &Waker) -> Result<Option<u64>> {
        // Copies are made and dropped without the lock, because that may run code of the program.
        let mut task = task.clone();
        let mut state = self.state.lock();
        if state.outcome.is_some() {
            return Ok(None);
        }
        let at_end = state.at_end.get_or_insert_default();
        if let Some((number, old)) = at_end.tasks.iter_mut().find(|(number, _)| Some(*number) == known) {
            std::mem::swap(old, &mut task);
            let number = *number;
            drop(state);
            return Ok(Some(number));
        }
        at_end.last_task += 1;
        let number = at_end.last_task;
        crate::fallible::push("the tasks that await a transfer", &mut at_end.tasks, (number, task))?;
        Ok(Some(number))
    }

    /// Undoes a [`wake_task`](Self::wake_task).
    pub(super) fn forget_task(&self, number: u64) {
        let mut state = self.state.lock();
        let tasks = state.at_end.as_mut().map(|at_end| &mut at_end.tasks);
        let at = tasks.as_ref().and_then(|tasks| tasks.iter().position(|&(known, _)| known == number));
        let forgotten = tasks.zip(at).map(|(tasks, at)| tasks.swap_remove(at));
        drop(state);
        // Without the lock, because it may run code of the program.
        drop(forgotten);
    }

    /// Whether the outcome was taken.
    pub(super) fn is_taken(&self) -> bool {
        self.taken.load(Ordering::SeqCst)
    }

    /// Takes the outcome. Returns `false` if it was taken before.
    pub(super) fn take(&self) -> bool {
        !self.taken.swap(true, Ordering::SeqCst)
    }

    /// Undoes a [`take`](Self::take).
    pub(super) fn untake(&self) {
        self.taken.store(false, Ordering::SeqCst);
    }
}

/// Calls what ends a transfer that has not begun.
fn stop(mut state: MutexGuard<'_, State>) {
    let stop = state.stop.take().zip(state.stopped());
    drop(state);
    if let Some((stop, error)) = stop
        && let Some(stop) = stop.upgrade()
    {
        stop.stop(error);
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
