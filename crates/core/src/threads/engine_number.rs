//! Numbers and names of the engines of a process, and the engine for which a thread works.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hashbrown::HashMap;

use super::per_process::PerProcess;
use crate::sync::OnDrop;

/// Distinguishes the engines of a process that share threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct EngineNumber(u32);

type Names = Mutex<HashMap<EngineNumber, Arc<str>>>;

/// The names of the open engines.
static NAMES: PerProcess<Names> = PerProcess::new();

/// Keeps the name of an open engine known.
#[derive(Debug)]
pub(crate) struct KnownEngine(EngineNumber, Arc<Names>);

impl Drop for KnownEngine {
    fn drop(&mut self) {
        self.1.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Returns the name of the engine for which this thread works. Log lines begin with it.
pub fn engine_of_thread() -> Option<Arc<str>> {
    // Fails only while the thread ends.
    let number = CURRENT.try_with(Cell::get).ok()??;
    NAMES.get(Names::default).lock().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
}

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

    /// Makes the name of the engine known until the result is dropped.
    pub(crate) fn named(self, name: &str) -> KnownEngine {
        let names = NAMES.get(Names::default);
        names.lock().unwrap_or_else(PoisonError::into_inner).insert(self, name.into());
        KnownEngine(self, names)
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
