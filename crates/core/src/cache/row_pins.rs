//! The pinned rows of one cache: which are read, which are written, and which calls wait, in order.

use std::fmt::Debug;
use std::sync::Arc;

use hashbrown::HashSet;

use crate::error::Result;
use crate::fallible;
use crate::sync::{Condvar, Mutex};

/// Marks a row that a writer holds; any other number counts its readers.
const WRITER: u32 = u32::MAX;

/// Name of these lists in out-of-memory errors.
pub(super) const PINS: &str = "the pins of a cache";

/// Maximum number of counters for one cache. With more rows, neighbouring rows share a counter, and then
/// exclude each other too.
pub(super) const MAX_COUNTERS: u64 = 1 << 20;

/// The pinned rows of one cache.
#[derive(Debug, Default)]
pub(super) struct RowPins {
    pub(super) rows: Mutex<Rows>,
    pub(super) freed: Condvar,
}

/// Empty until the first pin; then one counter for every `1 << shift` rows.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) held: Vec<u32>,
    pub(super) shift: u32,
    /// Calls that wait, in order of arrival.
    pub(super) claims: Vec<Claim>,
    last_ticket: u64,
}

/// The rows that a waiting call will use. Conflicting calls that arrive later wait behind it.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) ticket: u64,
    reads: HashSet<usize>,
    writes: HashSet<usize>,
    /// The call, if it waits without a thread.
    waiter: Option<Arc<dyn Waiter>>,
}

/// A call that waits for its rows without a thread.
pub(super) trait Waiter: Debug + Send + Sync {
    /// Takes the rows if all of them are free now. Called without a lock.
    fn try_again(&self);
}

/// The rows that one call reads and writes in one cache. A row may occur more than once.
#[derive(Debug, Default)]
pub struct RowUse {
    pub reads: Vec<u64>,
    /// Rows that are written. A row in both lists is held as written.
    pub writes: Vec<u64>,
    /// Whether they pass calls that only wait.
    pub passes: bool,
}

impl Rows {
    pub(super) fn prepare(&mut self, rows: u64) -> Result<()> {
        while rows >> self.shift > MAX_COUNTERS {
            self.shift += 1;
        }
        self.held = fallible::filled(PINS, 0, self.index(rows) + 1)?;
        Ok(())
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_COUNTERS")]
    fn index(&self, row: u64) -> usize {
        (row >> self.shift) as usize
    }

    /// Returns a row in which this call must wait, because another call holds it or claimed it earlier.
    pub(super) fn conflict(&self, used: &RowUse, ticket: Option<u64>) -> Option<u64> {
        let written = used.writes.iter().find(|&&row| self.held[self.index(row)] != 0);
        let read = || used.reads.iter().find(|&&row| self.held[self.index(row)] == WRITER);
        let earlier = || self.claims.iter().take_while(|claim| ticket.is_none_or(|own| claim.ticket < own));
        let claimed = || earlier().filter(|_| !used.passes).find_map(|claim| self.claimed(claim, used));
        written.or_else(read).or_else(claimed).copied()
    }

    fn claimed<'a>(&self, claim: &Claim, used: &'a RowUse) -> Option<&'a u64> {
        let written = |row: &u64| claim.writes.contains(&self.index(*row));
        let touched = |row: &u64| written(row) || claim.reads.contains(&self.index(*row));
        used.writes.iter().find(|row| touched(row)).or_else(|| used.reads.iter().find(|row| written(row)))
    }

    /// Enters a claim behind all others, and returns its ticket. Tickets are above 0 and ascend.
    pub(super) fn claim(&mut self, used: &RowUse, waiter: Option<Arc<dyn Waiter>>) -> Result<u64> {
        let rows = |list: &[u64]| fallible::set(PINS, list.iter().map(|&row| self.index(row)));
        let (reads, writes) = (rows(&used.reads)?, rows(&used.writes)?);
        let ticket = self.last_ticket + 1;
        fallible::push(PINS, &mut self.claims, Claim { ticket, reads, writes, waiter })?;
        self.last_ticket = ticket;
        Ok(ticket)
    }

    /// Returns the first call with a ticket above `after` that waits without a thread and whose rows of this cache
    /// are free.
    pub(super) fn next_free(&self, after: u64) -> Option<(u64, Arc<dyn Waiter>)> {
        let later = self.claims.iter().enumerate().filter(|(_, claim)| claim.ticket > after);
        let mut free = later.filter(|&(at, claim)| claim.waiter.is_some() && !self.blocked(at, claim));
        free.find_map(|(_, claim)| Some((claim.ticket, claim.waiter.clone()?)))
    }

    /// Whether rows of the claim at position `at` are held, or claimed by an earlier call.
    fn blocked(&self, at: usize, claim: &Claim) -> bool {
        let overlaps = |earlier: &Claim| {
            let written = |row: &usize| earlier.writes.contains(row);
            claim.reads.iter().any(written)
                || claim.writes.iter().any(|row| written(row) || earlier.reads.contains(row))
        };
        claim.writes.iter().any(|&row| self.held[row] != 0)
            || claim.reads.iter().any(|&row| self.held[row] == WRITER)
            || self.claims[..at].iter().any(overlaps)
    }

    pub(super) fn take(&mut self, used: &RowUse) {
        for &row in &used.writes {
            let at = self.index(row);
            self.held[at] = WRITER;
        }
        for &row in &used.reads {
            let at = self.index(row);
            // A WRITER here belongs to this call: conflict() found no other one under the same lock.
            if self.held[at] != WRITER {
                self.held[at] += 1;
            }
        }
    }

    pub(super) fn give_back(&mut self, used: &RowUse) {
        for &row in &used.reads {
            let at = self.index(row);
            if self.held[at] != WRITER {
                self.held[at] -= 1;
            }
        }
        for &row in &used.writes {
            let at = self.index(row);
            self.held[at] = 0;
        }
    }
}
