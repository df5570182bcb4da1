//! Descriptions of remote caches, as their owners sent them, and the limit on what a link stores.

use std::borrow::Borrow;
use std::hash::Hash;
use std::sync::Arc;

use hashbrown::HashMap;

use super::peer_memory::Readable;
use crate::budget::BudgetShare;
use crate::copy::PeerTensors;
use crate::error::Result;
use crate::grants::RowRanges;
use crate::model::{CacheId, GrantId, Name};
use crate::plan::{CopyPlan, Side};
use crate::protocol::EntryVersion;
use crate::validate::RemoteCache;

/// Maximum number of bytes of a description that is kept for later calls: that of a cache of 8,192 tensors.
const MAX_DESCRIPTION_BYTES: u64 = 64 << 10;
/// Maximum number of bytes of all descriptions that a link stores, except by grants.
const MAX_STORED_BYTES: u64 = 4 << 20;
/// Maximum number of bytes of all descriptions by grants that a link stores. Those of grants that have ended displace no others.
const MAX_GRANTED_BYTES: u64 = 512 << 10;
/// Maximum number of names of caches that a link stores.
const MAX_NAMES: u64 = 1024;
/// Bytes that a description takes beside its lists.
const RECORD_BYTES: u64 =
    (size_of::<KnownCache>() + size_of::<BudgetShare>() + 2 * size_of::<(Name, Arc<KnownCache>)>()) as u64;

/// A map of what is known of a peer. Each entry has a weight, and all together have at most a given weight.
#[derive(Debug)]
pub(super) struct Known<K, V> {
    entries: HashMap<K, (V, u64)>,
    weight: u64,
    most: u64,
}

/// The descriptions that a link stores. Their weights are their bytes.
pub(super) type KnownCaches = Known<Name, Arc<KnownCache>>;
/// The ids of named caches, as the peer reported them. Their owner may have released them since.
pub(super) type KnownNames = Known<Arc<str>, CacheId>;

impl<K: Eq + Hash, V: Clone> Known<K, V> {
    fn new(most: u64) -> Self {
        Known { entries: HashMap::new(), weight: 0, most }
    }

    pub(super) fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.entries.get(key).map(|(value, _)| value.clone())
    }

    /// Stores `value` if there is memory. If all would weigh too much, first forgets all others. Each costs a request when it is
    /// next needed.
    fn insert(&mut self, key: K, value: V, weight: u64) {
        self.remove(&key);
        if self.weight + weight > self.most {
            (self.entries, self.weight) = (HashMap::new(), 0);
        }
        if self.entries.try_reserve(1).is_ok() {
            self.weight += weight;
            self.entries.insert(key, (value, weight));
        }
    }

    pub(super) fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        self.weight -= self.entries.remove(key).map_or(0, |(_, weight)| weight);
    }
}

impl KnownCaches {
    pub(super) fn of_link() -> Self {
        Known::new(MAX_STORED_BYTES)
    }

    pub(super) fn of_grants() -> Self {
        Known::new(MAX_GRANTED_BYTES)
    }

    /// Stores a description, unless it is too long or the budget of the peer has no memory for it.
    pub(super) fn remember(&mut self, name: Name, known: Arc<KnownCache>) {
        let share = known.share.clone();
        if share.used() <= MAX_DESCRIPTION_BYTES && share.keep(RECORD_BYTES).is_ok() {
            self.insert(name, known, share.used());
        }
    }
}

impl KnownNames {
    pub(super) fn of_link() -> Self {
        Known::new(MAX_NAMES)
    }

    pub(super) fn remember(&mut self, name: Arc<str>, cache: CacheId) {
        self.insert(name, cache, 1);
    }
}

/// A remote cache, as its owner described it.
#[derive(Debug)]
pub(crate) struct KnownCache {
    /// Its entry in the owner's table, and the generation for which the description is valid.
    pub(crate) at: EntryVersion,
    /// Its cache id at the owner.
    pub(crate) cache: CacheId,
    /// Its sizes, and the row to which the name resolves.
    pub(crate) remote: RemoteCache,
    /// Whether a pull of one of its slots may release a key.
    pub(crate) consumable: bool,
    /// Its memory, or the reason why this process cannot read it in place.
    pub(crate) tensors: Readable<PeerTensors>,
    /// The grant by which it was described, and the rows that the grant lends.
    pub(crate) granted: Option<(GrantId, RowRanges)>,
    /// The memory that it takes.
    pub(super) share: Arc<BudgetShare>,
}

impl KnownCache {
    /// Checks that `plan` reads only what the grant lends, if the cache was described by one.
    pub(crate) fn check_granted(&self, plan: &CopyPlan) -> Result<()> {
        let Some((_, rows)) = &self.granted else { return Ok(()) };
        let sizes = self.remote.layout.geometry.row_sizes();
        rows.check(self.cache, &plan.touched_rows(Side::Source, sizes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_a_given_weight_is_kept() {
        let mut known = Known::new(1000);
        for number in 0..300_u64 {
            known.insert(number, number, 10);
            assert_eq!(known.get(&number), Some(number));
            assert!(known.weight <= 1000 && known.weight == 10 * known.entries.len() as u64);
        }
        assert_eq!(known.entries.len(), 100, "as many as there is room for");
        // The same key replaces what was stored, and needs no further room.
        known.insert(250, 1, 10);
        assert_eq!((known.get(&250), known.entries.len(), known.weight), (Some(1), 100, 1000));
        known.remove(&250);
        assert_eq!((known.get(&250), known.weight), (None, 990));
        known.insert(1, 2, 1000);
        assert_eq!((known.get(&1), known.entries.len(), known.weight), (Some(2), 1, 1000));
    }
}
