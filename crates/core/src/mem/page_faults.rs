//! How often this thread had to wait for a page to be mapped: what tells a first touch from the speed of memory.
//!
//! Not for: statistics; it costs a system call.

/// Page faults of this thread so far; 0 where the kernel does not say.
#[must_use]
pub fn page_faults() -> u64 {
    // SAFETY: zeros are a valid value of this struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills in `usage`, which outlives the call.
    let told = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    if told == 0 { u64::try_from(usage.ru_minflt.saturating_add(usage.ru_majflt)).unwrap_or(0) } else { 0 }
}
