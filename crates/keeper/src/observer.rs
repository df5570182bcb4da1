//! The observer, a read-only client: it lists what a keeper has, and has no namespace and no memory of its own.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use llm_datadist_core::bindings::keeper::Mutex;
use llm_datadist_core::bindings::{fallible, remember_process, this_process};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::attachment::SharedMemory;
use crate::call_lock::{CallGuard, CallLock};
use crate::connection::{KeeperAccess, KeeperConnection};
use crate::dropped_on_thread::DroppedOnThread;
use crate::messages::{
    KeeperReply, KeeperRequest, ListRequest, ListedChange, ListedNamespace, ListedValue, VERSION,
};
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
    memory: Option<DroppedOnThread<SharedMemory>>,
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
        Self::attach(socket, &KeeperAccess::default(), false, deadline)
    }

    /// Attaches as [`open`](Self::open) does, with a token or to a keeper of another user.
    pub fn with_access(socket: &Path, access: &KeeperAccess, deadline: Deadline) -> Result<Observer> {
        Self::attach(socket, access, false, deadline)
    }

    /// Attaches as [`open`](Self::open) does, and maps the memory of the keeper.
    pub(crate) fn with_memory(socket: &Path, deadline: Deadline) -> Result<Observer> {
        Self::attach(socket, &KeeperAccess::default(), true, deadline)
    }

    fn attach(
        socket: &Path,
        access: &KeeperAccess,
        with_memory: bool,
        deadline: Deadline,
    ) -> Result<Observer> {
        remember_process();
        let request = KeeperRequest::Observe(VERSION, with_memory);
        let (connection, geometry, files) = KeeperConnection::open(socket, access, &request, &[], deadline)?;
        let mapped = with_memory.then(|| SharedMemory::map(geometry, files, deadline)).transpose()?;
        let memory = mapped.map(SharedMemory::shared);
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
    ///
    /// The deadline is that of the whole call, however many values there are.
    pub fn values(
        &self,
        namespace: Option<u32>,
        limit: usize,
        deadline: Deadline,
    ) -> Result<Vec<ListedValue>> {
        self.list(namespace, limit, || deadline)
    }

    /// Returns all values, as [`values`](Self::values). Each page of the list has a deadline of its own, so that there may be any number
    /// of values.
    pub(crate) fn all_values(&self, each: impl Fn() -> Deadline) -> Result<Vec<ListedValue>> {
        self.list(None, usize::MAX, each)
    }

    fn list(
        &self,
        namespace: Option<u32>,
        limit: usize,
        deadline: impl Fn() -> Deadline,
    ) -> Result<Vec<ListedValue>> {
        let latest = |value: &ListedValue| Reverse(value.used);
        let (mut values, mut from, mut used_after) = (Vec::new(), Some(0), 0);
        while let Some(slot) = from {
            let request = ListRequest { from: slot, namespace, used_after };
            let KeeperReply::Listed(page, next) = self.asked(&KeeperRequest::List(request), deadline())?
            else {
                return Err(self.away());
            };
            fallible::grow(LIST, &mut values, page.len())?;
            values.extend(page);
            // Not after each page, so that the time stays in proportion to the values of the keeper. The later pages leave out what was
            // used before all of these, so they are few, however many values there are.
            if limit > 0 && values.len() >= limit.saturating_mul(2) {
                let (_, last, _) = values.select_nth_unstable_by_key(limit - 1, latest);
                used_after = last.used;
                values.truncate(limit);
            }
            from = next.filter(|next| *next > slot);
        }
        values.sort_unstable_by_key(latest);
        values.truncate(limit);
        Ok(values)
    }

    /// Asks the keeper to end, without waiting for it. Returns `Err(NotLinked)` if it has ended the connection.
    pub(crate) fn ask_to_end(&self, deadline: Deadline) -> Result<()> {
        let _guard = self.locked(deadline)?;
        let connection = self.connection.as_ref().ok_or_else(|| self.away())?;
        connection.check(KeeperRequest::End.needs())?;
        connection.send(&KeeperRequest::End, deadline)
    }

    /// Takes the request to end back, and ends the connection. Returns whether it is too late, because the keeper has agreed before.
    /// Otherwise it does not end, whenever it reads the request.
    pub(crate) fn take_back(&self) -> bool {
        let reply = self.connection.as_ref().and_then(KeeperConnection::last_reply);
        matches!(reply, Some(KeeperReply::Ending))
    }

    /// Returns whether the keeper has ended the connection.
    pub(crate) fn has_ended(&self) -> bool {
        !self.connection.as_ref().is_some_and(KeeperConnection::alive)
    }

    /// Returns the memory of the keeper, if it is mapped.
    pub(crate) fn memory(&self) -> Result<&SharedMemory> {
        self.memory.as_deref().ok_or_else(|| self.away())
    }

    /// Returns which values were stored and removed since the last call, by any of the threads; nothing at the first call. Each change is
    /// returned once. A keeper remembers the last 65,536 changes. If there were more since the last call, the result has the number of
    /// those that are missing.
    pub fn changes(&self, deadline: Deadline) -> Result<NewChanges> {
        // Held for all pages, so that another thread does not get one of them.
        let guard = self.locked(deadline)?;
        let (mut all, mut from, mut more) = (NewChanges::default(), *self.next_change.lock(), true);
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
        *self.next_change.lock() = from;
        Ok(all)
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
        connection.check(request.needs())?;
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
    use llm_datadist_core::bindings::keeper::Window;

    use super::*;
    use crate::attachment::tests::{SilentKeeper, SilentPath, key, numbered_key, soon};
    use crate::key::StoreKey;
    use crate::messages::ChangePage;
    use crate::sizes::PAGE_VALUES;
    use crate::socket::ListeningPath;

    #[test]
    fn observer_gets_descriptors_only_with_memory() {
        let path = SilentPath::new();
        let _keeper = path.keeper(10, 64);
        for (with_memory, shared) in [(false, 0), (true, 3)] {
            let request = KeeperRequest::Observe(VERSION, with_memory);
            let (_connection, _, files) =
                KeeperConnection::open(&path.socket(), &KeeperAccess::default(), &request, &[], soon())
                    .unwrap();
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
        let change = |number| ListedChange { namespace: 0, key: key(number), stored: true };
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

    #[test]
    fn a_short_list_asks_for_few_pages() {
        let value = |number: u32| ListedValue {
            namespace: 0,
            key: key(7),
            slot: number,
            used: number.into(),
            leased: false,
        };
        let path = SilentPath::new();
        let listening = ListeningPath::open(&path.socket()).unwrap();
        std::thread::scope(|scope| {
            let keeper = scope.spawn(|| {
                let keeper = SilentKeeper::asked(listening).answer();
                let first: Vec<_> = (1..=u32::try_from(PAGE_VALUES).unwrap()).map(value).collect();
                for (asked, after, page, next) in [
                    (0, 0, first.clone(), Some(960)),
                    // The third of the latest three is 958.
                    (960, 958, vec![value(1000), value(999)], Some(70_000)),
                    (70_000, 958, vec![], None),
                ] {
                    let KeeperRequest::List(request) = keeper.message() else { panic!("it lists") };
                    assert_eq!((request.from, request.used_after), (asked, after));
                    keeper.reply(&KeeperReply::Listed(page, next));
                }
            });
            let observer = Observer::open(&path.socket(), soon()).unwrap();
            let listed = observer.values(None, 3, soon()).unwrap();
            assert_eq!(listed.iter().map(|value| value.used).collect::<Vec<_>>(), [1000, 999, 960]);
            keeper.join().unwrap();
        });
    }

    #[test]
    fn a_list_of_any_limit_has_the_latest_values() {
        let path = SilentPath::new();
        let _keeper = path.keeper(5000, 64);
        let store = path.store(64);
        // Each key once, in an order that has nothing to do with that of the slots.
        let order: Vec<StoreKey> = (0..5000).map(|number| numbered_key(number * 1009 % 5000)).collect();
        for keys in order.chunks(1) {
            store.put(keys, &[Window::of_slice(&[1; 64])], soon()).unwrap();
        }
        for keys in [&order[100..400], &order[3000..3100]] {
            // The first key of a call is used last.
            store.put(keys, &vec![Window::of_slice(&[1; 64]); keys.len()], soon()).unwrap();
        }
        store.stats(soon()).unwrap();
        let rest = order
            .iter()
            .enumerate()
            .rev()
            .filter(|(at, _)| !(100..400).contains(at) && !(3000..3100).contains(at));
        let latest: Vec<StoreKey> = order[3000..3100]
            .iter()
            .chain(&order[100..400])
            .chain(rest.map(|(_, key)| key))
            .copied()
            .collect();
        let observer = Observer::open(&path.socket(), soon()).unwrap();
        for limit in [1, 3, 99, 960, 1000, 2500, 5000, 6000] {
            let listed = observer.values(None, limit, soon()).unwrap();
            let keys: Vec<StoreKey> = listed.iter().map(|value| value.key).collect();
            assert!(keys == latest[..limit.min(5000)], "{limit}");
        }
    }
}
