//! The asynchronous calls of one engine that have not ended.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::events::{HeldEnd, Transfer};
use crate::model::{ClusterId, Deadline};
use crate::sync::{Condvar, Mutex};

/// A call that has not ended.
pub(super) trait RunningCall: Send + Sync {
    /// Ends the call because the engine closes; later, if a worker has begun it.
    fn close(&self);

    /// Returns the transfer of the call, if it has an event and may use a link to `cluster`.
    fn transfer_with(&self, cluster: ClusterId) -> Option<&Arc<Transfer>>;

    /// Whether the call waits for its program, and fails if the link to `cluster` ends meanwhile.
    fn waits_with(&self, _cluster: ClusterId) -> bool {
        false
    }

    /// Ends a call that [waits](Self::waits_with) because the link to `cluster` has ended.
    fn link_ended(&self, _cluster: ClusterId) {}
}

/// The asynchronous calls of one engine that have not ended. They keep calls alive that wait without a thread.
#[derive(Default)]
pub(crate) struct RunningCalls {
    state: Mutex<State>,
    /// Notified when the last call has ended.
    idle: Condvar,
}

#[derive(Default)]
struct State {
    /// By the number of the transfer. `None` until the call has [entered](RunningCalls::enter).
    calls: BTreeMap<u64, Option<Arc<dyn RunningCall>>>,
    closed: bool,
}

impl RunningCalls {
    /// Makes an entry for a call, which counts as one that runs until it [leaves](Self::leave).
    pub(super) fn reserve(&self, transfer: &Transfer) {
        self.state.lock().calls.insert(transfer.number(), None);
    }

    /// Adds a call to its entry. Returns `Err(Closed)` once the engine closes.
    pub(super) fn enter(&self, transfer: &Transfer, call: Arc<dyn RunningCall>) -> Result<()> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        let replaced = state.calls.get_mut(&transfer.number()).and_then(|entry| entry.replace(call));
        drop(state);
        drop(replaced);
        Ok(())
    }

    /// Removes a call that has ended, or whose start has failed.
    pub(super) fn leave(&self, transfer: &Transfer) {
        let mut state = self.state.lock();
        let ended = state.calls.remove(&transfer.number());
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
            drop(self.idle.wait_timeout(state, deadline.wait_limit()));
            deadline.interruption("waiting for transfers to end")?;
            state = self.state.lock();
        }
        Ok(true)
    }

    /// Has every call that may use a link to `cluster` keep the end of the link. Returns whether there is one.
    pub(super) fn hold(&self, cluster: ClusterId, end: &Arc<HeldEnd>) -> bool {
        let state = self.state.lock();
        let mut held = false;
        for transfer in state.calls.values().flatten().filter_map(|call| call.transfer_with(cluster)) {
            held |= transfer.hold(end);
        }
        held
    }

    /// Returns the calls that wait for their program, and fail because the link to `cluster` has ended.
    pub(super) fn waiting_with(&self, cluster: ClusterId) -> Vec<Arc<dyn RunningCall>> {
        let state = self.state.lock();
        state.calls.values().flatten().filter(|call| call.waits_with(cluster)).cloned().collect()
    }

    /// Ends all calls and refuses new ones.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let calls: Vec<_> = state.calls.values().flatten().cloned().collect();
        drop(state);
        // Without the lock, because a call that ends leaves.
        for call in calls {
            call.close();
        }
    }
}
