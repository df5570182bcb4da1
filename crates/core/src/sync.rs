//! The locks, counters and threads of `table::pin`, `engine::workers`, `task` and `lanes`: the standard ones, or loom's where
//! its model runs them (`--cfg loom`; `tests/integration/loom_{pin, job, task}.rs`).
//!
//! Not for: anything else; a lock that no model looks at comes from `std`.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
#[cfg(loom)]
pub(crate) use loom::thread::Builder;
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::thread::Builder;
