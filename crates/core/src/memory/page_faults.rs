//! Whether this thread had to wait for a page to be mapped: what tells a first touch from the speed of memory.
//!
//! Not for: statistics; it costs a system call.

use std::cell::Cell;

thread_local! {
    /// Page faults of this thread when it was last asked.
    static BEFORE: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// Whether this thread met a page fault since it asked the last time; `true` the first time. Asked once for each stretch
/// of a copy: one call that begins with the answer to the one before, because the question is 1 % of copying a MiB.
#[must_use]
pub fn faulted() -> bool {
    let now = page_faults();
    BEFORE.replace(now) != now
}

#[must_use]
/// Page faults of this thread so far; 0 where the kernel does not say.
pub fn page_faults() -> u64 {
    // SAFETY: zeros are a valid value of this struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills in `usage`, which outlives the call.
    let told = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    if told == 0 { u64::try_from(usage.ru_minflt.saturating_add(usage.ru_majflt)).unwrap_or(0) } else { 0 }
}
