//! Pins: which rows of a cache are being read or written at this moment.
//!
//! Many readers or one writer. A call pins all its rows before it moves a byte: caches in one global order, and
//! all rows of a cache at once, so calls never wait in a cycle. Calls that conflict get a row in order of
//! arrival, so nobody starves (`tests/integration/row_pins.rs`); the one exception is `ahead` in [`pin_reads_for`].

use std::sync::Arc;

use super::cache::Cache;
use super::row_pins::{MAX_COUNTERS, PINS, RowUse};
use crate::error::Result;
use crate::fallible;
use crate::model::Deadline;

/// Rows of a cache that are held for one call, together with the cache; released on drop.
#[derive(Debug)]
pub struct Pin {
    cache: Arc<Cache>,
    used: RowUse,
}

impl Pin {
    #[cfg(feature = "testing")]
    pub fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }
}

/// Pins the rows of `src` that are read and those of `dst` that are written. Both may be the same cache;
/// there is one pin then. Returns `Err` of kind `Timeout` once `deadline` has passed, and of kind
/// `Interrupted` if the caller was interrupted while it waited. The functions below do the same.
pub fn pin(
    (src, reads): (&Arc<Cache>, Vec<u64>),
    (dst, writes): (&Arc<Cache>, Vec<u64>),
    deadline: Deadline,
) -> Result<[Option<Pin>; 2]> {
    if Arc::ptr_eq(src, dst) {
        return Ok([Some(pin_one(src, RowUse { reads, writes, ahead: false }, deadline)?), None]);
    }
    let read = || pin_one(src, RowUse { reads, ..RowUse::default() }, deadline);
    let write = || pin_one(dst, RowUse { writes, ..RowUse::default() }, deadline);
    if Arc::as_ptr(src) < Arc::as_ptr(dst) {
        let read = read()?;
        Ok([Some(read), Some(write()?)])
    } else {
        let write = write()?;
        Ok([Some(read()?), Some(write)])
    }
}

/// Waits until no call uses any row of `cache`.
pub fn unpinned(cache: &Arc<Cache>, deadline: Deadline) -> Result<()> {
    let (count, step) = {
        let rows = cache.pins.rows.lock();
        if rows.held.is_empty() {
            return Ok(());
        }
        (cache.geometry().rows(), 1u64 << rows.shift)
    };
    let all = (0..count).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    let all = fallible::collect_growing(PINS, all.size_hint().0, all)?;
    pin_writes(cache, all, deadline).map(|_| ())
}

/// Returns the number of consecutive rows that share one pin counter. To pin all of them, naming one is
/// enough.
pub fn rows_of_a_pin(cache: &Cache) -> u64 {
    let mut shift = 0;
    while cache.geometry().rows() >> shift > MAX_COUNTERS {
        shift += 1;
    }
    1 << shift
}

pub fn pin_reads(cache: &Arc<Cache>, reads: Vec<u64>, deadline: Deadline) -> Result<Pin> {
    pin_one(cache, RowUse { reads, ..RowUse::default() }, deadline)
}

/// Pins rows that a peer reads.
///
/// With `ahead`, the reader passes writers that are still waiting, but not one that holds the rows. This is
/// for a peer that serves a push of this process at the same time. Without it there could be a cycle: the
/// peer holds the rows into which it reads, the push may wait for these rows, a local writer waits for the
/// push, and the peer's read waits for the writer (`push_pull_and_copy_do_not_deadlock`).
pub fn pin_reads_for(cache: &Arc<Cache>, reads: Vec<u64>, ahead: bool, deadline: Deadline) -> Result<Pin> {
    pin_one(cache, RowUse { reads, writes: vec![], ahead }, deadline)
}

pub fn pin_writes(cache: &Arc<Cache>, writes: Vec<u64>, deadline: Deadline) -> Result<Pin> {
    pin_one(cache, RowUse { writes, ..RowUse::default() }, deadline)
}

fn pin_one(cache: &Arc<Cache>, used: RowUse, deadline: Deadline) -> Result<Pin> {
    let pins = &cache.pins;
    let mut rows = pins.rows.lock();
    if rows.held.is_empty() {
        rows.prepare(cache.geometry().rows())?;
    }
    let mut ticket = None;
    let taken = loop {
        let Some(row) = rows.conflict(&used, ticket) else { break Ok(()) };
        if deadline.passed() {
            let error = deadline.error("waiting for blocks that another call is copying");
            break Err(error.with("cache_id", cache.id()).with("row", row));
        }
        if ticket.is_none() {
            match rows.claim(&used) {
                Ok(claimed) => ticket = Some(claimed),
                Err(error) => break Err(error.with("cache_id", cache.id())),
            }
        }
        // The lock is released before the check for an interruption, because a signal handler may use the
        // cache.
        drop(pins.freed.wait_timeout(rows, deadline.nap()));
        let interrupted = deadline.interruption("waiting for blocks that another call is copying");
        rows = pins.rows.lock();
        if let Err(error) = interrupted {
            break Err(error.with("cache_id", cache.id()).with("row", row));
        }
    };
    if let Some(ticket) = ticket {
        rows.claims.retain(|claim| claim.ticket != ticket);
    }
    match taken {
        Ok(()) => rows.take(&used),
        Err(error) => {
            drop(rows);
            // Calls that waited behind this one may continue.
            pins.freed.notify_all();
            return Err(error);
        }
    }
    drop(rows);
    Ok(Pin { cache: cache.clone(), used })
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut rows = self.cache.pins.rows.lock();
        rows.give_back(&self.used);
        let waiting = !rows.claims.is_empty();
        drop(rows);
        if waiting {
            self.cache.pins.freed.notify_all();
        }
    }
}
