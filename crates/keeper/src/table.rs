//! The values of a keeper: the slots, which key is in which, and which one is used again next.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::bindings::keeper::{
    Copy, Generations, Kernel, Region, SharedWords, Tensors, Window, copy_all,
};
use llm_datadist_core::{Error, ErrorKind, Result};

use crate::index::{self, Index, Place};
use crate::key::IndexKey;
use crate::leases::{ClientLeases, HeldValues};
use crate::messages::Stored;
use crate::recency::Recency;

/// The values, changed by one thread.
#[derive(Debug)]
pub(crate) struct SlotTable {
    /// What clients map: the values, the index and the generations of the slots.
    pub(crate) shared: SharedFiles,
    /// The slots as one tensor.
    bytes: Tensors,
    slot_bytes: u64,
    /// The key in each slot that was ever used.
    keys: Vec<Option<IndexKey>>,
    slots: u32,
    /// Used slots whose values were dropped.
    free: Vec<u32>,
    /// The values that can be replaced: those without a lease.
    recency: Recency,
    held: HeldValues,
    /// Values that were overwritten because all slots were in use.
    pub(crate) evicted: u64,
}

/// The memory that clients map.
#[derive(Debug)]
pub(crate) struct SharedFiles {
    pub(crate) values: Arc<Region>,
    pub(crate) index: Index<SharedWords>,
    pub(crate) generations: Generations,
}

impl SharedFiles {
    /// Returns the descriptors for clients, in the order in which they are sent. Returns `Err(NotEnabled)` if the kernel cannot prevent
    /// clients from writing.
    pub(crate) fn descriptors(&self) -> Result<[BorrowedFd<'_>; 3]> {
        let files = (self.values.descriptor(), self.index.descriptor(), self.generations.descriptor());
        if let (Some(values), Some(index), Some(generations)) = files {
            return Ok([values, index, generations]);
        }
        let text = "this kernel cannot share memory that others may only read; a keeper needs Linux 5.1";
        Err(Error::new(ErrorKind::NotEnabled, text))
    }
}

/// Returns the bytes of memory that a full table uses: the values, the index, and what it has for each slot.
pub(crate) fn table_bytes(slots: u32, slot_bytes: u64) -> u64 {
    // A key, a free slot, two neighbours in the order of use, and a generation.
    let each = size_of::<Option<IndexKey>>() + size_of::<u32>() + size_of::<(u32, u32)>() + size_of::<u64>();
    index::words(slots) * 8 + u64::from(slots) * (slot_bytes + each as u64)
}

impl SlotTable {
    /// Creates a table of `slots` slots of `slot_bytes` bytes. Returns `Err` of kind `OutOfMemory` if memory is short, or of kind
    /// `System` if the system refuses it.
    pub(crate) fn new(slots: u32, slot_bytes: u64) -> Result<SlotTable> {
        let bytes = u64::from(slots) * slot_bytes;
        let values = Arc::new(Region::shared("llm_datadist values", bytes)?);
        let words = SharedWords::new("llm_datadist index", index::words(slots))?;
        Ok(SlotTable {
            bytes: Tensors::carved(values.clone(), [0], bytes, ())?,
            shared: SharedFiles { values, index: Index::new(words, slots), generations: Generations::new()? },
            slot_bytes,
            keys: fallible::with_capacity("the keys of slots", slots as usize)?,
            slots,
            free: fallible::with_capacity("the free slots", slots as usize)?,
            recency: Recency::new(slots)?,
            held: HeldValues::new(slots),
            evicted: 0,
        })
    }

    /// Returns the number of slots.
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns the bytes of a slot.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Returns the number of values.
    pub(crate) fn values(&self) -> u32 {
        u32::try_from(self.keys.len() - self.free.len()).unwrap_or(u32::MAX)
    }

    /// Copies `value`, which fits a slot, unless the key has a value. The value becomes visible once it is complete.
    pub(crate) fn put(&mut self, key: &IndexKey, value: Window<'_>) -> Result<Stored> {
        if let Some(place) = self.shared.index.find(key) {
            self.touch(std::iter::once(place.slot));
            return Ok(Stored::Present);
        }
        let Some(slot) = self.take_slot() else { return Ok(Stored::NoRoom) };
        // From here on no reader accepts what the slot held.
        self.shared.generations.bump(slot);
        let generation = self.shared.generations.of(slot);
        let copied = self.fill(slot, value);
        if copied.is_err() || !self.shared.index.insert(key, Place { slot, generation }) {
            self.free.push(slot);
            return copied.map(|()| Stored::NoRoom);
        }
        self.keys[slot as usize] = Some(*key);
        self.recency.touch(slot);
        Ok(Stored::Stored)
    }

    /// Makes the values of slots the most recently used ones, the last slot first: the start of a chain outlives its end. Ignores
    /// slots without a value.
    pub(crate) fn touch(&mut self, slots: impl DoubleEndedIterator<Item = u32>) {
        for slot in slots.rev() {
            let used = self.keys.get(slot as usize).is_some_and(Option::is_some);
            if used && !self.held.holds(self.place(slot)) {
                self.recency.touch(slot);
            }
        }
    }

    /// Returns the slot of a key.
    pub(crate) fn slot_of(&self, key: &IndexKey) -> Option<u32> {
        self.shared.index.find(key).map(|place| place.slot)
    }

    /// Leases the values of keys to a client until `end`. Returns for each key whether the client has a lease on its value now.
    pub(crate) fn lease(&mut self, client: &mut ClientLeases, keys: &[IndexKey], end: Instant) -> Vec<bool> {
        let lease = |key| {
            let Some(place) = self.shared.index.find(key) else { return false };
            let leased = self.held.lease(client, place, end);
            if leased {
                self.recency.remove(place.slot);
            }
            leased
        };
        keys.iter().map(lease).collect()
    }

    /// Ends the leases of a client for which `ended` returns `true`. Their values are now the most recently used ones.
    pub(crate) fn end_leases(
        &mut self,
        client: &mut ClientLeases,
        ended: impl FnMut(&Place, Instant) -> bool,
    ) {
        let SlotTable { shared, keys, recency, held, .. } = self;
        held.end(client, ended, |place| {
            // The value may have been dropped meanwhile.
            let same = shared.generations.of(place.slot) == place.generation;
            if same && keys[place.slot as usize].is_some() {
                recency.touch(place.slot);
            }
        });
    }

    /// Ends the lease of a client on the value of a key, which is now the most recently used one.
    pub(crate) fn unlease(&mut self, client: &mut ClientLeases, key: &IndexKey) {
        if let Some(place) = self.shared.index.find(key)
            && self.held.end_one(client, place)
        {
            self.recency.touch(place.slot);
        }
    }

    /// Returns the number of values that leases hold.
    pub(crate) fn held(&self) -> u32 {
        self.held.count()
    }

    /// Returns a slot with its generation now.
    fn place(&self, slot: u32) -> Place {
        Place { slot, generation: self.shared.generations.of(slot) }
    }

    /// Drops the value of a key. Returns whether there was one.
    pub(crate) fn drop_value(&mut self, key: &IndexKey) -> bool {
        let Some(slot) = self.slot_of(key) else { return false };
        self.empty(slot);
        self.free.push(slot);
        true
    }

    /// Returns a slot that holds no value: a free one, one that was never used, or that of the least recently used value. `None` if
    /// leases hold all values.
    fn take_slot(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.keys.len() < self.slots as usize {
            self.keys.push(None);
            return u32::try_from(self.keys.len() - 1).ok();
        }
        let oldest = self.recency.oldest()?;
        self.empty(oldest);
        self.evicted += 1;
        Some(oldest)
    }

    /// Removes the value of a slot. Readers that are copying it will not accept what they get.
    fn empty(&mut self, slot: u32) {
        if let Some(key) = self.keys[slot as usize].take() {
            self.shared.index.remove(&key);
            self.shared.generations.bump(slot);
            self.recency.remove(slot);
        }
    }

    fn fill(&self, slot: u32, value: Window<'_>) -> Result<()> {
        let place = self.bytes.window(0, u64::from(slot) * self.slot_bytes, value.len())?;
        copy_all(&[Copy::one(value, place)], Kernel::for_bytes(value.len()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLOTS: u32 = 8;

    /// A store as a list of keys and values, the least recently used one first.
    #[derive(Default)]
    struct Model(Vec<(u64, u8)>);

    impl Model {
        fn put(&mut self, key: u64, value: u8) -> Stored {
            if self.touch(key) {
                return Stored::Present;
            }
            if self.0.len() == SLOTS as usize {
                self.0.remove(0);
            }
            self.0.push((key, value));
            Stored::Stored
        }

        fn touch(&mut self, key: u64) -> bool {
            let at = self.0.iter().position(|(other, _)| *other == key);
            let entry = at.map(|at| self.0.remove(at));
            self.0.extend(entry);
            entry.is_some()
        }

        fn get(&self, key: u64) -> Option<u8> {
            self.0.iter().find(|(other, _)| *other == key).map(|(_, value)| *value)
        }
    }

    /// Reads a value as a client does, with the check of its generation.
    fn get(table: &SlotTable, key: u64) -> Option<u8> {
        let Place { slot, generation } = table.shared.index.find(&index_key(key))?;
        let mut bytes = [0; 100];
        let from = table.bytes.window(0, u64::from(slot) * table.slot_bytes, 100).unwrap();
        copy_all(&[Copy::one(from, Window::of_slice_mut(&mut bytes))], Kernel::PLAIN).unwrap();
        assert_eq!(table.shared.generations.of(slot), generation);
        assert_eq!(bytes, [bytes[0]; 100]);
        Some(bytes[0])
    }

    fn index_key(key: u64) -> IndexKey {
        IndexKey([key << 32, 0, 0, key])
    }

    #[derive(Clone, Debug)]
    enum Call {
        Put(u64, u8),
        Touch(Vec<u64>),
        Drop(u64),
    }

    fn call() -> impl Strategy<Value = Call> {
        prop_oneof![
            4 => (0u64..20, any::<u8>()).prop_map(|(key, value)| Call::Put(key, value)),
            1 => prop::collection::vec(0u64..20, 0..4).prop_map(Call::Touch),
            1 => (0u64..20).prop_map(Call::Drop),
        ]
    }

    proptest! {
        #[test]
        fn a_table_keeps_what_a_list_in_order_of_use_keeps(calls in prop::collection::vec(call(), 1..200)) {
            let (mut table, mut model) = (SlotTable::new(SLOTS, 128).unwrap(), Model::default());
            for call in calls {
                match call {
                    Call::Put(key, value) => {
                        let put = table.put(&index_key(key), Window::of_slice(&[value; 100])).unwrap();
                        prop_assert_eq!(put, model.put(key, value));
                    }
                    Call::Touch(keys) => {
                        let slots: Vec<u32> = keys.iter().filter_map(|&key| table.slot_of(&index_key(key))).collect();
                        table.touch(slots.into_iter());
                        for key in keys.into_iter().rev() {
                            model.touch(key);
                        }
                    }
                    Call::Drop(key) => {
                        let before = model.0.len();
                        model.0.retain(|(other, _)| *other != key);
                        prop_assert_eq!(table.drop_value(&index_key(key)), before > model.0.len());
                    }
                }
                prop_assert_eq!(table.values() as usize, model.0.len());
                for key in 0u64..20 {
                    prop_assert_eq!(get(&table, key), model.get(key));
                }
            }
        }
    }

    #[test]
    fn the_memory_of_a_table_includes_that_of_its_keys() {
        // 4 Mi buckets of 64 bytes, and for each slot a key of 40 bytes and 20 bytes of numbers.
        assert_eq!(table_bytes(2 << 20, 128), (256 << 20) + 64 + (2 << 20) * (128 + 40 + 20));
    }

    #[test]
    fn clients_cannot_write_or_shrink_what_they_map() {
        let table = SlotTable::new(4, 64).unwrap();
        for file in table.shared.descriptors().unwrap() {
            assert_eq!(rustix::io::pwrite(file, &[1], 0), Err(rustix::io::Errno::PERM));
            assert_eq!(rustix::fs::ftruncate(file, 0), Err(rustix::io::Errno::PERM));
        }
    }

    #[test]
    fn the_end_of_a_chain_goes_first() {
        let mut table = SlotTable::new(3, 64).unwrap();
        for key in 1..4 {
            table.put(&index_key(key), Window::of_slice(&[1; 64])).unwrap();
        }
        let chain: Vec<u32> = (1..4).filter_map(|key| table.slot_of(&index_key(key))).collect();
        table.touch(chain.into_iter());
        for (new, gone) in [(4, 3), (5, 2), (6, 1)] {
            assert!(table.slot_of(&index_key(gone)).is_some());
            table.put(&index_key(new), Window::of_slice(&[2; 64])).unwrap();
            assert_eq!(table.slot_of(&index_key(gone)), None);
        }
        assert_eq!(table.evicted, 3);
    }

    #[test]
    fn a_reader_of_a_replaced_value_sees_another_generation() {
        let mut table = SlotTable::new(1, 64).unwrap();
        table.put(&index_key(1), Window::of_slice(&[1; 64])).unwrap();
        let before = table.shared.index.find(&index_key(1)).unwrap();
        table.put(&index_key(2), Window::of_slice(&[2; 64])).unwrap();
        assert_ne!(table.shared.generations.of(before.slot), before.generation);
        let before = table.shared.index.find(&index_key(2)).unwrap();
        assert!(table.drop_value(&index_key(2)));
        assert_ne!(table.shared.generations.of(before.slot), before.generation);
        assert!(!table.drop_value(&index_key(2)));
    }

    #[test]
    fn a_value_larger_than_the_memory_is_refused_and_its_slot_is_free_again() {
        let mut table = SlotTable::new(1, 64).unwrap();
        assert!(table.put(&index_key(1), Window::of_slice(&[1; 65])).is_err());
        assert_eq!((table.values(), table.slot_of(&index_key(1))), (0, None));
        assert_eq!(table.put(&index_key(1), Window::of_slice(&[1; 64])).unwrap(), Stored::Stored);
    }

    #[test]
    fn leased_values_stay_until_their_leases_end() {
        let mut table = SlotTable::new(8, 64).unwrap();
        let put =
            |table: &mut SlotTable, key| table.put(&index_key(key), Window::of_slice(&[1; 64])).unwrap();
        for key in 0..8 {
            put(&mut table, key);
        }
        let mut client = ClientLeases::default();
        let keys = [0, 1, 2, 99].map(index_key);
        assert_eq!(table.lease(&mut client, &keys, Instant::now()), [true, true, false, false]);
        table.touch([0, 1].into_iter());
        for key in 10..30 {
            assert_eq!(put(&mut table, key), Stored::Stored);
        }
        assert_eq!([0, 1, 2].map(|key| get(&table, key)), [Some(1), Some(1), None]);
        // A value that is dropped is gone, whatever leases it. Its slot is used again as any other.
        assert!(table.drop_value(&index_key(1)));
        assert_eq!((put(&mut table, 30), table.held()), (Stored::Stored, 2));
        table.end_leases(&mut client, |_, _| true);
        assert_eq!((get(&table, 0), get(&table, 30), table.held()), (Some(1), Some(1), 0));
        for key in 40..48 {
            put(&mut table, key);
        }
        assert_eq!([0, 30].map(|key| get(&table, key)), [None, None]);
    }
}
