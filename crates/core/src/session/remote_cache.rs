//! Remote caches as their owner described them, and how many of the descriptions a link keeps.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::memory::Tensors;
use crate::model::{CacheId, Name};
use crate::protocol::Place;
use crate::validate::RemoteCache;

/// Descriptions that a link keeps.
const MOST_RECORDS: usize = 1 << 16;

/// Forgets half of the descriptions, whichever those are, where there is no room for one more: that costs one request for
/// each that is asked for again.
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
pub(crate) struct Known {
    /// Where it is in the owner's table, and the generation for which this is true.
    pub(crate) at: Place,
    /// Its id at its owner.
    pub(crate) cache: CacheId,
    /// Its sizes and the row the name led to.
    pub(crate) remote: RemoteCache,
    /// Whether a pull of one of its slots may release a key.
    pub(crate) consumable: bool,
    /// Its memory, if this process can see it.
    pub(crate) tensors: Option<Arc<Tensors>>,
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
