//! Pins: which rows of a cache are being read or written at this moment.
//!
//! Many readers or one writer. A call pins all its rows before it moves a byte, those of both its caches at once, so
//! calls never wait in a cycle. Calls that conflict get their rows in the order in which they asked, so nobody
//! starves (`tests/integration/row_pins.rs`); the one exception is [`pin_for_peer`].

use std::sync::Arc;

use super::cache::Cache;
use super::call_pins::{Pins, RowsOfCall};
use super::row_pins::{MAX_COUNTERS, PINS, RowUse};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::Deadline;

/// Pins the rows of `src` that are read and those of `dst` that are written. Both may be the same cache;
/// there is one pin then. Returns `Err` of kind `Timeout` once `deadline` has passed, and of kind
/// `Interrupted` if the caller was interrupted while it waited. The functions below do the same.
pub fn pin(
    (src, reads): (&Arc<Cache>, Vec<u64>),
    (dst, writes): (&Arc<Cache>, Vec<u64>),
    deadline: Deadline,
) -> Result<Pins> {
    pin_all(RowsOfCall::new((src.clone(), reads), (dst.clone(), writes)), deadline)
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

pub fn pin_reads(cache: &Arc<Cache>, reads: Vec<u64>, deadline: Deadline) -> Result<Pins> {
    pin_all(RowsOfCall::of_one(cache.clone(), RowUse { reads, ..RowUse::default() }), deadline)
}

/// Pins rows for a request of a peer. With [`RowUse::passes`], the request passes calls that only wait, but not one
/// that holds the rows (`resources/calls_to_peers.rs` has the reason).
pub fn pin_for_peer(cache: &Arc<Cache>, rows: RowUse, deadline: Deadline) -> Result<Pins> {
    pin_all(RowsOfCall::of_one(cache.clone(), rows), deadline)
}

pub fn pin_writes(cache: &Arc<Cache>, writes: Vec<u64>, deadline: Deadline) -> Result<Pins> {
    pin_all(RowsOfCall::of_one(cache.clone(), RowUse { writes, ..RowUse::default() }), deadline)
}

fn pin_all(rows: RowsOfCall, deadline: Deadline) -> Result<Pins> {
    const WAITING: &str = "waiting for blocks that another call is copying";
    let mut tickets = None;
    let mut locked = rows.lock()?;
    let failed = loop {
        let Some((cache, row)) = locked.conflict(tickets) else {
            locked.take(tickets);
            drop(locked);
            return Ok(rows.pins());
        };
        let named = |error: Error| error.with("cache_id", cache.id()).with("row", row);
        if deadline.passed() {
            break named(deadline.error(WAITING));
        }
        if tickets.is_none() {
            match locked.claim(None) {
                Ok(claimed) => tickets = Some(claimed),
                Err(error) => break error,
            }
        }
        // The locks are released before the check for an interruption, because a signal handler may use the
        // caches.
        locked.wait(cache, deadline.nap());
        let interrupted = deadline.interruption(WAITING);
        locked = rows.lock()?;
        if let Err(error) = interrupted {
            break named(error);
        }
    };
    locked.withdraw(tickets);
    drop(locked);
    rows.wake_others();
    Err(failed)
}
