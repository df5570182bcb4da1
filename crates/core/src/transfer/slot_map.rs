//! A slot map: a table that names each entry by a key, for calls, alarms and jobs.
//!
//! It grows by chunks, so an entry takes the same memory however many there are, and no entry moves.

use std::num::NonZeroU32;

use crate::error::Result;
use crate::fallible;

/// Slots of one chunk.
const CHUNK: usize = 128;
/// This many chunks are kept when the table is empty.
const MIN_CHUNKS: usize = 8;
/// Marks the end of the list of unused slots.
const NONE: u32 = u32::MAX;

/// Names one entry of a table. The name of a removed entry is reused only after 2^32 − 1 further entries. A later entry
/// compares greater, except when the numbers wrap between the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlotKey {
    number: NonZeroU32,
    index: u32,
}

/// A table whose entries have keys, and never move.
pub(super) struct SlotMap<T> {
    /// All are full but the last one in use; those behind it are empty.
    chunks: Vec<Vec<Slot<T>>>,
    /// Number of slots that were ever used since the table was empty.
    touched: usize,
    /// First of the unused slots among these, which are linked by `next`.
    unused: u32,
    len: usize,
    last_number: NonZeroU32,
}

struct Slot<T> {
    /// `None` if the slot is unused, or reserved.
    value: Option<T>,
    /// `None` if the slot is unused.
    number: Option<NonZeroU32>,
    next: u32,
}

impl<T> Default for SlotMap<T> {
    fn default() -> Self {
        SlotMap { chunks: Vec::new(), touched: 0, unused: NONE, len: 0, last_number: NonZeroU32::MIN }
    }
}

impl<T> SlotMap<T> {
    /// Returns the number of entries, with those that are only reserved.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no entry.
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Creates an entry without a value. `what` names the table in the error.
    pub(super) fn reserve(&mut self, what: &str) -> Result<SlotKey> {
        let number = self.last_number.checked_add(1).unwrap_or(NonZeroU32::MIN);
        let index = if self.unused == NONE { self.new_entry(what)? } else { self.unused };
        if let Some(entry) = self.entry(index) {
            entry.number = Some(number);
            self.unused = std::mem::replace(&mut entry.next, NONE);
        }
        (self.last_number, self.len) = (number, self.len + 1);
        Ok(SlotKey { number, index })
    }

    /// Sets the value of an entry.
    pub(super) fn fill(&mut self, key: SlotKey, value: T) {
        if let Some(entry) = self.entry(key.index).filter(|entry| entry.number == Some(key.number)) {
            entry.value = Some(value);
        }
    }

    /// Whether the entry exists.
    pub(super) fn contains(&self, key: SlotKey) -> bool {
        let index = key.index as usize;
        let entry = self.chunks.get(index / CHUNK).and_then(|chunk| chunk.get(index % CHUNK));
        entry.is_some_and(|entry| entry.number == Some(key.number))
    }

    /// Removes an entry, and returns its value. An entry that was removed before has none.
    pub(super) fn remove(&mut self, key: SlotKey) -> Option<T> {
        let unused = self.unused;
        let entry = self.entry(key.index).filter(|entry| entry.number == Some(key.number))?;
        (entry.number, entry.next) = (None, unused);
        let value = entry.value.take();
        (self.unused, self.len) = (key.index, self.len - 1);
        if self.len == 0 && self.chunks.len() > MIN_CHUNKS {
            self.chunks.truncate(MIN_CHUNKS);
            self.chunks.iter_mut().for_each(Vec::clear);
            (self.touched, self.unused) = (0, NONE);
        }
        value
    }

    /// Returns the values.
    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten().filter_map(|entry| entry.value.as_ref())
    }

    /// Returns the keys of the values for which `is_wanted` holds.
    pub(super) fn keys_of(&self, is_wanted: impl Fn(&T) -> bool) -> Vec<SlotKey> {
        let slots = (0..).zip(self.chunks.iter().flatten());
        let wanted = slots.filter(|(_, slot)| slot.value.as_ref().is_some_and(&is_wanted));
        wanted.filter_map(|(index, slot)| slot.number.map(|number| SlotKey { number, index })).collect()
    }

    fn entry(&mut self, index: u32) -> Option<&mut Slot<T>> {
        self.chunks.get_mut(index as usize / CHUNK)?.get_mut(index as usize % CHUNK)
    }

    /// Adds an unused slot.
    #[expect(clippy::cast_possible_truncation, reason = "fewer entries than fit into memory")]
    fn new_entry(&mut self, what: &str) -> Result<u32> {
        if self.touched / CHUNK == self.chunks.len() {
            let chunk = fallible::with_capacity(what, CHUNK)?;
            fallible::push(what, &mut self.chunks, chunk)?;
        }
        self.chunks[self.touched / CHUNK].push(Slot { value: None, number: None, next: NONE });
        self.touched += 1;
        Ok(self.touched as u32 - 1)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The operations of a table, compared with a list of pairs.
    #[test]
    fn entries_are_those_of_a_naive_twin() {
        let (mut table, mut twin, mut removed) =
            (SlotMap::default(), Vec::<(SlotKey, u64)>::new(), Vec::new());
        let (mut random, mut emptied) = (1u64, 0);
        // The numbers wrap in the middle of the test.
        table.last_number = NonZeroU32::new(u32::MAX - 50_000).unwrap();
        for step in 0..200_000u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (choice, which) = (random >> 60, (random >> 20) as usize);
            // The table is filled beyond the chunks that are kept, and emptied, in turn.
            let grows = step / 10_000 % 2 == 0;
            if (choice < if grows { 10 } else { 2 }) || twin.is_empty() {
                let key = table.reserve("test").unwrap();
                assert!(table.contains(key));
                table.fill(key, step);
                twin.push((key, step));
            } else {
                let (key, value) = twin.swap_remove(which % twin.len());
                assert_eq!(table.remove(key), Some(value));
                removed.push(key);
                emptied += u32::from(table.touched == 0);
            }
            if let Some(&key) = removed.get(which % removed.len().max(1)) {
                table.fill(key, 0);
                assert!(!table.contains(key) && table.remove(key).is_none());
            }
            assert_eq!((table.len(), table.is_empty()), (twin.len(), twin.is_empty()));
        }
        let mut values: Vec<_> = table.values().copied().collect();
        let mut expected: Vec<_> = twin.iter().map(|(_, value)| *value).collect();
        values.sort_unstable();
        expected.sort_unstable();
        assert_eq!(values, expected);
        let mut even = table.keys_of(|value| value % 2 == 0);
        let mut of_twin: Vec<_> =
            twin.iter().filter(|(_, value)| value % 2 == 0).map(|(key, _)| *key).collect();
        even.sort_unstable();
        of_twin.sort_unstable();
        assert_eq!(even, of_twin);
        for (key, value) in twin {
            assert_eq!(table.remove(key), Some(value));
        }
        assert!(table.chunks.len() <= MIN_CHUNKS && emptied > 2, "emptied {emptied} times");
    }

    /// An entry takes 24 bytes; the pointer in it takes 16.
    #[test]
    fn an_entry_is_small() {
        assert_eq!(size_of::<Slot<std::sync::Arc<dyn Send>>>(), 24);
        assert_eq!(size_of::<Option<SlotKey>>(), 8);
    }
}
