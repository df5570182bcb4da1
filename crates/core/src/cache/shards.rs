//! A hash map that grows in small steps: it consists of many small tables, each of which doubles by itself.
//!
//! One large table moves every entry when it doubles: 48 ms for a million entries, in which every call that
//! needs the cache table waits. Here a step takes a 64th of that (`cargo bench --bench scale -- --only keys`).

use std::hash::{BuildHasher, Hash};

use hashbrown::DefaultHashBuilder;
use hashbrown::hash_table::HashTable;

use crate::error::Result;
use crate::fallible;

/// Name of the lists of the cache table in out-of-memory errors.
pub(super) const TABLE: &str = "the table of caches";
/// Enough tables that a step takes less than a millisecond for a million entries.
const SHARDS: usize = 64;
/// 2^64 divided by the golden ratio. The highest bits of a product with it depend on every bit of the other factor.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// Shift that leaves the bits of the product which choose the table.
const CHOICE: u32 = u64::BITS - SHARDS.ilog2();

/// A map from keys to values.
#[derive(Debug)]
pub(super) struct Shards<K, V> {
    tables: Box<[HashTable<(K, V)>]>,
    len: usize,
    hashes: DefaultHashBuilder,
}

impl<K: Eq + Hash, V> Shards<K, V> {
    pub(super) fn new() -> Self {
        let tables = (0..SHARDS).map(|_| HashTable::new()).collect();
        Shards { tables, len: 0, hashes: DefaultHashBuilder::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        let hash = self.hashes.hash_one(key);
        self.tables[shard(hash)].find(hash, |(found, _)| found == key).map(|(_, value)| value)
    }

    /// Reserves memory for `keys`, so that inserting them allocates nothing. On `Err` no entry has changed.
    pub(super) fn make_room<'a>(&mut self, keys: impl ExactSizeIterator<Item = &'a K>) -> Result<()>
    where
        K: 'a,
    {
        let hashes = &self.hashes;
        let mut reserve = |shard: usize, more: usize| {
            let room = self.tables[shard].try_reserve(more, |(found, _)| hashes.hash_one(found));
            room.map_err(|_| fallible::out_of_memory(TABLE, (self.len + more) * size_of::<(K, V)>()))
        };
        if keys.len() <= 1 {
            return keys.into_iter().try_for_each(|key| reserve(shard(hashes.hash_one(key)), 1));
        }
        let mut more = [0; SHARDS];
        keys.for_each(|key| more[shard(hashes.hash_one(key))] += 1);
        more.into_iter().enumerate().try_for_each(|(shard, more)| reserve(shard, more))
    }

    /// Inserts a value, and replaces the previous one of the key.
    pub(super) fn insert(&mut self, key: K, value: V) {
        let hash = self.hashes.hash_one(&key);
        let table = &mut self.tables[shard(hash)];
        if let Some(there) = table.find_mut(hash, |(found, _)| *found == key) {
            there.1 = value;
            return;
        }
        table.insert_unique(hash, (key, value), |(found, _)| self.hashes.hash_one(found));
        self.len += 1;
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let hash = self.hashes.hash_one(key);
        let entry = self.tables[shard(hash)].find_entry(hash, |(found, _)| found == key).ok()?;
        self.len -= 1;
        Some(entry.remove().0.1)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.tables.iter().flat_map(|table| table.iter().map(|(_, value)| value))
    }
}

/// The table of a hash. It depends on every bit, because single bits of the default hasher may be the same for
/// all keys of a sequence: then half of the tables would stay empty, in about one process of 400.
fn shard(hash: u64) -> usize {
    (hash.wrapping_mul(GOLDEN_RATIO) >> CHOICE) as usize % SHARDS
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((0_u16..400, any::<u8>(), 0..3), 0..2000)) {
            let (mut shards, mut twin) = (Shards::new(), HashMap::new());
            for (key, value, what) in steps {
                if what == 0 {
                    prop_assert_eq!(shards.remove(&key), twin.remove(&key));
                } else {
                    shards.insert(key, value);
                    twin.insert(key, value);
                }
                prop_assert_eq!(shards.get(&key), twin.get(&key));
                prop_assert_eq!(shards.len(), twin.len());
            }
            let sorted = |mut values: Vec<u8>| {
                values.sort_unstable();
                values
            };
            prop_assert_eq!(
                sorted(shards.values().copied().collect()),
                sorted(twin.values().copied().collect())
            );
        }
    }

    #[test]
    fn all_tables_are_used_whichever_bits_of_the_hash_differ() {
        for shift in [0, 16, 32, 48] {
            let mut sizes = [0; SHARDS];
            for hash in 0..64_000_u64 {
                sizes[shard(hash << shift)] += 1;
            }
            assert!(sizes.iter().all(|size| (700..1300).contains(size)), "shift {shift}: {sizes:?}");
        }
    }

    #[test]
    fn no_table_is_much_larger_than_the_others() {
        let mut shards = Shards::new();
        for key in 0..64_000_u64 {
            shards.insert(key, ());
        }
        let sizes: Vec<_> = shards.tables.iter().map(HashTable::len).collect();
        assert!(sizes.iter().all(|size| (700..1300).contains(size)), "{sizes:?}");
    }
}
