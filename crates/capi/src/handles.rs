//! Handles: numbers that stand for what a program has.
//!
//! A number is used only once in a process, and its first byte says what kind of handle it is. So a handle that was freed, that was
//! never returned or that is of another kind is refused (`invalid_handles_are_refused_by_every_call`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use llm_datadist_core::{Error, ErrorKind, Result};

/// A kind of handles, and those of it that this process and the ones that forked it have returned.
pub(crate) struct HandleKind {
    /// What the handles stand for, in errors.
    name: &'static str,
    /// The first byte of the numbers.
    byte: u64,
    /// The kind of the error for an invalid handle.
    error: ErrorKind,
    /// The last handle.
    last: AtomicU64,
    /// The last handle that existed when this process was forked.
    inherited: AtomicU64,
}

/// Objects of the C++ class.
pub(crate) static OBJECTS: HandleKind = HandleKind::new("handle", 0, ErrorKind::Closed);
/// Engines of the native API.
pub(crate) static ENGINES: HandleKind = HandleKind::new("engine", 1, ErrorKind::Closed);
/// Caches of these engines.
pub(crate) static CACHES: HandleKind = HandleKind::new("cache", 2, ErrorKind::CacheNotFound);
/// Transfers of these engines.
pub(crate) static TRANSFERS: HandleKind = HandleKind::new("transfer", 3, ErrorKind::Closed);
/// Engines of `hixl`.
pub(crate) static HIXL_ENGINES: HandleKind = HandleKind::new("hixl engine", 4, ErrorKind::Closed);

impl HandleKind {
    const fn new(name: &'static str, byte: u64, error: ErrorKind) -> Self {
        let (last, inherited) = (AtomicU64::new(byte << 56), AtomicU64::new(byte << 56));
        HandleKind { name, byte, error, last, inherited }
    }

    /// Returns the handle with this number, which is below 2^56.
    pub(crate) fn handle(&self, number: u64) -> u64 {
        (self.byte << 56) | number
    }

    fn unknown(&self, handle: u64) -> Error {
        let name = self.name;
        let inherited = self.handle(1)..=self.inherited.load(Ordering::Relaxed);
        let text = if inherited.contains(&handle) {
            format!("there is no such {name} in this process, which was forked after the {name} was made")
        } else {
            format!("there is no such {name}: it was freed, or never returned")
        };
        Error::new(self.error, text).with("handle", handle)
    }
}

/// Records, in a forked child, that the handles so far belong to its parent.
pub(crate) fn forked() {
    for kind in [&OBJECTS, &ENGINES, &CACHES, &TRANSFERS, &HIXL_ENGINES] {
        kind.inherited.store(kind.last.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// What the handles of one kind stand for, in one process.
pub(crate) struct HandleTable<T> {
    kind: &'static HandleKind,
    all: RwLock<BTreeMap<u64, T>>,
}

impl<T: Clone> HandleTable<T> {
    /// Creates the table without handles.
    pub(crate) const fn new(kind: &'static HandleKind) -> Self {
        HandleTable { kind, all: RwLock::new(BTreeMap::new()) }
    }

    /// Adds a value and returns its handle.
    pub(crate) fn add(&self, value: T) -> u64 {
        let handle = self.kind.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.all.write().unwrap_or_else(PoisonError::into_inner).insert(handle, value);
        handle
    }

    /// Adds a value with a number of its own, which no other value of the process has, and returns its handle.
    pub(crate) fn add_numbered(&self, number: u64, value: T) -> u64 {
        let handle = self.kind.handle(number);
        self.kind.last.fetch_max(handle, Ordering::Relaxed);
        self.all.write().unwrap_or_else(PoisonError::into_inner).insert(handle, value);
        handle
    }

    /// Returns the value of a handle.
    pub(crate) fn get(&self, handle: u64) -> Result<T> {
        let found = self.all.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned();
        found.ok_or_else(|| self.kind.unknown(handle))
    }

    /// Frees a handle and returns its value.
    pub(crate) fn remove(&self, handle: u64) -> Result<T> {
        let found = self.all.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
        found.ok_or_else(|| self.kind.unknown(handle))
    }

    /// Frees the handles whose values are not kept.
    pub(crate) fn retain(&self, keep: impl Fn(&T) -> bool) {
        // Dropped without the lock.
        let gone: Vec<T> = {
            let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
            let handles: Vec<u64> =
                all.iter().filter(|(_, value)| !keep(value)).map(|(handle, _)| *handle).collect();
            handles.iter().filter_map(|handle| all.remove(handle)).collect()
        };
        drop(gone);
    }
}
