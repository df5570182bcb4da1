//! The asynchronous calls of one engine: starting them, waiting for all of them, and ending them with the engine.

use std::sync::Arc;

use hashbrown::HashMap;

use super::async_call::{AsyncCall, CallPurpose, Work};
use super::executor::ExecutorHandle;
use crate::cache::CallRows;
use crate::error::{Error, Result};
use crate::events::{EventQueue, Transfer};
use crate::fallible;
use crate::model::Deadline;
use crate::resources::Resources;
use crate::sync::{Condvar, Mutex};

/// The asynchronous calls of one engine.
#[derive(Debug)]
pub struct AsyncCalls {
    queue: Arc<EventQueue>,
    running: Arc<RunningCalls>,
}

/// The calls that have not ended.
#[derive(Debug, Default)]
pub(super) struct RunningCalls {
    state: Mutex<State>,
    /// Notified when the last call has ended.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By the number of the transfer. This is what keeps a call alive that waits without a thread.
    calls: HashMap<u64, Arc<AsyncCall>>,
    closed: bool,
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

    /// Starts a call that runs `work` on a lane once `rows` are free.
    pub(crate) fn start(
        &self,
        lanes: &ExecutorHandle,
        resources: &Arc<Resources>,
        purpose: CallPurpose,
        rows: CallRows,
        work: Work,
    ) -> Result<Arc<Transfer>> {
        let transfer = Transfer::start(&self.queue)?;
        let call = AsyncCall::new(&transfer, lanes, resources, &self.running, purpose, work);
        let started = self.running.enter(&call).and_then(|()| call.wait_for(rows));
        if let Err(error) = started {
            self.running.leave(transfer.number());
            transfer.abandon();
            return Err(error);
        }
        Ok(transfer)
    }

    /// Waits until no call runs. Returns `false` once `deadline` has passed, and `Err` only if interrupted.
    pub fn drain(&self, deadline: Deadline) -> Result<bool> {
        let mut state = self.running.state.lock();
        while !state.calls.is_empty() {
            if deadline.passed() {
                return Ok(false);
            }
            drop(self.running.idle.wait_timeout(state, deadline.nap()));
            deadline.interruption("waiting for transfers to end")?;
            state = self.running.state.lock();
        }
        Ok(true)
    }

    /// Ends all calls and refuses new ones, because the engine closes. A call that a lane has begun ends a little
    /// later.
    pub fn close(&self) {
        let mut state = self.running.state.lock();
        state.closed = true;
        let calls: Vec<_> = state.calls.values().cloned().collect();
        drop(state);
        for call in calls {
            call.close();
        }
    }
}

impl Drop for AsyncCalls {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl RunningCalls {
    fn enter(&self, call: &Arc<AsyncCall>) -> Result<()> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        let asked = (state.calls.len() + 1) * size_of::<(u64, Arc<AsyncCall>)>();
        let room = state.calls.try_reserve(1);
        room.map_err(|_| fallible::out_of_memory("the list of running transfers", asked))?;
        state.calls.insert(call.number(), call.clone());
        Ok(())
    }

    pub(super) fn leave(&self, number: u64) {
        let mut state = self.state.lock();
        let ended = state.calls.remove(&number);
        let idle = state.calls.is_empty();
        drop(state);
        drop(ended);
        if idle {
            self.idle.notify_all();
        }
    }
}
