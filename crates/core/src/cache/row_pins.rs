//! The pinned rows of one cache: who reads, who writes, and who waits, in order.

use std::sync::PoisonError;

use hashbrown::HashSet;

use crate::error::Result;
use crate::fallible;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// A row held by one writer; any other number counts its readers.
const WRITER: u32 = u32::MAX;

/// Name of these lists in out-of-memory errors.
pub(super) const PINS: &str = "the pins of a cache";

/// Most numbers one cache keeps. Where there are more rows, neighbours share a number and exclude each other too.
pub(super) const MOST: u64 = 1 << 20;

/// The pinned rows of one cache.
#[derive(Debug, Default)]
pub(super) struct Pins {
    rows: Mutex<Rows>,
    pub(super) freed: Condvar,
}

/// Empty until the first pin, then one number per `1 << shift` rows.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) held: Vec<u32>,
    pub(super) shift: u32,
    /// Calls that wait, in the order they came.
    pub(super) claims: Vec<Claim>,
    last_ticket: u64,
}

/// What a waiting call will use: whoever came later waits behind it.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) ticket: u64,
    reads: HashSet<usize>,
    writes: HashSet<usize>,
}

/// The rows one call reads and writes in one cache; rows may repeat.
#[derive(Debug, Default)]
pub struct RowUse {
    /// Read.
    pub reads: Vec<u64>,
    /// Written; a row in both lists is held as written.
    pub writes: Vec<u64>,
    /// Reads before writers that only wait.
    pub ahead: bool,
}

impl Pins {
    pub(super) fn locked(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rows {
    pub(super) fn prepare(&mut self, rows: u64) -> Result<()> {
        while rows >> self.shift > MOST {
            self.shift += 1;
        }
        self.held = fallible::filled(PINS, 0, self.index(rows) + 1)?;
        Ok(())
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most MOST")]
    fn index(&self, row: u64) -> usize {
        (row >> self.shift) as usize
    }

    /// A row that another call holds, or claimed before this one, in a way that excludes this one.
    pub(super) fn conflict(&self, used: &RowUse, ticket: Option<u64>) -> Option<u64> {
        let written = used.writes.iter().find(|&&row| self.held[self.index(row)] != 0);
        let read = || used.reads.iter().find(|&&row| self.held[self.index(row)] == WRITER);
        let earlier = || self.claims.iter().take_while(|claim| ticket.is_none_or(|own| claim.ticket < own));
        let claimed = || earlier().filter(|_| !used.ahead).find_map(|claim| self.claimed(claim, used));
        written.or_else(read).or_else(claimed).copied()
    }

    fn claimed<'a>(&self, claim: &Claim, used: &'a RowUse) -> Option<&'a u64> {
        let written = |row: &u64| claim.writes.contains(&self.index(*row));
        let touched = |row: &u64| written(row) || claim.reads.contains(&self.index(*row));
        used.writes.iter().find(|row| touched(row)).or_else(|| used.reads.iter().find(|row| written(row)))
    }

    pub(super) fn claim(&mut self, used: &RowUse) -> Result<u64> {
        let rows = |list: &[u64]| fallible::set(PINS, list.iter().map(|&row| self.index(row)));
        let (reads, writes) = (rows(&used.reads)?, rows(&used.writes)?);
        let ticket = self.last_ticket + 1;
        fallible::push(PINS, &mut self.claims, Claim { ticket, reads, writes })?;
        self.last_ticket = ticket;
        Ok(ticket)
    }

    pub(super) fn take(&mut self, used: &RowUse) {
        for &row in &used.writes {
            let at = self.index(row);
            self.held[at] = WRITER;
        }
        for &row in &used.reads {
            let at = self.index(row);
            // A WRITER here is this call's own: conflict() saw none before, under the same lock.
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
