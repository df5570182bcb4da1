//! A client that only looks: it lists what a keeper has, and has no namespace and no memory of its own.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use llm_datadist_core::bindings::{fallible, remember_process, this_process};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::attachment::Attachment;
use crate::messages::{KeeperReply, KeeperRequest, ListRequest, ListedChange, ListedNamespace, ListedValue};
use crate::sizes::PAGE_VALUES;
use crate::stats::KeeperStats;
use crate::turns::Turns;

/// Name of the list in out-of-memory errors.
const LIST: &str = "the list of values";

/// A connection to a keeper for people and tools. Several threads may use it. It does not attach again: once a call has failed, all
/// calls do.
#[derive(Debug)]
pub struct Observer {
    process: u32,
    socket: PathBuf,
    attachment: Option<Attachment>,
    closed: AtomicBool,
    /// The number of the change with which the next call of `changes` begins; `None` before the first one.
    next_change: Mutex<Option<u64>>,
    turns: Turns,
}

/// What has changed since the last time that an observer asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewChanges {
    /// The changes in their order.
    pub changes: Vec<ListedChange>,
    /// How many changes before those the keeper does not remember any more.
    pub missed: u64,
}

impl Observer {
    /// Attaches to the keeper at `socket`.
    ///
    /// Returns `Err(NotLinked)` if no keeper listens there, `Err(Timeout)` if it does not answer before `deadline`, `Err(InvalidArgument)`
    /// if it refuses or the path cannot be one of a socket, and `Err(System)` if the system refuses the connection or too many look.
    pub fn open(socket: &Path, deadline: Deadline) -> Result<Observer> {
        remember_process();
        let attachment = Attachment::observe(socket, deadline)?;
        let (process, socket) = (this_process(), socket.into());
        Ok(Observer {
            process,
            socket,
            attachment: Some(attachment),
            closed: AtomicBool::new(false),
            next_change: Mutex::new(None),
            turns: Turns::default(),
        })
    }

    /// Returns what the keeper has counted.
    pub fn stats(&self, deadline: Deadline) -> Result<KeeperStats> {
        match self.asked(&KeeperRequest::Stats, deadline)? {
            KeeperReply::Stats(stats) => Ok(stats),
            _ => Err(self.away()),
        }
    }

    /// Returns the namespaces that the keeper knows, in the order of their numbers.
    pub fn namespaces(&self, deadline: Deadline) -> Result<Vec<ListedNamespace>> {
        let (mut namespaces, mut from) = (Vec::new(), Some(0));
        while let Some(number) = from {
            let KeeperReply::Namespaces(page, next) =
                self.asked(&KeeperRequest::Namespaces(number), deadline)?
            else {
                return Err(self.away());
            };
            namespaces.extend(page);
            from = next.filter(|next| *next > number);
        }
        Ok(namespaces)
    }

    /// Returns the values of a namespace, or of all, the most recently used ones first, at most `limit`.
    ///
    /// Not all are of the same moment: the keeper serves others meanwhile. A value that stays meanwhile is there exactly once, whatever
    /// is used. A key whose value is replaced or put again meanwhile may be missing, or be there twice with different slots.
    pub fn values(
        &self,
        namespace: Option<u32>,
        limit: usize,
        deadline: Deadline,
    ) -> Result<Vec<ListedValue>> {
        let latest = |value: &ListedValue| Reverse(value.used);
        let (mut values, mut from) = (Vec::new(), Some(0));
        while let Some(slot) = from {
            let request = ListRequest { from: slot, namespace };
            let KeeperReply::Listed(page, next) = self.asked(&KeeperRequest::List(request), deadline)? else {
                return Err(self.away());
            };
            fallible::grow(LIST, &mut values, page.len())?;
            values.extend(page);
            // So that the time stays in proportion to the values of the keeper.
            if limit > 0 && values.len() >= limit.saturating_add(limit.max(PAGE_VALUES)) {
                values.select_nth_unstable_by_key(limit - 1, latest);
                values.truncate(limit);
            }
            from = next.filter(|next| *next > slot);
        }
        values.sort_unstable_by_key(latest);
        values.truncate(limit);
        Ok(values)
    }

    /// Has the keeper end.
    pub(crate) fn end(&self, deadline: Deadline) -> Result<()> {
        match self.asked(&KeeperRequest::End, deadline) {
            // The end of the connection is the answer.
            Err(error) if error.kind() == ErrorKind::NotLinked => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(self.away()),
        }
    }

    /// Returns the connection, with what the keeper shares.
    pub(crate) fn attachment(&self) -> Result<&Attachment> {
        self.attachment.as_ref().ok_or_else(|| self.away())
    }

    /// Returns which values were stored and removed since the last call, by any of the threads; nothing at the first call. A keeper
    /// remembers the last 65,536 changes, so a client that asks too rarely is told how many it has missed.
    pub fn changes(&self, deadline: Deadline) -> Result<NewChanges> {
        let (mut all, mut more) = (NewChanges::default(), true);
        while more {
            let from = *self.next_change();
            let KeeperReply::Changes(page) = self.asked(&KeeperRequest::Changes(from), deadline)? else {
                return Err(self.away());
            };
            *self.next_change() = Some(page.next);
            fallible::grow(LIST, &mut all.changes, page.changes.len())?;
            all.changes.extend(page.changes);
            all.missed += page.missed;
            // Beyond what a keeper remembers, the next call goes on.
            more = page.more && all.changes.len() < 1 << 16;
        }
        Ok(all)
    }

    fn next_change(&self) -> MutexGuard<'_, Option<u64>> {
        self.next_change.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection. Later calls fail, and calls that wait for the keeper end at once. Closing again does nothing.
    pub fn close(&self) {
        if self.process == this_process() && !self.closed.swap(true, Ordering::Relaxed) {
            self.attachment.iter().for_each(Attachment::end);
        }
    }

    fn asked(&self, request: &KeeperRequest, deadline: Deadline) -> Result<KeeperReply> {
        if self.process != this_process() {
            let text = "this process was forked after the observer was opened; it belongs to its parent";
            return Err(Error::new(ErrorKind::Forked, text));
        }
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "the observer was closed"));
        }
        let attachment = self.attachment.as_ref().ok_or_else(|| self.away())?;
        let Some(_turn) = self.turns.take(deadline)? else {
            return Err(deadline.error("waiting for other calls"));
        };
        let reply = attachment.ask(request, deadline);
        if reply.is_err() {
            // The reply may still come, and would be taken for that of the next call.
            attachment.end();
        }
        reply
    }

    fn away(&self) -> Error {
        Error::new(ErrorKind::NotLinked, "the keeper is away").with("socket", self.socket.display())
    }
}

/// A forked child leaks its copy: other values of the child may have the numbers of the descriptors.
impl Drop for Observer {
    fn drop(&mut self) {
        if self.process != this_process() {
            std::mem::forget(self.attachment.take());
        }
    }
}
