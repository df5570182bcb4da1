//! Counters of one kind of call, with a histogram of how long the calls took.
//!
//! Writing costs a few relaxed additions and takes no lock. Not for: which calls there are (`stats`, `links`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets of the histogram: bucket `i` counts calls of less than `2^i` nanoseconds that no earlier bucket counts; the
/// last takes the rest, those of `2^38` nanoseconds (about 275 seconds) and more.
pub const BUCKETS: usize = 40;

/// The counters.
#[derive(Debug)]
pub struct Counters {
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

/// The counters of one operation, as they were when read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// An upper bound in nanoseconds of the fastest half: the next power of two, and never above `max_nanos`.
    pub p50_nanos: u64,
    /// An upper bound in nanoseconds of the fastest 99 %: the next power of two, and never above `max_nanos`.
    pub p99_nanos: u64,
    /// How many calls took how long: see [`BUCKETS`].
    pub buckets: [u64; BUCKETS],
}

impl Default for OpState {
    fn default() -> Self {
        OpState {
            calls: 0,
            failures: 0,
            bytes: 0,
            total_nanos: 0,
            max_nanos: 0,
            p50_nanos: 0,
            p99_nanos: 0,
            buckets: [0; BUCKETS],
        }
    }
}

impl Counters {
    /// Counts one call.
    pub fn count(&self, took: Duration, ok: bool) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = (u64::BITS - nanos.leading_zeros()) as usize;
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.failures.fetch_add(u64::from(!ok), Ordering::Relaxed);
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
        self.max_nanos.fetch_max(nanos, Ordering::Relaxed);
        self.histogram[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts bytes moved.
    pub fn moved(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// As they are now.
    #[must_use]
    pub fn state(&self) -> OpState {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let buckets = std::array::from_fn(|bucket| load(&self.histogram[bucket]));
        // After the buckets: a call enters its time here first, so the longest one in a bucket is known.
        let max_nanos = load(&self.max_nanos);
        OpState {
            calls: load(&self.calls),
            failures: load(&self.failures),
            bytes: load(&self.bytes),
            total_nanos: load(&self.nanos),
            max_nanos,
            p50_nanos: percentile(&buckets, 50).min(max_nanos),
            p99_nanos: percentile(&buckets, 99).min(max_nanos),
            buckets,
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
