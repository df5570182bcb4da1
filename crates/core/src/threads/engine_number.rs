//! Numbers of the engines of a process, and the engine for which a thread works.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sync::OnDrop;

/// Distinguishes the engines of a process that share threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EngineNumber(u32);

thread_local! {
    /// The engine for which this thread works.
    static CURRENT: Cell<Option<EngineNumber>> = const { Cell::new(None) };
}

impl EngineNumber {
    /// Returns a number that no engine of this process has.
    pub(crate) fn next() -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        EngineNumber(LAST.fetch_add(1, Ordering::Relaxed))
    }

    /// Has this thread work for the engine until the result is dropped.
    pub(crate) fn on_this_thread(self) -> impl Drop + use<> {
        let before = CURRENT.replace(Some(self));
        OnDrop(move || CURRENT.set(before))
    }

    /// Returns the engine for which this thread works.
    pub(crate) fn current() -> Option<Self> {
        CURRENT.get()
    }
}
