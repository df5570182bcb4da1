//! All of a region committed at once, in huge pages as far as the kernel gives them, by the workers of an engine.
//!
//! Not for: what is merged in the background (above).

use std::sync::Arc;

use super::pool_merge::Merging;
use crate::copy::Work;
use crate::error::Result;

/// How many units a worker commits at once.
pub(super) const UNITS_OF_A_PART: u64 = 16;

/// All of a region, to be committed.
pub(super) struct Commit(pub(super) Arc<Merging>);

impl Work for Commit {
    fn unit(&self, part: usize) -> Result<()> {
        let Commit(merging) = self;
        let first = part as u64 * UNITS_OF_A_PART;
        for unit in first..(first + UNITS_OF_A_PART).min(merging.region.units()) {
            match merging.region.commit(unit)? {
                Ok(()) => merging.committed(unit),
                // What is reserved for it lies in huge pages as it is.
                Err(refusal) if merging.region.merges() => {
                    merging.refused(refusal);
                }
                Err(_) => {}
            }
        }
        Ok(())
    }
}
