//! Counts the transfers of a link by the path on which their bytes moved.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::copy::PathKind;
use crate::sync::Mutex;

/// The transfers of one link that succeeded, by path.
#[derive(Debug, Default)]
pub struct PathCounters {
    counters: [PathCounter; PathKind::ALL.len()],
    staged_bytes: AtomicU64,
    reason: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct PathCounter {
    transfers: AtomicU64,
    bytes: AtomicU64,
}

/// The transfers on one path when they were counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathState {
    /// Number of plans that were moved. A transfer between caches with different KV layouts may have several.
    pub transfers: u64,
    /// Bytes moved.
    pub bytes: u64,
}

impl PathCounters {
    /// Counts bytes that moved on `path`. `staged` is whether they passed a host buffer of this engine.
    pub fn count(&self, path: PathKind, bytes: u64, staged: bool) {
        let counter = &self.counters[path as usize];
        counter.transfers.fetch_add(1, Ordering::Relaxed);
        counter.bytes.fetch_add(bytes, Ordering::Relaxed);
        if staged {
            self.staged_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Records why the owner has to send the bytes of a transfer. Returns whether the reason differs from the previous one.
    pub fn owner_sends(&self, reason: &str) -> bool {
        let mut known = self.reason.lock();
        let is_new = known.as_deref() != Some(reason);
        if is_new {
            *known = Some(reason.to_owned());
        }
        is_new
    }

    /// Returns the transfers on each path, with its name.
    pub fn states(&self) -> Vec<(&'static str, PathState)> {
        let state = |&(path, name): &(PathKind, &'static str)| {
            let counter = &self.counters[path as usize];
            let transfers = counter.transfers.load(Ordering::Relaxed);
            (name, PathState { transfers, bytes: counter.bytes.load(Ordering::Relaxed) })
        };
        PathKind::ALL.iter().map(state).collect()
    }

    /// Returns the number of bytes that passed a host buffer of this engine.
    pub fn staged_bytes(&self) -> u64 {
        self.staged_bytes.load(Ordering::Relaxed)
    }

    /// Returns why the owner most recently had to send the bytes of a transfer.
    pub fn reason(&self) -> Option<String> {
        self.reason.lock().clone()
    }
}
