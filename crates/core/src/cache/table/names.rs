//! The names by which peers find caches. A name belongs to one live cache, and is free again as soon as that has left the
//! table. Its next cache has another id.

use std::sync::Arc;

use super::{State, Table};
use crate::cache::shards::TABLE;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::CacheId;

impl Table {
    /// Checks that no live cache has this name. Otherwise returns `Err` of kind [`ErrorKind::KeyTaken`].
    pub fn check_name(&self, name: &str) -> Result<()> {
        self.state.lock().check_name(name)
    }

    /// Returns the id of the cache that a peer asks for by its name. Returns `Err` of kind [`ErrorKind::CacheNotFound`] if
    /// there is none that peers may access.
    pub fn find_name(&self, name: &str) -> Result<CacheId> {
        let state = self.state.lock();
        let found = state.names.get(name).and_then(|&index| state.entry(index));
        let found = found.filter(|entry| entry.cache.remote_accessible()).map(|entry| entry.cache.id());
        let text = || format!("no cache that peers may access is named '{name}'");
        found.ok_or_else(|| Error::new(ErrorKind::CacheNotFound, text()))
    }
}

impl State {
    pub(super) fn check_name(&self, name: &str) -> Result<()> {
        let Some(other) = self.names.get(name).and_then(|&index| self.entry(index)) else { return Ok(()) };
        let taken = Error::argument("name", format_args!("'{name}'"), "a name that no live cache has");
        Err(taken.of_kind(ErrorKind::KeyTaken).with("cache_id", other.cache.id()))
    }

    /// Reserves the memory that adding this many named caches needs.
    pub(super) fn make_room_for_names(&mut self, count: usize) -> Result<()> {
        let room = self.names.try_reserve(count);
        room.map_err(|_| fallible::out_of_memory(TABLE, self.names.len() * size_of::<(Arc<str>, u32)>()))
    }
}
