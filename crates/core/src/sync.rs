//! The locks, counters and threads of `table::pin`, `engine::workers`, `engine::handover`, `task` and `lanes`: the standard
//! ones, or loom's where its model runs them (`--cfg loom`; `tests/rust/loom_{pin, job, handover, task}.rs`).
//!
//! Not for: anything else; a lock that no model looks at comes from `std`.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};
#[cfg(loom)]
pub(crate) use loom::thread::Builder;
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::thread::Builder;

/// Between a change that is announced and the look at what others announced: no two threads that do both may each miss the
/// other. `SeqCst` on all four promises it; loom takes `SeqCst` for less there, and is told by a fence, which it knows.
#[inline]
pub(crate) fn one_order() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}
