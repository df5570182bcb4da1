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
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::throttle::{Again, REST, SPARE, Throttle, UNITS_PER_CHECK};
use crate::memory::{MergeRefusal, OwnPages, Region, Tensors, usable_under};
use crate::model::CacheId;
use crate::sync::Mutex;

/// The registered memory that is lent to one merger.
#[derive(Debug, Default)]
pub(super) struct Lending {
    lent: Mutex<HashMap<CacheId, Arc<Lent>>>,
    again: Again,
    merged: AtomicU64,
}

/// The memory of one cache: addresses of the units that are left, or `None` once it was given back. The lock
/// is held while one of them is merged.
#[derive(Debug)]
struct Lent(Mutex<Option<Vec<u64>>>);

impl Lending {
    /// Lends the memory of `cache`, unless it is lent already or `kept` returns `false`. Returns whether
    /// there is something to merge.
    ///
    /// `kept` is called under the lock that [`give_back`](Self::give_back) takes. So if a call first removes
    /// the cache and then gives its memory back, none of it stays here.
    pub(super) fn lend(&self, cache: CacheId, tensors: &Tensors, kept: impl FnOnce() -> bool) -> bool {
        let mut lent = self.lent.lock();
        if lent.contains_key(&cache) || !kept() {
            return false;
        }
        let units = tensors.whole_units();
        let some = !units.is_empty();
        // The cache is recorded even if it has no units, so that they need not be searched again.
        lent.insert(cache, Arc::new(Lent(Mutex::new(Some(units)))));
        if some {
            self.again.at_once();
        }
        some
    }

    /// Takes the memory of `cache` back. Once this returns, nothing here touches it.
    pub(super) fn give_back(&self, cache: CacheId) {
        let lent = self.lent.lock().remove(&cache);
        if let Some(lent) = lent {
            *lent.0.lock() = None;
        }
    }

    pub(super) fn due(&self) -> bool {
        self.again.due()
    }

    /// Returns the bytes that were merged, or already lay in huge pages, including memory that was given back
    /// since.
    pub(super) fn merged(&self) -> u64 {
        self.merged.load(Ordering::Relaxed)
    }

    /// Merges what is present. What is left is due again later. Returns whether some of it was in use, which is
    /// due after `retry`.
    pub(super) fn walk(&self, throttle: &mut Throttle<'_>, retry: Duration) -> bool {
        // Before the list is read, because memory that is lent from here on sets the time again.
        self.again.begin();
        let all: Vec<_> = self.lent.lock().values().cloned().collect();
        let Some(pages) = OwnPages::open() else { return false };
        let mut busy = false;
        let whole = all.iter().all(|lent| self.walk_over(lent, &pages, throttle, &mut busy));
        if !whole || all.iter().any(|lent| lent.left()) {
            self.again.later(if busy { retry } else { REST });
        }
        busy
    }

    /// Returns `false` if the pass must stop: memory is short, or the merger was closed.
    fn walk_over(&self, lent: &Lent, pages: &OwnPages, throttle: &mut Throttle<'_>, busy: &mut bool) -> bool {
        let (mut index, mut looked) = (0, 0);
        loop {
            let since = Instant::now();
            let short = looked % UNITS_PER_CHECK == 0 && usable_under(Path::new("/")) < SPARE;
            looked += 1;
            {
                let mut units = lent.0.lock();
                let Some(units) = units.as_mut() else { return true };
                let Some(&at) = units.get(index) else { return true };
                match if short { Some(Err(MergeRefusal::NoMemory)) } else { pages.merge(at) } {
                    None => index += 1,
                    Some(Err(MergeRefusal::Busy)) => {
                        *busy = true;
                        index += 1;
                    }
                    Some(Err(MergeRefusal::NoMemory)) => return false,
                    Some(Err(MergeRefusal::Unable(_))) => {
                        units.swap_remove(index);
                    }
                    Some(Ok(())) => {
                        units.swap_remove(index);
                        self.merged.fetch_add(Region::UNIT_BYTES, Ordering::Relaxed);
                    }
                }
            }
            if !throttle.keep(since) {
                return false;
            }
        }
    }
}

impl Lent {
    /// Returns whether units are left that may be merged later.
    fn left(&self) -> bool {
        self.0.lock().as_ref().is_some_and(|units| !units.is_empty())
    }
}
