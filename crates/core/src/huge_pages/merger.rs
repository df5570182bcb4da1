//! The merger of one engine: its regions, what is lent to it, and the thread that runs while there is work.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Builder;
use std::time::Duration;

use super::commit::{Commit, UNITS_OF_A_PART};
use super::pace::{Closing, Merged, Pace, Walk};
use super::pool_merge::Merging;
use super::registered::Lending;
use super::small_page_hint::Hint;
use crate::copy::CopyEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Region, Tensors, usable_under};
use crate::model::{CacheId, Deadline};

/// Bytes moved, or allocated, after which it looks whether there is work.
const LOOK_AFTER: u64 = 64 << 20;
/// Before units that were in use are tried again.
const BETWEEN_TRIES: Duration = Duration::from_millis(100);
/// Merges the regions of one engine; by default none. Dropped, its thread has ended.
#[derive(Debug, Default)]
pub struct Merger {
    /// None if it merges nothing.
    shared: Option<Arc<Shared>>,
    /// Where registered memory is left alone.
    hint: Option<Hint>,
}

#[derive(Debug, Default)]
pub(super) struct Shared {
    regions: Vec<Arc<Merging>>,
    /// None if registered memory is left alone.
    lending: Option<Lending>,
    /// Since it last looked.
    moved: AtomicU64,
    closing: Closing,
}

impl Merger {
    /// A merger of `regions`, which leaves registered memory alone. It has no thread until there is work.
    #[must_use]
    pub fn new(regions: impl IntoIterator<Item = Arc<Region>>) -> Self {
        Self::over(regions, None)
    }

    /// A merger of `regions`, and of registered memory that is lent to it.
    #[must_use]
    pub fn with_registered(regions: impl IntoIterator<Item = Arc<Region>>) -> Self {
        Self::over(regions, Some(Lending::new()))
    }

    fn over(regions: impl IntoIterator<Item = Arc<Region>>, lending: Option<Lending>) -> Self {
        let regions = regions.into_iter().map(|region| Arc::new(Merging::new(region))).collect();
        Merger { shared: Some(Arc::new(Shared::of(regions, lending))), hint: None }
    }

    /// The same merger, which logs one hint if registered memory that peers read through the kernel lies in small pages.
    #[must_use]
    pub fn hinting(mut self) -> Self {
        self.hint = Some(Hint::default());
        self
    }

    /// Takes registered memory on loan that a peer is told of: what of it is there is merged, until it is given back.
    /// Not if the cache is not `kept` any more. Whether there is something new to merge.
    pub fn lend(&self, cache: CacheId, tensors: &Tensors, kept: impl FnOnce() -> bool) -> bool {
        if let Some(hint) = &self.hint {
            hint.described_to_peer(cache, tensors);
        }
        self.lending().is_some_and(|lending| lending.lend(cache, tensors, kept))
    }

    /// Gives back what was lent, of a cache that is not kept any more: once this returns nothing touches it.
    pub fn give_back(&self, cache: CacheId) {
        if let Some(lending) = self.lending() {
            lending.give_back(cache);
        }
    }

    /// Bytes of registered memory that were merged.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        self.lending().map_or(0, Lending::merged)
    }

    fn lending(&self) -> Option<&Lending> {
        self.shared.as_ref().and_then(|shared| shared.lending.as_ref())
    }

    /// Commits all of its regions now, in huge pages as far as the kernel gives them, on the workers of `engine`. `Err`,
    /// before anything is committed, if there is not that much memory.
    pub fn commit(&self, engine: &CopyEngine) -> Result<()> {
        let bytes = |region: &Arc<Merging>| region.region.units() * Region::UNIT_BYTES;
        // What is reserved for them is there.
        let Some(shared) = &self.shared else { return Ok(()) };
        let wanted: u64 = shared.regions.iter().filter(|region| region.region.merges()).map(bytes).sum();
        let usable = usable_under(Path::new("/"));
        if wanted > usable {
            let text = "huge_pages = \"eager\" commits the pools at once, and there is not that much memory";
            let error = Error::new(ErrorKind::OutOfMemory, text).with("pool_bytes", wanted);
            return Err(error.with("usable_bytes", usable));
        }
        for region in &shared.regions {
            let parts =
                usize::try_from(region.region.units().div_ceil(UNITS_OF_A_PART)).unwrap_or(usize::MAX);
            // Work, not a wait: it takes as long as the memory is large.
            engine.spread(Arc::new(Commit(region.clone())), parts, Deadline::after(Duration::MAX))?;
        }
        Ok(())
    }

    /// Notes that `bytes` were moved or allocated; looks for work once it is much.
    pub fn moved(&self, bytes: u64) {
        let Some(shared) = &self.shared else { return };
        let before = shared.moved.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) >= LOOK_AFTER {
            self.look();
        }
    }

    /// Looks for work, and starts on it. Never waits for any to be done.
    #[cold]
    pub fn look(&self) {
        let Some(shared) = &self.shared else { return };
        shared.moved.store(0, Ordering::Relaxed);
        let mut state = shared.closing.locked();
        if state.closed || state.running || !shared.due() {
            return;
        }
        // The one before has said that it ends, and does nothing else any more.
        if let Some(ended) = state.thread.take() {
            let _ = ended.join();
        }
        let shared = shared.clone();
        // Without a thread nothing is merged, and the next look tries again.
        state.thread = Builder::new().name("llm-merge".into()).spawn(move || shared.work()).ok();
        state.running = state.thread.is_some();
    }

    /// What was merged of `region`.
    #[must_use]
    pub fn merged(&self, region: &Region) -> Merged {
        let of = |work: &&Arc<Merging>| std::ptr::eq(&raw const *work.region, region);
        let work = self.shared.as_ref().and_then(|shared| shared.regions.iter().find(of));
        work.map_or_else(Merged::default, |work| work.report())
    }

    /// Whether its thread is at work.
    #[must_use]
    pub fn running(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.closing.locked().running)
    }

    /// Ends its thread, and starts none any more.
    pub fn close(&self) {
        let Some(shared) = &self.shared else { return };
        let thread = {
            let mut state = shared.closing.locked();
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
    pub(super) fn of(regions: Vec<Arc<Merging>>, lending: Option<Lending>) -> Self {
        Shared { regions, lending, ..Shared::default() }
    }

    /// The thread: merges until nothing is left, or the engine closes.
    pub(super) fn work(&self) {
        let mut pace = Pace::new(&self.closing);
        loop {
            let mut left = false;
            for region in self.regions.iter().filter(|region| region.able() && region.rested()) {
                left |= region.walk(&mut pace) == Walk::Some;
            }
            if let Some(lending) = &self.lending {
                left |= lending.walk(&mut pace) == Walk::Some;
            }
            if left && self.closing.sleep(BETWEEN_TRIES) {
                continue;
            }
            // Under the lock: who looks sees it running, or starts another.
            let mut state = self.closing.locked();
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
