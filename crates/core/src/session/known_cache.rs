//! Descriptions of remote caches, as their owners sent them, and the limit on how many a link stores.

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
/// Maximum number of bytes of all descriptions that a link stores.
const MAX_STORED_BYTES: u64 = 4 << 20;
/// Bytes that a description takes beside its lists.
const RECORD_BYTES: u64 =
    (size_of::<KnownCache>() + size_of::<BudgetShare>() + 2 * size_of::<(Name, Arc<KnownCache>)>()) as u64;

/// The descriptions that a link stores.
pub(super) type KnownCaches = Records<Arc<KnownCache>>;

/// A bounded map. Each entry has a number of bytes.
#[derive(Debug)]
pub(super) struct Records<T> {
    entries: HashMap<Name, (T, u64)>,
    bytes: u64,
}

impl<T> Default for Records<T> {
    fn default() -> Self {
        Records { entries: HashMap::new(), bytes: 0 }
    }
}

impl<T> Records<T> {
    pub(super) fn get(&self, name: &Name) -> Option<&T> {
        self.entries.get(name).map(|(value, _)| value)
    }

    /// Stores `value`, which takes `bytes` bytes: at most [`MAX_STORED_BYTES`]. If there is no room for it, discards an arbitrary half of
    /// the others. Each discarded one costs a request when it is next needed.
    fn insert(&mut self, name: Name, value: T, bytes: u64) {
        self.remove(&name);
        while self.bytes + bytes > MAX_STORED_BYTES && !self.entries.is_empty() {
            let mut kept = true;
            self.entries.retain(|_, (_, bytes)| {
                kept = !kept;
                self.bytes -= if kept { 0 } else { *bytes };
                kept
            });
        }
        self.bytes += bytes;
        self.entries.insert(name, (value, bytes));
    }

    pub(super) fn remove(&mut self, name: &Name) {
        if let Some((_, bytes)) = self.entries.remove(name) {
            self.bytes -= bytes;
        }
    }
}

impl KnownCaches {
    /// Stores a description, unless it is too long or the budget of the peer has no memory for it.
    pub(super) fn remember(&mut self, name: Name, known: Arc<KnownCache>) {
        let share = known.share.clone();
        if share.used() <= MAX_DESCRIPTION_BYTES && share.keep(RECORD_BYTES).is_ok() {
            self.insert(name, known, share.used());
        }
    }
}

/// A remote cache, as its owner described it.
#[derive(Debug)]
pub(crate) struct KnownCache {
    /// Its place in the owner's table, and the generation for which the description is valid.
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
        let sizes = self.remote.common_sizes(plan.tensors_at(Side::Source))?;
        rows.check(self.cache, &plan.touched_rows(Side::Source, sizes.row_sizes())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_bytes_than_are_kept_cost_half_of_the_names() {
        let name = |number: u64| Name::Row { cache: CacheId(number.cast_signed()), row: 0 };
        let (mut records, mut least) = (Records::default(), usize::MAX);
        let (bytes, most) = (1 << 10, MAX_STORED_BYTES >> 10);
        for number in 0..3 * most {
            records.insert(name(number), number, bytes);
            assert!(
                records.bytes <= MAX_STORED_BYTES && records.bytes == bytes * records.entries.len() as u64
            );
            if number >= most {
                least = least.min(records.entries.len());
            }
        }
        assert_eq!(least as u64, most / 2 + 1);
        // The same name replaces what was stored, and a long description makes as much room as it needs.
        records.insert(name(0), 1, MAX_STORED_BYTES);
        records.insert(name(0), 2, MAX_STORED_BYTES);
        assert_eq!(
            (records.get(&name(0)), records.entries.len(), records.bytes),
            (Some(&2), 1, MAX_STORED_BYTES)
        );
        records.remove(&name(0));
        assert_eq!(records.bytes, 0);
    }
}
