//! Counts the requests and transfers over a link, and the paths on which bytes moved.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::counters::{Counters, OpState};
use crate::copy::{PathKind, Rule};
use crate::sync::Mutex;

/// The counters of one link, which end with it.
#[derive(Debug, Default)]
pub struct LinkStats {
    requests: Counters,
    transfers: Counters,
    /// The transfers that succeeded, by path and by the rule that chose it.
    paths: [[PathCounter; Rule::ALL.len()]; PathKind::ALL.len()],
    staged_bytes: AtomicU64,
    reason: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct PathCounter {
    transfers: AtomicU64,
    bytes: AtomicU64,
}

/// The transfers on one path when they were counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PathState {
    /// Number of plans that were moved. A transfer between caches with different KV layouts may have several.
    pub transfers: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// The number of these plans by the rule that chose the path. Rules without plans are left out.
    pub rules: BTreeMap<&'static str, u64>,
}

impl LinkStats {
    /// Counts a request to the peer that took `took`, with the `bytes` that it moved; `None` if it failed.
    pub fn count_request(&self, took: Duration, bytes: Option<u64>) {
        self.requests.count(took, bytes.is_some());
        self.requests.add_bytes(bytes.unwrap_or(0));
    }

    /// Counts a pull or push that did the work of `count` calls in `took`, with the `bytes` that it moved; `None` if it failed.
    pub fn count_transfers(&self, count: u32, took: Duration, bytes: Option<u64>) {
        self.transfers.count_each(count, took, bytes.is_some());
        self.transfers.add_bytes(bytes.unwrap_or(0));
    }

    /// Counts bytes that moved on `path`, by `rule`. `staged` is whether they passed a host buffer of this engine.
    pub fn count_path(&self, path: PathKind, rule: Rule, bytes: u64, staged: bool) {
        let counter = &self.paths[path as usize][rule as usize];
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

    /// Returns the counters of requests and of transfers.
    pub fn calls(&self) -> (OpState, OpState) {
        (self.requests.state(), self.transfers.state())
    }

    /// Returns the transfers on each path, with its name, the number of bytes that passed a host buffer of this engine, and why
    /// the owner most recently had to send the bytes of a transfer.
    pub fn paths(&self) -> (Vec<(&'static str, PathState)>, u64, Option<String>) {
        let state = |path: PathKind| {
            let mut state = PathState::default();
            for (rule, counter) in Rule::ALL.into_iter().zip(&self.paths[path as usize]) {
                let transfers = counter.transfers.load(Ordering::Relaxed);
                state.transfers += transfers;
                state.bytes += counter.bytes.load(Ordering::Relaxed);
                state.rules.extend((transfers > 0).then_some((rule.name(), transfers)));
            }
            (path.name(), state)
        };
        let paths = PathKind::ALL.into_iter().map(state).collect();
        (paths, self.staged_bytes.load(Ordering::Relaxed), self.reason.lock().clone())
    }
}
