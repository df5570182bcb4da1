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
/// Maximum number of grants that a link stores.
const MAX_GRANTS: usize = 256;
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
    /// Number of entries whose name is a grant.
    grants: usize,
}

impl<T> Default for Records<T> {
    fn default() -> Self {
        Records { entries: HashMap::new(), bytes: 0, grants: 0 }
    }
}

impl<T> Records<T> {
    pub(super) fn get(&self, name: &Name) -> Option<&T> {
        self.entries.get(name).map(|(value, _)| value)
    }

    /// Stores `value`, which takes `bytes` bytes: at most [`MAX_STORED_BYTES`]. If there is no room for it, discards an arbitrary half
    /// of the others. If it is a grant and there are [`MAX_GRANTS`], first discards the grants that do not `last`. If all of them
    /// last, discards all grants. Each discarded one costs a request when it is next needed.
    fn insert(&mut self, name: Name, value: T, bytes: u64, last: impl Fn(&T) -> bool) {
        self.remove(&name);
        let granted = is_grant(&name);
        if granted && self.grants >= MAX_GRANTS {
            self.retain(|name, value| !is_grant(name) || last(value));
        }
        if granted && self.grants >= MAX_GRANTS {
            self.retain(|name, _| !is_grant(name));
        }
        while self.bytes + bytes > MAX_STORED_BYTES && !self.entries.is_empty() {
            let mut kept = true;
            self.retain(|_, _| {
                kept = !kept;
                kept
            });
        }
        self.bytes += bytes;
        self.grants += usize::from(granted);
        self.entries.insert(name, (value, bytes));
    }

    fn retain(&mut self, mut keeps: impl FnMut(&Name, &T) -> bool) {
        self.entries.retain(|name, (value, bytes)| {
            let kept = keeps(name, value);
            self.bytes -= if kept { 0 } else { *bytes };
            self.grants -= usize::from(!kept && is_grant(name));
            kept
        });
    }

    pub(super) fn remove(&mut self, name: &Name) {
        if let Some((_, bytes)) = self.entries.remove(name) {
            self.bytes -= bytes;
            self.grants -= usize::from(is_grant(name));
        }
    }
}

fn is_grant(name: &Name) -> bool {
    matches!(name, Name::Grant(_))
}

impl KnownCaches {
    /// Stores a description, unless it is too long or the budget of the peer has no memory for it. `last` returns whether the grant
    /// of another one has not ended, as far as this process sees.
    pub(super) fn remember(
        &mut self,
        name: Name,
        known: Arc<KnownCache>,
        last: impl Fn(&KnownCache) -> bool,
    ) {
        let share = known.share.clone();
        if share.used() <= MAX_DESCRIPTION_BYTES && share.keep(RECORD_BYTES).is_ok() {
            self.insert(name, known, share.used(), |known| last(known));
        }
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
            records.insert(name(number), number, bytes, |_| true);
            assert!(
                records.bytes <= MAX_STORED_BYTES && records.bytes == bytes * records.entries.len() as u64
            );
            if number >= most {
                least = least.min(records.entries.len());
            }
        }
        assert_eq!(least as u64, most / 2 + 1);
        // The same name replaces what was stored, and a long description makes as much room as it needs.
        records.insert(name(0), 1, MAX_STORED_BYTES, |_| true);
        records.insert(name(0), 2, MAX_STORED_BYTES, |_| true);
        assert_eq!(
            (records.get(&name(0)), records.entries.len(), records.bytes),
            (Some(&2), 1, MAX_STORED_BYTES)
        );
        records.remove(&name(0));
        assert_eq!(records.bytes, 0);
    }

    #[test]
    fn at_most_256_grants_are_kept_and_those_that_have_ended_go_first() {
        let name = |slot| Name::Grant(GrantId { slot, generation: 0, secret: [0; 16] });
        let cache = Name::Row { cache: CacheId(1), row: 0 };
        let mut records = Records::default();
        records.insert(cache, false, 100, |_| true);
        let most = u32::try_from(MAX_GRANTS).unwrap();
        // Only the grant 7 lasts.
        (0..=most).for_each(|slot| records.insert(name(slot), slot == 7, 10, |lasts| *lasts));
        assert_eq!((records.grants, records.entries.len(), records.bytes), (2, 3, 120));
        assert_eq!((records.get(&name(7)), records.get(&name(most))), (Some(&true), Some(&false)));
        // There is room for 256 that last. The same grant again takes no further room.
        (0..most).chain(0..2).for_each(|slot| records.insert(name(slot), true, 10, |lasts| *lasts));
        assert_eq!((records.grants, records.get(&name(most))), (MAX_GRANTS, None));
        // If all of them last, all are discarded.
        records.insert(name(most), true, 10, |lasts| *lasts);
        assert_eq!((records.grants, records.entries.len(), records.bytes), (1, 2, 110));
        records.remove(&name(most));
        assert_eq!((records.grants, records.bytes), (0, 100));
        assert!(records.get(&cache).is_some(), "other descriptions stay");
    }
}
