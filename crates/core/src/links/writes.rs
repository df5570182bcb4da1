//! What this side is writing into caches of a peer: a read of the peer's memory that met such a write is no read.
//!
//! The owner pins the rows that its peers write and send for, but a read through mapped memory takes no pin there. So
//! whoever reads asks before and after; between the two no write of the same cache over the same link may have begun or
//! been under way (`test_a_transfer_and_pulls_on_one_link` in `tests/test_seed_contract.py`). Not for: writes by the
//! owner itself or over other links, which are its business and theirs (docs/links.md).

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::id::CacheId;

/// Caches that are kept; beyond, those at rest are forgotten, which can only make a read look disturbed.
const MOST: usize = 1 << 12;

/// Writes into the caches of one peer over one link.
#[derive(Debug, Default)]
pub(super) struct Writes(Mutex<Noted>);

#[derive(Debug, Default)]
struct Noted {
    /// Writes that ever began.
    begun: u64,
    /// The value of `begun` below which nothing is known of caches that are not listed.
    forgotten: u64,
    caches: HashMap<CacheId, Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    under_way: u32,
    /// Which write began last.
    last: u64,
}

impl Writes {
    /// Runs `write`, which writes into `cache`. A write whose end is not known stays under way for ever: then the cache
    /// is never read without its owner again.
    pub(super) fn during<T>(&self, cache: CacheId, write: impl FnOnce() -> Result<T>) -> Result<T> {
        {
            let mut noted = self.noted();
            noted.begun += 1;
            let last = noted.begun;
            if noted.caches.len() >= MOST {
                noted.caches.retain(|_, cache| cache.under_way > 0);
                noted.forgotten = last;
            }
            let cache = noted.caches.entry(cache).or_default();
            cache.under_way += 1;
            cache.last = last;
        }
        let result = write();
        if result.as_ref().map_or_else(answered, |_| true)
            && let Some(cache) = self.noted().caches.get_mut(&cache)
        {
            cache.under_way -= 1;
        }
        result
    }

    /// Where a read of `cache` begins; `None` while it is written.
    pub(super) fn quiet(&self, cache: CacheId) -> Option<u64> {
        let noted = self.noted();
        let at_rest = noted.caches.get(&cache).is_none_or(|cache| cache.under_way == 0);
        at_rest.then_some(noted.begun)
    }

    /// Whether a read of `cache` that began at `since` met no write.
    pub(super) fn undisturbed(&self, cache: CacheId, since: u64) -> bool {
        let noted = self.noted();
        noted
            .caches
            .get(&cache)
            .map_or(noted.forgotten <= since, |cache| cache.under_way == 0 && cache.last <= since)
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the peer itself said that it failed, so that it writes no more.
fn answered(error: &Error) -> bool {
    error.fact("said_by").is_some()
}
