//! Locks, counters and threads of `cache::row_pins`, `copy::workers`, `transfer::task` and
//! `transfer::executor`.
//!
//! They are those of the standard library. With `--cfg loom` they are those of loom, whose models run that
//! code (`tests/integration/loom_pin.rs`, `copy/workers/loom_tests.rs`, `transfer/task/loom_tests.rs`). Locks
//! that no loom model runs are taken from `std` directly.

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
