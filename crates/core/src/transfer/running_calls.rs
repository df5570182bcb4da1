//! The asynchronous calls of one engine that have not ended.

use std::fmt;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::error::{Error, Result};
use crate::fallible;
use crate::model::Deadline;
use crate::sync::{Condvar, Mutex};

/// A call that has not ended.
pub(super) trait RunningCall: Send + Sync + fmt::Debug {
    /// Ends the call because the engine closes; later, if a lane has begun it.
    fn close(&self);
}

/// The asynchronous calls of one engine that have not ended. They keep calls alive that wait without a thread.
#[derive(Debug, Default)]
pub(super) struct RunningCalls {
    state: Mutex<State>,
    /// Notified when the last call has ended.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By the number of the transfer.
    calls: HashMap<u64, Arc<dyn RunningCall>>,
    closed: bool,
}

impl RunningCalls {
    /// Adds a call. Returns `Err(Closed)` once the engine closes.
    pub(super) fn enter(&self, number: u64, call: Arc<dyn RunningCall>) -> Result<()> {
        self.enter_all(std::iter::once((number, call)))
    }

    /// Adds calls, all or none, as [`enter`](Self::enter) does.
    pub(super) fn enter_all(
        &self,
        calls: impl ExactSizeIterator<Item = (u64, Arc<dyn RunningCall>)>,
    ) -> Result<()> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        let asked = (state.calls.len() + calls.len()) * size_of::<(u64, Arc<dyn RunningCall>)>();
        let room = state.calls.try_reserve(calls.len());
        room.map_err(|_| fallible::out_of_memory("the list of running transfers", asked))?;
        state.calls.extend(calls);
        Ok(())
    }

    /// Removes a call that has ended.
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

    /// Waits until no call runs. Returns `false` once `deadline` has passed, and `Err` only if interrupted.
    pub(super) fn drain(&self, deadline: Deadline) -> Result<bool> {
        let mut state = self.state.lock();
        while !state.calls.is_empty() {
            if deadline.passed() {
                return Ok(false);
            }
            drop(self.idle.wait_timeout(state, deadline.nap()));
            deadline.interruption("waiting for transfers to end")?;
            state = self.state.lock();
        }
        Ok(true)
    }

    /// Ends all calls and refuses new ones.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let calls: Vec<_> = state.calls.values().cloned().collect();
        drop(state);
        // Without the lock, because a call that ends leaves.
        for call in calls {
            call.close();
        }
    }
}
