//! Asynchronous calls: each waits for its rows and for a lane without a thread of its own.
//!
//! ```text
//!  start ── claims the rows ── (all free) ── a lane runs the work ── the last user of the rows ── finish
//!    └──── the deadline, a cancellation or the end of the engine stops a call that no lane has begun
//! ```
//!
//! A call ends when the last reference to its [`HeldRows`] is dropped. So its end is reported only once nothing touches its
//! memory any more, even if the kernel keeps a read longer than the deadline.

use std::cell::RefCell;
use std::sync::{Arc, Weak};
use std::time::Instant;

use hashbrown::HashMap;

use super::executor::{Alarm, ExecutorHandle, Job};
use crate::cache::{PendingPins, Pins, RowsOfCall, pin_when_free};
use crate::error::{Error, ErrorKind, Result};
use crate::events::{EventQueue, Transfer};
use crate::model::{ClusterId, Deadline};
use crate::resources::{CallToPeer, Resources};
use crate::stats::Op;
use crate::sync::{Condvar, Mutex};

/// What a call does once it has its rows. Returns the number of bytes moved.
pub(crate) type Work = Box<dyn FnOnce(&Arc<HeldRows>, Deadline) -> Result<u64> + Send>;

/// The asynchronous calls of one engine.
#[derive(Debug)]
pub struct AsyncCalls {
    queue: Arc<EventQueue>,
    running: Arc<Running>,
}

/// The calls that have not ended.
#[derive(Debug, Default)]
struct Running {
    calls: Mutex<HashMap<u64, Weak<AsyncCall>>>,
    /// Notified when a call ends.
    ended: Condvar,
}

/// What a call is for.
pub(crate) struct Purpose {
    pub(crate) op: Op,
    /// The cluster whose lanes run it.
    pub(crate) cluster: ClusterId,
    pub(crate) deadline: Deadline,
    /// Whether it calls the cluster, which is a peer.
    pub(crate) remote: bool,
}

impl AsyncCalls {
    /// Creates the state without calls. At most `limit` may run or wait for their outcome to be taken.
    pub fn new(limit: usize) -> Self {
        AsyncCalls { queue: Arc::new(EventQueue::new(limit)), running: Arc::default() }
    }

    /// Returns the queue that receives the outcomes.
    pub fn queue(&self) -> &Arc<EventQueue> {
        &self.queue
    }

    /// Starts a call that runs `work` on a lane once it has `rows`.
    pub(crate) fn start(
        &self,
        lanes: &ExecutorHandle,
        resources: &Arc<Resources>,
        purpose: Purpose,
        rows: RowsOfCall,
        work: Work,
    ) -> Result<Arc<Transfer>> {
        let deadline = purpose.deadline;
        let begun = purpose.remote.then(|| resources.calls_to_peers.begin(purpose.cluster)).transpose()?;
        let transfer = Transfer::start(&self.queue)?;
        let call = Arc::new(AsyncCall {
            transfer: transfer.clone(),
            lanes: lanes.clone(),
            resources: resources.clone(),
            running: self.running.clone(),
            purpose,
            _begun: begun,
            started: Instant::now(),
            step: Mutex::new(Step { work: Some(work), ..Step::default() }),
        });
        let pending = self.running.enter(&call).and_then(|()| {
            let alarm = lanes.at(Instant::now() + deadline.left(), Box::new(Late(Arc::downgrade(&call))))?;
            call.step.lock().alarm = Some(alarm);
            let stopped = Arc::downgrade(&call);
            transfer.stop_with(move |error| {
                if let Some(call) = stopped.upgrade() {
                    call.stop(error);
                }
            });
            let waiting = call.clone();
            pin_when_free(rows, move |pins| waiting.ready(pins))
        });
        match pending {
            Ok(pending) => call.step.lock().pending = pending,
            Err(error) => {
                call.forget_alarm();
                self.running.leave(transfer.number());
                transfer.abandon();
                return Err(error);
            }
        }
        Ok(transfer)
    }

    /// Waits until no call runs. Returns `false` once `deadline` has passed, and `Err` only if interrupted.
    pub fn drain(&self, deadline: Deadline) -> Result<bool> {
        let mut calls = self.running.calls.lock();
        while !calls.is_empty() {
            if deadline.passed() {
                return Ok(false);
            }
            drop(self.running.ended.wait_timeout(calls, deadline.nap()));
            deadline.interruption("waiting for transfers to end")?;
            calls = self.running.calls.lock();
        }
        Ok(true)
    }

    /// Ends all calls, because the engine closes. Those that a lane has begun end a little later.
    pub fn close(&self) {
        let calls = std::mem::take(&mut *self.running.calls.lock());
        for call in calls.values().filter_map(Weak::upgrade) {
            call.transfer.close();
        }
    }
}

impl Drop for AsyncCalls {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl Running {
    fn enter(&self, call: &Arc<AsyncCall>) -> Result<()> {
        let mut calls = self.calls.lock();
        calls
            .try_reserve(1)
            .map_err(|_| Error::new(ErrorKind::OutOfMemory, "no memory for the list of running transfers"))?;
        calls.insert(call.transfer.number(), Arc::downgrade(call));
        Ok(())
    }

    fn leave(&self, number: u64) {
        self.calls.lock().remove(&number);
        self.ended.notify_all();
    }
}

struct AsyncCall {
    transfer: Arc<Transfer>,
    lanes: ExecutorHandle,
    resources: Arc<Resources>,
    running: Arc<Running>,
    purpose: Purpose,
    /// Before any row is claimed, until the call has ended.
    _begun: Option<CallToPeer>,
    started: Instant,
    step: Mutex<Step>,
}

/// How far a call is.
#[derive(Default)]
struct Step {
    /// `None` once a lane has begun, or once it was stopped.
    work: Option<Work>,
    /// The rows, once they are free.
    pins: Option<Pins>,
    pending: Option<Arc<PendingPins>>,
    alarm: Option<Alarm>,
}

impl AsyncCall {
    /// Hands the call, whose rows are free now, to a lane.
    fn ready(self: Arc<Self>, pins: Pins) {
        let mut step = self.step.lock();
        if step.work.is_none() {
            drop(step);
            return drop(pins);
        }
        step.pins = Some(pins);
        drop(step);
        let cluster = self.purpose.cluster;
        self.lanes.clone().carry(cluster, Box::new(CallJob(self)));
    }

    /// Ends the call with `error` if no lane has begun it.
    fn stop(&self, error: Error) {
        let mut step = self.step.lock();
        let (work, pins, pending) = (step.work.take(), step.pins.take(), step.pending.take());
        drop(step);
        // Without a lock, because other calls may continue now.
        if let Some(pending) = pending {
            pending.withdraw();
        }
        drop(pins);
        if work.is_some() {
            drop(work);
            self.end(Err(error));
        }
    }

    /// Runs the work of the call, unless it was stopped.
    fn run(self: Arc<Self>) {
        let mut step = self.step.lock();
        let (Some(work), pins) = (step.work.take(), step.pins.take()) else { return };
        drop(step);
        let deadline = self.purpose.deadline.watched(Some(stopped));
        let held = Arc::new(HeldRows { pins, call: self.clone(), outcome: Mutex::default() });
        RUNNING.set(Some(self.transfer.clone()));
        let outcome = self.transfer.proceed().and_then(|()| work(&held, deadline));
        RUNNING.set(None);
        *held.outcome.lock() = Some(outcome);
    }

    /// Ends the call. Nothing of it may touch memory any more.
    fn end(&self, outcome: Result<u64>) {
        self.forget_alarm();
        let took = self.started.elapsed();
        let succeeded = self.transfer.finish(outcome);
        self.resources.stats.counted(self.purpose.op, took, succeeded);
        self.running.leave(self.transfer.number());
    }

    fn forget_alarm(&self) {
        let alarm = self.step.lock().alarm.take();
        if let Some(alarm) = alarm {
            self.lanes.forget(alarm);
        }
    }
}

/// The rows of a call that a lane has begun. Their last user ends the call.
pub(crate) struct HeldRows {
    pins: Option<Pins>,
    call: Arc<AsyncCall>,
    /// `None` if the work panicked.
    outcome: Mutex<Option<Result<u64>>>,
}

impl HeldRows {
    /// Returns the record of the call.
    pub(crate) fn transfer(&self) -> &Transfer {
        &self.call.transfer
    }
}

impl Drop for HeldRows {
    fn drop(&mut self) {
        self.pins = None;
        let text = "the lane of a transfer ended without a result";
        let missing = || Err(Error::new(ErrorKind::System, text));
        self.call.end(self.outcome.lock().take().unwrap_or_else(missing));
    }
}

/// Runs a call on a lane.
struct CallJob(Arc<AsyncCall>);

impl Job for CallJob {
    fn run(self: Box<Self>) {
        self.0.run();
    }

    fn refused(self: Box<Self>, why: Error) {
        self.0.stop(why);
    }
}

/// Stops a call that no lane has begun before its deadline.
struct Late(Weak<AsyncCall>);

impl Job for Late {
    fn run(self: Box<Self>) {
        if let Some(call) = self.0.upgrade() {
            call.stop(call.purpose.deadline.error("waiting for blocks or threads that other calls use"));
        }
    }

    fn refused(self: Box<Self>, _: Error) {}
}

thread_local! {
    /// The transfer that this lane runs.
    static RUNNING: RefCell<Option<Arc<Transfer>>> = const { RefCell::new(None) };
}

/// Whether the transfer that this lane runs was stopped.
fn stopped() -> bool {
    RUNNING.with_borrow(|running| running.as_ref().is_some_and(|transfer| transfer.proceed().is_err()))
}

impl std::fmt::Debug for AsyncCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AsyncCall").field("transfer", &self.transfer).finish_non_exhaustive()
    }
}
