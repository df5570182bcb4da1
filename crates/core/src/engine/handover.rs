//! The buffers that two stages of a pipeline hand to each other: how many were filled, and how many of those drained.
//!
//! Both stages go through the same pieces in the same order, so nothing but the two counts passes between them. Waking a
//! thread costs several small blocks, and the other stage is mostly a moment behind: so whoever waits looks a few
//! hundred times before it sleeps. Every order of both stages: `tests/rust/loom_handover.rs`. Not for: the buffers, or what
//! is in them (`ring`).

use std::hint::spin_loop;
use std::sync::PoisonError;
use std::thread::yield_now;

use crate::id::Deadline;
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, one_order};

/// Looks before a stage sleeps: some ten microseconds, less than waking it costs both sides. The model checker has none,
/// so that both stages sleep whenever they can.
const LOOKS: usize = if cfg!(loom) { 0 } else { 400 };
/// Looks before the core is offered to others.
const YIELD: usize = 32;

/// The counts of one pipeline. Every change is made before it is announced, and seen with all that came before it.
#[derive(Debug, Default)]
pub(super) struct HandOver {
    filled: AtomicU64,
    drained: AtomicU64,
    /// Nothing more is filled.
    closed: AtomicBool,
    /// Nothing more is drained.
    over: AtomicBool,
    sleeping: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl HandOver {
    /// One more buffer is filled.
    pub(super) fn filled(&self) {
        self.filled.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    /// One more buffer is free again.
    pub(super) fn drained(&self) {
        self.drained.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    /// The filling stage has ended.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// The draining stage has ended.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Waits until fewer than `buffers` of the first `count` buffers that were filled are not drained yet. `None` once
    /// `deadline` has passed; `Some(false)` if the draining stage has ended.
    pub(super) fn wait_free(&self, count: u64, buffers: u64, deadline: Deadline) -> Option<bool> {
        let free = || self.drained.load(Ordering::SeqCst) + buffers > count;
        let over = || self.over.load(Ordering::SeqCst);
        self.wait(|| free() || over(), Some(deadline)).then(|| !over())
    }

    /// Waits until more than `count` buffers were filled; `false` if there will be no more.
    pub(super) fn wait_filled(&self, count: u64) -> bool {
        let filled = || self.filled.load(Ordering::SeqCst) > count;
        self.wait(|| filled() || self.closed.load(Ordering::SeqCst), None);
        // Looked at again: what was filled before the end is drained.
        filled()
    }

    /// Waits until the draining stage has ended.
    pub(super) fn wait_end(&self) {
        self.wait(|| self.over.load(Ordering::SeqCst), None);
    }

    /// Whether `ready` came true in time.
    fn wait(&self, ready: impl Fn() -> bool, deadline: Option<Deadline>) -> bool {
        for look in 1..=LOOKS {
            if ready() {
                return true;
            }
            // The stage that is waited for may be kept from this very core.
            if look % YIELD == 0 { yield_now() } else { spin_loop() }
        }
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Said before the last look: whoever changes something after it sees that somebody sleeps.
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        one_order();
        let in_time = loop {
            if ready() {
                break true;
            }
            held = match deadline.map(|deadline| deadline.left()) {
                Some(left) if left.is_zero() => break false,
                Some(left) => self.changed.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(held).unwrap_or_else(PoisonError::into_inner),
            };
        };
        self.sleeping.fetch_sub(1, Ordering::SeqCst);
        in_time
    }

    fn wake(&self) {
        one_order();
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            // Held for a moment, so that nobody is between the last look and the sleep.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }
}

#[cfg(all(test, loom))]
#[path = "../../../../tests/rust/loom_handover.rs"]
mod loom_handover;
