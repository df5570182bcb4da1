//! Pins: the rows that a call reads or writes at this moment, in all its caches.
//!
//! Many readers or one writer. A call takes all its rows at once before it moves a byte, and waits for them in the
//! queues of all its caches at once. So calls never wait in a cycle, and calls of this engine that meet in a row take
//! turns in the order in which they were started.
//!
//! While this engine calls peers, a request of a peer passes calls that only wait, up to a limit for each of them, but
//! none that uses the rows. Otherwise engines could wait for each other: a call of this engine waits for a peer, a
//! second one waits behind it, and the peer's own call, for which the first one waits, would wait behind the second
//! (`push_pull_and_copy_do_not_deadlock`).

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::cache::Cache;
use super::readiness::{OnReady, Readiness};
use super::row_queues::{PINS, RowQueues, RowUse, counter_shift};
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::fallible;
use crate::model::{Deadline, RowList};
use crate::sync::MutexGuard;

/// The rows that one call uses, in one cache or several. The caches ascend by address.
#[derive(Debug)]
pub struct CallRows(SmallVec<[CacheRows; 1]>);

/// The rows that one call uses in one cache.
#[derive(Debug)]
struct CacheRows {
    cache: Arc<Cache>,
    used: RowUse,
    state: QueueState,
}

/// How far a call is in the queues of a cache.
#[derive(Clone, Copy, Debug)]
enum QueueState {
    /// It has not waited.
    New,
    /// It has not waited, and frees the cache: it waits for all other calls.
    Freeing,
    /// It waits as this waiter, or has waited.
    Waiting(u32),
}

/// Rows that are taken for one call, together with their caches; given back on drop.
#[derive(Debug)]
pub struct Pin(CallRows);

/// A call in the queues of its rows; it leaves them on drop.
#[derive(Debug)]
pub struct WaitingCall {
    /// Empty once the rows are taken.
    rows: CallRows,
    readiness: Arc<Readiness>,
}

impl CacheRows {
    fn new(cache: Arc<Cache>, used: RowUse) -> Self {
        // As readers of one row, calls exclude only the end of the cache (`all_rows`).
        let any = !used.reads.is_empty() || !used.writes.is_empty();
        let used = if cache.is_unordered() && any {
            RowUse { reads: smallvec![0], ..RowUse::default() }
        } else {
            used
        };
        CacheRows { cache, used, state: QueueState::New }
    }

    /// Returns the call in the queues of the cache, if it waits there or has waited.
    fn waiter(&self) -> Option<u32> {
        if let QueueState::Waiting(waiter) = self.state { Some(waiter) } else { None }
    }

    /// Locks the rows of the cache. `Err(OutOfMemory)` if their counters cannot be allocated. `Err(CacheNotFound)` for a new call if
    /// the cache was freed after the call had found it: its memory may be gone (`a_freed_cache_admits_no_call`).
    fn lock(&self) -> Result<MutexGuard<'_, RowQueues>> {
        let mut queues = self.cache.pins.lock();
        ensure(!queues.is_freed() || !matches!(self.state, QueueState::New), || {
            Error::new(ErrorKind::CacheNotFound, "the cache was freed before the call took its rows")
                .with("cache_id", self.cache.id())
        })?;
        queues.prepare(self.cache.rows())?;
        Ok(queues)
    }
}

impl CallRows {
    /// Returns the rows of a call that uses none.
    pub fn none() -> Self {
        CallRows(SmallVec::new())
    }

    /// Returns the rows of a call that uses one cache.
    pub fn of(cache: Arc<Cache>, used: RowUse) -> Self {
        CallRows(smallvec![CacheRows::new(cache, used)])
    }

    /// Returns the rows of `src` that are read and those of `dst` that are written. Both may be the same cache.
    pub fn copy((src, reads): (Arc<Cache>, RowList), (dst, writes): (Arc<Cache>, RowList)) -> Self {
        if Arc::ptr_eq(&src, &dst) {
            return Self::of(src, RowUse { reads, writes });
        }
        let ascending = Arc::as_ptr(&src) < Arc::as_ptr(&dst);
        let src = CacheRows::new(src, RowUse { reads, ..RowUse::default() });
        let dst = CacheRows::new(dst, RowUse { writes, ..RowUse::default() });
        CallRows(if ascending { smallvec![src, dst] } else { smallvec![dst, src] })
    }

    /// Returns the rows of a call that uses any number of caches. A cache may occur more than once.
    pub fn of_all(mut parts: Vec<(Arc<Cache>, RowUse)>) -> Result<Self> {
        parts.sort_by_key(|(cache, _)| Arc::as_ptr(cache));
        let mut rows = fallible::inline_with_capacity(PINS, parts.len())?;
        for equal in parts.chunk_by(|(a, _), (b, _)| Arc::ptr_eq(a, b)) {
            let all = |list: fn(&RowUse) -> &RowList| {
                let lists = equal.iter().map(|(_, used)| &list(used)[..]);
                let mut all = fallible::inline_with_capacity(PINS, lists.clone().map(<[u64]>::len).sum())?;
                lists.for_each(|list| all.extend_from_slice(list));
                Ok(all)
            };
            let used = RowUse { reads: all(|used| &used.reads)?, writes: all(|used| &used.writes)? };
            rows.push(CacheRows::new(equal[0].0.clone(), used));
        }
        Ok(CallRows(rows))
    }

    /// Takes the rows for a call of this engine, and waits for them in turn. Returns `Err` of kind `Timeout` once
    /// `deadline` has passed, and of kind `Interrupted` if the caller was interrupted while it waited.
    pub fn pin(self, deadline: Deadline) -> Result<Pin> {
        self.pin_for_peer(deadline, || false)
    }

    /// Takes the rows for a request of a peer; otherwise like [`pin`](Self::pin). It passes calls that only wait, if
    /// `passes` says so under the locks of the caches, and if none of them was passed too often.
    pub fn pin_for_peer(self, deadline: Deadline, passes: impl FnOnce() -> bool) -> Result<Pin> {
        let mut locked = self.lock()?;
        let passes = passes() && self.all(&locked, RowQueues::may_pass);
        if self.take_if_free(&mut locked, passes) {
            drop(locked);
            return Ok(Pin(self));
        }
        let readiness = Readiness::new(None);
        let entered = self.enter_locked(&mut locked, passes, &readiness);
        drop(locked);
        self.waiting(entered, readiness)?.pin(deadline)
    }

    /// Takes the rows if they are free and no call waits for them. Returns `None` otherwise, or if there is no memory for their
    /// counters.
    pub fn pin_now(self) -> Option<Pin> {
        let mut locked = self.lock().ok()?;
        let free = self.take_if_free(&mut locked, false);
        drop(locked);
        free.then(|| Pin(self))
    }

    fn take_if_free(&self, locked: &mut [MutexGuard<'_, RowQueues>], passes: bool) -> bool {
        let free = self.all(locked, |queues, used| queues.taken(used, passes).is_none());
        if free {
            self.0.iter().zip(locked.iter_mut()).for_each(|(rows, queues)| queues.take(&rows.used));
        }
        free
    }

    fn all(&self, locked: &[MutexGuard<'_, RowQueues>], holds: impl Fn(&RowQueues, &RowUse) -> bool) -> bool {
        self.0.iter().zip(locked).all(|(rows, queues)| holds(queues, &rows.used))
    }

    /// Puts a call into the queues of its rows. Each time that they have all become free, `on_ready` is called on the
    /// thread that frees the last one, without a lock. It must be short.
    pub fn enter(self, passes: bool, on_ready: Option<Arc<dyn OnReady>>) -> Result<WaitingCall> {
        let readiness = Readiness::new(on_ready);
        let mut locked = self.lock()?;
        let entered = self.enter_locked(&mut locked, passes, &readiness);
        drop(locked);
        self.waiting(entered, readiness)
    }

    /// Enters the queues, and returns the waiters of the call. After an error, they are those that it has entered.
    fn enter_locked(
        &self,
        locked: &mut [MutexGuard<'_, RowQueues>],
        passes: bool,
        readiness: &Arc<Readiness>,
    ) -> (Vec<u32>, Result<()>) {
        let mut waiters = match fallible::with_capacity(PINS, self.0.len()) {
            Ok(waiters) => waiters,
            Err(error) => return (Vec::new(), Err(error)),
        };
        for (CacheRows { cache, used, .. }, queues) in self.0.iter().zip(locked) {
            match queues.enter(used, passes, readiness) {
                Ok(waiter) => waiters.push(waiter),
                Err(error) => return (waiters, Err(error.with("cache_id", cache.id()))),
            }
        }
        (waiters, Ok(()))
    }

    /// Returns the call that has entered the queues, or leaves them after an error. No lock may be held.
    fn waiting(
        mut self,
        (waiters, entered): (Vec<u32>, Result<()>),
        readiness: Arc<Readiness>,
    ) -> Result<WaitingCall> {
        self.0.iter_mut().zip(waiters).for_each(|(rows, waiter)| rows.state = QueueState::Waiting(waiter));
        let waiting = WaitingCall { rows: self, readiness };
        entered.map(|()| waiting)
    }

    /// Locks the rows of all caches.
    fn lock(&self) -> Result<SmallVec<[MutexGuard<'_, RowQueues>; 2]>> {
        let mut locked = fallible::inline_with_capacity(PINS, self.0.len())?;
        for rows in &self.0 {
            locked.push(rows.lock()?);
        }
        Ok(locked)
    }
}

impl WaitingCall {
    /// Whether all rows are free. Another call may take one before this call does.
    pub fn is_ready(&self) -> bool {
        self.readiness.is_ready()
    }

    /// Takes the rows once they are free. Fails as [`CallRows::pin`] does.
    pub fn pin(mut self, deadline: Deadline) -> Result<Pin> {
        loop {
            {
                let mut locked = self.rows.lock()?;
                if self.readiness.is_ready() {
                    for (rows, queues) in self.rows.0.iter().zip(locked.iter_mut()) {
                        if let Some(waiter) = rows.waiter() {
                            queues.begin(waiter, &rows.used);
                        }
                    }
                    drop(locked);
                    return Ok(Pin(CallRows(std::mem::take(&mut self.rows.0))));
                }
            }
            let doing = "waiting for blocks that another call is copying";
            if deadline.passed() {
                return Err(self.named(deadline.error(doing)));
            }
            self.readiness.wait(deadline.wait_limit());
            deadline.interruption(doing).map_err(|error| self.named(error))?;
        }
    }

    /// Adds a row for which the call waits to an error.
    pub fn named(&self, error: Error) -> Error {
        let blocking = self.rows.0.iter().find_map(|rows| {
            let row = rows.cache.pins.lock().blocking(rows.waiter()?);
            row.map(|row| (rows.cache.id(), row))
        });
        match blocking {
            Some((cache, row)) => error.with("cache_id", cache).with("row", row),
            None => error,
        }
    }
}

impl Drop for WaitingCall {
    fn drop(&mut self) {
        let mut ready = ReadyCalls::default();
        for rows in &self.rows.0 {
            let Some(waiter) = rows.waiter() else { continue };
            ready.take(&mut rows.cache.pins.lock(), |queues| queues.withdraw(waiter));
        }
    }
}

/// The calls that have become ready because rows were given back. Drop notifies them; there must be no lock then.
#[derive(Debug, Default)]
pub struct ReadyCalls(Vec<Arc<Readiness>>);

impl ReadyCalls {
    fn take(&mut self, queues: &mut RowQueues, change: impl FnOnce(&mut RowQueues) -> bool) {
        if change(queues) {
            queues.take_ready(&mut self.0);
        }
    }
}

impl Drop for ReadyCalls {
    fn drop(&mut self) {
        self.0.drain(..).for_each(Readiness::notify);
    }
}

impl Pin {
    /// Returns whether the call had to wait for the rows.
    pub fn waited(&self) -> bool {
        self.0.0.iter().any(|rows| rows.waiter().is_some())
    }

    /// Returns whether the call may write any of the rows. In unordered memory, any call may.
    pub fn may_write(&self) -> bool {
        self.0.0.iter().any(|rows| !rows.used.writes.is_empty() || rows.cache.is_unordered())
    }

    /// Gives back the rows and the caches. The calls that may begin now are notified when the result is dropped.
    pub fn release(mut self) -> ReadyCalls {
        self.give_back()
    }

    fn give_back(&mut self) -> ReadyCalls {
        let mut ready = ReadyCalls::default();
        for CacheRows { cache, used, .. } in &std::mem::take(&mut self.0.0) {
            ready.take(&mut cache.pins.lock(), |queues| queues.release(used));
        }
        ready
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        drop(self.give_back());
    }
}

/// Returns the rows of a call that waits until no call uses any row of `cache`, which was freed. From now on, no new call takes any.
pub fn all_rows(cache: &Arc<Cache>) -> Result<CallRows> {
    let step = {
        let mut queues = cache.pins.lock();
        queues.set_freed();
        queues.step()
    };
    let Some(step) = step else { return Ok(CallRows::none()) };
    let all = (0..cache.rows()).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    let writes = fallible::collect_growing(PINS, all.size_hint().0, all)?.into();
    let used = RowUse { writes, ..RowUse::default() };
    let rows = CacheRows { cache: cache.clone(), used, state: QueueState::Freeing };
    Ok(CallRows(smallvec![rows]))
}

/// Waits until no call uses any row of `cache`, which was freed.
pub fn unpinned(cache: &Arc<Cache>, deadline: Deadline) -> Result<()> {
    all_rows(cache)?.pin(deadline).map(drop)
}

/// Returns the number of consecutive rows that share one pin counter. To pin all of them, naming one is
/// enough.
pub fn rows_of_a_pin(cache: &Cache) -> u64 {
    1 << counter_shift(cache.rows())
}
