//! Descriptions of remote caches, as their owners sent them, and the limit on how many a link stores.

use std::sync::Arc;

use hashbrown::HashMap;

use super::peer_memory::Readable;
use crate::budget::BudgetShare;
use crate::copy::PeerTensors;
use crate::model::{CacheId, Name};
use crate::protocol::EntryVersion;
use crate::validate::RemoteCache;

/// Maximum number of descriptions that a link stores.
const MOST_RECORDS: usize = 1 << 16;

/// Discards an arbitrary half of the descriptions if there is no room for another. Each discarded one costs a
/// request when it is next needed.
pub(super) fn make_room<T>(records: &mut HashMap<Name, T>) {
    if records.len() >= MOST_RECORDS {
        let mut kept = false;
        records.retain(|_, _| {
            kept = !kept;
            kept
        });
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
    /// The memory that it takes.
    pub(super) _share: Arc<BudgetShare>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_names_than_are_kept_cost_half_of_them() {
        let (mut records, mut least) = (HashMap::new(), usize::MAX);
        for name in 0..3 * MOST_RECORDS as u64 {
            make_room(&mut records);
            records.insert(Name::Row { cache: CacheId(name.cast_signed()), row: 0 }, name);
            assert!(records.len() <= MOST_RECORDS);
            if name >= MOST_RECORDS as u64 {
                least = least.min(records.len());
            }
        }
        assert_eq!(least, MOST_RECORDS / 2 + 1);
    }
}
