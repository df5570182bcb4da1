//! Counters for calls of one kind, with a histogram of their durations.
//!
//! Counting costs a few relaxed additions and takes no lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Serialize, Serializer};

/// Number of buckets of the histogram. Bucket `i` counts calls of at least `2^(i-1)` and less than `2^i`
/// nanoseconds. The last bucket counts calls of `2^38` nanoseconds (about 275 seconds) and more.
pub const BUCKETS: usize = 40;

/// The counters of one kind of call.
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

/// The counters of one kind of call when they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OpState {
    /// Number of calls that ended, failures included.
    pub calls: u64,
    /// Number of calls that failed.
    pub failures: u64,
    /// Bytes moved by calls that succeeded.
    pub bytes: u64,
    /// Nanoseconds that all calls took together.
    pub total_nanos: u64,
    /// Nanoseconds of the longest call.
    pub max_nanos: u64,
    /// Upper bound of the 50th percentile in nanoseconds: the next power of two, but at most `max_nanos`.
    pub p50_nanos: u64,
    /// Upper bound of the 99th percentile in nanoseconds: the next power of two, but at most `max_nanos`.
    pub p99_nanos: u64,
    /// Number of calls by duration: bucket `i` counts calls of at least `2^(i-1)` and less than `2^i` nanoseconds.
    #[serde(serialize_with = "list")]
    pub buckets: [u64; BUCKETS],
}

fn list<S: Serializer>(counts: &[u64], to: S) -> Result<S::Ok, S::Error> {
    counts.serialize(to)
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
    /// Counts one call that took `took`; `ok` is whether it succeeded.
    pub fn count(&self, took: Duration, ok: bool) {
        self.count_each(1, took, ok);
    }

    /// Counts one request that did the work of `count` calls in `took`. Each call gets an equal share of the time. A failed
    /// request counts as one call.
    pub fn count_each(&self, count: u32, took: Duration, ok: bool) {
        let count = if ok { count.max(1) } else { 1 };
        let nanos = u64::try_from((took / count).as_nanos()).unwrap_or(u64::MAX);
        let (count, bucket) = (u64::from(count), (u64::BITS - nanos.leading_zeros()) as usize);
        self.calls.fetch_add(count, Ordering::Relaxed);
        self.failures.fetch_add(u64::from(!ok), Ordering::Relaxed);
        self.nanos.fetch_add(nanos.saturating_mul(count), Ordering::Relaxed);
        self.max_nanos.fetch_max(nanos, Ordering::Relaxed);
        self.histogram[bucket.min(BUCKETS - 1)].fetch_add(count, Ordering::Relaxed);
    }

    pub fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the current values. They are read one by one while calls are running, so a call may be counted
    /// in one field and not yet in another.
    pub fn state(&self) -> OpState {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let buckets = std::array::from_fn(|bucket| load(&self.histogram[bucket]));
        // Read after the buckets. A call updates `max_nanos` before its bucket, so the maximum covers every
        // counted call.
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

/// Returns the upper bound of the bucket that contains the given percentile; 0 if nothing was counted.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_each_divides_the_time_and_counts_a_failure_once() {
        let (counters, us) = (Counters::default(), Duration::from_micros);
        counters.count_each(4, us(100), true);
        counters.count_each(3, us(60), false);
        counters.count_each(0, us(1), true);
        let state = counters.state();
        assert_eq!((state.calls, state.failures), (6, 1));
        assert_eq!((state.total_nanos, state.max_nanos), (161_000, 60_000));
        // Four calls of 25 µs, one of 60 µs, one of 1 µs. Buckets are powers of two in nanoseconds.
        assert_eq!((state.buckets[15], state.buckets[16], state.buckets[10]), (4, 1, 1));
    }
}
