//! The calls of a store that were started and not waited for: how many there may be, and their end with the store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use llm_datadist_core::bindings::keeper::{ClientCalls, ClientLane};
use llm_datadist_core::bindings::this_process;
use llm_datadist_core::{Deadline, Error, ErrorKind, EventQueue, Result, Transfer};

/// The default of the bytes of values that calls use at a time.
pub(crate) const QUEUE_BYTES: u64 = 16 << 30;
/// Calls that run, or have an outcome that nobody has taken.
const MAX_JOBS: usize = 4_096;

/// The calls of a store that were started and not waited for. Their threads are those of the engines of this process.
#[derive(Debug)]
pub(crate) struct StartedCalls {
    process: u32,
    /// Made by the first call, so that a store without any has no descriptor for them.
    calls: OnceLock<ClientCalls>,
    /// Bytes of the values of the calls that have not ended.
    pinned: Arc<AtomicU64>,
    /// The largest number of these bytes.
    pub(crate) limit: u64,
}

impl Default for StartedCalls {
    fn default() -> StartedCalls {
        StartedCalls {
            process: this_process(),
            calls: OnceLock::new(),
            pinned: Arc::default(),
            limit: QUEUE_BYTES,
        }
    }
}

/// The bytes of the values of one call, until it is dropped.
struct PinnedBytes(Arc<AtomicU64>, u64);

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl StartedCalls {
    fn calls(&self) -> &ClientCalls {
        self.calls.get_or_init(|| ClientCalls::new(MAX_JOBS))
    }

    /// Returns the outcomes that nobody has taken.
    pub(crate) fn events(&self) -> &Arc<EventQueue> {
        self.calls().events()
    }

    /// Starts a call on values of `bytes` bytes. Returns `Err(Busy)` if there are too many calls or bytes.
    pub(crate) fn start(
        &self,
        lane: ClientLane,
        bytes: u64,
        deadline: Deadline,
        work: impl FnOnce(Deadline) -> Result<u64> + Send + 'static,
    ) -> Result<Arc<Transfer>> {
        let pinned = self.pin(bytes)?;
        self.calls().start(lane, deadline, move |deadline| {
            let _pinned = pinned;
            work(deadline)
        })
    }

    fn pin(&self, bytes: u64) -> Result<PinnedBytes> {
        let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= self.limit);
        match self.pinned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(PinnedBytes(self.pinned.clone(), bytes)),
            Err(now) => {
                let text = "the calls that have not ended use too many bytes of values";
                let error = Error::new(ErrorKind::Busy, text).with("bytes", bytes).with("in_use", now);
                Err(error.with("queue", self.limit))
            }
        }
    }

    /// Ends all calls, and waits until none touches memory, at most 10 s.
    pub(crate) fn close(&self) {
        if let Some(calls) = self.calls.get() {
            calls.close();
        }
    }
}

/// A forked child leaks its copy: it does not have the threads, and a lock may be held for ever.
impl Drop for StartedCalls {
    fn drop(&mut self) {
        if self.process != this_process() {
            std::mem::forget(self.calls.take());
        }
    }
}
