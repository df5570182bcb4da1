//! The transfers that asynchronous calls have started, by handle.
//!
//! The handle of a transfer is its number, which no other transfer of the process has. So a handle that was freed or never
//! returned is refused (`invalid_transfers_are_refused_by_every_call`). A transfer does not keep its engine open, and
//! answers after the engine was closed (`transfers_outlive_their_engine`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use llm_datadist_core::{Error, ErrorKind, Result, Transfer};

/// The transfers of one process whose handles were not freed.
#[derive(Default)]
pub(crate) struct TransferHandles(RwLock<BTreeMap<u64, Arc<Transfer>>>);

/// The last handle that this process, or the one that forked it, has returned.
static LAST: AtomicU64 = AtomicU64::new(0);
/// The last handle that existed when this process was forked.
static INHERITED: AtomicU64 = AtomicU64::new(0);

/// Records, in a forked child, that the handles so far belong to its parent.
pub(crate) fn forked() {
    INHERITED.store(LAST.load(Ordering::Relaxed), Ordering::Relaxed);
}

impl TransferHandles {
    /// Adds a transfer and returns its handle.
    pub(crate) fn add(&self, transfer: Arc<Transfer>) -> u64 {
        let handle = transfer.number();
        LAST.fetch_max(handle, Ordering::Relaxed);
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(handle, transfer);
        handle
    }

    /// Returns the transfer of a handle.
    pub(crate) fn get(&self, handle: u64) -> Result<Arc<Transfer>> {
        let found = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned();
        found.ok_or_else(|| unknown(handle))
    }

    /// Frees a handle. The transfer goes on.
    pub(crate) fn free(&self, handle: u64) -> Result<()> {
        let transfer = self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
        transfer.map(drop).ok_or_else(|| unknown(handle))
    }
}

fn unknown(handle: u64) -> Error {
    let text = if (1..=INHERITED.load(Ordering::Relaxed)).contains(&handle) {
        "there is no such transfer in this process, which was forked after the transfer was started"
    } else {
        "there is no such transfer: its handle was freed, or never returned"
    };
    Error::new(ErrorKind::Closed, text).with("transfer", handle)
}
