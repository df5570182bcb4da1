//! Counters and latency histograms, read as one structure.
//!
//! Writing costs a few relaxed additions and takes no lock. Not for: logs, or state that somebody owns (pools, table):
//! those are asked when the structure is read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::engine::{Outcome, Route};
use crate::error::Result;
use crate::pool::PoolState;
use crate::table::TableState;

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
}

impl Op {
    /// Every operation, with its name in reports.
    pub const ALL: [(Op, &'static str); 8] = [
        (Op::Allocate, "allocate"),
        (Op::Deallocate, "deallocate"),
        (Op::RemoveKey, "remove_key"),
        (Op::Register, "register"),
        (Op::CopyCache, "copy_cache"),
        (Op::CopyBlocks, "copy_blocks"),
        (Op::SwapIn, "swap_in"),
        (Op::SwapOut, "swap_out"),
    ];
}

/// Buckets of the histogram: bucket `i` counts calls of less than `2^i` nanoseconds; the last takes the rest.
const BUCKETS: usize = 40;

#[derive(Debug)]
struct Counters {
    calls: AtomicU64,
    failures: AtomicU64,
    bytes: AtomicU64,
    nanos: AtomicU64,
    max_nanos: AtomicU64,
    histogram: [AtomicU64; BUCKETS],
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            calls: AtomicU64::default(),
            failures: AtomicU64::default(),
            bytes: AtomicU64::default(),
            nanos: AtomicU64::default(),
            max_nanos: AtomicU64::default(),
            histogram: std::array::from_fn(|_| AtomicU64::default()),
        }
    }
}

/// All counters of one engine.
#[derive(Debug, Default)]
pub struct Stats {
    ops: [Counters; Op::ALL.len()],
    direct: AtomicU64,
    ring: AtomicU64,
}

/// The counters of one operation, as they were when read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpState {
    /// Calls that ended, failures included.
    pub calls: u64,
    /// Calls that failed.
    pub failures: u64,
    /// Bytes moved by calls that succeeded.
    pub bytes: u64,
    /// Nanoseconds in all calls.
    pub total_nanos: u64,
    /// The longest call in nanoseconds.
    pub max_nanos: u64,
    /// Upper bound in nanoseconds of the fastest half, to a power of two.
    pub p50_nanos: u64,
    /// Upper bound in nanoseconds of the fastest 99 %, to a power of two.
    pub p99_nanos: u64,
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
    /// Bytes copied with ordinary stores.
    pub plain_bytes: u64,
    /// Bytes copied with streaming stores.
    pub streaming_bytes: u64,
    /// Workers that copy, the calling thread among them.
    pub copy_workers: u64,
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
}

impl Stats {
    /// Runs one operation and counts it.
    pub fn timed<T>(&self, op: Op, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let result = call();
        self.count(op, started.elapsed(), result.is_ok());
        result
    }

    /// Counts what a copy moved.
    pub fn moved(&self, op: Op, outcome: &Outcome) {
        self.ops[op as usize].bytes.fetch_add(outcome.bytes, Ordering::Relaxed);
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

    fn count(&self, op: Op, took: Duration, ok: bool) {
        let counters = &self.ops[op as usize];
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = (u64::BITS - nanos.leading_zeros()) as usize;
        counters.calls.fetch_add(1, Ordering::Relaxed);
        counters.failures.fetch_add(u64::from(!ok), Ordering::Relaxed);
        counters.nanos.fetch_add(nanos, Ordering::Relaxed);
        counters.max_nanos.fetch_max(nanos, Ordering::Relaxed);
        counters.histogram[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
    }
}

impl Counters {
    fn state(&self) -> OpState {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let histogram: Vec<u64> = self.histogram.iter().map(load).collect();
        OpState {
            calls: load(&self.calls),
            failures: load(&self.failures),
            bytes: load(&self.bytes),
            total_nanos: load(&self.nanos),
            max_nanos: load(&self.max_nanos),
            p50_nanos: percentile(&histogram, 50),
            p99_nanos: percentile(&histogram, 99),
        }
    }
}

/// The upper bound of the bucket that holds the call below which `percent` of all lie.
fn percentile(histogram: &[u64], percent: u64) -> u64 {
    let total: u64 = histogram.iter().sum();
    let wanted = (total * percent).div_ceil(100);
    let mut seen = 0;
    for (bucket, count) in histogram.iter().enumerate() {
        seen += count;
        if total > 0 && seen >= wanted {
            return 1 << bucket;
        }
    }
    0
}
