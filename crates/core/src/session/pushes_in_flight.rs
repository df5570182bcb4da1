//! Tracks pushes in flight per remote cache, over all links to one engine.
//!
//! An owner pins the rows that it writes or sends, but a mapped read does not ask the owner. If such a read
//! overlaps with a push or a layer from the same process, its bytes are discarded and requested from the
//! owner instead (`readers_see_one_version_of_a_row`). A push that the peer did not confirm counts as long
//! as the peer may still be executing it (`unanswered_push_keeps_reads_out_of_place`). Writes by the owner itself are not
//! tracked; docs/links.md states what is guaranteed for those.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use crate::model::{CacheId, ClusterId};
use crate::sync::{AtomicU64, Mutex, Ordering, fence};

/// Maximum number of remembered caches. Beyond that, caches that are not being written are forgotten.
const MAX_CACHES: usize = 1 << 10;

/// The pushes of this engine, keyed by the engine that receives them: its cluster and instance number. Two links may lead to one
/// engine, and a link that has ended may have left a push that the peer still executes.
#[derive(Debug, Default)]
pub(super) struct PushesByEngine(Mutex<HashMap<(ClusterId, u64), Arc<PushesInFlight>>>);

impl PushesByEngine {
    /// Returns the pushes to `engine`, for a new link to it. Forgets engines without links and pushes.
    pub(super) fn to(&self, engine: (ClusterId, u64)) -> Arc<PushesInFlight> {
        let mut engines = self.0.lock();
        engines.retain(|_, pushes| Arc::strong_count(pushes) > 1 || pushes.any_now());
        engines.entry(engine).or_default().clone()
    }
}

/// The pushes to one engine.
#[derive(Debug, Default)]
pub(crate) struct PushesInFlight {
    /// Number of pushes begun.
    begun: AtomicU64,
    caches: Mutex<Caches>,
}

#[derive(Debug, Default)]
struct Caches {
    written: HashMap<CacheId, CachePushes>,
    /// The latest push to a cache that is not in `written` has a number below this one.
    forgotten: u64,
}

#[derive(Debug, Default)]
struct CachePushes {
    under_way: u32,
    /// Number of the latest push.
    last: u64,
    /// The peer may still execute an unconfirmed push until then.
    until: Option<Instant>,
}

impl CachePushes {
    fn now(&self) -> bool {
        self.under_way > 0 || self.until.is_some_and(|until| until > Instant::now())
    }
}

impl PushesInFlight {
    /// Records a push to `cache` of the peer, in progress until the guard is dropped.
    pub(crate) fn begin(&self, cache: CacheId) -> PushInFlight<'_> {
        let mut caches = self.caches.lock();
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        if caches.written.len() >= MAX_CACHES {
            caches.written.retain(|_, written| written.now());
            caches.forgotten = number;
        }
        let written = caches.written.entry(cache).or_default();
        written.under_way += 1;
        written.last = number;
        PushInFlight { pushes: self, cache }
    }

    /// Called before `cache` is read in place. Returns a value for
    /// [`none_since`](Self::none_since), or `None` while a push to the cache is in progress.
    pub(crate) fn none_now(&self, cache: CacheId) -> Option<u64> {
        let begun = self.begun.load(Ordering::SeqCst);
        if begun == 0 {
            return Some(0); // most links only ever pull
        }
        let caches = self.caches.lock();
        let written = caches.written.get(&cache).is_some_and(CachePushes::now);
        (!written).then_some(begun)
    }

    /// Whether a push to any cache is in progress.
    fn any_now(&self) -> bool {
        self.caches.lock().written.values().any(CachePushes::now)
    }

    /// Whether no push to `cache` has begun since [`none_now`](Self::none_now) returned `before`: then none has changed what this
    /// thread has read in between (`bytes_of_a_push_are_discarded`).
    pub(crate) fn none_since(&self, cache: CacheId, before: u64) -> bool {
        // Keeps the reads of the data before the read of the number, which alone keeps only later reads behind it.
        fence(Ordering::Acquire);
        if self.begun.load(Ordering::SeqCst) == before {
            return true;
        }
        let caches = self.caches.lock();
        caches.written.get(&cache).map_or(caches.forgotten <= before, |written| written.last <= before)
    }
}

/// A push in progress to a remote cache.
pub(crate) struct PushInFlight<'a> {
    pushes: &'a PushesInFlight,
    cache: CacheId,
}

impl PushInFlight<'_> {
    /// Records that the peer did not confirm the push, and may execute it for `limit` more.
    pub(crate) fn unanswered(self, limit: Duration) {
        if let Some(written) = self.pushes.caches.lock().written.get_mut(&self.cache) {
            let until = Instant::now() + limit;
            written.until = Some(written.until.map_or(until, |known| known.max(until)));
        }
    }
}

impl Drop for PushInFlight<'_> {
    fn drop(&mut self) {
        if let Some(written) = self.pushes.caches.lock().written.get_mut(&self.cache) {
            written.under_way -= 1;
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const CACHE: CacheId = CacheId(7);

    #[test]
    fn links_to_one_engine_share_their_pushes() {
        let (engines, engine) = (PushesByEngine::default(), (ClusterId(2), 300));
        let (first, second) = (engines.to(engine), engines.to(engine));
        let restarted = engines.to((ClusterId(2), 301));
        let before = second.none_now(CACHE).unwrap();
        let push = first.begin(CACHE);
        assert_eq!((second.none_now(CACHE), second.none_since(CACHE, before)), (None, false));
        assert_eq!((restarted.none_now(CACHE), second.none_now(CacheId(8))), (Some(0), Some(1)));
        drop(push);
        assert_eq!(second.none_now(CACHE), Some(1));
    }

    #[test]
    fn an_unconfirmed_push_outlasts_its_link() {
        let (engines, engine) = (PushesByEngine::default(), (ClusterId(2), 300));
        engines.to(engine).begin(CACHE).unanswered(Duration::from_secs(3600));
        assert_eq!(engines.to(engine).none_now(CACHE), None);
        engines.to((ClusterId(3), 1)).begin(CACHE).unanswered(Duration::ZERO);
        drop(engines.to(engine));
        let known: Vec<_> = engines.0.lock().keys().copied().collect();
        assert_eq!(known, [engine], "nothing is kept of an engine without links and pushes");
    }
}
