//! The cache table: finds caches by id, by key and by name, counts references, and releases a cache when the last one
//! is gone.
//!
//! It has one lock, held for a few hash lookups and never during a copy. Memory returns to its pool when the
//! last [`Arc`] of a cache drops. A copy holds one
//! (`memory_released_during_a_copy_returns_when_the_copy_ends`).

mod names;
mod pulled;
mod remote;

pub use self::remote::Resolved;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use hashbrown::HashMap;
use smallvec::SmallVec;

use self::pulled::Pulled;
use super::cache::{Cache, Origin};
use super::shards::{Shards, TABLE};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::memory::{Adopted, Generations, Tensors};
use crate::model::{CacheDesc, CacheId, CacheKey, CacheKind, CacheLayout, Placement};
use crate::sync::Mutex;

/// What to do with a key that already names a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnBoundKey {
    Refuse,
    Replace,
}

/// All caches and keys of one engine.
#[derive(Debug)]
pub struct Table {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// One generation for each entry. It is raised under the lock when the cache leaves the entry or loses a
    /// key, and so before the memory is used again.
    generations: Arc<Generations>,
    /// The tensors of a key's slot that peers have pulled, kept until all of them have been pulled.
    pulled: HashMap<CacheKey, Pulled>,
    last_id: i64,
    ids: Shards<CacheId, EntryIndex>,
    /// For each key, the entry of its cache and the row in it.
    keys: Shards<CacheKey, (EntryIndex, u32)>,
    /// The caches that have a name.
    names: HashMap<Arc<str>, EntryIndex>,
    entries: Vec<Option<TableEntry>>,
    free: Vec<EntryIndex>,
    /// Registered caches that were removed and may still be in use. Only calls that wait for the end of that
    /// use need this.
    leaving: HashMap<CacheId, Weak<Cache>>,
    /// Allocated caches that were removed while something still used them: an array, a view or a call. Only reports need
    /// this.
    released: Vec<ReleasedCache>,
}

/// An allocated cache that was removed while something still used it.
#[derive(Debug)]
struct ReleasedCache {
    cache: Weak<Cache>,
    placement: Placement,
    bytes: u64,
}

/// Index of an entry. Ids and keys map to an index and not to each other, so a lookup takes one hash and one
/// index.
type EntryIndex = u32;

#[derive(Debug)]
struct TableEntry {
    cache: Arc<Cache>,
    /// The reference by id: `true` until the cache is deallocated.
    held: bool,
    bound: u32,
    /// The key given to each row. A removed key remains here, so that the removal need not touch this list.
    /// An item is valid only if `keys` still maps it to this row.
    keys: RowKeys,
}

/// The keys of a cache's rows. Usually there is only one; it needs no separate allocation, because each extra
/// memory access costs time when caches are visited in random order.
type RowKeys = SmallVec<[Option<CacheKey>; 1]>;

fn keys_by_row(keys: &[(u64, CacheKey)]) -> Result<RowKeys> {
    let at = |row: u64| usize::try_from(row).unwrap_or(usize::MAX);
    let rows = keys.iter().map(|&(row, _)| at(row) + 1).max().unwrap_or(0);
    let mut by_row: RowKeys = fallible::inline_with_capacity(TABLE, rows)?;
    by_row.resize(rows, None);
    for &(row, key) in keys {
        by_row[at(row)] = Some(key);
    }
    Ok(by_row)
}

/// Number of caches and keys in a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TableState {
    /// Number of caches, including those that are held only by their keys.
    pub caches: u64,
    /// Number of keys.
    pub keys: u64,
}

impl Table {
    /// Creates an empty table that publishes its changes in `generations`.
    pub fn new(generations: Arc<Generations>) -> Table {
        let state = State {
            generations,
            pulled: HashMap::new(),
            last_id: 0,
            ids: Shards::new(),
            keys: Shards::new(),
            names: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            leaving: HashMap::new(),
            released: Vec::new(),
        };
        Table { state: Mutex::new(state) }
    }

    /// Adds an allocated cache under a new id and, if it is given, a name, and binds its keys.
    ///
    /// `keys` are as [`validate::bindings`](crate::validate::bindings) returns them, each only once. On `Err`
    /// nothing has changed; it is of kind [`ErrorKind::KeyTaken`] if a live cache has the name or one of the keys.
    pub fn allocate(
        &self,
        name: Option<&str>,
        keys: &[(u64, CacheKey)],
        desc: &CacheDesc,
        layout: CacheLayout,
        tensors: Tensors,
    ) -> Result<Arc<Cache>> {
        self.enter(OnBoundKey::Refuse, name, keys, |named| {
            Cache::new(named, Origin::Allocated, desc, layout, tensors, true)
        })
    }

    /// Adds the caller's memory as [`allocate`](Self::allocate) does. But a key that names another cache names this one from now
    /// on.
    pub fn register(
        &self,
        name: Option<&str>,
        keys: &[(u64, CacheKey)],
        adopted: Adopted,
        remote_accessible: bool,
    ) -> Result<Arc<Cache>> {
        let (desc, layout, unordered) = (adopted.desc().clone(), adopted.layout(), adopted.is_unordered());
        let tensors = Tensors::adopted(adopted);
        self.enter(OnBoundKey::Replace, name, keys, |named| {
            let cache = Cache::new(named, Origin::Registered, &desc, layout, tensors, remote_accessible);
            cache.unordered_if(unordered)
        })
    }

    fn enter(
        &self,
        on_bound_key: OnBoundKey,
        name: Option<&str>,
        keys: &[(u64, CacheKey)],
        build: impl FnOnce((CacheId, Option<Arc<str>>)) -> Cache,
    ) -> Result<Arc<Cache>> {
        let (by_row, name) = (keys_by_row(keys)?, name.map(Arc::<str>::from));
        // Declared before the lock, so that caches released by a replaced key drop after the lock is
        // released.
        let mut released: Vec<TableEntry> = Vec::new();
        let mut state = self.state.lock();
        if on_bound_key == OnBoundKey::Refuse
            && let Some((key, other)) = keys.iter().find_map(|(_, key)| Some((key, state.named(*key)?.1)))
        {
            let text = format!("{key} already names a live cache");
            return Err(Error::new(ErrorKind::KeyTaken, text).with("cache_id", other.cache.id()));
        }
        name.as_ref().map_or(Ok(()), |name| state.check_name(name))?;
        let replaced = state.replaced(keys);
        // Everything that allocates memory happens before the first change.
        state.make_room(keys)?;
        state.make_room_for_names(name.iter().len())?;
        if on_bound_key == OnBoundKey::Replace {
            fallible::grow(TABLE, &mut released, keys.len())?;
        }
        for &(_, key) in keys {
            released.extend(state.unbind(key));
        }
        let id = CacheId(state.last_id + 1);
        state.last_id = id.0;
        let cache = Arc::new(build((id, name.clone())));
        let bound = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        let index = state.insert(TableEntry { cache: cache.clone(), held: true, bound, keys: by_row });
        state.ids.insert(id, index);
        state.names.extend(name.map(|name| (name, index)));
        for &(row, key) in keys {
            state.keys.insert(key, (index, u32::try_from(row).unwrap_or(u32::MAX)));
        }
        drop(state);
        for (old, (key, count)) in replaced {
            warn_of_replacement(id, old, key, count);
        }
        Ok(cache)
    }

    /// Returns the cache with this id, or `Err` of kind [`ErrorKind::CacheNotFound`].
    pub fn find(&self, id: CacheId) -> Result<Arc<Cache>> {
        let state = self.state.lock();
        let found = state.ids.get(&id).and_then(|&index| state.entry(index));
        found.map(|entry| entry.cache.clone()).ok_or_else(|| no_cache(id))
    }

    /// Returns the cache and row that a key names, or `Err` of kind [`ErrorKind::CacheNotFound`].
    #[cfg(feature = "testing")]
    pub fn find_key(&self, key: CacheKey) -> Result<(Arc<Cache>, u32)> {
        let state = self.state.lock();
        let found = state.named(key).map(|(_, entry, row)| (entry.cache.clone(), row));
        found.ok_or_else(|| no_key(key))
    }

    /// Releases the reference by id. A continuous cache stays until its last key is removed; a blocks cache
    /// is removed at once, with its key. Has no effect on unknown ids and registered caches (contract §7.2,
    /// §7.4).
    pub fn deallocate(&self, id: CacheId) {
        let mut state = self.state.lock();
        let Some(&index) = state.ids.get(&id) else { return };
        let Some(entry) = state.entry_mut(index).filter(|entry| entry.cache.origin() == Origin::Allocated)
        else {
            return;
        };
        entry.held = false;
        let released = match entry.cache.kind() {
            CacheKind::Batch => state.remove_if_unreferenced(index),
            CacheKind::Blocks => state.remove(index),
        };
        state.note_released(released.as_ref());
        drop(state);
        drop(released);
    }

    /// Removes a key of an allocated cache, and releases the cache if that was its last reference. Has no
    /// effect on unknown keys and keys of registered caches (contract §7.5).
    pub fn remove_key(&self, key: CacheKey) {
        let mut state = self.state.lock();
        let allocated =
            state.named(key).is_some_and(|(_, entry, _)| entry.cache.origin() == Origin::Allocated);
        let released = if allocated { state.unbind(key) } else { None };
        state.note_released(released.as_ref());
        drop(state);
        drop(released);
    }

    /// Raises the generations of all caches, so that peers no longer accept what they know about them. Called
    /// when the engine closes, before its memory is released.
    pub fn retire(&self) {
        let state = self.state.lock();
        for index in state.ids.values() {
            state.generations.bump(*index);
        }
    }

    /// Removes a registered cache and its keys, and returns it. Later calls with the same id return it again, as
    /// long as it is in use and [`forget_unregistered`](Self::forget_unregistered) was not called. Returns
    /// `None` for unknown and allocated ids (contract §7.8).
    pub fn unregister(&self, id: CacheId) -> Result<Option<Arc<Cache>>> {
        let mut state = self.state.lock();
        let Some(&index) = state.ids.get(&id) else {
            // A pin keeps its cache alive, so a cache that is already dropped is not in use.
            return Ok(state.leaving.get(&id).and_then(Weak::upgrade));
        };
        state.leaving.try_reserve(1).map_err(|_| fallible::out_of_memory(TABLE, state.leaving.len()))?;
        let registered = state.entry(index).is_some_and(|entry| entry.cache.origin() == Origin::Registered);
        let released = if registered { state.remove(index) } else { None };
        let cache = released.map(|entry| entry.cache);
        if let Some(cache) = &cache {
            state.leaving.retain(|_, left| left.strong_count() > 0);
            state.leaving.insert(id, Arc::downgrade(cache));
        }
        drop(state);
        Ok(cache)
    }

    /// Forgets a cache that was unregistered and is no longer in use.
    pub fn forget_unregistered(&self, id: CacheId) {
        self.state.lock().leaving.remove(&id);
    }

    /// Returns the bytes and the number of the released caches of a placement whose memory is still in use.
    pub fn released(&self, placement: Placement) -> (u64, usize) {
        let state = self.state.lock();
        let used = |of: &&ReleasedCache| of.placement == placement && of.cache.strong_count() > 0;
        state.released.iter().filter(used).fold((0, 0), |(bytes, count), of| (bytes + of.bytes, count + 1))
    }

    pub fn state(&self) -> TableState {
        let state = self.state.lock();
        TableState { caches: state.ids.len() as u64, keys: state.keys.len() as u64 }
    }
}

impl State {
    /// Reserves the memory that adding a cache with `keys`, and later removing it, needs. On `Err` nothing
    /// has changed.
    fn make_room(&mut self, keys: &[(u64, CacheKey)]) -> Result<()> {
        if self.free.is_empty() {
            fallible::grow(TABLE, &mut self.entries, 1)?;
            // Every entry may become free, and freeing must not fail.
            let entries = self.entries.len() + 1;
            fallible::grow(TABLE, &mut self.free, entries)?;
        }
        let id = CacheId(self.last_id + 1);
        self.ids.make_room(std::iter::once(&id))?;
        self.keys.make_room(keys.iter().map(|(_, key)| key))
    }

    fn entry(&self, index: EntryIndex) -> Option<&TableEntry> {
        self.entries.get(index as usize)?.as_ref()
    }

    fn entry_mut(&mut self, index: EntryIndex) -> Option<&mut TableEntry> {
        self.entries.get_mut(index as usize)?.as_mut()
    }

    /// Returns the entry that a key names, with its index, and the row in it.
    fn named(&self, key: CacheKey) -> Option<(EntryIndex, &TableEntry, u32)> {
        let &(index, row) = self.keys.get(&key)?;
        Some((index, self.entry(index)?, row))
    }

    /// Returns the caches that `keys` name now, each with the first such key and their number.
    fn replaced(&self, keys: &[(u64, CacheKey)]) -> BTreeMap<CacheId, (CacheKey, usize)> {
        let mut replaced = BTreeMap::new();
        for &(_, key) in keys {
            if let Some((_, other, _)) = self.named(key) {
                replaced.entry(other.cache.id()).or_insert((key, 0)).1 += 1;
            }
        }
        replaced
    }

    fn insert(&mut self, entry: TableEntry) -> EntryIndex {
        if let Some(index) = self.free.pop() {
            self.entries[index as usize] = Some(entry);
            return index;
        }
        self.entries.push(Some(entry));
        // An entry takes more than 32 bytes, so 2^32 of them do not fit into the memory of any machine that
        // this runs on.
        EntryIndex::try_from(self.entries.len() - 1).unwrap_or(EntryIndex::MAX)
    }

    /// Removes a key, and returns the cache if that was its last reference.
    fn unbind(&mut self, key: CacheKey) -> Option<TableEntry> {
        let (index, _) = self.keys.remove(&key)?;
        self.forget(index, key);
        self.entry_mut(index)?.bound -= 1;
        self.remove_if_unreferenced(index)
    }

    /// Removes an allocated cache without references.
    fn remove_if_unreferenced(&mut self, index: EntryIndex) -> Option<TableEntry> {
        let entry = self.entry(index)?;
        let gone = entry.cache.origin() == Origin::Allocated && !entry.held && entry.bound == 0;
        if gone { self.take(index) } else { None }
    }

    /// Removes a cache and all its keys.
    fn remove(&mut self, index: EntryIndex) -> Option<TableEntry> {
        let entry = self.take(index)?;
        for (row, key) in entry.keys.iter().enumerate() {
            if let Some(key) = key
                && let Some(&(named, at)) = self.keys.get(key)
                && (named, at as usize) == (index, row)
            {
                self.keys.remove(key);
                self.pulled.remove(key);
            }
        }
        Some(entry)
    }

    /// Forgets pulls by `key`, which no longer names the entry, and invalidates what peers know of it.
    fn forget(&mut self, index: EntryIndex, key: CacheKey) {
        self.pulled.remove(&key);
        self.generations.bump(index);
    }

    /// Notes a cache that was removed, if something still uses it. Without memory for the note, reports lack the cache.
    fn note_released(&mut self, entry: Option<&TableEntry>) {
        let Some(entry) = entry.filter(|entry| Arc::strong_count(&entry.cache) > 1) else { return };
        // Checking all of them only when there is no room for another takes constant time on average.
        if self.released.len() == self.released.capacity() {
            self.released.retain(|released| released.cache.strong_count() > 0);
            // Room for as many again.
            let _ = self.released.try_reserve(self.released.len().max(16));
        }
        if self.released.len() < self.released.capacity() {
            let (placement, bytes) = (entry.cache.placement(), entry.cache.bytes());
            self.released.push(ReleasedCache { cache: Arc::downgrade(&entry.cache), placement, bytes });
        }
    }

    fn take(&mut self, index: EntryIndex) -> Option<TableEntry> {
        let entry = self.entries.get_mut(index as usize)?.take()?;
        self.ids.remove(&entry.cache.id());
        if let Some(name) = entry.cache.name() {
            self.names.remove(name);
        }
        self.generations.bump(index);
        self.free.push(index);
        Some(entry)
    }
}

/// Logs a warning. Two caches under one key are nearly always a mistake, because peers that request the key
/// get the later one.
#[cold]
fn warn_of_replacement(cache_id: CacheId, old: CacheId, key: CacheKey, count: usize) {
    let more = if count > 1 { format!(" and {} more keys", count - 1) } else { String::new() };
    tracing::warn!(
        target: "llm_datadist::table",
        cache_id = cache_id.0,
        replaced_cache_id = old.0,
        "a cache was registered under {key}{more}, which named another live cache: peers that ask for the key now get \
         the new cache"
    );
}

fn no_cache(id: CacheId) -> Error {
    Error::new(ErrorKind::CacheNotFound, "the cache was freed or never existed").with("cache_id", id)
}

fn no_key(key: CacheKey) -> Error {
    Error::new(ErrorKind::CacheNotFound, format!("no cache is bound to {key}"))
}
