//! Commits the memory of pools, in huge pages as far as the kernel permits (`huge_pages="eager"`).

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::copy::CopyEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{MergeRefusal, Region, usable_under};
use crate::model::Deadline;

/// Number of units that a worker commits in one part of the work.
const UNITS_OF_A_PART: u64 = 16;

/// What the kernel merged of one pool, and the error that prevented more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Bytes that were merged.
    pub bytes: u64,
    /// The kernel's error number, if the kernel merges nothing.
    pub errno: Option<i32>,
}

/// Commits all of `pools`, in huge pages as far as the kernel permits, on the workers of `engine`. Returns
/// what was merged of each; nothing of a pool that is `None`.
///
/// Returns `Err` of kind [`ErrorKind::OutOfMemory`], before anything is committed, if there is not enough
/// memory.
pub fn commit_pools<const N: usize>(
    pools: [Option<Arc<Region>>; N],
    engine: &CopyEngine,
) -> Result<[Merged; N]> {
    // Regions of reserved huge pages are not counted, because their memory is set aside already.
    let ordinary = pools.iter().flatten().filter(|region| region.merges());
    let wanted: u64 = ordinary.map(|region| region.units() * Region::UNIT_BYTES).sum();
    let usable = usable_under(Path::new("/"));
    if wanted > usable {
        let text = "not enough memory to commit the pools (huge_pages=\"eager\")";
        let error = Error::new(ErrorKind::OutOfMemory, text).with("pool_bytes", wanted);
        return Err(error.with("usable_bytes", usable));
    }
    let mut merged = [Merged::default(); N];
    for (merged, region) in merged.iter_mut().zip(pools) {
        if let Some(region) = region {
            *merged = PoolCommit::new(region).run(engine)?;
        }
    }
    Ok(merged)
}

/// The commit of one pool.
#[derive(Debug)]
struct PoolCommit {
    region: Arc<Region>,
    merged: AtomicU64,
    refusal: OnceLock<i32>,
}

impl PoolCommit {
    fn new(region: Arc<Region>) -> PoolCommit {
        PoolCommit { region, merged: 0.into(), refusal: OnceLock::new() }
    }

    fn run(self, engine: &CopyEngine) -> Result<Merged> {
        let parts = usize::try_from(self.region.units().div_ceil(UNITS_OF_A_PART)).unwrap_or(usize::MAX);
        let shared = Arc::new(self);
        let commit = shared.clone();
        // No deadline: this is work and no wait, and it takes as long as the memory is large.
        engine.workers().run(
            Arc::new(move |part| commit.part(part)),
            parts,
            Deadline::after(Duration::MAX),
        )?;
        Ok(shared.merged())
    }

    /// Commits the units of one part of the pool.
    fn part(&self, part: usize) -> Result<()> {
        let first = part as u64 * UNITS_OF_A_PART;
        for unit in first..(first + UNITS_OF_A_PART).min(self.region.units()) {
            match self.region.commit(unit)? {
                Ok(()) => {
                    self.merged.fetch_add(Region::UNIT_BYTES, Ordering::Relaxed);
                }
                // A region of reserved huge pages needs no merging, so only a region of ordinary pages
                // records the refusal.
                Err(refusal) if self.region.merges() => self.refused(refusal),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Records `refusal` if it applies to the whole pool: the kernel does not support or does not permit
    /// merging if this is its answer before anything of the pool was merged.
    fn refused(&self, refusal: MergeRefusal) {
        if let MergeRefusal::Unable(errno) = refusal
            && self.merged.load(Ordering::Relaxed) == 0
        {
            let _ = self.refusal.set(errno);
        }
    }

    fn merged(&self) -> Merged {
        Merged { bytes: self.merged.load(Ordering::Relaxed), errno: self.refusal.get().copied() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_reserved_is_committed_and_no_refusal() {
        let region =
            Arc::new(Region::shared("test", 4 * Region::UNIT_BYTES).unwrap().made_of_reserved_pages());
        assert!(!region.merges());
        let commit = PoolCommit::new(region.clone());
        commit.part(0).unwrap();
        assert_eq!(region.committed_bytes(), 4 * Region::UNIT_BYTES);
        assert_eq!(commit.merged(), Merged::default());
    }
}
