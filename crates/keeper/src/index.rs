//! The index: which key is in which slot. A hash table in shared numbers, which the keeper writes and clients read in place.
//!
//! Each bucket is guarded by its version, which is odd while the keeper writes it. A reader takes what it has read of a bucket only if
//! the version was even and has not changed. Whether the bytes of the slot are still those of the key is decided by the generation
//! that the bucket has. Behind the buckets is a number for each slot: the checksum of its value.

use std::hint::spin_loop;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};

use llm_datadist_core::bindings::keeper::{PeerWords, SharedWords};

use crate::key::IndexKey;

/// Words before the first bucket. One of them counts the times that keys move.
const HEAD: u64 = 8;
/// The word that is odd while keys move to other buckets.
const MOVES: u64 = 0;
/// Words of a bucket: its version, four of the key, the slot plus 1 (0 in an empty one), the generation, and one unused.
const BUCKET: u64 = 8;
/// Buckets in which a key may be, from its first one on. Bounds the time of each call, whatever keys clients choose.
const MAX_PROBE: u64 = 64;
/// How often a reader tries to read a bucket, or to find a key, that is changing. Then it is a miss.
const TRIES: u32 = 8;

/// Where the value of a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Location {
    /// The slot.
    pub(crate) slot: u32,
    /// The generation that the slot has as long as it holds this value.
    pub(crate) generation: u64,
}

/// Numbers that can be loaded, by their position.
pub(crate) trait LoadWord {
    /// Loads the number at `at`, without order among other loads.
    fn load_word(&self, at: u64) -> u64;
}

impl LoadWord for SharedWords {
    fn load_word(&self, at: u64) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }
}

impl LoadWord for PeerWords {
    fn load_word(&self, at: u64) -> u64 {
        self.load(at)
    }
}

/// The table, over the numbers of this process or those of another one.
#[derive(Debug)]
pub(crate) struct Index<W> {
    words: W,
    mask: u64,
}

/// What a bucket has.
#[derive(Clone, Copy, Debug)]
enum BucketState {
    Empty,
    Has(IndexKey, Location),
    /// It was written each time that it was read.
    Changing,
}

/// Returns the number of buckets of an index for this many slots: at most half of them are in use.
fn buckets(slots: u32) -> u64 {
    (u64::from(slots) * 2).next_power_of_two().max(MAX_PROBE)
}

/// Returns the number of words of an index for this many slots.
pub(crate) fn words(slots: u32) -> u64 {
    HEAD + buckets(slots) * BUCKET + u64::from(slots)
}

impl<W: LoadWord> Index<W> {
    /// Returns the index for `slots` slots in `words`, of which there are [`words`].
    pub(crate) fn new(words: W, slots: u32) -> Self {
        Index { words, mask: buckets(slots) - 1 }
    }

    /// Returns where the value of `key` is.
    pub(crate) fn find(&self, key: &IndexKey) -> Option<Location> {
        for _ in 0..TRIES {
            let before = self.words.load_word(MOVES);
            fence(Ordering::Acquire);
            if let Some((_, location)) = self.bucket_of(key) {
                return Some(location);
            }
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.words.load_word(MOVES) == before {
                return None;
            }
            spin_loop();
        }
        None
    }

    /// Returns the bucket that has `key`, and what it says.
    fn bucket_of(&self, key: &IndexKey) -> Option<(u64, Location)> {
        let home = self.home(key);
        for step in 0..MAX_PROBE {
            let bucket = (home + step) & self.mask;
            match self.read(bucket) {
                BucketState::Empty => return None,
                BucketState::Has(found, location) if found == *key => return Some((bucket, location)),
                BucketState::Has(..) | BucketState::Changing => {}
            }
        }
        None
    }

    /// Reads a bucket.
    fn read(&self, bucket: u64) -> BucketState {
        let at = HEAD + bucket * BUCKET;
        for _ in 0..TRIES {
            let version = self.words.load_word(at);
            fence(Ordering::Acquire);
            let key = IndexKey(std::array::from_fn(|word| self.words.load_word(at + 1 + word as u64)));
            let slot = self.words.load_word(at + 5);
            let generation = self.words.load_word(at + 6);
            fence(Ordering::Acquire);
            if version.is_multiple_of(2) && self.words.load_word(at) == version {
                let slot = slot.checked_sub(1).and_then(|slot| u32::try_from(slot).ok());
                return slot
                    .map_or(BucketState::Empty, |slot| BucketState::Has(key, Location { slot, generation }));
            }
            spin_loop();
        }
        BucketState::Changing
    }

    /// Returns the checksum of the value in a slot. It is right if the generation of the slot is the same afterwards.
    pub(crate) fn checksum(&self, slot: u32) -> u64 {
        self.words.load_word(self.checksum_at(slot))
    }

    fn checksum_at(&self, slot: u32) -> u64 {
        HEAD + (self.mask + 1) * BUCKET + u64::from(slot)
    }

    /// Returns the first bucket in which `key` may be.
    fn home(&self, key: &IndexKey) -> u64 {
        key.mixed() & self.mask
    }
}

/// Changes, which one thread of the keeper makes.
impl Index<SharedWords> {
    /// Returns the descriptor of the index, for clients to map read-only; `None` if the kernel cannot prevent them from writing.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.words.descriptor()
    }

    /// Returns whether one of the buckets in which a key may be is empty.
    pub(crate) fn has_room(&self, key: &IndexKey) -> bool {
        self.empty_bucket(key).is_some()
    }

    /// Adds a key that the index does not have. Returns `false` if there is no [room](Self::has_room) for it.
    pub(crate) fn insert(&self, key: &IndexKey, location: Location) -> bool {
        let empty = self.empty_bucket(key);
        if let Some(bucket) = empty {
            self.write(bucket, Some((*key, location)));
        }
        empty.is_some()
    }

    /// Sets the checksum of the value in a slot, before its key is added.
    pub(crate) fn set_checksum(&self, slot: u32, checksum: u64) {
        self.words.word(self.checksum_at(slot)).store(checksum, Ordering::Relaxed);
    }

    fn empty_bucket(&self, key: &IndexKey) -> Option<u64> {
        let home = self.home(key);
        let mut buckets = (0..MAX_PROBE).map(|step| (home + step) & self.mask);
        buckets.find(|&bucket| matches!(self.read(bucket), BucketState::Empty))
    }

    /// Returns what the buckets have, apart from those that a process has left half-written. A process that was killed while it moved
    /// a key leaves it twice.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (IndexKey, Location)> {
        (0..=self.mask).filter_map(|bucket| match self.read(bucket) {
            BucketState::Has(key, location) => Some((key, location)),
            BucketState::Empty | BucketState::Changing => None,
        })
    }

    /// Removes all keys, also what a process that was killed has left half-written.
    pub(crate) fn clear(&self) {
        self.begin_moves();
        for bucket in 0..=self.mask {
            // An empty bucket is only read, so that it uses no more memory.
            if !matches!(self.read(bucket), BucketState::Empty) {
                self.write(bucket, None);
            }
        }
        self.end_moves();
    }

    /// Removes a key. Keys behind it move up, so that no bucket between a key and its first one is empty.
    pub(crate) fn remove(&self, key: &IndexKey) {
        let Some((mut hole, _)) = self.bucket_of(key) else { return };
        self.begin_moves();
        let mut next = hole;
        // A key is less than `MAX_PROBE` buckets behind its first one, so no key further behind can move into the hole.
        while self.distance(hole, next) + 1 < MAX_PROBE {
            next = (next + 1) & self.mask;
            let BucketState::Has(moved, location) = self.read(next) else { break };
            if self.distance(self.home(&moved), next) >= self.distance(hole, next) {
                self.write(hole, Some((moved, location)));
                hole = next;
            }
        }
        self.write(hole, None);
        self.end_moves();
    }

    /// Returns the number of buckets from `from` to `to`, which is behind it.
    fn distance(&self, from: u64, to: u64) -> u64 {
        to.wrapping_sub(from) & self.mask
    }

    /// Makes the count of moves odd, which it is already if a process was killed meanwhile.
    fn begin_moves(&self) {
        self.set_moves(self.words.load_word(MOVES) | 1);
    }

    fn end_moves(&self) {
        self.set_moves(self.words.load_word(MOVES).wrapping_add(1));
    }

    fn set_moves(&self, count: u64) {
        // Readers see it before what moves, and what has moved before the next change.
        fence(Ordering::SeqCst);
        self.words.word(MOVES).store(count, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    fn write(&self, bucket: u64, entry: Option<(IndexKey, Location)>) {
        let at = HEAD + bucket * BUCKET;
        let version = self.words.word(at);
        // It is odd already if a process was killed while it wrote the bucket.
        let writing = version.load(Ordering::Relaxed) | 1;
        version.store(writing, Ordering::Relaxed);
        fence(Ordering::Release);
        let (IndexKey(key), slot, generation) = entry.map_or((IndexKey([0; 4]), 0, 0), |(key, location)| {
            (key, u64::from(location.slot) + 1, location.generation)
        });
        for (word, part) in (1..).zip(key.into_iter().chain([slot, generation])) {
            self.words.word(at + word).store(part, Ordering::Relaxed);
        }
        version.store(writing.wrapping_add(1), Ordering::Release);
    }
}

/// Damage, as a process leaves it that is killed.
#[cfg(test)]
impl Index<SharedWords> {
    /// Leaves the bucket of a key half-written.
    pub(crate) fn half_write(&self, key: &IndexKey) {
        let (bucket, _) = self.bucket_of(key).unwrap();
        self.words.word(HEAD + bucket * BUCKET).fetch_add(1, Ordering::SeqCst);
    }

    /// Leaves a key in two buckets, between which it moves.
    pub(crate) fn half_move(&self, key: &IndexKey) {
        self.begin_moves();
        let (_, location) = self.bucket_of(key).unwrap();
        assert!(self.insert(key, location));
    }

    /// Changes the location of a key.
    pub(crate) fn replace(&self, key: &IndexKey, location: Location) {
        let (bucket, _) = self.bucket_of(key).unwrap();
        self.write(bucket, Some((*key, location)));
    }

    /// Returns whether no key moves and no bucket is half-written.
    pub(crate) fn is_whole(&self) -> bool {
        let whole = |bucket| self.words.load_word(HEAD + bucket * BUCKET).is_multiple_of(2);
        self.words.load_word(MOVES).is_multiple_of(2) && (0..=self.mask).all(whole)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn index(slots: u32) -> Index<SharedWords> {
        Index::new(SharedWords::new("a test", words(slots)).unwrap(), slots)
    }

    proptest! {
        /// Few homes, so that keys of several homes are behind each other and wrap around the end.
        #[test]
        fn an_index_finds_what_a_map_finds(calls in prop::collection::vec((any::<bool>(), 0u64..40), 1..300)) {
            let (index, mut model) = (index(40), HashMap::new());
            for (at, (insert, number)) in (1..).zip(calls) {
                let key = IndexKey([0, 0, 0, (number / 4) | ((number % 4) << 62)]);
                if insert && !model.contains_key(&key) {
                    let location = Location { slot: at, generation: u64::from(at) * 3 };
                    prop_assert!(index.insert(&key, location));
                    model.insert(key, location);
                } else if !insert {
                    index.remove(&key);
                    model.remove(&key);
                }
                for number in 0u64..40 {
                    let key = IndexKey([0, 0, 0, (number / 4) | ((number % 4) << 62)]);
                    prop_assert_eq!(index.find(&key), model.get(&key).copied());
                }
            }
        }
    }

    /// Keys whose first bucket is the same one.
    fn equal_homes(index: &Index<SharedWords>, count: usize) -> Vec<IndexKey> {
        let home = index.home(&IndexKey([0; 4]));
        let all = (0..).map(|number| IndexKey([number, 0, 0, 0]));
        all.filter(|key| index.home(key) == home).take(count).collect()
    }

    #[test]
    fn keys_with_one_home_are_bounded_and_leave_without_a_gap() {
        let index = index(1000);
        let keys = equal_homes(&index, 65);
        let location = |at: usize| Location { slot: at.try_into().unwrap(), generation: 1 };
        for (at, key) in keys[..64].iter().enumerate() {
            assert!(index.insert(key, location(at)));
        }
        assert!(!index.insert(&keys[64], location(64)), "there are at most 64 buckets for a key");
        for (at, key) in keys[..64].iter().enumerate() {
            assert_eq!(index.find(key), Some(location(at)));
            index.remove(key);
            assert_eq!(index.find(key), None);
            assert!(keys[at + 1..64].iter().all(|key| index.find(key).is_some()), "after {at}");
        }
        assert!(index.insert(&keys[64], location(64)));
    }

    #[test]
    fn a_bucket_that_is_being_written_is_no_hit() {
        let index = index(10);
        let key = IndexKey([1, 2, 3, 4]);
        assert!(index.insert(&key, Location { slot: 3, generation: 9 }));
        let version = index.words.word(HEAD + index.home(&key) * BUCKET);
        version.fetch_add(1, Ordering::SeqCst);
        assert_eq!(index.find(&key), None);
        version.fetch_add(1, Ordering::SeqCst);
        assert_eq!(index.find(&key), Some(Location { slot: 3, generation: 9 }));
    }
}
