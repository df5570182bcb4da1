//! Python objects of one engine that its events return again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The handles of what has not ended, by key. A hash map would take up to twice the memory, and move all entries at times while a
/// call starts.
pub(crate) struct Handles<K, V>(Mutex<Entries<K, V>>);

/// The entries, or `None` once the engine was closed.
type Entries<K, V> = Option<BTreeMap<K, V>>;

impl<K, V> Default for Handles<K, V> {
    fn default() -> Self {
        Handles(Mutex::new(Some(BTreeMap::new())))
    }
}

impl<K: Ord + Copy, V> Handles<K, V> {
    fn lock(&self) -> MutexGuard<'_, Entries<K, V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what `read` finds in the entry with this key.
    pub(crate) fn get<T>(&self, key: &K, read: impl FnOnce(&V) -> T) -> Option<T> {
        self.lock().as_ref()?.get(key).map(read)
    }

    /// Adds an entry, unless the engine was closed.
    pub(crate) fn insert(&self, key: K, handle: V) {
        // What is not kept is dropped without the lock, because it may be the last reference.
        let replaced = match self.lock().as_mut() {
            Some(entries) => entries.insert(key, handle),
            None => Some(handle),
        };
        drop(replaced);
    }

    /// Takes an entry out. The caller drops it without a lock.
    pub(crate) fn remove(&self, key: &K) -> Option<V> {
        self.lock().as_mut()?.remove(key)
    }

    /// Takes out the entries of which `which` is true. The caller drops them without a lock.
    pub(crate) fn remove_where(&self, which: impl Fn(&V) -> bool) -> Vec<V> {
        let mut entries = self.lock();
        let Some(entries) = entries.as_mut() else { return Vec::new() };
        let keys: Vec<K> = entries.iter().filter(|(_, handle)| which(handle)).map(|(key, _)| *key).collect();
        keys.iter().filter_map(|key| entries.remove(key)).collect()
    }

    /// Drops all entries, and those that are added later.
    pub(crate) fn clear(&self) {
        let entries = self.lock().take();
        drop(entries);
    }
}
