//! The queue of descriptors that peers sent in place of memory, and that wait to be closed.
//!
//! A peer can make closing a descriptor take arbitrarily long: a socket that lingers, or a file of a file system that does not
//! answer. So threads that do nothing else close them (`test_descriptors_that_close_slowly_hold_nobody_up`). While
//! [`MAX_OPEN`] of them are open, no stream receives another (`descriptors_that_never_close_are_bounded`).

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

/// Number of open descriptors from which on no more are received. Those of the receive before may exceed it.
const MAX_OPEN: usize = 32;
/// Number of open descriptors from which on the local socket accepts no connections: more than one message brings beyond
/// [`MAX_OPEN`]. The rest are sockets with descriptors that were not received.
const CROWDED: usize = 320;
const MAX_THREADS: usize = 4;

/// Number of descriptors that wait or are being closed. Not under the lock, so that a forked child, which has no thread to release
/// the lock, can receive memory.
static OPEN: AtomicUsize = AtomicUsize::new(0);
static QUEUE: Mutex<DiscardQueue> = Mutex::new(DiscardQueue { waiting: VecDeque::new(), threads: 0 });

struct DiscardQueue {
    waiting: VecDeque<OwnedFd>,
    /// Number of threads that close descriptors.
    threads: usize,
}

/// Closes `descriptor` on another thread.
pub fn discard(descriptor: OwnedFd) {
    OPEN.fetch_add(1, Ordering::Relaxed);
    let mut queue = lock();
    queue.waiting.push_back(descriptor);
    queue.start_thread();
}

/// Whether no more descriptors may be received.
pub(super) fn is_full() -> bool {
    let full = OPEN.load(Ordering::Relaxed) >= MAX_OPEN;
    if full {
        // It may have been impossible before.
        lock().start_thread();
    }
    full
}

/// Whether no more connections that carry descriptors may be accepted. Before Linux 6.16, each may leave a socket here.
pub fn is_crowded() -> bool {
    OPEN.load(Ordering::Relaxed) >= CROWDED && is_full()
}

fn lock() -> MutexGuard<'static, DiscardQueue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiscardQueue {
    /// Starts a thread if descriptors wait. If none can be started, they wait for the next attempt.
    fn start_thread(&mut self) {
        let needed = !self.waiting.is_empty() && self.threads < MAX_THREADS;
        if needed && Builder::new().name("llm-discard".into()).spawn(close_all).is_ok() {
            self.threads += 1;
        }
    }

    /// Takes the next descriptor for a thread, which ends if there is none.
    fn next(&mut self) -> Option<OwnedFd> {
        let next = self.waiting.pop_front();
        self.threads -= usize::from(next.is_none());
        next
    }
}

fn close_all() {
    loop {
        let Some(descriptor) = lock().next() else { return };
        drop(descriptor);
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}
