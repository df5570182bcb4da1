//! The turn of one waiting call: whether all its rows are free, in all its caches.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::sync::{AtomicUsize, Condvar, Mutex, OnDrop, Ordering};

/// What is notified when nothing blocks a waiting call any more.
pub trait OnOpened: Send + Sync {
    /// Called on the thread that frees the last row, without a lock. It must be short.
    fn opened(self: Arc<Self>);
}

impl<F: Fn() + Send + Sync> OnOpened for F {
    fn opened(self: Arc<Self>) {
        self();
    }
}

/// The turn of one waiting call.
pub(super) struct CallTurn {
    /// Number of caches in which a row is not free. Changes under the lock of the cache.
    blocking: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
    /// Called when nothing blocks the call any more. It may be too late by then, or be called twice.
    opened: Option<Arc<dyn OnOpened>>,
}

impl CallTurn {
    pub(super) fn new(opened: Option<Arc<dyn OnOpened>>) -> Arc<Self> {
        Arc::new(CallTurn {
            blocking: AtomicUsize::new(0),
            lock: Mutex::default(),
            changed: Condvar::new(),
            opened,
        })
    }

    /// Notes that one more cache blocks the call.
    pub(super) fn block(&self) {
        self.blocking.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that a cache does not block the call any more. Returns whether none does.
    pub(super) fn unblock(&self) -> bool {
        self.blocking.fetch_sub(1, Ordering::SeqCst) == 1
    }

    /// Whether nothing blocks the call. It stays so only under the locks of its caches.
    pub(super) fn is_open(&self) -> bool {
        self.blocking.load(Ordering::SeqCst) == 0
    }

    /// Waits at most `limit` until the turn is open.
    pub(super) fn wait(&self, limit: Duration) {
        let lock = self.lock.lock();
        if !self.is_open() {
            drop(self.changed.wait_timeout(lock, limit));
        }
    }

    /// Tells the call that its turn is open. The caller holds no lock.
    pub(super) fn announce(self: Arc<Self>) {
        // A thread that waits either sees that the turn is open, or is notified.
        drop(self.lock.lock());
        self.changed.notify_all();
        if self.opened.is_some() {
            announce_one_by_one(self);
        }
    }
}

thread_local! {
    /// The turns that this thread has still to announce, while it announces one.
    static ANNOUNCING: RefCell<Option<VecDeque<Arc<CallTurn>>>> = const { RefCell::new(None) };
}

/// Calls `opened` of a turn. If that opens further turns, they follow afterwards: with a call inside each call, a long
/// queue would need a deep stack.
fn announce_one_by_one(turn: Arc<CallTurn>) {
    let nested = ANNOUNCING.with_borrow_mut(|later| {
        let nested = later.is_some();
        later.get_or_insert_default().push_back(turn);
        nested
    });
    if nested {
        return;
    }
    // Also after a panic, so that later turns of this thread are announced.
    let _end = OnDrop(|| ANNOUNCING.set(None));
    while let Some(turn) = ANNOUNCING.with_borrow_mut(|later| later.as_mut().and_then(VecDeque::pop_front)) {
        if let Some(opened) = &turn.opened {
            opened.clone().opened();
        }
    }
}

impl fmt::Debug for CallTurn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallTurn").field("blocking", &self.blocking).finish_non_exhaustive()
    }
}
