//! The table operations that peers need: resolving a name, checking that it is still valid, and releasing
//! keys after a pull.
//!
//! The messages themselves are handled by `session::answers`.

use std::sync::Arc;

use super::{EntryIndex, State, Table, TableEntry, no_cache, no_key};
use crate::cache::shards::TABLE;
use crate::cache::{Cache, Origin};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{AddressLocation, CacheId, CacheKey, CacheKind, Name};

/// The key that ids of 0 and below stand for in a public name (contract §12.4).
const KEY_ZERO: CacheKey = CacheKey::Request { model: 0, id: 0 };

/// The result of resolving a name, with the generation to compare before the result is used again.
#[derive(Clone, Debug)]
pub struct Resolved {
    pub cache: Arc<Cache>,
    /// Its index in the table.
    pub index: u32,
    pub generation: u64,
    /// The batch slot; 0 for a blocks cache.
    pub row: u32,
}

/// Number of caches that are visited while the lock is held once.
const CACHES_PER_LOCK: usize = 1 << 10;

impl Table {
    /// Resolves a name that a peer sent to a cache and a row. Returns `Err` of kind
    /// [`ErrorKind::CacheNotFound`] if there is no such cache, key or row.
    pub fn describe(&self, name: Name) -> Result<Resolved> {
        let state = self.state.lock();
        let (index, entry, row) = state.lookup(name)?;
        let cache = entry.cache.clone();
        Ok(Resolved { cache, index, generation: state.generations.of(index), row })
    }

    /// Returns the location of each of `addrs` among the caches that peers may access. If several caches
    /// share the memory, selects the one with the most bytes after the address. Returns `Err(InvalidArgument)` if one of
    /// `addrs` lies in no such cache.
    ///
    /// This visits every cache, so it is used at the start of a transfer and not for each layer.
    pub fn locate(&self, addrs: &[u64]) -> Result<Vec<AddressLocation>> {
        /// Name of these lists in out-of-memory errors.
        const FOUND_ADDRESSES: &str = "the places of addresses";
        let nowhere = AddressLocation { cache: CacheId(0), tensor: 0, offset: 0 };
        let mut found = fallible::filled(FOUND_ADDRESSES, nowhere, addrs.len())?;
        // The bytes from each address to the end of its tensor; 0 if no cache has it.
        let mut rooms = fallible::filled(FOUND_ADDRESSES, 0u64, addrs.len())?;
        let mut order = fallible::collect(FOUND_ADDRESSES, 0..addrs.len())?;
        order.sort_unstable_by_key(|&at| addrs[at]);
        // Most caches contain none of the addresses. They are excluded by their lowest and highest address,
        // under the lock and without an allocation.
        let may_hold = |cache: &Cache| {
            let ends =
                cache.addrs().iter().fold((u64::MAX, 0), |(low, high), &at| (at.min(low), at.max(high)));
            let first = order.partition_point(|&at| addrs[at] < ends.0);
            let next = order.get(first).map(|&at| addrs[at]);
            next.is_some_and(|next| next <= ends.1 || next - ends.1 < cache.geometry().tensor_bytes())
        };
        for first in (0..).step_by(CACHES_PER_LOCK) {
            let state = self.state.lock();
            let Some(entries) = state.entries.get(first..) else { break };
            let some = entries.iter().take(CACHES_PER_LOCK).flatten();
            let some =
                some.map(|entry| &entry.cache).filter(|cache| cache.remote_accessible() && may_hold(cache));
            let caches = fallible::collect_growing(FOUND_ADDRESSES, 0, some.cloned())?;
            drop(state);
            for cache in &caches {
                let (bytes, rows) = (cache.geometry().tensor_bytes(), cache.geometry().row_sizes());
                for (tensor, &base) in (0..).zip(cache.addrs()) {
                    let first = order.partition_point(|&at| addrs[at] < base);
                    for &at in order[first..].iter().take_while(|&&at| addrs[at] - base < bytes) {
                        let offset = addrs[at] - base;
                        // A gap between two rows belongs to another tensor, or to nobody.
                        if rows.hold(offset, 1) && rooms[at] < bytes - offset {
                            rooms[at] = bytes - offset;
                            found[at] = AddressLocation { cache: cache.id(), tensor, offset };
                        }
                    }
                }
            }
        }
        let unknown = rooms.iter().position(|&room| room == 0);
        unknown.map_or(Ok(found), |at| Err(unknown_address(at, addrs[at])))
    }

    /// Records that a peer has pulled `count` tensors, from tensor `first` on, of `cache`, to which `name`
    /// resolved.
    ///
    /// Once all tensors were pulled under one request key, the key is removed, and the cache is released if
    /// that was its last reference (contract §12.3). This has no effect on prefixes, blocks caches,
    /// registered caches and rows without a key.
    ///
    /// Returns `Err` of kind [`ErrorKind::CacheNotFound`] if `name` no longer resolves to that cache; it is
    /// then unknown whether the pulled bytes belonged to it.
    pub fn consume(&self, name: Name, cache: CacheId, first: u32, count: u32) -> Result<()> {
        let mut state = self.state.lock();
        let released = state.consume(name, cache, first, count)?;
        drop(state);
        drop(released);
        Ok(())
    }

    /// Removes the request key of a batch slot of an allocated cache, if it has one, because all its tensors
    /// were pushed to a peer (contract §17).
    pub fn release_row(&self, cache: CacheId, row: u32) {
        let mut state = self.state.lock();
        let index = state.ids.get(&cache).copied();
        let key = index.and_then(|index| state.consumable(index, row));
        let released = key.and_then(|key| state.unbind(key));
        drop(state);
        drop(released);
    }
}

impl State {
    fn lookup(&self, name: Name) -> Result<(EntryIndex, &TableEntry, u32)> {
        let (id, row) = match name {
            Name::Key(key) => return self.named(key).ok_or_else(|| no_key(key)),
            Name::Row { cache, row } => (cache, row),
            Name::Grant(_) => {
                let text =
                    "the table of caches has no grants: `Resources::resolve` looks up the cache of a grant";
                return Err(Error::new(ErrorKind::System, text));
            }
        };
        let found = if id.0 > 0 {
            self.ids.get(&id).and_then(|&index| Some((index, self.entry(index)?)))
        } else {
            self.named(KEY_ZERO).map(|(index, entry, _)| (index, entry))
        };
        let (index, entry) = found.ok_or_else(|| no_cache(id))?;
        // For a name that selects a slot, a blocks cache counts as one slot (contract §12.1).
        let rows = if entry.cache.kind() == CacheKind::Batch { entry.cache.rows() } else { 1 };
        if u64::from(row) < rows {
            return Ok((index, entry, row));
        }
        let text = format!("the cache has no slot {row}, only 0 to {}", rows - 1);
        Err(Error::new(ErrorKind::CacheNotFound, text).with("cache_id", entry.cache.id()))
    }

    fn consume(&mut self, name: Name, cache: CacheId, first: u32, count: u32) -> Result<Option<TableEntry>> {
        // Prefixes and blocks caches are never consumed, even if their key was removed meanwhile.
        if matches!(name, Name::Key(CacheKey::Prefix { .. } | CacheKey::Blocks { .. })) {
            return Ok(None);
        }
        let (index, entry, row) = self.lookup(name)?;
        if entry.cache.id() != cache {
            let text = format!("{name} now names another cache");
            return Err(Error::new(ErrorKind::CacheNotFound, text).with("cache_id", cache));
        }
        let tensors = entry.cache.num_tensors();
        let Some(end) = first.checked_add(count).filter(|&end| end <= tensors) else {
            let value = format!("{count} tensors from tensor {first}");
            let required = format_args!("within the {tensors} tensors of the cache");
            return Err(Error::argument("pulled", value, required));
        };
        let Some(key) = self.consumable(index, row).filter(|_| count > 0) else { return Ok(None) };
        let complete = if count == tensors {
            true
        } else {
            let room = self.pulled.try_reserve(1);
            room.map_err(|_| fallible::out_of_memory(TABLE, self.pulled.len()))?;
            self.pulled.entry(key).or_default().add(first..end, tensors)?
        };
        Ok(if complete { self.unbind(key) } else { None })
    }

    /// Returns the request key of a slot of an allocated cache, if it has one.
    fn consumable(&self, index: EntryIndex, row: u32) -> Option<CacheKey> {
        let entry = self.entry(index)?;
        let allocated = entry.cache.origin() == Origin::Allocated && entry.cache.kind() == CacheKind::Batch;
        let key = entry.keys.get(row as usize).copied().flatten().filter(|_| allocated)?;
        let live = self.keys.get(&key) == Some(&(index, row));
        (live && matches!(key, CacheKey::Request { .. })).then_some(key)
    }
}

fn unknown_address(at: usize, addr: u64) -> Error {
    let text = format!("dst_addrs[{at}]={addr:#x} lies in no cache that peers may reach");
    Error::new(ErrorKind::InvalidArgument, text)
}
