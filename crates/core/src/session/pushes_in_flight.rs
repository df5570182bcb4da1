//! Which remote caches this side has the peer write, over one link: a read of the peer's memory in place sees no pin there.
//!
//! The owner pins what it writes and what it sends, but a mapped read asks nobody. Where such a read meets a push or a
//! layer of the same process, what was read is thrown away and asked for instead (`pulls_and_layers_of_the_same_rows`). A
//! write whose peer did not answer counts as long as the peer may still be at it (`a_push_without_an_answer`). Not for: writes of the owner itself (docs/links.md says what is promised of those).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use crate::model::CacheId;

/// Caches that are remembered; beyond, those that are not being written are forgotten.
const MOST: usize = 1 << 10;

/// The writes of one link.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    /// Writes begun.
    begun: AtomicU64,
    /// Writes under way, also those that wait for rows here.
    under_way: AtomicUsize,
    caches: Mutex<Caches>,
}

#[derive(Debug, Default)]
struct Caches {
    written: HashMap<CacheId, Written>,
    /// What is not in `written` was last begun before this write.
    forgotten: u64,
}

#[derive(Debug, Default)]
struct Written {
    under_way: u32,
    /// Number of the latest.
    last: u64,
    /// The peer may be at one until then, though nobody waits for it here.
    until: Option<Instant>,
}

impl Written {
    fn now(&self) -> bool {
        self.under_way > 0 || self.until.is_some_and(|until| until > Instant::now())
    }
}

impl Writes {
    /// Has `cache` of the peer written until the guard is dropped.
    pub(crate) fn begin(&self, cache: CacheId) -> Writing<'_> {
        let mut caches = self.locked();
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        if caches.written.len() >= MOST {
            caches.written.retain(|_, written| written.now());
            caches.forgotten = number;
        }
        let written = caches.written.entry(cache).or_default();
        written.under_way += 1;
        written.last = number;
        self.under_way.fetch_add(1, Ordering::SeqCst);
        Writing { writes: self, cache }
    }

    /// Whether this side has the peer write something now.
    pub(crate) fn now(&self) -> bool {
        self.under_way.load(Ordering::SeqCst) > 0
    }

    /// Before `cache` is read in place: what to compare with after it, or `None` while it is being written.
    pub(crate) fn unwritten(&self, cache: CacheId) -> Option<u64> {
        let begun = self.begun.load(Ordering::SeqCst);
        if begun == 0 {
            return Some(0); // most links only ever pull
        }
        let caches = self.locked();
        let written = caches.written.get(&cache).is_some_and(Written::now);
        (!written).then_some(begun)
    }

    /// Whether no write of `cache` has begun since [`unwritten`](Self::unwritten) gave `before`.
    pub(crate) fn still_unwritten(&self, cache: CacheId, before: u64) -> bool {
        if self.begun.load(Ordering::SeqCst) == before {
            return true;
        }
        let caches = self.locked();
        caches.written.get(&cache).map_or(caches.forgotten <= before, |written| written.last <= before)
    }
}

/// A write of a remote cache under way.
pub(crate) struct Writing<'a> {
    writes: &'a Writes,
    cache: CacheId,
}

impl Writing<'_> {
    /// The peer did not say that it is done: it may be at it for `limit` more.
    pub(crate) fn unanswered(self, limit: Duration) {
        if let Some(written) = self.writes.locked().written.get_mut(&self.cache) {
            let until = Instant::now() + limit;
            written.until = Some(written.until.map_or(until, |known| known.max(until)));
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.writes.under_way.fetch_sub(1, Ordering::SeqCst);
        if let Some(written) = self.writes.locked().written.get_mut(&self.cache) {
            written.under_way -= 1;
        }
    }
}

impl Writes {
    fn locked(&self) -> MutexGuard<'_, Caches> {
        self.caches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
