//! Counts the page faults of this thread, to distinguish a first touch from the speed of memory.
//!
//! Each count costs a system call.

use std::cell::Cell;

thread_local! {
    /// Page faults of this thread at the previous call of [`faulted`].
    static BEFORE: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// Returns whether this thread has had a page fault since the previous call; `true` at the first call.
///
/// It is called once for each unit of a copy, and compares with the previous call. Another call at the start
/// of each unit would cost 1 % of the time to copy a MiB.
pub fn faulted() -> bool {
    let now = page_faults();
    BEFORE.replace(now) != now
}

/// Returns the page faults of this thread so far; 0 if the kernel does not report them.
pub fn page_faults() -> u64 {
    // SAFETY: zeros are a valid value of this struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes to `usage`, which outlives the call.
    let status = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    if status == 0 { u64::try_from(usage.ru_minflt.saturating_add(usage.ru_majflt)).unwrap_or(0) } else { 0 }
}
