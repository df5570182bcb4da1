//! The attempts to link on demand that run. Calls that link to one address at once share an attempt.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use super::link::{EngineId, Link};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::sync::{Condvar, Mutex, OnDrop};

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
    Ended(AttemptEnd),
    /// The attempt has panicked.
    Lost,
}

impl LinkAttempts {
    /// Returns the end of the attempt for `target` that runs, or else of the one that `attempt` makes. Returns `Err` if the caller was
    /// interrupted or `deadline` passes before.
    pub(super) fn share(
        &self,
        target: &LinkTarget,
        deadline: Deadline,
        attempt: impl FnOnce() -> AttemptEnd,
    ) -> Result<AttemptEnd> {
        loop {
            let (running, is_first) = match self.0.lock().entry(target.clone()) {
                Entry::Occupied(running) => (running.get().clone(), false),
                Entry::Vacant(entry) => (entry.insert(Arc::default()).clone(), true),
            };
            if is_first {
                let ended = Cell::new(None);
                // Forgotten first, so that a call for which the end does not count begins an attempt of its own.
                let forgets = OnDrop(|| {
                    self.0.lock().remove(target);
                    running.end(ended.take().map_or(AttemptState::Lost, AttemptState::Ended));
                });
                let end = attempt();
                ended.set(Some(end.clone()));
                drop(forgets);
                return Ok(end);
            }
            if let Some(end) = running.wait(deadline)? {
                return Ok(end);
            }
        }
    }
}

impl Attempt {
    /// Sets how the attempt has ended.
    fn end(&self, end: AttemptState) {
        *self.state.lock() = end;
        self.changed.notify_all();
    }

    /// Waits for the end. Returns `None` if it says nothing about other calls.
    fn wait(&self, deadline: Deadline) -> Result<Option<AttemptEnd>> {
        let mut state = self.state.lock();
        loop {
            match &*state {
                AttemptState::Running => {}
                AttemptState::Ended(end) => return Ok(end.counts_for_others().then(|| end.clone())),
                AttemptState::Lost => return Ok(None),
            }
            drop(self.changed.wait_timeout(state, deadline.wait_limit()));
            deadline.waiting("linking")?;
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
