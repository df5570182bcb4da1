//! Merges registered memory that peers read through the kernel, as far as it is present, while its owner
//! lends it.
//!
//! Such reads leave no trace in this process, so memory is lent when its address is sent to a peer. Merging
//! commits nothing, and touches only private pages of this process
//! (`registered_memory_is_merged_where_it_is_present_and_private`).
//!
//! The owner may take the memory away. Each unit is merged under a lock that `give_back` also takes. So
//! `give_back` waits for one unit at most, and nothing is touched later
//! (`unregistered_memory_is_left_alone`). The module `merger` decides when to run this.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::pace::{Pace, REST, SPARE, TRIES, UNITS_PER_CHECK, Walk};
use crate::memory::{OwnPages, Refusal, Region, Tensors, usable_under};
use crate::model::CacheId;

/// Value of `next` if there is nothing to do until more memory is lent.
const NEVER: u64 = u64::MAX;

/// The registered memory that is lent to one merger.
#[derive(Debug)]
pub(super) struct Lending {
    lent: Mutex<HashMap<CacheId, Arc<Lent>>>,
    made: Instant,
    /// Milliseconds after `made` before which there is nothing to do.
    next: AtomicU64,
    /// Number of consecutive passes that met pages in use.
    tries: AtomicU8,
    merged: AtomicU64,
}

/// The memory of one cache: addresses of the units that are left, or `None` once it was given back. The lock
/// is held while one of them is merged.
#[derive(Debug)]
struct Lent(Mutex<Option<Vec<u64>>>);

/// What a pass left behind.
#[derive(Default)]
struct Left {
    units: usize,
    busy: bool,
    /// The whole pass must stop: memory is short, or the merger was closed.
    stopped: bool,
}

impl Lending {
    pub(super) fn new() -> Self {
        Lending {
            lent: Mutex::default(),
            made: Instant::now(),
            next: AtomicU64::new(NEVER),
            tries: AtomicU8::new(0),
            merged: AtomicU64::new(0),
        }
    }

    /// Lends the memory of `cache`, unless it is lent already or `kept` returns `false`. Returns whether
    /// there is something to merge.
    ///
    /// `kept` is called under the lock that [`give_back`](Self::give_back) takes. So if a call first removes
    /// the cache and then gives its memory back, none of it stays here.
    pub(super) fn lend(&self, cache: CacheId, tensors: &Tensors, kept: impl FnOnce() -> bool) -> bool {
        let mut lent = locked(&self.lent);
        if lent.contains_key(&cache) || !kept() {
            return false;
        }
        let units = tensors.whole_units();
        let some = !units.is_empty();
        // The cache is recorded even if it has no units, so that they need not be searched again.
        lent.insert(cache, Arc::new(Lent(Mutex::new(Some(units)))));
        if some {
            self.tries.store(0, Ordering::Relaxed);
            self.next.store(0, Ordering::Relaxed);
        }
        some
    }

    /// Takes the memory of `cache` back. Once this returns, nothing here touches it.
    pub(super) fn give_back(&self, cache: CacheId) {
        let lent = locked(&self.lent).remove(&cache);
        if let Some(lent) = lent {
            *locked(&lent.0) = None;
        }
    }

    pub(super) fn due(&self) -> bool {
        let next = self.next.load(Ordering::Relaxed);
        next != NEVER && self.made.elapsed() >= Duration::from_millis(next)
    }

    /// Returns the bytes that were merged, or already lay in huge pages, including memory that was given back
    /// since.
    pub(super) fn merged(&self) -> u64 {
        self.merged.load(Ordering::Relaxed)
    }

    /// Merges what is present. What is left is tried again later, and soon if its pages were in use.
    pub(super) fn walk(&self, pace: &mut Pace<'_>) -> Walk {
        if !self.due() {
            return Walk::Whole;
        }
        // Memory that is lent from here on sets `next` itself.
        self.next.store(NEVER, Ordering::Relaxed);
        let all: Vec<_> = locked(&self.lent).values().cloned().collect();
        let Some(pages) = OwnPages::open() else { return Walk::Whole };
        let mut left = Left::default();
        for lent in &all {
            self.walk_over(lent, &pages, pace, &mut left);
            if left.stopped {
                break;
            }
        }
        let soon = left.busy && !left.stopped && self.tries.fetch_add(1, Ordering::Relaxed) + 1 < TRIES;
        if soon {
            self.next.store(0, Ordering::Relaxed);
            return Walk::Busy;
        }
        self.tries.store(0, Ordering::Relaxed);
        if left.units > 0 {
            let rested = u64::try_from((self.made.elapsed() + REST).as_millis()).unwrap_or(NEVER - 1);
            self.next.fetch_min(rested, Ordering::Relaxed);
        }
        Walk::Whole
    }

    fn walk_over(&self, lent: &Lent, pages: &OwnPages, pace: &mut Pace<'_>, rest: &mut Left) {
        let (mut index, mut looked) = (0, 0);
        loop {
            let since = Instant::now();
            let short = looked % UNITS_PER_CHECK == 0 && usable_under(Path::new("/")) < SPARE;
            looked += 1;
            {
                let mut units = locked(&lent.0);
                let Some(units) = units.as_mut() else { return };
                let Some(&at) = units.get(index) else {
                    rest.units += units.len();
                    return;
                };
                match if short { Some(Err(Refusal::NoMemory)) } else { pages.merge(at) } {
                    None => index += 1,
                    Some(Err(Refusal::Busy)) => {
                        rest.busy = true;
                        index += 1;
                    }
                    Some(Err(Refusal::NoMemory)) => {
                        rest.units += units.len();
                        rest.stopped = true;
                        return;
                    }
                    Some(Err(Refusal::Unable(_))) => {
                        units.swap_remove(index);
                    }
                    Some(Ok(())) => {
                        units.swap_remove(index);
                        self.merged.fetch_add(Region::UNIT_BYTES, Ordering::Relaxed);
                    }
                }
            }
            if !pace.keep(since) {
                rest.stopped = true;
                return;
            }
        }
    }
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
