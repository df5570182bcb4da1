//! The asynchronous calls of one engine: starting them, waiting for all of them, and ending them with the engine.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::async_call::{AsyncCall, CallPurpose, CallsOfEngine, Work};
use super::clock::Alarmed;
use super::executor::{ExecutorHandle, Job, JobClass};
use super::layer_notice::TaskEnd;
use super::running_calls::{RunningCall, RunningCalls};
use crate::cache::{CallRows, Pin};
use crate::error::{Error, Result};
use crate::events::{CallsOfPeers, EventQueue, HeldEnd, MAX_HELD, Transfer};
use crate::model::{ClusterId, Deadline};
use crate::resources::Resources;
use crate::stats::Op;

/// The asynchronous calls of one engine.
pub struct AsyncCalls {
    queue: Arc<EventQueue>,
    engine: Arc<CallsOfEngine>,
}

impl AsyncCalls {
    /// Creates the state without calls. `executor` runs them, `resources` count them, and their outcomes go to `queue`.
    pub fn new(queue: Arc<EventQueue>, executor: &ExecutorHandle, resources: Weak<Resources>) -> Self {
        let running = Arc::default();
        let engine = Arc::new(CallsOfEngine { executor: executor.clone(), resources, running });
        let calls: Weak<CallsOfEngine> = Arc::downgrade(&engine);
        queue.set_calls(calls);
        AsyncCalls { queue, engine }
    }

    /// Returns the queue that receives the outcomes.
    pub fn queue(&self) -> &Arc<EventQueue> {
        &self.queue
    }

    /// Returns the calls that have not ended.
    pub(crate) fn running(&self) -> &Arc<RunningCalls> {
        &self.engine.running
    }

    /// Returns what hands jobs to the workers.
    pub(crate) fn executor(&self) -> &ExecutorHandle {
        &self.engine.executor
    }

    /// Reserves a slot for a call, in the event queue and in the table of running calls.
    pub(crate) fn begin(&self) -> Result<BegunCall<'_>> {
        let transfer = self.queue.start()?;
        self.running().reserve(&transfer);
        Ok(BegunCall { calls: self, transfer, used: false })
    }

    /// Starts a call that runs `work` on a worker once `rows` are free.
    pub(crate) fn start(&self, purpose: CallPurpose, rows: CallRows, work: Work) -> Result<Arc<Transfer>> {
        self.begin()?.start(purpose, rows, work)
    }

    /// Waits until no call runs. Returns `false` once `deadline` has passed, and `Err` only if interrupted.
    pub fn drain(&self, deadline: Deadline) -> Result<bool> {
        self.running().drain(deadline)
    }

    /// Ends all calls, refuses new ones and drops all events, because the engine closes. A call that a worker has begun ends a
    /// little later.
    pub fn close(&self) {
        self.running().close();
        self.queue.close();
    }
}

/// A call with a reserved slot in the event queue and in the table of running calls. Drop releases both, unless the call was started or
/// has ended.
pub(crate) struct BegunCall<'a> {
    calls: &'a AsyncCalls,
    transfer: Arc<Transfer>,
    used: bool,
}

/// A call that its caller runs while it starts it, for those who wait for the ends of calls.
struct ShortCall {
    transfer: Arc<Transfer>,
    /// The cluster that it calls, or that of the engine.
    cluster: ClusterId,
}

impl BegunCall<'_> {
    /// Returns the handle with which the task that takes this reservation reports its end.
    pub(super) fn end(&self) -> TaskEnd {
        TaskEnd { transfer: self.transfer.clone(), running: self.calls.running().clone() }
    }

    /// Notes that the task was started.
    pub(super) fn started(mut self) {
        self.used = true;
    }

    /// Starts the call, which runs `work` on a worker once `rows` are free.
    pub(crate) fn start(mut self, purpose: CallPurpose, rows: CallRows, work: Work) -> Result<Arc<Transfer>> {
        let (engine, running) = (&self.calls.engine, self.calls.running());
        let call = AsyncCall::new(&self.transfer, engine, purpose, work);
        running.enter(&self.transfer, call.clone())?;
        call.wait_for(rows)?;
        self.used = true;
        Ok(self.transfer.clone())
    }

    /// Runs `run` on the calling thread, and returns the transfer, which has ended. `run` gets the transfer, and returns the
    /// outcome and the rows that the call has. If it returns `None`, the call has to wait, so it must be started.
    pub(crate) fn run_now(
        mut self,
        op: Op,
        cluster: ClusterId,
        run: impl FnOnce(&Transfer) -> Option<(Result<u64>, Option<Pin>)>,
    ) -> std::result::Result<Arc<Transfer>, Self> {
        let (engine, running) = (&self.calls.engine, self.calls.running());
        let short = Arc::new(ShortCall { transfer: self.transfer.clone(), cluster });
        if running.enter(&self.transfer, short).is_err() {
            return Err(self);
        }
        let Some((outcome, pin)) = run(&self.transfer) else { return Err(self) };
        // In the order of `Execution`: the calls that wait for the rows are notified after the end of this one was reported.
        let _ready = pin.map(Pin::release);
        engine.ended(&self.transfer, Some(op), outcome);
        running.leave(&self.transfer);
        self.used = true;
        Ok(self.transfer.clone())
    }
}

impl Drop for BegunCall<'_> {
    fn drop(&mut self) {
        if !self.used {
            self.calls.running().leave(&self.transfer);
            self.transfer.abandon();
        }
    }
}

impl RunningCall for ShortCall {
    fn close(&self) {
        self.transfer.close();
    }

    fn transfer_with(&self, cluster: ClusterId) -> Option<&Arc<Transfer>> {
        (self.cluster == cluster).then_some(&self.transfer)
    }
}

impl CallsOfPeers for CallsOfEngine {
    fn hold(&self, cluster: ClusterId, end: &Arc<HeldEnd>) {
        if self.running.hold(cluster, end) {
            let alarm: Arc<dyn Alarmed> = Arc::new(HeldTooLong(Arc::downgrade(end)));
            if self.executor.clock().at(Instant::now() + MAX_HELD, alarm).is_err() {
                // Without the alarm, the end could be late.
                end.report();
            }
        }
        let waiting = self.running.waiting_with(cluster);
        if !waiting.is_empty() {
            // By a worker, because the caller holds locks of the links.
            self.executor
                .submit(JobClass::LinkEnds, Arc::new(LinkEnded { cluster, waiting, _end: end.clone() }));
        }
    }
}

/// Ends calls that waited for their program when their link ended.
struct LinkEnded {
    cluster: ClusterId,
    waiting: Vec<Arc<dyn RunningCall>>,
    _end: Arc<HeldEnd>,
}

impl Job for LinkEnded {
    fn run(self: Arc<Self>) {
        self.waiting.iter().for_each(|call| call.link_ended(self.cluster));
    }

    fn refused(self: Arc<Self>, _: Error) {}
}

/// The end of a link has waited long enough for calls.
struct HeldTooLong(Weak<HeldEnd>);

impl Alarmed for HeldTooLong {
    fn due(self: Arc<Self>) {
        if let Some(end) = self.0.upgrade() {
            end.report();
        }
    }
}

impl Drop for AsyncCalls {
    fn drop(&mut self) {
        self.queue.close();
    }
}
