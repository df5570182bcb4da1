//! The attempts to link on demand that run. Calls that link to one address at once share an attempt.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use super::link::{EngineId, Link};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::sync::{Condvar, Mutex, OnDrop};

/// How long a call waits for the attempt of another one, which may be stuck: nothing limits it but the time limit of its own
/// call.
const SHARED_ATTEMPT_WAIT: Duration = Duration::from_secs(1);

/// What an attempt is for: the address, and the name that the engine there must have, if it is given.
pub(super) type LinkTarget = (SocketAddr, Option<String>);

/// How an attempt has ended.
#[derive(Clone)]
pub(super) enum AttemptEnd {
    /// The link that it has made or found.
    Linked(Arc<Link>),
    /// Why there is none, and the engine that has answered.
    Failed(Error, Option<EngineId>),
}

/// The attempts of one engine that run.
#[derive(Default)]
pub(super) struct LinkAttempts(Mutex<HashMap<LinkTarget, Arc<Attempt>>>);

#[derive(Default)]
struct Attempt {
    state: Mutex<AttemptState>,
    /// Notified when the attempt has ended.
    changed: Condvar,
}

#[derive(Default)]
enum AttemptState {
    #[default]
    Running,
    /// Has the end, if it counts for other calls. That of an attempt that has panicked does not.
    Ended(Option<AttemptEnd>),
}

impl LinkAttempts {
    /// Returns the end of the attempt for `target` that runs, or else of the one that `attempt` makes. If the one that runs does
    /// not end within [`SHARED_ATTEMPT_WAIT`], this call makes one that is not shared. Returns `Err` if the caller was interrupted or
    /// `deadline` passes before.
    pub(super) fn share(
        &self,
        target: &LinkTarget,
        deadline: Deadline,
        attempt: impl FnOnce() -> AttemptEnd,
    ) -> Result<AttemptEnd> {
        let shared_until = deadline.at_most(SHARED_ATTEMPT_WAIT);
        loop {
            let (running, is_first) = match self.0.lock().entry(target.clone()) {
                Entry::Occupied(running) => (running.get().clone(), false),
                Entry::Vacant(entry) => (entry.insert(Arc::default()).clone(), true),
            };
            if is_first {
                let ended = Cell::new(None);
                // The attempt is removed first, so that a call for which the end does not count begins an attempt of its own.
                let forgets = OnDrop(|| {
                    self.0.lock().remove(target);
                    running.end(ended.take().filter(AttemptEnd::counts_for_others));
                });
                let end = attempt();
                ended.set(Some(end.clone()));
                drop(forgets);
                return Ok(end);
            }
            if let Some(end) = running.wait(shared_until)? {
                return Ok(end);
            }
            deadline.check("linking")?;
            if shared_until.passed() {
                return Ok(attempt());
            }
        }
    }
}

impl Attempt {
    /// Sets how the attempt has ended, if that counts for other calls.
    fn end(&self, end: Option<AttemptEnd>) {
        *self.state.lock() = AttemptState::Ended(end);
        self.changed.notify_all();
    }

    /// Waits for the end, until `shared_until` passes. Returns `None` if there is none by then, or if it does not count for others.
    /// Returns `Err` if the caller was interrupted.
    fn wait(&self, shared_until: Deadline) -> Result<Option<AttemptEnd>> {
        let mut state = self.state.lock();
        loop {
            if let AttemptState::Ended(end) = &*state {
                return Ok(end.clone());
            }
            if shared_until.passed() {
                return Ok(None);
            }
            drop(self.changed.wait_timeout(state, shared_until.wait_limit()));
            shared_until.interruption("linking")?;
            state = self.state.lock();
        }
    }
}

impl AttemptEnd {
    /// Whether another call would have had the same end. Each call has a time limit of its own, and may be cancelled.
    fn counts_for_others(&self) -> bool {
        match self {
            AttemptEnd::Linked(_) => true,
            AttemptEnd::Failed(error, _) => !matches!(
                error.kind(),
                ErrorKind::Timeout | ErrorKind::Interrupted | ErrorKind::Cancelled | ErrorKind::Closed
            ),
        }
    }
}
