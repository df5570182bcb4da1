//! The locks of the engine, polling before a sleep, a guard for the end of a scope, and one against panics.
//!
//! The locks differ from those of the standard library in one point: a panic does not poison them.
//!
//! Code that holds a lock changes a few fields or map entries at a time, so what a panicking thread leaves behind
//! is consistent.
//!
//! With `--cfg loom` they are loom's, for the models in `tests/loom_pins.rs`, `tests/loom_task.rs` and the files
//! `loom_tests.rs`. Locks in statics are taken from `std` directly, because loom has none.

#[cfg(loom)]
use loom::sync as imp;
#[cfg(not(loom))]
use std::sync as imp;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{PoisonError, TryLockError};
use std::thread::yield_now;
use std::time::{Duration, Instant};

#[cfg(loom)]
pub(crate) use loom::thread::{Builder, ThreadId, current};
#[cfg(not(loom))]
pub(crate) use std::thread::{Builder, ThreadId, current};

pub(crate) use imp::MutexGuard;
pub(crate) use imp::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// A mutual exclusion lock that a panic does not poison.
#[derive(Debug, Default)]
pub struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    /// Creates a lock that is free.
    pub fn new(value: T) -> Self {
        Mutex(imp::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lock, or `None` if a thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the value. No lock is needed, because the borrow is exclusive.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A condition variable for [`Mutex`]. A notification takes a system call only if a thread waits.
#[derive(Debug, Default)]
pub struct Condvar {
    variable: imp::Condvar,
    /// Threads that wait, or are about to wait and hold the lock. A thread that changes under the lock what they wait for, and
    /// then notifies them, sees them here.
    waiting: AtomicUsize,
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Condvar { variable: imp::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let guard = self.variable.wait(guard).unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        guard
    }

    /// Returns the lock, and whether `limit` has passed without a notification.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        limit: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let waited = self.variable.wait_timeout(guard, limit);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        let (guard, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        (guard, waited.timed_out())
    }

    /// Wakes a thread that waits.
    pub fn notify_one(&self) {
        if self.is_awaited() {
            self.variable.notify_one();
        }
    }

    pub(crate) fn notify_all(&self) {
        if self.is_awaited() {
            self.variable.notify_all();
        }
    }

    fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }
}

/// Runs a function when it is dropped, also during a panic.
pub(crate) struct OnDrop<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// How long a thread polls for more work, or for the end of what it waits for, before it sleeps: about the time of one
/// hand-over between threads.
pub(crate) const SPIN_BEFORE_PARK: Duration = Duration::from_micros(50);
/// Polls between two checks of the clock. After each check, the thread yields its core.
const POLLS: u32 = 64;

/// Polls `ready` for at most `limit`, and returns whether it became true. Under loom, whose clock does not move, it looks
/// once.
pub(crate) fn poll(limit: Duration, ready: impl Fn() -> bool) -> bool {
    if limit.is_zero() || cfg!(loom) {
        return ready();
    }
    let started = Instant::now();
    loop {
        for _ in 0..POLLS {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if started.elapsed() >= limit {
            return false;
        }
        // The thread that is waited for may need this core.
        yield_now();
    }
}

/// Runs `work`. If it panics, logs the panic and returns `None`, so that the thread continues with other work.
pub(crate) fn guarded<T>(doing: &str, work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|payload| {
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(|text| &**text)).unwrap_or("no text");
            tracing::error!(
                target: "llm_datadist::links",
                "panic while {doing}: {text}; the engine abandoned this work and continues. Please report this error"
            );
            // Dropping the payload may panic, too.
            std::mem::forget(payload);
        })
        .ok()
}
