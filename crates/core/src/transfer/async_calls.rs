//! The asynchronous calls of one engine: starting them, waiting for all of them, and ending them with the engine.

use std::sync::Arc;

use super::async_call::{AsyncCall, CallPurpose, Work};
use super::executor::ExecutorHandle;
use super::running_calls::RunningCalls;
use crate::cache::CallRows;
use crate::error::Result;
use crate::events::{EventQueue, Transfer};
use crate::model::Deadline;
use crate::resources::Resources;

/// The asynchronous calls of one engine.
#[derive(Debug)]
pub struct AsyncCalls {
    queue: Arc<EventQueue>,
    running: Arc<RunningCalls>,
}

impl AsyncCalls {
    /// Creates the state without calls, whose outcomes go to `queue`.
    pub fn new(queue: Arc<EventQueue>) -> Self {
        AsyncCalls { queue, running: Arc::default() }
    }

    /// Returns the queue that receives the outcomes.
    pub fn queue(&self) -> &Arc<EventQueue> {
        &self.queue
    }

    /// Returns the calls that have not ended.
    pub(super) fn running(&self) -> &Arc<RunningCalls> {
        &self.running
    }

    /// Starts a call that runs `work` on a lane once `rows` are free.
    pub(crate) fn start(
        &self,
        lanes: &ExecutorHandle,
        resources: &Arc<Resources>,
        purpose: CallPurpose,
        rows: CallRows,
        work: Work,
    ) -> Result<Arc<Transfer>> {
        let transfer = self.queue.start(purpose.event)?;
        let call = AsyncCall::new(&transfer, lanes, resources, &self.running, purpose, work);
        let started = self.running.enter(transfer.number(), call.clone()).and_then(|()| call.wait_for(rows));
        if let Err(error) = started {
            self.running.leave(transfer.number());
            transfer.abandon();
            return Err(error);
        }
        Ok(transfer)
    }

    /// Waits until no call runs. Returns `false` once `deadline` has passed, and `Err` only if interrupted.
    pub fn drain(&self, deadline: Deadline) -> Result<bool> {
        self.running.drain(deadline)
    }

    /// Ends all calls, refuses new ones and drops all events, because the engine closes. A call that a lane has begun ends a
    /// little later.
    pub fn close(&self) {
        self.running.close();
        self.queue.close();
    }
}

impl Drop for AsyncCalls {
    fn drop(&mut self) {
        self.queue.close();
    }
}
