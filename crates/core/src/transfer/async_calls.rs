//! The asynchronous calls of one engine: starting them, waiting for all of them, and ending them with the engine.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::async_call::{AsyncCall, CallPurpose, CallsOfEngine, Work};
use super::clock::Alarmed;
use super::executor::{ExecutorHandle, Job, JobClass};
use super::running_calls::{RunningCall, RunningCalls};
use crate::cache::CallRows;
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
    pub(super) fn running(&self) -> &Arc<RunningCalls> {
        &self.engine.running
    }

    /// Returns what hands jobs to the workers.
    pub(super) fn executor(&self) -> &ExecutorHandle {
        &self.engine.executor
    }

    /// Starts a call that runs `work` on a worker once `rows` are free.
    pub(crate) fn start(&self, purpose: CallPurpose, rows: CallRows, work: Work) -> Result<Arc<Transfer>> {
        let transfer = self.queue.start(purpose.event)?;
        let started = self.running().reserve().and_then(|key| {
            let call = AsyncCall::new(&transfer, &self.engine, key, purpose, work);
            let entered = self.running().enter(key, call.clone()).and_then(|()| call.wait_for(rows));
            entered.inspect_err(|_| self.running().leave(key))
        });
        if let Err(error) = started {
            transfer.abandon();
            return Err(error);
        }
        Ok(transfer)
    }

    /// Runs `call` as a call that has ended when it is returned. Returns `None` if `call` did not run, because it would have to wait.
    pub(crate) fn run_now(
        &self,
        op: Op,
        call: impl FnOnce() -> Option<Result<u64>>,
    ) -> Result<Option<Arc<Transfer>>> {
        let transfer = self.queue.start(true)?;
        let Some(outcome) = call() else {
            transfer.abandon();
            return Ok(None);
        };
        self.engine.ended(&transfer, Some(op), outcome);
        Ok(Some(transfer))
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
            self.executor.submit(JobClass::LinkEnds, Arc::new(LinkEnded { waiting, _end: end.clone() }));
        }
    }
}

/// Ends calls that waited for their program when their link ended.
struct LinkEnded {
    waiting: Vec<Arc<dyn RunningCall>>,
    _end: Arc<HeldEnd>,
}

impl Job for LinkEnded {
    fn run(self: Arc<Self>) {
        self.waiting.iter().for_each(|call| call.link_ended());
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

impl std::fmt::Debug for AsyncCalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AsyncCalls")
            .field("queue", &self.queue)
            .field("running", self.running())
            .finish_non_exhaustive()
    }
}
