//! The merger of one engine: its regions, the registered memory lent to it, and a thread that runs while
//! there is work.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Builder;
use std::time::Duration;

use super::pool_merge::{Merging, UNITS_OF_A_PART};
use super::registered::Lending;
use super::small_page_hint::Hint;
use super::throttle::{BETWEEN_TRIES, Closing, Merged, REST, TRIES, Throttle};
use crate::copy::CopyEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Region, Tensors, usable_under};
use crate::model::{CacheId, Deadline};

/// Bytes moved or allocated after which the merger checks for work.
const CHECK_AFTER: u64 = 64 << 20;

/// Merges the regions of one engine into huge pages; the default one merges nothing. Dropping it ends its
/// thread.
#[derive(Debug, Default)]
pub struct Merger {
    /// `None` if it merges nothing.
    shared: Option<Arc<Shared>>,
    /// Present if the merger leaves registered memory alone but may log a hint about it.
    hint: Option<Hint>,
}

#[derive(Debug, Default)]
struct Shared {
    regions: Vec<Arc<Merging>>,
    /// `None` if registered memory is left alone.
    lending: Option<Lending>,
    /// Bytes moved or allocated since the last check for work.
    moved: AtomicU64,
    closing: Closing,
}

impl Merger {
    /// Creates a merger of `regions` that leaves registered memory alone. It has no thread until there is
    /// work.
    pub fn new(regions: impl IntoIterator<Item = Arc<Region>>) -> Self {
        Self::over(regions, None)
    }

    /// Creates a merger of `regions` and of the registered memory that is lent to it.
    pub fn with_registered(regions: impl IntoIterator<Item = Arc<Region>>) -> Self {
        Self::over(regions, Some(Lending::default()))
    }

    fn over(regions: impl IntoIterator<Item = Arc<Region>>, lending: Option<Lending>) -> Self {
        let regions = regions.into_iter().map(|region| Arc::new(Merging::new(region))).collect();
        Merger { shared: Some(Arc::new(Shared { regions, lending, ..Shared::default() })), hint: None }
    }

    /// Returns the same merger, which also logs one hint if registered memory that peers read through the
    /// kernel lies in small pages.
    #[must_use]
    pub fn hinting(mut self) -> Self {
        self.hint = Some(Hint::default());
        self
    }

    /// Lends the registered memory of `cache` to the merger, because its address is being sent to a peer. The
    /// merger merges what is present until [`give_back`](Self::give_back). Nothing is lent if `kept` returns
    /// `false`: the cache was unregistered meanwhile.
    ///
    /// Returns whether there is something new to merge.
    pub fn lend(&self, cache: CacheId, tensors: &Tensors, kept: impl FnOnce() -> bool) -> bool {
        if let Some(hint) = &self.hint {
            hint.described_to_peer(cache, tensors);
        }
        self.lending().is_some_and(|lending| lending.lend(cache, tensors, kept))
    }

    /// Takes back what was lent of `cache`, which has been unregistered. Once this returns, the merger does
    /// not touch that memory.
    pub fn give_back(&self, cache: CacheId) {
        if let Some(lending) = self.lending() {
            lending.give_back(cache);
        }
    }

    /// Returns the bytes of registered memory that were merged.
    pub fn lent_bytes(&self) -> u64 {
        self.lending().map_or(0, Lending::merged)
    }

    fn lending(&self) -> Option<&Lending> {
        self.shared.as_ref().and_then(|shared| shared.lending.as_ref())
    }

    /// Commits all regions now, in huge pages as far as the kernel permits, on the workers of `engine`.
    ///
    /// Returns `Err` of kind [`ErrorKind::OutOfMemory`], before anything is committed, if there is not enough
    /// memory.
    pub fn commit(&self, engine: &CopyEngine) -> Result<()> {
        let bytes = |region: &Arc<Merging>| region.region.units() * Region::UNIT_BYTES;
        // Regions of reserved huge pages are not counted, because their memory is set aside already.
        let Some(shared) = &self.shared else { return Ok(()) };
        let wanted: u64 = shared.regions.iter().filter(|region| region.region.merges()).map(bytes).sum();
        let usable = usable_under(Path::new("/"));
        if wanted > usable {
            let text = "not enough memory to commit the pools (huge_pages=\"eager\")";
            let error = Error::new(ErrorKind::OutOfMemory, text).with("pool_bytes", wanted);
            return Err(error.with("usable_bytes", usable));
        }
        for region in &shared.regions {
            let parts =
                usize::try_from(region.region.units().div_ceil(UNITS_OF_A_PART)).unwrap_or(usize::MAX);
            // No deadline: this is work and no wait, and it takes as long as the memory is large.
            let region = region.clone();
            let commit = Arc::new(move |part| region.commit_part(part));
            engine.spread(commit, parts, Deadline::after(Duration::MAX))?;
        }
        Ok(())
    }

    /// Records that `bytes` bytes were moved or allocated, and checks for work after every 64 MiB.
    pub fn note_use(&self, bytes: u64) {
        let Some(shared) = &self.shared else { return };
        let before = shared.moved.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) >= CHECK_AFTER {
            self.check_for_work();
        }
    }

    /// Checks for work, and starts the thread if there is any. Never waits for merging to finish.
    #[cold]
    pub fn check_for_work(&self) {
        let Some(shared) = &self.shared else { return };
        shared.moved.store(0, Ordering::Relaxed);
        let mut state = shared.closing.state.lock();
        if state.closed || state.running || !shared.due() {
            return;
        }
        // The previous thread has recorded its end and does nothing else, so joining it does not block.
        if let Some(ended) = state.thread.take() {
            let _ = ended.join();
        }
        let shared = shared.clone();
        // If the thread cannot start, nothing is merged, and the next check tries again.
        state.thread = Builder::new().name("llm-merge".into()).spawn(move || shared.work()).ok();
        state.running = state.thread.is_some();
    }

    /// Returns what was merged of `region`.
    pub fn merged(&self, region: &Region) -> Merged {
        let of = |work: &&Arc<Merging>| std::ptr::eq(&raw const *work.region, region);
        let work = self.shared.as_ref().and_then(|shared| shared.regions.iter().find(of));
        work.map_or_else(Merged::default, |work| work.report())
    }

    /// Returns whether the thread is running.
    #[cfg(feature = "testing")]
    pub fn running(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.closing.state.lock().running)
    }

    /// Ends the thread and prevents another one from starting.
    pub fn close(&self) {
        let Some(shared) = &self.shared else { return };
        let thread = {
            let mut state = shared.closing.state.lock();
            state.closed = true;
            state.thread.take()
        };
        shared.closing.announce();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Merger {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Runs on the thread: merges until nothing more is due or the merger is closed.
    fn work(&self) {
        let (mut throttle, mut tries) = (Throttle::new(&self.closing), 0);
        loop {
            tries += 1;
            let retry = if tries < TRIES { BETWEEN_TRIES } else { REST };
            let mut busy = false;
            for region in self.regions.iter().filter(|region| region.due()) {
                busy |= region.walk(&mut throttle, retry);
            }
            for lending in self.lending.iter().filter(|lending| lending.due()) {
                busy |= lending.walk(&mut throttle, retry);
            }
            if busy && tries < TRIES && self.closing.sleep(BETWEEN_TRIES) {
                continue;
            }
            // Under the lock, a concurrent check for work either sees the thread running, or starts another
            // one.
            let mut state = self.closing.state.lock();
            if state.closed || !self.due() {
                state.running = false;
                return;
            }
        }
    }

    fn due(&self) -> bool {
        self.regions.iter().any(|region| region.due()) || self.lending.as_ref().is_some_and(Lending::due)
    }
}
