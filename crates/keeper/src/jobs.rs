//! The calls of a store that were started and not waited for: how many there may be, and their end with the store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once, OnceLock};

use llm_datadist_core::bindings::keeper::{ClientCallKind, ClientCalls};
use llm_datadist_core::bindings::this_process;
use llm_datadist_core::{Deadline, Error, ErrorKind, EventQueue, Result, Transfer};

use crate::keeper_link::closed;

/// The default of the bytes of values that calls use at a time.
pub(crate) const QUEUE_BYTES: u64 = 16 << 30;
/// Calls that run, or have an outcome that nobody has taken.
const MAX_JOBS: usize = 4_096;

/// The calls of a store that were started and not waited for. Their threads are those of the engines of this process.
#[derive(Debug)]
pub(crate) struct StartedCalls {
    process: u32,
    /// Made by the first call, so that a store without any has no descriptor for them. `None` if the store was closed before.
    calls: OnceLock<Option<ClientCalls>>,
    /// Whether the calls were ended. A second close waits for the end of the first one, and never again for a call that is stuck.
    ended: Once,
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
            ended: Once::new(),
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
    fn calls(&self) -> Result<&ClientCalls> {
        self.calls.get_or_init(|| Some(ClientCalls::new(MAX_JOBS))).as_ref().ok_or_else(closed)
    }

    /// Returns the outcomes that nobody has taken.
    pub(crate) fn events(&self) -> Result<&Arc<EventQueue>> {
        self.calls().map(ClientCalls::events)
    }

    /// Starts a call on values of `bytes` bytes.
    ///
    /// Returns `Err(InvalidArgument)` if it may never have so many bytes, `Err(Busy)` if there are too many calls or bytes now, and
    /// `Err(Closed)` once the calls were ended.
    pub(crate) fn start(
        &self,
        kind: ClientCallKind,
        bytes: u64,
        deadline: Deadline,
        work: impl FnOnce(Deadline) -> Result<u64> + Send + 'static,
    ) -> Result<Arc<Transfer>> {
        let pinned = self.pin(bytes)?;
        let started = self.calls()?.start(kind, deadline, move |deadline| {
            let _pinned = pinned;
            work(deadline)
        });
        // The core only knows engines that are closed.
        started.map_err(|error| if error.kind() == ErrorKind::Closed { closed() } else { error })
    }

    fn pin(&self, bytes: u64) -> Result<PinnedBytes> {
        if bytes > self.limit {
            let allowed = format!("at least {bytes}, the bytes of the values of this call");
            return Err(Error::argument("queue", self.limit, allowed));
        }
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

    /// Ends all calls, refuses new ones, and waits until none touches memory, at most 10 s.
    pub(crate) fn close(&self) {
        self.ended.call_once(|| {
            if let Some(calls) = self.calls.get_or_init(|| None) {
                calls.close();
            }
        });
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
