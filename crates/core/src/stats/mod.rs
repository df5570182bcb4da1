//! Counters and latency histograms, read as one structure.
//!
//! Writing costs a few relaxed additions and takes no lock. Not for: logs, or state that somebody owns (pools, table):
//! those are asked when the structure is read.

mod counters;

pub use counters::{BUCKETS, Counters, OpState};

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::cache::TableState;
use crate::copy::{Outcome, Route};
use crate::error::Result;
use crate::model::ClusterId;
use crate::pool::PoolState;

/// The operations that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// `allocate_cache`, `allocate_blocks_cache`.
    Allocate,
    /// `deallocate_cache`, `deallocate_blocks_cache`.
    Deallocate,
    /// `remove_cache_key`.
    RemoveKey,
    /// `register_cache`, `register_blocks_cache`, `unregister_cache`.
    Register,
    /// `copy_cache` and the seed's `CopyKvCache`.
    CopyCache,
    /// `copy_blocks`.
    CopyBlocks,
    /// `swap_blocks`, host to device.
    SwapIn,
    /// `swap_blocks`, device to host.
    SwapOut,
    /// `link_clusters`, each cluster of the list for itself.
    Link,
    /// `unlink_clusters`, each cluster of the list for itself.
    Unlink,
    /// `pull_cache`, `pull_blocks`.
    Pull,
    /// `push_cache`, `push_blocks`, and the seed's `PushKvCache`.
    Push,
    /// One layer of `transfer_cache_async`, brought to one destination.
    Layer,
    /// Requests of peers answered; bytes are those that went through this process.
    Served,
}

impl Op {
    /// Every operation, with its name in reports.
    pub const ALL: [(Op, &'static str); 14] = [
        (Op::Allocate, "allocate"),
        (Op::Deallocate, "deallocate"),
        (Op::RemoveKey, "remove_key"),
        (Op::Register, "register"),
        (Op::CopyCache, "copy_cache"),
        (Op::CopyBlocks, "copy_blocks"),
        (Op::SwapIn, "swap_in"),
        (Op::SwapOut, "swap_out"),
        (Op::Link, "link"),
        (Op::Unlink, "unlink"),
        (Op::Pull, "pull"),
        (Op::Push, "push"),
        (Op::Layer, "transfer_layer"),
        (Op::Served, "served"),
    ];
}

/// All counters of one engine.
#[derive(Debug, Default)]
pub struct Stats {
    ops: [Counters; Op::ALL.len()],
    direct: AtomicU64,
    ring: AtomicU64,
}

/// Everything an engine counts, in one structure.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The device pool, if there is one.
    pub device_pool: Option<PoolReport>,
    /// The host pool, if there is one.
    pub host_pool: Option<PoolReport>,
    /// Caches and keys.
    pub table: TableState,
    /// Each operation with its name.
    pub ops: Vec<(&'static str, OpState)>,
    /// Swap-ins that went straight to their place.
    pub swap_in_direct: u64,
    /// Swap-ins that went through the ring.
    pub swap_in_ring: u64,
    /// Bytes of device memory the swap-in ring holds.
    pub ring_bytes: u64,
    /// Bytes of registered memory that were put into huge pages for peers, or found there; also of what was unregistered
    /// since.
    pub registered_merged_bytes: u64,
    /// Bytes copied with ordinary stores.
    pub plain_bytes: u64,
    /// Bytes copied with streaming stores.
    pub streaming_bytes: u64,
    /// Workers that copy, the calling thread among them.
    pub copy_workers: u64,
    /// Every link that lives.
    pub links: Vec<LinkState>,
}

/// A link as it is now.
#[derive(Clone, Debug)]
pub struct LinkState {
    /// Who is at the other end.
    pub cluster: ClusterId,
    /// Where.
    pub address: String,
    /// How messages travel: `shm`, `tcp` or `local`.
    pub transport: &'static str,
    /// How the memory of its pools travels: `mapped` or `stream`; `none` if it has no pool that could be mapped.
    pub pools: &'static str,
    /// How its registered memory travels: `process` or `stream`.
    pub registered: &'static str,
    /// Why pools are not mapped, or else why registered memory is not read by process id, between processes of one host.
    pub refusal: Option<String>,
    /// Whether this side made the link.
    pub outgoing: bool,
    /// Milliseconds since the last sign of life.
    pub silent_ms: u64,
    /// Requests to the peer: calls, failures, bytes and times.
    pub requests: OpState,
    /// Pulls and pushes: calls, failures, bytes and times.
    pub transfers: OpState,
}

/// A pool and the memory under it.
#[derive(Clone, Copy, Debug)]
pub struct PoolReport {
    /// The pool as numbers.
    pub pool: PoolState,
    /// What the kernel was asked for in huge pages.
    pub huge_pages: &'static str,
    /// Bytes committed by touching.
    pub committed_bytes: u64,
    /// Bytes that the engine had the kernel put into huge pages.
    pub merged_bytes: u64,
    /// The kernel's error number, if it refused to: it is too old, or may not.
    pub merge_errno: Option<i32>,
}

impl Stats {
    /// Runs one operation and counts it.
    pub fn timed<T>(&self, op: Op, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let result = call();
        self.ops[op as usize].count(started.elapsed(), result.is_ok());
        result
    }

    /// Counts a call that ended.
    pub fn counted(&self, op: Op, took: Duration, ok: bool) {
        self.ops[op as usize].count(took, ok);
    }

    /// Counts bytes that travelled over a link.
    pub fn travelled(&self, op: Op, bytes: u64) {
        self.ops[op as usize].moved(bytes);
    }

    /// Counts what a copy moved.
    pub fn moved(&self, op: Op, outcome: &Outcome) {
        self.ops[op as usize].moved(outcome.bytes);
        if op == Op::SwapIn {
            let way = if outcome.route == Route::Ring { &self.ring } else { &self.direct };
            way.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Swap-ins that went straight, and through the ring.
    #[must_use]
    pub fn swap_ins(&self) -> (u64, u64) {
        (self.direct.load(Ordering::Relaxed), self.ring.load(Ordering::Relaxed))
    }

    /// Every operation as it is now.
    #[must_use]
    pub fn ops(&self) -> Vec<(&'static str, OpState)> {
        Op::ALL.iter().map(|&(op, name)| (name, self.ops[op as usize].state())).collect()
    }
}
