//! Commits all of a region at once, in huge pages as far as the kernel permits, on the workers of an engine.

use std::sync::Arc;

use super::pool_merge::Merging;
use crate::copy::Work;
use crate::error::Result;

/// Number of units that a worker commits in one part of the work.
pub(super) const UNITS_OF_A_PART: u64 = 16;

/// The work of committing all of a region.
pub(super) struct Commit(pub(super) Arc<Merging>);

impl Work for Commit {
    fn unit(&self, part: usize) -> Result<()> {
        let Commit(merging) = self;
        let first = part as u64 * UNITS_OF_A_PART;
        for unit in first..(first + UNITS_OF_A_PART).min(merging.region.units()) {
            match merging.region.commit(unit)? {
                Ok(()) => merging.committed(unit),
                // A region of reserved huge pages needs no merging, so only a region of ordinary pages
                // records the refusal.
                Err(refusal) if merging.region.merges() => {
                    merging.refused(refusal);
                }
                Err(_) => {}
            }
        }
        Ok(())
    }
}
