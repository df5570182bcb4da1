//! The queues of the rows of one cache: which calls use a row, and which calls wait for it, in order.
//!
//! This is bookkeeping under the lock of the cache: it waits for nothing and wakes nobody. A call takes all its rows
//! at once, or enters the queues of all of them. An entry is *open* if the row is free for it and no earlier entry
//! of the row conflicts with it. The open entries of a queue are at its front, so each operation touches only entries
//! whose state changes (`tests/integration/row_queues.rs` compares with a naive reference model).

use std::sync::Arc;

use super::readiness::Readiness;
use crate::error::Result;
use crate::fallible;
use crate::model::RowList;

/// Marks a row that a writer uses; any other number counts the readers.
const WRITER: u32 = u32::MAX;
/// Marks the end of a queue or list.
const NONE: u32 = u32::MAX;

/// Name of these lists in out-of-memory errors.
pub(super) const PINS: &str = "the pins of a cache";

/// Maximum number of counters for one cache. With more rows, neighbouring rows share a counter, and then
/// exclude each other too.
const MAX_COUNTERS: u64 = 1 << 20;

/// How many requests of peers may pass a waiting call in one row. Beyond that, they wait behind it.
const MAX_PASSES: u16 = 1024;

/// Memory for this many entries is kept when no call waits.
const MIN_CAPACITY: usize = 4096;

/// The rows that one call reads and writes in one cache. A row may occur more than once.
#[derive(Debug, Default)]
pub struct RowUse {
    pub reads: RowList,
    /// Rows that are written. A row in both lists is used as written.
    pub writes: RowList,
}

/// The rows of one cache, with the calls that use them and wait for them.
#[derive(Debug, Default)]
pub(super) struct RowQueues {
    /// One for every `1 << shift` rows; empty until the first call.
    rows: Vec<Row>,
    shift: u32,
    entries: Vec<Entry>,
    /// First of the unused entries, which are linked by `next`.
    unused_entry: u32,
    waiters: Vec<Waiter>,
    /// First of the unused waiters, which are linked by `entry`.
    unused_waiter: u32,
    /// Number of waiters in use.
    waiting: usize,
    /// Waiters whose entries have all become open, each at most once.
    ready: Vec<u32>,
    /// Whether the cache was freed, so that no new call may use its rows.
    freed: bool,
}

/// One row, or neighbouring rows that share a counter.
#[derive(Clone, Copy, Debug)]
struct Row {
    /// Number of readers, or [`WRITER`].
    users: u32,
    first: u32,
    last: u32,
}

/// A call in the queue of one row.
#[derive(Clone, Copy, Debug)]
struct Entry {
    waiter: u32,
    row: u32,
    before: u32,
    next: u32,
    /// The next entry of the same call.
    sibling: u32,
    /// How many requests of peers have passed it.
    passed: u16,
    writes: bool,
    open: bool,
}

/// A call that waits for rows of this cache. Unused if `readiness` is `None`.
#[derive(Debug)]
struct Waiter {
    readiness: Option<Arc<Readiness>>,
    /// The first of its entries, which are linked by `sibling`.
    entry: u32,
    /// Number of its entries that are not open.
    blocked: usize,
    passes: bool,
    /// Whether the list `ready` contains this waiter.
    listed: bool,
}

impl Row {
    /// Whether the calls that use the row admit one more.
    fn admits(self, writes: bool) -> bool {
        if writes { self.users == 0 } else { self.users != WRITER }
    }
}

/// Returns by how many bits the number of a row is shifted to that of its counter, in a cache of `rows` rows.
pub(super) fn counter_shift(rows: u64) -> u32 {
    let mut shift = 0;
    while rows >> shift > MAX_COUNTERS {
        shift += 1;
    }
    shift
}

impl RowQueues {
    /// Allocates the counters for a cache of `rows` rows, once.
    pub(super) fn prepare(&mut self, rows: u64) -> Result<()> {
        if !self.rows.is_empty() {
            return Ok(());
        }
        self.shift = counter_shift(rows);
        (self.unused_entry, self.unused_waiter) = (NONE, NONE);
        let free = Row { users: 0, first: NONE, last: NONE };
        self.rows = fallible::filled(PINS, free, self.index(rows) + 1)?;
        Ok(())
    }

    /// Notes that the cache was freed.
    pub(super) fn set_freed(&mut self) {
        self.freed = true;
    }

    /// Whether the cache was freed.
    pub(super) fn is_freed(&self) -> bool {
        self.freed
    }

    /// Returns the number of consecutive rows that share a counter; `None` before the first call.
    pub(super) fn step(&self) -> Option<u64> {
        (!self.rows.is_empty()).then_some(1 << self.shift)
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_COUNTERS")]
    fn index(&self, row: u64) -> usize {
        (row >> self.shift) as usize
    }

    /// Returns a row that keeps a call from taking its rows now: one that another call uses, or for which another
    /// call waits that this one does not pass.
    pub(super) fn taken(&self, used: &RowUse, passes: bool) -> Option<u64> {
        let taken = |row: u64, writes| {
            let row = self.rows[self.index(row)];
            let last_peer = if passes { self.last_that_passes(row) } else { row.last };
            !row.admits(writes) || self.conflicts(row.first, last_peer, writes)
        };
        let written = used.writes.iter().find(|row| taken(**row, true));
        written.or_else(|| used.reads.iter().find(|row| taken(**row, false))).copied()
    }

    /// Whether a request of a peer may pass the calls that wait for its rows. It passes all or none: otherwise a call
    /// could go before it in one row and behind it in another.
    pub(super) fn may_pass(&self, used: &RowUse) -> bool {
        let may_pass = |row: u64, writes| {
            let next = self.entries.get(self.first_passed(self.index(row)) as usize);
            next.is_none_or(|next| !(writes || next.writes) || next.passed < MAX_PASSES)
        };
        used.writes.iter().all(|row| may_pass(*row, true))
            && used.reads.iter().all(|row| may_pass(*row, false))
    }

    /// Returns the last of the entries at the front of a queue that are requests of peers.
    fn last_that_passes(&self, row: Row) -> u32 {
        let (mut last, mut next) = (NONE, row.first);
        while let Some(entry) = self.entries.get(next as usize) {
            if !self.waiters[entry.waiter as usize].passes {
                break;
            }
            (last, next) = (next, entry.next);
        }
        last
    }

    /// Whether an entry from `first` to `last` conflicts with a call.
    fn conflicts(&self, first: u32, last: u32, writes: bool) -> bool {
        let mut at = if last == NONE { NONE } else { first };
        while let Some(entry) = self.entries.get(at as usize) {
            if writes || entry.writes {
                return true;
            }
            at = if at == last { NONE } else { entry.next };
        }
        false
    }

    /// Takes rows that [`taken`](Self::taken) has found free.
    pub(super) fn take(&mut self, used: &RowUse) {
        for &row in &used.writes {
            let row = self.index(row);
            if self.rows[row].users != WRITER {
                self.rows[row].users = WRITER;
                self.note_pass(self.first_passed(row), true);
            }
        }
        for &row in &used.reads {
            let row = self.index(row);
            // A WRITER here is this call itself.
            if self.rows[row].users != WRITER {
                self.rows[row].users += 1;
                self.note_pass(self.first_passed(row), false);
            }
        }
    }

    /// Returns the first entry of a row that is no request of a peer.
    fn first_passed(&self, row: usize) -> u32 {
        let row = self.rows[row];
        let last = self.last_that_passes(row);
        self.entries.get(last as usize).map_or(row.first, |last| last.next)
    }

    /// Notes that a call goes before the entries from `first` on.
    fn note_pass(&mut self, first: u32, writes: bool) {
        if first == NONE {
            return;
        }
        let entry = &mut self.entries[first as usize];
        if writes || entry.writes {
            entry.passed = entry.passed.saturating_add(1);
            self.close_from(first);
        }
    }

    /// Puts a call into the queues of all its rows. It may [`begin`](Self::begin) once nothing blocks `readiness`.
    pub(super) fn enter(&mut self, used: &RowUse, passes: bool, readiness: &Arc<Readiness>) -> Result<u32> {
        let waiter = self.new_waiter(used, passes, readiness)?;
        for (rows, writes) in [(&used.writes, true), (&used.reads, false)] {
            for &row in rows {
                self.enter_row(waiter, self.index(row), writes);
            }
        }
        if self.waiters[waiter as usize].blocked > 0 {
            readiness.block();
        }
        Ok(waiter)
    }

    /// Makes room for a waiter and its entries, and returns the waiter.
    #[expect(clippy::cast_possible_truncation, reason = "fewer waiters than fit into memory")]
    fn new_waiter(&mut self, used: &RowUse, passes: bool, readiness: &Arc<Readiness>) -> Result<u32> {
        fallible::grow(PINS, &mut self.entries, used.reads.len() + used.writes.len())?;
        fallible::grow(PINS, &mut self.waiters, 1)?;
        let unlisted = self.waiters.len() + 1 - self.ready.len();
        fallible::grow(PINS, &mut self.ready, unlisted)?;
        self.waiting += 1;
        let new =
            Waiter { readiness: Some(readiness.clone()), entry: NONE, blocked: 0, passes, listed: false };
        if self.unused_waiter == NONE {
            self.waiters.push(new);
            return Ok(self.waiters.len() as u32 - 1);
        }
        let slot = self.unused_waiter;
        let unused = &mut self.waiters[slot as usize];
        self.unused_waiter = unused.entry;
        *unused = Waiter { listed: unused.listed, ..new };
        Ok(slot)
    }

    fn enter_row(&mut self, waiter: u32, row: usize, writes: bool) {
        let (before, next) = self.position(waiter, row);
        let is_own = |entry: u32| entry != NONE && self.entries[entry as usize].waiter == waiter;
        // A row that occurs again. Writes are entered first, so the entry has the stronger use.
        if is_own(before) || is_own(self.rows[row].last) {
            return;
        }
        let open = self.would_open(row, before, writes);
        let sibling = self.waiters[waiter as usize].entry;
        #[expect(clippy::cast_possible_truncation, reason = "at most MAX_COUNTERS")]
        let entry = Entry { waiter, row: row as u32, before, next, sibling, passed: 0, writes, open };
        let entry = self.new_entry(entry);
        self.waiters[waiter as usize].entry = entry;
        self.waiters[waiter as usize].blocked += usize::from(!open);
        self.link(row, before, next, entry);
        self.note_pass(next, writes);
    }

    /// Returns the entries between which a call enters the queue of a row: at its end, or behind the requests of
    /// other peers.
    fn position(&self, waiter: u32, row: usize) -> (u32, u32) {
        let row = self.rows[row];
        if !self.waiters[waiter as usize].passes {
            return (row.last, NONE);
        }
        let last = self.last_that_passes(row);
        (last, self.entries.get(last as usize).map_or(row.first, |last| last.next))
    }

    /// Whether an entry behind `before` is open.
    fn would_open(&self, row: usize, before: u32, writes: bool) -> bool {
        let before = self.entries.get(before as usize);
        let behind = before.is_none_or(|before| before.open && !before.writes && !writes);
        behind && self.rows[row].admits(writes)
    }

    #[expect(clippy::cast_possible_truncation, reason = "fewer entries than fit into memory")]
    fn new_entry(&mut self, entry: Entry) -> u32 {
        if self.unused_entry == NONE {
            self.entries.push(entry);
            return self.entries.len() as u32 - 1;
        }
        let slot = self.unused_entry;
        self.unused_entry = self.entries[slot as usize].next;
        self.entries[slot as usize] = entry;
        slot
    }

    /// Takes the rows of a call that nothing blocks, and removes its entries.
    pub(super) fn begin(&mut self, waiter: u32, used: &RowUse) {
        self.remove(waiter, |_, _| ());
        for &row in &used.writes {
            let row = self.index(row);
            self.rows[row].users = WRITER;
        }
        for &row in &used.reads {
            let row = self.index(row);
            if self.rows[row].users != WRITER {
                self.rows[row].users += 1;
            }
        }
    }

    /// Removes the entries of a call that does not begin. Returns whether [`take_ready`](Self::take_ready) has a call.
    pub(super) fn withdraw(&mut self, waiter: u32) -> bool {
        self.remove(waiter, Self::open_from);
        !self.ready.is_empty()
    }

    /// Removes the entries of a call, and calls `removed` with the entry behind each.
    fn remove(&mut self, waiter: u32, removed: impl Fn(&mut Self, u32)) {
        let mut at = self.waiters[waiter as usize].entry;
        while at != NONE {
            let entry = self.entries[at as usize];
            self.unlink(entry);
            self.entries[at as usize].next = std::mem::replace(&mut self.unused_entry, at);
            removed(self, entry.next);
            at = entry.sibling;
        }
        let unused = &mut self.waiters[waiter as usize];
        (unused.readiness, unused.blocked) = (None, 0);
        unused.entry = std::mem::replace(&mut self.unused_waiter, waiter);
        self.waiting -= 1;
        if self.waiting == 0 && self.entries.capacity() > MIN_CAPACITY {
            (self.entries, self.unused_entry) = (Vec::new(), NONE);
        }
    }

    fn link(&mut self, row: usize, before: u32, next: u32, entry: u32) {
        match self.entries.get_mut(before as usize) {
            Some(before) => before.next = entry,
            None => self.rows[row].first = entry,
        }
        match self.entries.get_mut(next as usize) {
            Some(next) => next.before = entry,
            None => self.rows[row].last = entry,
        }
    }

    fn unlink(&mut self, Entry { row, before, next, .. }: Entry) {
        match self.entries.get_mut(before as usize) {
            Some(before) => before.next = next,
            None => self.rows[row as usize].first = next,
        }
        match self.entries.get_mut(next as usize) {
            Some(next) => next.before = before,
            None => self.rows[row as usize].last = before,
        }
    }

    /// Gives back the rows of a call. Returns whether [`take_ready`](Self::take_ready) has a call.
    pub(super) fn release(&mut self, used: &RowUse) -> bool {
        for &row in &used.reads {
            let row = self.index(row);
            if self.rows[row].users != WRITER {
                self.rows[row].users -= 1;
                self.row_released(row);
            }
        }
        for &row in &used.writes {
            let row = self.index(row);
            if self.rows[row].users == WRITER {
                self.rows[row].users = 0;
                self.row_released(row);
            }
        }
        !self.ready.is_empty()
    }

    fn row_released(&mut self, row: usize) {
        let Row { users, first, .. } = self.rows[row];
        if users == 0 && first != NONE {
            self.open_from(first);
        }
    }

    /// Opens `entry` and those behind it, as far as nothing blocks them.
    fn open_from(&mut self, mut entry: u32) {
        while let Some(&Entry { waiter, row, before, next, writes, open, .. }) =
            self.entries.get(entry as usize)
        {
            if open || !self.would_open(row as usize, before, writes) {
                return;
            }
            self.entries[entry as usize].open = true;
            let of_call = &mut self.waiters[waiter as usize];
            of_call.blocked -= 1;
            if of_call.blocked == 0
                && of_call.readiness.as_ref().is_some_and(|readiness| readiness.unblock())
                && !of_call.listed
            {
                of_call.listed = true;
                self.ready.push(waiter);
            }
            entry = next;
        }
    }

    /// Closes `entry` and those behind it, because a call goes before them.
    fn close_from(&mut self, mut entry: u32) {
        while let Some(closed) = self.entries.get_mut(entry as usize).filter(|entry| entry.open) {
            closed.open = false;
            entry = closed.next;
            let of_call = &mut self.waiters[closed.waiter as usize];
            of_call.blocked += 1;
            if of_call.blocked == 1
                && let Some(readiness) = &of_call.readiness
            {
                readiness.block();
            }
        }
    }

    /// Adds the calls to `calls` that nothing blocks any more, each once for each time that this has become so.
    pub(super) fn take_ready(&mut self, calls: &mut Vec<Arc<Readiness>>) {
        for waiter in self.ready.drain(..) {
            let waiter = &mut self.waiters[waiter as usize];
            waiter.listed = false;
            calls.extend(waiter.readiness.clone());
        }
    }

    /// Returns a row for which a waiting call waits.
    pub(super) fn blocking(&self, waiter: u32) -> Option<u64> {
        let mut at = self.waiters[waiter as usize].entry;
        while let Some(entry) = self.entries.get(at as usize) {
            if !entry.open {
                return Some(u64::from(entry.row) << self.shift);
            }
            at = entry.sibling;
        }
        None
    }
}
