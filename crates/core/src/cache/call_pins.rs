//! The rows that one call uses, in one cache or in two, and the pins on them.
//!
//! All rows of a call are taken at once, and a call that must wait claims its place in both caches at once. So a
//! call never holds rows while it waits for others, and two calls that meet in both caches wait in one order. The
//! rows of two caches are locked in the order of their addresses.

use std::sync::Arc;
use std::time::Duration;

use super::cache::Cache;
use super::row_pins::{RowUse, Rows, Waiter};
use crate::error::Result;
use crate::sync::MutexGuard;

/// Rows of a cache that are held for one call, together with the cache; released on drop.
#[derive(Debug)]
pub struct Pin {
    cache: Arc<Cache>,
    used: RowUse,
}

/// The pins of one call: one for each of its caches.
pub type Pins = [Option<Pin>; 2];

/// The places of a waiting call in the queues of its caches.
pub(super) type Tickets = [u64; 2];

/// The rows that one call uses. The caches ascend by address.
#[derive(Debug)]
pub struct RowsOfCall([Option<(Arc<Cache>, RowUse)>; 2]);

impl RowsOfCall {
    /// Returns the rows of `src` that are read, and those of `dst` that are written.
    pub fn new((src, reads): (Arc<Cache>, Vec<u64>), (dst, writes): (Arc<Cache>, Vec<u64>)) -> Self {
        if Arc::ptr_eq(&src, &dst) {
            return Self::of_one(src, RowUse { reads, writes, passes: false });
        }
        let first = Arc::as_ptr(&src) < Arc::as_ptr(&dst);
        let src = Some((src, RowUse { reads, ..RowUse::default() }));
        let dst = Some((dst, RowUse { writes, ..RowUse::default() }));
        RowsOfCall(if first { [src, dst] } else { [dst, src] })
    }

    /// Returns the rows of a call that uses one cache.
    pub fn of_one(cache: Arc<Cache>, used: RowUse) -> Self {
        RowsOfCall([Some((cache, used)), None])
    }

    /// Locks the rows of all caches. `Err(OutOfMemory)` if the counters of a cache cannot be allocated.
    pub(super) fn lock(&self) -> Result<LockedRows<'_>> {
        let [first, second] = &self.0;
        let first = first.as_ref().map(LockedCache::new).transpose()?;
        Ok(LockedRows([first, second.as_ref().map(LockedCache::new).transpose()?]))
    }

    /// Returns the pins on rows that [`LockedRows::take`] has taken.
    pub(super) fn pins(self) -> Pins {
        self.0.map(|part| part.map(|(cache, used)| Pin { cache, used }))
    }

    /// Has calls that waited behind this one try again.
    pub(super) fn wake_others(&self) {
        self.0.iter().flatten().for_each(|(cache, _)| wake(cache));
    }
}

struct LockedCache<'a> {
    cache: &'a Arc<Cache>,
    used: &'a RowUse,
    rows: MutexGuard<'a, Rows>,
}

impl<'a> LockedCache<'a> {
    fn new((cache, used): &'a (Arc<Cache>, RowUse)) -> Result<Self> {
        let mut rows = cache.pins.rows.lock();
        if rows.held.is_empty() {
            rows.prepare(cache.geometry().rows())?;
        }
        Ok(LockedCache { cache, used, rows })
    }
}

/// The rows of a call while their caches are locked.
pub(super) struct LockedRows<'a>([Option<LockedCache<'a>>; 2]);

impl<'a> LockedRows<'a> {
    /// Returns a row, with its cache, for which the call must wait, because another call holds it or claimed it
    /// earlier.
    pub(super) fn conflict(&self, tickets: Option<Tickets>) -> Option<(&'a Arc<Cache>, u64)> {
        self.0.iter().enumerate().find_map(|(at, part)| {
            let LockedCache { cache, used, rows } = part.as_ref()?;
            rows.conflict(used, tickets.map(|tickets| tickets[at])).map(|row| (*cache, row))
        })
    }

    /// Claims the rows behind all calls that already wait.
    pub(super) fn claim(&mut self, waiter: Option<&Arc<dyn Waiter>>) -> Result<Tickets> {
        let mut tickets = Tickets::default();
        for at in 0..tickets.len() {
            let Some(part) = &mut self.0[at] else { continue };
            match part.rows.claim(part.used, waiter.cloned()) {
                Ok(ticket) => tickets[at] = ticket,
                Err(error) => {
                    let error = error.with("cache_id", part.cache.id());
                    self.withdraw(Some(tickets));
                    return Err(error);
                }
            }
        }
        Ok(tickets)
    }

    /// Removes the claims of the call.
    pub(super) fn withdraw(&mut self, tickets: Option<Tickets>) {
        for (part, ticket) in self.0.iter_mut().zip(tickets.into_iter().flatten()) {
            part.iter_mut().for_each(|part| part.rows.claims.retain(|claim| claim.ticket != ticket));
        }
    }

    /// Takes all rows, and removes the claims of the call.
    pub(super) fn take(&mut self, tickets: Option<Tickets>) {
        self.withdraw(tickets);
        self.0.iter_mut().flatten().for_each(|part| part.rows.take(part.used));
    }

    /// Unlocks all caches, and waits at most `limit` until rows of `cache` are released.
    pub(super) fn wait(self, cache: &Arc<Cache>, limit: Duration) {
        let own = self.0.into_iter().flatten().filter(|part| Arc::ptr_eq(part.cache, cache));
        // Dropping the iterator unlocks the other cache first.
        let Some(rows) = own.map(|part| part.rows).last() else { return };
        drop(cache.pins.freed.wait_timeout(rows, limit));
    }
}

/// Has the calls that wait for rows of `cache` try again.
fn wake(cache: &Cache) {
    cache.pins.freed.notify_all();
    let mut after = 0;
    loop {
        let free = cache.pins.rows.lock().next_free(after);
        let Some((ticket, waiter)) = free else { return };
        waiter.try_again();
        after = ticket;
    }
}

impl Pin {
    #[cfg(feature = "testing")]
    pub fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut rows = self.cache.pins.rows.lock();
        rows.give_back(&self.used);
        let waiting = !rows.claims.is_empty();
        drop(rows);
        if waiting {
            wake(&self.cache);
        }
    }
}
