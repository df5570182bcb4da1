//! The replies of peers that calls of this engine wait for.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use llm_datadist_core::{ClusterId, Deadline};

use crate::messages::WireRegion;
use crate::status::{Outcome, Status};
use crate::sync::lock;

/// What a peer has replied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// It accepts, or refuses.
    Done(bool),
    /// Regions, one for each address.
    Located(Vec<WireRegion>),
    /// The link has ended.
    Lost,
}

/// The calls that wait.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    last: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    calls: HashMap<u64, (ClusterId, Option<Reply>)>,
    /// Whether no reply comes any more.
    closed: bool,
}

impl Replies {
    /// Returns the number of a new question for a peer.
    pub(crate) fn begin(&self, peer: ClusterId) -> u64 {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let mut waiting = lock(&self.waiting);
        let lost = waiting.closed.then_some(Reply::Lost);
        waiting.calls.insert(id, (peer, lost));
        id
    }

    /// Notes the reply of `peer`. Another peer cannot reply, nor can one reply twice.
    pub(crate) fn set(&self, peer: ClusterId, id: u64, reply: Reply) {
        let mut waiting = lock(&self.waiting);
        if let Some((of, slot @ None)) = waiting.calls.get_mut(&id)
            && *of == peer
        {
            *slot = Some(reply);
            self.changed.notify_all();
        }
    }

    /// Lets all questions for a peer end, because the link has ended or the program has disconnected.
    pub(crate) fn lost(&self, peer: ClusterId) {
        for (of, slot) in lock(&self.waiting).calls.values_mut() {
            if *of == peer {
                slot.get_or_insert(Reply::Lost);
            }
        }
        self.changed.notify_all();
    }

    /// Lets all questions end, also later ones, because the engine closes.
    pub(crate) fn close(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.closed = true;
        for (_, slot) in waiting.calls.values_mut() {
            slot.get_or_insert(Reply::Lost);
        }
        self.changed.notify_all();
    }

    /// Forgets a question that was not sent.
    pub(crate) fn forget(&self, id: u64) {
        lock(&self.waiting).calls.remove(&id);
    }

    /// Waits for the reply.
    pub(crate) fn wait(&self, id: u64, deadline: Deadline) -> Outcome<Reply> {
        let mut waiting = lock(&self.waiting);
        loop {
            match waiting.calls.get(&id) {
                Some((_, None)) => {}
                _ => {
                    return Ok(waiting.calls.remove(&id).and_then(|(_, reply)| reply).unwrap_or(Reply::Lost));
                }
            }
            if deadline.passed() {
                waiting.calls.remove(&id);
                return Err(Status::Timeout);
            }
            waiting =
                self.changed.wait_timeout(waiting, deadline.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
