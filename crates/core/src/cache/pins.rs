//! Pins: which rows of a cache are being read or written right now.
//!
//! Any number of calls may read a row at once; one that writes it is alone. A call pins everything it uses before it
//! moves a byte, or waits until its deadline. Caches are pinned in one global order, and the rows of one cache all at
//! once, so two calls never wait for each other in a circle. Calls that meet in a row get it in the order they came, so
//! neither readers nor writers starve (`tests/integration/pin.rs`). Not for: keeping the memory alive, which the `Arc` of the
//! cache in each pin does.

use std::sync::Arc;

use super::cache::Cache;
use super::row_pins::{MOST, PINS, RowUse};
use crate::error::Result;
use crate::fallible;
use crate::model::Deadline;

/// Rows held for one call, and their cache with them; given back on drop.
#[derive(Debug)]
pub struct Pin {
    cache: Arc<Cache>,
    used: RowUse,
}

impl Pin {
    /// The cache that is pinned.
    #[must_use]
    pub fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }
}

/// Pins the rows read of `src` and written of `dst`, which may be one cache. `Err` once `deadline` has passed.
pub fn pin(
    (src, reads): (&Arc<Cache>, Vec<u64>),
    (dst, writes): (&Arc<Cache>, Vec<u64>),
    deadline: Deadline,
) -> Result<[Option<Pin>; 2]> {
    if Arc::ptr_eq(src, dst) {
        return Ok([Some(pin_one(src, RowUse { reads, writes, ahead: false }, deadline)?), None]);
    }
    let read = || pin_one(src, RowUse { reads, writes: vec![], ahead: false }, deadline);
    let write = || pin_one(dst, RowUse { reads: vec![], writes, ahead: false }, deadline);
    if Arc::as_ptr(src) < Arc::as_ptr(dst) {
        let read = read()?;
        Ok([Some(read), Some(write()?)])
    } else {
        let write = write()?;
        Ok([Some(read()?), Some(write)])
    }
}

/// Waits until no call uses any row of `cache`. `Err` once `deadline` has passed.
pub fn unpinned(cache: &Arc<Cache>, deadline: Deadline) -> Result<()> {
    let (count, step) = {
        let rows = cache.pins.locked();
        if rows.held.is_empty() {
            return Ok(());
        }
        (cache.geometry().rows(), 1u64 << rows.shift)
    };
    let all = (0..count).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    let all = fallible::gathered(PINS, all.size_hint().0, all)?;
    pin_writes(cache, all, deadline).map(|_| ())
}

/// Rows that share a number of their pins: naming one of them is enough.
#[must_use]
pub fn rows_of_a_pin(cache: &Cache) -> u64 {
    let mut shift = 0;
    while cache.geometry().rows() >> shift > MOST {
        shift += 1;
    }
    1 << shift
}

/// Pins rows that are read. `Err` once `deadline` has passed.
pub fn pin_reads(cache: &Arc<Cache>, reads: Vec<u64>, deadline: Deadline) -> Result<Pin> {
    pin_one(cache, RowUse { reads, writes: vec![], ahead: false }, deadline)
}

/// Pins rows that a peer reads. With `ahead`, before writers that wait for them, not before one that writes: for a peer that
/// this side is having written. The peer holds the rows that it reads into, the push may wait for those, and the writer for
/// the push: each would wait for the next (`a_pull_meets_a_transfer_and_a_writer`). `Err` once `deadline` has passed.
pub fn pin_reads_for(cache: &Arc<Cache>, reads: Vec<u64>, ahead: bool, deadline: Deadline) -> Result<Pin> {
    pin_one(cache, RowUse { reads, writes: vec![], ahead }, deadline)
}

/// Pins rows that are written. `Err` once `deadline` has passed.
pub fn pin_writes(cache: &Arc<Cache>, writes: Vec<u64>, deadline: Deadline) -> Result<Pin> {
    pin_one(cache, RowUse { reads: vec![], writes, ahead: false }, deadline)
}

fn pin_one(cache: &Arc<Cache>, used: RowUse, deadline: Deadline) -> Result<Pin> {
    let pins = &cache.pins;
    let mut rows = pins.locked();
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
        // The lock is let go before the caller is asked whether it was interrupted: a signal handler may use the cache.
        drop(pins.freed.wait_timeout(rows, deadline.nap()));
        let interrupted = deadline.interruption("waiting for blocks that another call is copying");
        rows = pins.locked();
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
            // Those behind this call may go on.
            pins.freed.notify_all();
            return Err(error);
        }
    }
    drop(rows);
    Ok(Pin { cache: cache.clone(), used })
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut rows = self.cache.pins.locked();
        rows.give_back(&self.used);
        let waiting = !rows.claims.is_empty();
        drop(rows);
        if waiting {
            self.cache.pins.freed.notify_all();
        }
    }
}
