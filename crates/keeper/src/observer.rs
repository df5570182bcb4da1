//! A client that only looks: it lists what a keeper has, and has no namespace and no memory of its own.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use llm_datadist_core::bindings::{fallible, remember_process, this_process};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::attachment::SharedMemory;
use crate::call_lock::{CallGuard, CallLock};
use crate::connection::KeeperConnection;
use crate::messages::{
    KeeperReply, KeeperRequest, ListRequest, ListedChange, ListedNamespace, ListedValue, VERSION,
};
use crate::sizes::PAGE_VALUES;
use crate::stats::KeeperStats;

/// Name of the list in out-of-memory errors.
const LIST: &str = "the list of values";

/// A connection to a keeper for people and tools. Several threads may use it. It does not attach again: after a call that the keeper has
/// not answered, all calls fail.
#[derive(Debug)]
pub struct Observer {
    process: u32,
    socket: PathBuf,
    /// `None` only while a copy in a forked process is dropped.
    connection: Option<KeeperConnection>,
    /// The memory of the keeper, if values are read as well.
    memory: Option<SharedMemory>,
    closed: AtomicBool,
    /// The number of the change with which the next call of `changes` begins; `None` before the first one.
    next_change: Mutex<Option<u64>>,
    call_lock: CallLock,
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
        Self::attach(socket, false, deadline)
    }

    /// Attaches as [`open`](Self::open) does, and maps the memory of the keeper.
    pub(crate) fn with_memory(socket: &Path, deadline: Deadline) -> Result<Observer> {
        Self::attach(socket, true, deadline)
    }

    fn attach(socket: &Path, with_memory: bool, deadline: Deadline) -> Result<Observer> {
        remember_process();
        let request = KeeperRequest::Observe(VERSION, with_memory);
        let (connection, geometry, files) = KeeperConnection::open(socket, &request, &[], deadline)?;
        let memory = with_memory.then(|| SharedMemory::map(geometry, files, deadline)).transpose()?;
        Ok(Observer {
            process: this_process(),
            socket: socket.into(),
            connection: Some(connection),
            memory,
            closed: AtomicBool::new(false),
            next_change: Mutex::new(None),
            call_lock: CallLock::default(),
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

    /// Returns the memory of the keeper, if it is mapped.
    pub(crate) fn memory(&self) -> Result<&SharedMemory> {
        self.memory.as_ref().ok_or_else(|| self.away())
    }

    /// Returns which values were stored and removed since the last call, by any of the threads; nothing at the first call. Each change is
    /// returned once. A keeper remembers the last 65,536 changes, so a client that asks too rarely is told how many it has missed.
    pub fn changes(&self, deadline: Deadline) -> Result<NewChanges> {
        // Held for all pages, so that another thread does not get one of them.
        let guard = self.locked(deadline)?;
        let (mut all, mut from, mut more) = (NewChanges::default(), *self.next_change(), true);
        while more {
            let KeeperReply::Changes(page) =
                self.asked_under(&guard, &KeeperRequest::Changes(from), deadline)?
            else {
                return Err(self.away());
            };
            if page.missed > 0 && !all.changes.is_empty() {
                // The gap is behind the changes of this call. The next call reports it, before those that come after it.
                break;
            }
            fallible::grow(LIST, &mut all.changes, page.changes.len())?;
            all.changes.extend(page.changes);
            all.missed += page.missed;
            from = Some(page.next);
            // Beyond what a keeper remembers, the next call goes on.
            more = page.more && all.changes.len() < 1 << 16;
        }
        *self.next_change() = from;
        Ok(all)
    }

    fn next_change(&self) -> MutexGuard<'_, Option<u64>> {
        self.next_change.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection. Later calls fail, and calls that wait for the keeper end at once. Closing again does nothing.
    pub fn close(&self) {
        if self.process == this_process() && !self.closed.swap(true, Ordering::Relaxed) {
            self.connection.iter().for_each(KeeperConnection::end);
        }
    }

    fn asked(&self, request: &KeeperRequest, deadline: Deadline) -> Result<KeeperReply> {
        let guard = self.locked(deadline)?;
        self.asked_under(&guard, request, deadline)
    }

    /// Waits for the calls of other threads.
    fn locked(&self, deadline: Deadline) -> Result<CallGuard<'_>> {
        if self.process != this_process() {
            let text = "this process was forked after the observer was opened; it belongs to its parent";
            return Err(Error::new(ErrorKind::Forked, text));
        }
        self.call_lock.lock_or_fail(deadline)
    }

    fn asked_under(
        &self,
        _guard: &CallGuard<'_>,
        request: &KeeperRequest,
        deadline: Deadline,
    ) -> Result<KeeperReply> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "the observer was closed"));
        }
        let connection = self.connection.as_ref().ok_or_else(|| self.away())?;
        let reply = connection.ask(request, deadline);
        if reply.is_err() {
            // The reply may still come, and would be taken for that of the next call.
            connection.end();
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
            std::mem::forget((self.connection.take(), self.memory.take()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::attachment::tests::{SilentKeeper, SilentPath};
    use crate::key::StoreKey;
    use crate::messages::ChangePage;
    use crate::socket::ListeningPath;
    use crate::{Keeper, KeeperOptions};

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    #[test]
    fn observer_gets_descriptors_only_with_memory() {
        let path = SilentPath::new();
        let options = KeeperOptions { memory: 64 * 10, value: 64, socket: path.socket() };
        let _keeper = Keeper::open(&options).unwrap();
        for (with_memory, shared) in [(false, 0), (true, 3)] {
            let request = KeeperRequest::Observe(VERSION, with_memory);
            let (_connection, _, files) =
                KeeperConnection::open(&path.socket(), &request, &[], soon()).unwrap();
            assert_eq!(files.len(), shared);
        }
        assert!(Observer::open(&path.socket(), soon()).unwrap().memory().is_err());
        assert_eq!(
            Observer::with_memory(&path.socket(), soon()).unwrap().memory().unwrap().geometry.slots,
            10
        );
    }

    #[test]
    fn changes_missed_between_pages_are_reported_by_the_next_call() {
        let change = |number: u8| ListedChange {
            namespace: 0,
            key: StoreKey::read(0, &[number; 28]).unwrap(),
            stored: true,
        };
        // The keeper forgets the changes 2 to 6 after the first page.
        let page = |numbers: &[u8], missed, next, more| {
            KeeperReply::Changes(ChangePage {
                changes: numbers.iter().copied().map(change).collect(),
                missed,
                next,
                more,
            })
        };
        let path = SilentPath::new();
        let listening = ListeningPath::open(&path.socket()).unwrap();
        std::thread::scope(|scope| {
            let keeper = scope.spawn(|| {
                let keeper = SilentKeeper::asked(listening).answer();
                for (asked, reply) in [
                    (None, page(&[], 0, 0, false)),
                    (Some(0), page(&[0, 1], 0, 2, true)),
                    (Some(2), page(&[7], 5, 8, false)),
                    (Some(2), page(&[7], 5, 8, false)),
                    (Some(8), page(&[8], 0, 9, false)),
                ] {
                    assert!(matches!(keeper.message(), KeeperRequest::Changes(from) if from == asked));
                    keeper.reply(&reply);
                }
            });
            let observer = Observer::open(&path.socket(), soon()).unwrap();
            let new = || observer.changes(soon()).unwrap();
            assert_eq!(new(), NewChanges::default());
            assert_eq!(new(), NewChanges { changes: [0, 1].map(change).into(), missed: 0 });
            assert_eq!(new(), NewChanges { changes: [7].map(change).into(), missed: 5 });
            assert_eq!(new(), NewChanges { changes: [8].map(change).into(), missed: 0 });
            keeper.join().unwrap();
        });
    }
}
