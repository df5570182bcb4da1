//! Logs one hint if peers read registered memory at half speed because it lies in small pages.
//!
//! Reads through the kernel leave no trace at the owner, so the check runs when the address of the memory is
//! sent to a peer. The pages belong to the caller and are not changed here. `huge_pages="eager"` merges them
//! when the memory is registered.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::memory::{OwnPages, Tensors};
use crate::model::CacheId;

/// Maximum number of checks of one engine. A later check may find memory that was not touched before.
const MAX_CHECKS: u32 = 64;
/// Maximum number of units that are checked in a cache, spread over it. Each takes a system call.
const SAMPLES: usize = 32;

/// Whether the hint was logged, and how often pages were checked.
#[derive(Debug, Default)]
pub struct SmallPageHint {
    given: AtomicBool,
    checks: AtomicU32,
}

impl SmallPageHint {
    /// Records that the address of `tensors` is sent to a peer which reads through the kernel. Logs the hint,
    /// once, if most of the pages that are present are small. Logs nothing if the kernel does not report page
    /// sizes (before Linux 6.7).
    pub fn described_to_peer(&self, cache: CacheId, tensors: &Tensors) {
        let done = self.given.load(Ordering::Relaxed) || self.checks.load(Ordering::Relaxed) >= MAX_CHECKS;
        if done || self.checks.fetch_add(1, Ordering::Relaxed) >= MAX_CHECKS {
            return;
        }
        if mostly_small(tensors) && !self.given.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "llm_datadist::huge_pages",
                "cache {cache}: peers read this registered memory by process id, and it lies in small pages: such reads \
                 reach about half the speed. huge_pages=\"eager\" puts it into huge pages when it is registered, \
                 and so does madvise(MADV_HUGEPAGE) before it is first written. This hint is given once"
            );
        }
    }
}

/// Returns whether most units of registered memory, of those that are present, lie in small pages.
fn mostly_small(tensors: &Tensors) -> bool {
    let units = tensors.whole_units();
    let Some(pages) = OwnPages::open().filter(|_| !units.is_empty()) else { return false };
    let every = units.len().div_ceil(SAMPLES);
    let known: Vec<bool> = units.iter().step_by(every).filter_map(|&at| pages.huge(at)).collect();
    let huge = known.iter().filter(|&&huge| huge).count();
    !known.is_empty() && huge * 2 < known.len()
}
