//! Values where they lie in the memory of the keeper, without a copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use llm_datadist_core::bindings::keeper::{Mutex, Window, window_sums};
use llm_datadist_core::bindings::this_process;
use llm_datadist_core::{Deadline, Result};

use crate::attachment::{Attachment, SharedMemory};
use crate::dropped_on_thread::DroppedOnThread;
use crate::index::Location;
use crate::key::StoreKey;
use crate::sizes;
use crate::stats::StoreStats;
use crate::store::{Store, still};

/// The values of keys where they lie in the memory of the keeper, with leases until it is dropped.
///
/// The bytes may change at any time: the keeper may have refused a lease, another store may drop a value, or the time of the leases may
/// be over. So what was computed from a value counts only if [`valid`](Self::valid), called afterwards, says that the value was right.
///
/// It does not need the keeper: what it has mapped stays readable, and the answer of `valid` right, after the keeper has ended, after
/// the store was closed, and in a forked child.
#[derive(Debug)]
pub struct StoreView {
    process: u32,
    store: Arc<Store>,
    /// What has the leases. `None` if the keeper was away, and once the view has ended.
    attachment: Mutex<Option<Arc<Attachment>>>,
    /// `None` if the keeper was away.
    memory: Option<DroppedOnThread<SharedMemory>>,
    keys: Vec<StoreKey>,
    /// For each key the location of its value, if the keeper has one.
    locations: Vec<Option<Location>>,
    leased: Vec<bool>,
    /// Whether `valid` has counted hits and misses.
    counted: AtomicBool,
}

/// The bytes of a value in the memory of the keeper. They stay mapped as long as this lives, whatever happens to the view; but they may
/// change at any time.
#[derive(Debug)]
pub struct ViewedValue {
    memory: DroppedOnThread<SharedMemory>,
    location: Location,
    bytes: u64,
}

impl StoreView {
    /// Leases the values of keys for `time`, as [`Store::lease`] does, and finds them. If the keeper is away, every key is a miss. If it
    /// does not answer before `deadline`, or refuses a lease, the values are there all the same.
    pub fn open(
        store: &Arc<Store>,
        keys: Vec<StoreKey>,
        time: Duration,
        deadline: Deadline,
    ) -> Result<StoreView> {
        sizes::check_keys(keys.len())?;
        sizes::check_lease(time)?;
        let attachment = store.attachment()?;
        if let Some(attachment) = &attachment {
            attachment.viewed.add(&keys)?;
        }
        let mut view = StoreView {
            process: this_process(),
            store: store.clone(),
            memory: attachment.as_ref().map(|attachment| attachment.memory.clone()),
            attachment: Mutex::new(attachment.clone()),
            locations: vec![None; keys.len()],
            leased: vec![false; keys.len()],
            keys,
            counted: AtomicBool::new(false),
        };
        if let Some(attachment) = &attachment {
            // An error drops the view, which ends its leases.
            view.leased = store.lease_at(attachment, &view.keys, time, deadline)?;
            view.locations = view.keys.iter().map(|key| attachment.location(key)).collect();
        } else {
            store.count_away(view.keys.len());
        }
        Ok(view)
    }

    /// Returns the value of a key, by its position; `None` if the keeper does not have it, or there is no such key. What is read of a
    /// value is right only if [`valid`](Self::valid) says so afterwards.
    pub fn value(&self, at: usize) -> Option<ViewedValue> {
        let (memory, location) = (self.memory.clone()?, (*self.locations.get(at)?)?);
        Some(ViewedValue { memory, location, bytes: self.store.value_bytes() })
    }

    /// Returns for each key whether the keeper has leased its value to this store.
    pub fn leased(&self) -> &[bool] {
        &self.leased
    }

    /// Returns for each key whether its value is still right: then everything that was read of it so far is right. `false` for a key
    /// without a value. If values have checksums, this reads all bytes of them, and a value without its checksum is not right.
    pub fn valid(&self) -> Result<Vec<bool>> {
        let Some(memory) = &self.memory else { return Ok(vec![false; self.keys.len()]) };
        // Before the generations are compared: the bytes of a value that is replaced meanwhile say nothing.
        let corrupt = self.corrupt(memory)?;
        // A thread of the parent may hold the lock of the counts of a forked child.
        let own = self.process == this_process();
        let counts = own && !self.counted.swap(true, Ordering::Relaxed);
        let mut right = still(memory, &self.locations);
        let mut wrong = Vec::with_capacity(corrupt.len());
        for at in corrupt {
            if std::mem::take(&mut right[at]) {
                wrong.extend(self.locations[at]);
            }
        }
        if counts {
            let mut counts = StoreStats::default();
            self.store.count_found(&self.locations, &right, wrong.len() as u64, &mut counts);
            self.store.add(&counts);
        }
        if own && let Some(attachment) = &*self.attachment.lock() {
            attachment.report_corrupt(&wrong);
        }
        Ok(right)
    }

    /// Returns the positions of the values whose bytes do not have their checksum. None if values have no checksums.
    fn corrupt(&self, memory: &SharedMemory) -> Result<Vec<usize>> {
        if !self.store.checksums() {
            return Ok(Vec::new());
        }
        let found = self.locations.iter().enumerate().filter_map(|(at, location)| Some((at, (*location)?)));
        let found: Vec<(usize, Location)> = found.collect();
        let keys = found.iter().map(|(at, _)| self.keys[*at].bytes()).collect::<Vec<_>>();
        let window = |(_, location): &(usize, Location)| memory.window(*location, self.store.value_bytes());
        let windows = found.iter().map(window).collect::<Result<Vec<_>>>()?;
        let sums = window_sums(keys.iter().zip(windows).map(|(key, value)| (&key[..], value)))?;
        let wrong =
            |((_, location), sum): &(&(usize, Location), u64)| memory.index.checksum(location.slot) != *sum;
        Ok(found.iter().zip(sums).filter(wrong).map(|((at, _), _)| *at).collect())
    }

    /// Ends the leases of the store on the keys that no other view of it has, also those of [`Store::lease`]. Does not wait for the keeper. What is mapped stays
    /// readable, and [`valid`](Self::valid) may still be called. Ending again does nothing, and so does ending in a forked child.
    pub fn end(&self) {
        if self.process != this_process() {
            return;
        }
        let attachment = self.attachment.lock().take();
        let Some(attachment) = attachment else { return };
        attachment.viewed.remove(&self.keys, |keys| attachment.unlease(keys));
        // In the order of the chain.
        let right = self.locations.iter().flatten().filter(|location| attachment.memory.still(location));
        attachment.touch(&right.map(|location| location.slot).collect::<Vec<_>>());
    }
}

/// A forked child leaks its copy: other values of the child may have the numbers of the descriptors.
impl Drop for StoreView {
    fn drop(&mut self) {
        self.end();
        std::mem::forget(self.attachment.get_mut().take());
    }
}

impl ViewedValue {
    /// Returns the bytes, which must only be read.
    pub fn window(&self) -> Result<Window<'_>> {
        self.memory.window(self.location, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use llm_datadist_core::bindings::keeper::{Copy, Kernel, copy_all};
    use proptest::prelude::*;

    use super::*;
    use crate::attachment::tests::{SilentPath, key, soon};
    use crate::messages::Stored;

    const TIME: Duration = Duration::from_secs(10);

    fn store(path: &SilentPath) -> Arc<Store> {
        Arc::new(path.store(64))
    }

    fn put(store: &Store, number: u8, byte: u8) {
        let stored = store.put(&[key(number)], &[Window::of_slice(&[byte; 64])], soon()).unwrap();
        assert_eq!(stored, [Stored::Stored]);
    }

    fn view(store: &Arc<Store>, numbers: &[u8]) -> StoreView {
        StoreView::open(store, numbers.iter().copied().map(key).collect(), TIME, soon()).unwrap()
    }

    /// Reads the bytes of a value, which are all equal.
    fn read(value: &ViewedValue) -> u8 {
        let mut bytes = [0; 64];
        copy_all(&[Copy::one(value.window().unwrap(), Window::of_slice_mut(&mut bytes))], Kernel::PLAIN)
            .unwrap();
        assert_eq!(bytes, [bytes[0]; 64]);
        bytes[0]
    }

    fn bytes(view: &StoreView) -> Vec<Option<u8>> {
        (0..view.leased().len()).map(|at| view.value(at).map(|value| read(&value))).collect()
    }

    fn leased(store: &Store) -> u32 {
        store.stats(soon()).unwrap().keeper.unwrap().leased
    }

    #[test]
    fn leased_values_stay_valid_and_replaced_ones_do_not() {
        let path = SilentPath::new();
        let _keeper = path.keeper(8, 64);
        let (store, other) = (store(&path), store(&path));
        (1..=8).for_each(|number| put(&store, number, number));
        let view = view(&store, &[1, 2, 3, 99]);
        assert_eq!(view.leased(), [true, true, false, false], "a quarter of the slots");
        assert_eq!(bytes(&view), [Some(1), Some(2), Some(3), None]);
        assert_eq!(view.valid().unwrap(), [true, true, true, false]);
        (11..=16).for_each(|number| put(&other, number, number));
        assert_eq!(bytes(&view)[..2], [Some(1), Some(2)]);
        assert_eq!(view.valid().unwrap(), [true, true, false, false]);
        // A lease does not prevent a drop, and the same value again is another one.
        assert_eq!(other.drop_values(&[key(1)], soon()).unwrap(), 1);
        put(&other, 1, 1);
        assert_eq!(view.valid().unwrap(), [false, true, false, false]);
        let stats = store.stats(soon()).unwrap();
        assert_eq!(
            (stats.hits, stats.hit_bytes, stats.misses_absent),
            (3, 3 * 64, 1),
            "of the first question"
        );
        let kept = view.value(1).unwrap();
        drop(view);
        assert_eq!(leased(&store), 1, "the lease on the value that was dropped ends with its time");
        (21..=28).for_each(|number| put(&other, number, number));
        assert_eq!(store.exists(&[key(1), key(2)]).unwrap(), [false, false]);
        assert!((21..=28).contains(&read(&kept)), "it stays mapped, with the bytes of another key");
    }

    #[test]
    fn end_of_a_view_leaves_the_leases_of_another_one() {
        let path = SilentPath::new();
        let _keeper = path.keeper(40, 64);
        let store = store(&path);
        (1..=4).for_each(|number| put(&store, number, number));
        let first = view(&store, &[1, 2, 3]);
        let second = view(&store, &[2, 3, 4]);
        assert_eq!(leased(&store), 4);
        first.end();
        first.end();
        assert_eq!(leased(&store), 3);
        assert_eq!(first.valid().unwrap(), [true; 3], "it may be asked later");
        drop(first);
        assert_eq!(leased(&store), 3);
        drop(second);
        assert_eq!(leased(&store), 0);
    }

    #[test]
    fn views_of_an_earlier_connection_do_not_keep_leases_of_a_later_one() {
        let path = SilentPath::new();
        let (first_keeper, store) = (path.keeper(8, 64), store(&path));
        put(&store, 1, 1);
        let first = view(&store, &[1]);
        drop(first_keeper);
        let _keeper = path.keeper(8, 64);
        while store.attachment().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        put(&store, 1, 1);
        let second = view(&store, &[1]);
        assert_eq!(leased(&store), 1);
        drop(second);
        assert_eq!((leased(&store), bytes(&first)), (0, vec![Some(1)]));
    }

    #[test]
    fn a_view_outlives_its_store_and_its_keeper() {
        let path = SilentPath::new();
        let (keeper, store) = (path.keeper(8, 64), store(&path));
        put(&store, 1, 1);
        put(&store, 2, 2);
        let view = view(&store, &[1, 2, 3]);
        store.close();
        assert_eq!(
            (bytes(&view), view.valid().unwrap()),
            (vec![Some(1), Some(2), None], vec![true, true, false])
        );
        drop((keeper, store));
        assert_eq!(
            (bytes(&view), view.valid().unwrap()),
            (vec![Some(1), Some(2), None], vec![true, true, false])
        );
        let value = view.value(1).unwrap();
        drop(view);
        assert_eq!(read(&value), 2);
    }

    #[test]
    fn without_a_keeper_all_values_are_missing() {
        let path = SilentPath::new();
        let store = store(&path);
        let view = view(&store, &[1, 2]);
        assert_eq!(
            (bytes(&view), view.valid().unwrap(), view.leased()),
            (vec![None; 2], vec![false; 2], &[false; 2][..])
        );
        assert_eq!(store.own_stats().unwrap().misses_away, 2);
        for (count, time, name) in [(4097, TIME, "len(keys)"), (1, Duration::ZERO, "ttl")] {
            let refused = StoreView::open(&store, vec![key(1); count], time, soon()).unwrap_err();
            assert!(refused.to_string().contains(name), "{refused}");
        }
    }

    #[test]
    fn a_hung_keeper_costs_the_leases_and_no_value() {
        let path = SilentPath::new();
        let keeper = path.start();
        let store = store(&path);
        let _silent = keeper.join().unwrap();
        let keys = vec![key(1)];
        let view = StoreView::open(&store, keys, TIME, Deadline::after(Duration::from_millis(1))).unwrap();
        // The table of the silent keeper is empty, but it was looked at.
        assert_eq!((view.valid().unwrap(), view.leased()), (vec![false], &[false][..]));
        assert_eq!(store.own_stats().unwrap().misses_absent, 1);
    }

    /// Each key of a view, with its life at that time.
    type Expected = Vec<(u8, Option<u8>)>;

    #[derive(Clone, Debug)]
    enum Step {
        Put(u8),
        Drop(u8),
        Open(Vec<u8>),
        Close(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u8..6).prop_map(Step::Put),
            2 => (0u8..6).prop_map(Step::Drop),
            1 => prop::collection::vec(0u8..6, 1..4).prop_map(Step::Open),
            1 => any::<usize>().prop_map(Step::Close),
        ]
    }

    /// The model counts the lives of each key. Slots are used again, because there are more lives than slots.
    #[test]
    fn views_say_what_a_model_says() {
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(32));
        let steps = prop::collection::vec(step(), 1..100);
        let test = |steps: Vec<Step>| {
            let path = SilentPath::new();
            let _keeper = path.keeper(6, 64);
            let (store, other) = (store(&path), store(&path));
            // For each living key its life, which is also the byte of its value.
            let (mut living, mut lives) = (HashMap::<u8, u8>::new(), 0);
            let mut views: Vec<(StoreView, Expected)> = Vec::new();
            for step in steps {
                match step {
                    Step::Put(number) if !living.contains_key(&number) => {
                        lives += 1;
                        put(&other, number, lives);
                        living.insert(number, lives);
                    }
                    Step::Drop(number) => {
                        let dropped = other.drop_values(&[key(number)], soon()).unwrap();
                        prop_assert_eq!(dropped == 1, living.remove(&number).is_some());
                    }
                    Step::Open(numbers) => {
                        let expected = numbers.iter().map(|number| (*number, living.get(number).copied()));
                        views.push((view(&store, &numbers), expected.collect()));
                    }
                    Step::Close(at) if !views.is_empty() => drop(views.swap_remove(at % views.len())),
                    Step::Put(_) | Step::Close(_) => {}
                }
                for (view, expected) in &views {
                    let (seen, valid) = (bytes(view), view.valid().unwrap());
                    for (at, &(number, life)) in expected.iter().enumerate() {
                        let right = life.is_some() && living.get(&number).copied() == life;
                        prop_assert_eq!(valid[at], right);
                        prop_assert_eq!(seen[at].is_some(), life.is_some());
                        prop_assert!(!right || seen[at] == life);
                    }
                }
            }
            Ok(())
        };
        runner.run(&steps, test).unwrap();
    }
}
