//! The table of slots: a reference model, recovery after a killed process, pages and leases.

use proptest::prelude::*;

use super::*;
use crate::messages::ValueTerms;

const SLOTS: u32 = 8;

impl SlotTable {
    fn put(&mut self, key: &IndexKey, value: Window<'_>) -> Result<Stored> {
        self.put_value(key, value, 0)
    }
}

/// Terms of values without checksums.
fn terms(value: u64) -> ValueTerms {
    ValueTerms { value, checksums: false }
}

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
    let Location { slot, generation } = table.shared.index.find(&index_key(key))?;
    let mut bytes = [0; 100];
    let from = table.bytes.window(0, u64::from(slot) * table.slot_bytes(), 100).unwrap();
    copy_all(&[Copy::one(from, Window::of_slice_mut(&mut bytes))], Kernel::PLAIN).unwrap();
    assert_eq!(table.shared.generations.of(slot), generation);
    assert_eq!(bytes, [bytes[0]; 100]);
    Some(bytes[0])
}

fn table(slots: u32, slot_bytes: u64) -> SlotTable {
    SlotTable::over(Arc::new(SharedFiles::new(slots, slot_bytes).unwrap())).unwrap()
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
        let (mut table, mut model) = (super::tests::table(SLOTS, 128), Model::default());
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
    // 4 Mi buckets of 64 bytes, 4,096 namespaces of 4,128 bytes, and for each slot a key of 40 bytes and 36 bytes of numbers.
    let namespaces = 4096 * (4096 + 32) + 64;
    assert_eq!(table_bytes(2 << 20, 128), (256 << 20) + 64 + namespaces + (2 << 20) * (128 + 40 + 36));
}

#[test]
fn clients_cannot_write_or_shrink_what_they_map() {
    let table = table(4, 64);
    for file in table.shared.descriptors().unwrap() {
        assert_eq!(rustix::io::pwrite(file, &[1], 0), Err(rustix::io::Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(file, 0), Err(rustix::io::Errno::PERM));
    }
}

#[test]
fn the_end_of_a_chain_goes_first() {
    let mut table = table(3, 64);
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
fn pages_have_each_value_that_stays_once() {
    let mut table = table(100_000, 64);
    let of = |number: u64| IndexKey([(number << 32) | (number % 2), 0, 0, number]);
    for number in 0..100_000 {
        table.put(&of(number), Window::of_slice(&[1; 64])).unwrap();
    }
    table.lease(&mut ClientLeases::default(), &[of(9)], Instant::now());
    let (mut listed, mut from) = (Vec::new(), Some(0));
    while let Some(begin) = from {
        let (page, next) = table.list(ListRequest { from: begin, namespace: None, used_after: 0 });
        assert!(page.len() <= PAGE_VALUES && next.is_none_or(|next| next > begin));
        (listed, from) = ([listed, page].concat(), next);
        // What is used and dropped meanwhile changes nothing for the other values.
        table.touch([0, 99_999].into_iter());
        table.drop_value(&of(5000));
    }
    let slots: Vec<u32> = listed.iter().map(|value| value.slot).collect();
    assert!(slots.iter().copied().eq((0..100_000).filter(|slot| *slot != 5000)));
    assert!(listed.iter().all(|value| IndexKey::of(value.namespace, &value.key) == of(value.slot.into())));
    assert!(listed.iter().all(|value| value.leased == (value.slot == 9)));
    assert!(listed[1..4999].is_sorted_by_key(|value| value.used));
    // A namespace without values in many slots: pages without values, of a bounded number of slots.
    let none = ListRequest { from: 0, namespace: Some(2), used_after: 0 };
    assert_eq!(table.list(none), (Vec::new(), Some(PAGE_SLOTS)));
    assert_eq!(table.list(ListRequest { from: PAGE_SLOTS, ..none }), (Vec::new(), None));
    assert_eq!(table.list(ListRequest { from: u32::MAX, ..none }), (Vec::new(), None));
    let (odd, _) = table.list(ListRequest { namespace: Some(1), ..none });
    assert!(odd.iter().all(|value| value.namespace == 1 && value.slot % 2 == 1));
    // The last uses are those of 0, and of 99,999 by the touches.
    let latest = ListRequest { namespace: None, used_after: 100_000, ..none };
    assert!(table.list(latest).0.iter().map(|value| value.slot).eq([0]));
    assert!(table.list(ListRequest { from: 90_000, ..latest }).0.iter().map(|value| value.slot).eq([99_999]));
}

#[test]
fn a_reader_of_a_replaced_value_sees_another_generation() {
    let mut table = table(1, 64);
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
    let mut table = table(1, 64);
    assert!(table.put(&index_key(1), Window::of_slice(&[1; 65])).is_err());
    assert_eq!((table.values(), table.slot_of(&index_key(1))), (0, None));
    assert_eq!(table.put(&index_key(1), Window::of_slice(&[1; 64])).unwrap(), Stored::Stored);
}

#[test]
fn a_put_without_room_for_its_key_replaces_nothing() {
    let mut table = table(64, 64);
    let home = index_key(1).mixed() & 127;
    let mut equal = (0..).map(index_key).filter(|key| key.mixed() & 127 == home);
    for key in equal.by_ref().take(64) {
        assert_eq!(table.put(&key, Window::of_slice(&[1; 64])).unwrap(), Stored::Stored);
    }
    let key = equal.next().unwrap();
    assert_eq!(table.put(&key, Window::of_slice(&[1; 64])).unwrap(), Stored::NoRoom);
    assert_eq!((table.values(), table.evicted), (64, 0));
    assert!(table.put(&key, Window::of_slice(&[1; 65])).is_err());
    assert_eq!((table.values(), table.evicted), (64, 0));
}

/// A table of the namespace 0 with the values 1 to 6, of which 4 was dropped. 2 was used last.
fn left_behind() -> SlotTable {
    let mut table = table(10, 128);
    assert_eq!(table.namespaces.attach("n", terms(100)), Ok(0));
    for key in 1..=6 {
        table.put(&of_zero(key), Window::of_slice(&[u8::try_from(key).unwrap(); 100])).unwrap();
    }
    table.touch([1].into_iter());
    table.drop_value(&of_zero(4));
    table
}

fn of_zero(key: u64) -> IndexKey {
    IndexKey([0, 0, 0, key])
}

/// Returns the values that the next process has, in their order of use.
fn recovered(table: SlotTable) -> (SlotTable, Vec<u64>) {
    let files = table.shared.clone();
    // A process that is killed drops nothing.
    std::mem::forget(table);
    let mut next = SlotTable::over(files).unwrap();
    assert!(next.shared.index.is_whole());
    assert_eq!(next.free.len() + next.values() as usize, next.keys.len());
    let mut order = Vec::new();
    let mut recency = Vec::new();
    while let Some(slot) = next.recency.oldest() {
        let key = next.keys[slot as usize].unwrap();
        let location = next.shared.index.find(&key).unwrap();
        assert_eq!((location.slot, location.generation), (slot, next.shared.generations.of(slot)));
        let mut bytes = [0; 100];
        let from = next.bytes.window(0, u64::from(slot) * 128, 100).unwrap();
        copy_all(&[Copy::one(from, Window::of_slice_mut(&mut bytes))], Kernel::PLAIN).unwrap();
        assert_eq!(bytes.map(u64::from), [key.0[3]; 100]);
        order.push(key.0[3]);
        next.recency.remove(slot);
        recency.push(slot);
    }
    next.touch(recency.into_iter().rev());
    (next, order)
}

#[test]
fn the_next_process_has_the_values_and_their_order_of_use() {
    let (mut table, order) = recovered(left_behind());
    assert_eq!(order, [1, 3, 5, 6, 2]);
    assert_eq!((table.values(), table.namespaces.attach("n", terms(100))), (5, Ok(0)));
    for key in 7..=11 {
        table.put(&of_zero(key), Window::of_slice(&[u8::try_from(key).unwrap(); 100])).unwrap();
    }
    table.put(&of_zero(12), Window::of_slice(&[12; 100])).unwrap();
    assert_eq!(table.evicted, 1);
    let (_, order) = recovered(table);
    assert_eq!(order, [3, 5, 6, 2, 7, 8, 9, 10, 11, 12]);
}

#[test]
fn the_next_process_has_what_any_calls_have_left() {
    let calls = prop::collection::vec(call(), 1..200);
    let mut runner = proptest::test_runner::TestRunner::default();
    runner
        .run(&calls, |calls| {
            let mut table = table(SLOTS, 128);
            table.namespaces.attach("n", terms(100)).unwrap();
            let mut model = Model::default();
            for call in calls {
                match call {
                    Call::Put(key, _) => {
                        let value = u8::try_from(key).unwrap();
                        table.put(&of_zero(key), Window::of_slice(&[value; 100])).unwrap();
                        model.put(key, value);
                    }
                    Call::Touch(keys) => keys.into_iter().for_each(|key| {
                        table.touch(table.slot_of(&of_zero(key)).into_iter());
                        model.touch(key);
                    }),
                    Call::Drop(key) => {
                        table.drop_value(&of_zero(key));
                        model.0.retain(|(other, _)| *other != key);
                    }
                }
            }
            let (_, order) = recovered(table);
            prop_assert_eq!(order, model.0.iter().map(|(key, _)| *key).collect::<Vec<_>>());
            Ok(())
        })
        .unwrap();
}

/// Each damage is what a process leaves that is killed between two steps, or more than that. The values 1 and 2 are not damaged.
#[test]
fn damage_costs_the_damaged_values_only() {
    type Damage = fn(&mut SlotTable);
    let location = |table: &SlotTable, key| table.shared.index.find(&of_zero(key)).unwrap();
    let cases: [(&str, Damage, &[u64]); 9] = [
        ("a bucket is half-written", |table| table.shared.index.half_write(&of_zero(3)), &[1, 5, 6, 2]),
        ("a key is in two buckets", |table| table.shared.index.half_move(&of_zero(3)), &[1, 3, 5, 6, 2]),
        ("a slot was taken for another value", |table| table.shared.generations.bump(2), &[1, 5, 6, 2]),
        (
            "a slot was filled, but its key is not there",
            |table| {
                let slot = table.take_slot().unwrap();
                table.shared.generations.bump(slot);
                table.fill(slot, Window::of_slice(&[99; 100])).unwrap();
            },
            &[1, 3, 5, 6, 2],
        ),
        (
            "a value is removed from the index, and not from its slot",
            |table| table.shared.index.remove(&of_zero(3)),
            &[1, 5, 6, 2],
        ),
        (
            "a slot is out of range",
            |table| {
                let index = &table.shared.index;
                index.replace(&of_zero(3), Location { slot: 10, generation: 0 });
                index.replace(&of_zero(5), Location { slot: u32::MAX - 1, generation: u64::MAX });
                index.replace(&of_zero(6), Location { slot: 7, generation: 0 });
            },
            &[1, 2],
        ),
        (
            "another generation",
            |table| {
                let Location { slot, generation } = table.shared.index.find(&of_zero(3)).unwrap();
                table.shared.index.replace(&of_zero(3), Location { slot, generation: generation + 1 });
            },
            &[1, 5, 6, 2],
        ),
        (
            "two keys have one slot",
            |table| {
                let location = table.shared.index.find(&of_zero(3)).unwrap();
                assert!(table.shared.index.insert(&of_zero(33), location));
            },
            &[1, 5, 6, 2],
        ),
        (
            "an unknown namespace",
            |table| {
                let key = IndexKey([7, 0, 0, 70]);
                table.put(&key, Window::of_slice(&[70; 100])).unwrap();
            },
            &[1, 3, 5, 6, 2],
        ),
    ];
    for (what, damage, rest) in cases {
        let mut table = left_behind();
        let before = [1, 2, 3, 5, 6].map(|key| location(&table, key));
        damage(&mut table);
        let (next, order) = recovered(table);
        assert_eq!(order, rest, "{what}");
        // A reader that has found a value before sees whether it is still that one.
        for (key, location) in [1, 2, 3, 5, 6].into_iter().zip(before) {
            let same = next.shared.generations.of(location.slot) == location.generation;
            assert_eq!(same, rest.contains(&key), "{what}: {key}");
        }
    }
}

#[test]
fn a_namespace_is_forgotten_although_no_slot_was_ever_used() {
    let mut table = table(10, 128);
    assert_eq!(table.namespaces.attach("n", terms(100)), Ok(0));
    assert_eq!(recovered(table).0.namespaces.count(), 0);
}

#[test]
fn nothing_is_left_once_all_is_forgotten() {
    let table = left_behind();
    table.shared.index.half_move(&of_zero(3));
    table.shared.index.half_write(&of_zero(5));
    let before = table.shared.index.find(&of_zero(1)).unwrap();
    SlotTable::forget_all(&table.shared);
    let (next, order) = recovered(table);
    assert_eq!((order, next.namespaces.count()), (Vec::new(), 0));
    assert_ne!(next.shared.generations.of(before.slot), before.generation);
}

#[test]
fn leased_values_stay_until_their_leases_end() {
    let mut table = table(8, 64);
    let put = |table: &mut SlotTable, key| table.put(&index_key(key), Window::of_slice(&[1; 64])).unwrap();
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
