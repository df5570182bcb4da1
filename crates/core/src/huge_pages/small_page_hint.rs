//! One line in the log where peers read registered memory at half speed because it lies in small pages.
//!
//! Reads through the kernel leave no trace at the owner, so being told of the memory is what counts. Not for: changing the
//! pages, which are the caller's own (`lent`, where that is asked for).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::memory::{OwnPages, Tensors};
use crate::model::CacheId;

/// How often an engine looks: what was not touched yet at the first time may be at a later one.
const LOOKS: u32 = 64;
/// Units of a cache that are looked at, spread over it. Each costs a system call.
const SAMPLES: usize = 32;

/// Whether the hint was given, and how often pages were looked at.
#[derive(Debug, Default)]
pub(super) struct Hint {
    given: AtomicBool,
    looks: AtomicU32,
}

impl Hint {
    /// Notes that a peer which reads through the kernel is told of `tensors`. Logs the hint, once, if most of what is there
    /// lies in small pages. Says nothing where the kernel does not tell (before Linux 6.7).
    pub(super) fn described_to_peer(&self, cache: CacheId, tensors: &Tensors) {
        let done = self.given.load(Ordering::Relaxed) || self.looks.load(Ordering::Relaxed) >= LOOKS;
        if done || self.looks.fetch_add(1, Ordering::Relaxed) >= LOOKS {
            return;
        }
        if mostly_small(tensors) && !self.given.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "llm_datadist::huge_pages",
                "cache {cache}: peers read this registered memory by process id, and it lies in small pages: such reads \
                 reach about half the speed. huge_pages=\"merge_registered\" puts it into huge pages, and so does \
                 madvise(MADV_HUGEPAGE) before it is first written. This hint is given once"
            );
        }
    }
}

/// Whether most units of registered memory, of those that are there, lie in small pages.
fn mostly_small(tensors: &Tensors) -> bool {
    let units = tensors.lent_units();
    let Some(pages) = OwnPages::open().filter(|_| !units.is_empty()) else { return false };
    let every = units.len().div_ceil(SAMPLES);
    let known: Vec<bool> = units.iter().step_by(every).filter_map(|&at| pages.huge(at)).collect();
    let huge = known.iter().filter(|&&huge| huge).count();
    !known.is_empty() && huge * 2 < known.len()
}
