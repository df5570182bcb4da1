//! Locks, counters and threads of the code that loom models run (`tests/loom_pins.rs`,
//! `copy/workers/loom_tests.rs`, `transfer/task/loom_tests.rs`): loom's with `--cfg loom`, else those of the
//! standard library. Other code takes them from `std` directly.

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
