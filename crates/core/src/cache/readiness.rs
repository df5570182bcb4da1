//! The readiness of one waiting call: whether all its rows are free, in all its caches.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::sync::{AtomicUsize, Condvar, Mutex, OnDrop, Ordering};

/// What is notified when nothing blocks a waiting call any more.
pub trait OnReady: Send + Sync {
    /// Called on the thread that frees the last row, without a lock. It must be short.
    fn ready(self: Arc<Self>);
}

impl<F: Fn() + Send + Sync> OnReady for F {
    fn ready(self: Arc<Self>) {
        self();
    }
}

/// Whether one waiting call is ready, and what is notified once it is.
pub(super) struct Readiness {
    /// Number of caches in which a row is not free. Changes under the lock of the cache.
    blocking: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
    /// Called when nothing blocks the call any more. It may be too late by then, or be called twice.
    on_ready: Option<Arc<dyn OnReady>>,
}

impl Readiness {
    pub(super) fn new(on_ready: Option<Arc<dyn OnReady>>) -> Arc<Self> {
        Arc::new(Readiness {
            blocking: AtomicUsize::new(0),
            lock: Mutex::default(),
            changed: Condvar::new(),
            on_ready,
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
    pub(super) fn is_ready(&self) -> bool {
        self.blocking.load(Ordering::SeqCst) == 0
    }

    /// Waits at most `limit` until the call is ready.
    pub(super) fn wait(&self, limit: Duration) {
        let lock = self.lock.lock();
        if !self.is_ready() {
            drop(self.changed.wait_timeout(lock, limit));
        }
    }

    /// Tells the call that it is ready. The caller holds no lock.
    pub(super) fn notify(self: Arc<Self>) {
        // A thread that waits either sees that the call is ready, or is notified.
        drop(self.lock.lock());
        self.changed.notify_all();
        if self.on_ready.is_some() {
            notify_one_by_one(self);
        }
    }
}

thread_local! {
    /// The calls that this thread has still to notify, while it notifies one.
    static NOTIFYING: RefCell<Option<VecDeque<Arc<Readiness>>>> = const { RefCell::new(None) };
}

/// Notifies one call. If that makes further calls ready, they follow afterwards: with a call inside each call, a long
/// queue would need a deep stack.
fn notify_one_by_one(readiness: Arc<Readiness>) {
    let nested = NOTIFYING.with_borrow_mut(|later| {
        let nested = later.is_some();
        later.get_or_insert_default().push_back(readiness);
        nested
    });
    if nested {
        return;
    }
    // Also after a panic, so that later calls of this thread are notified.
    let _end = OnDrop(|| NOTIFYING.set(None));
    while let Some(readiness) =
        NOTIFYING.with_borrow_mut(|later| later.as_mut().and_then(VecDeque::pop_front))
    {
        if let Some(on_ready) = &readiness.on_ready {
            on_ready.clone().ready();
        }
    }
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readiness").field("blocking", &self.blocking).finish_non_exhaustive()
    }
}
