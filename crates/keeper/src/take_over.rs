//! Copies the values of a keeper that is replaced by another one, which then takes its path.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::bindings::keeper::peer_credentials;
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::index::Place;
use crate::key::IndexKey;
use crate::messages::{ListedNamespace, ListedValue, Stored, ValueTerms};
use crate::observer::Observer;
use crate::shared_files::SharedFiles;
use crate::socket::{FileNumbers, ListeningPath, connect_to, is_readable};
use crate::table::SlotTable;

/// How long the other keeper may take for an answer.
const ANSWER: Duration = Duration::from_secs(10);
/// How long this keeper waits for the other one to agree to end.
const AGREEING: Duration = Duration::from_secs(300);
/// How often it looks whether a keeper that has ended the connection serves again, and how long it waits for an answer then.
const ALIVE: Duration = Duration::from_secs(1);
/// How often it looks whether the other one has ended.
const LOOK: Duration = Duration::from_millis(5);
/// How often the values of the other keeper are listed: until a round copies at most so many bytes, and at most so often.
const LITTLE: u64 = 16 << 20;
const MAX_ROUNDS: u32 = 10;
/// Values that are copied between two looks at `stop`.
const BATCH: usize = 64;

/// What became of the values of the other keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenOver {
    /// Values that this keeper has now.
    pub values: u64,
    /// Values that were listed and that it has not, because they do not fit or have changed since.
    pub left: u64,
}

/// Copies the values of the keeper at the path of `listening`, has it end, and takes its path, unless `stop` is readable by then.
/// Returns the table of the values, too.
pub(crate) fn take_over(
    files: &Arc<SharedFiles>,
    listening: &ListeningPath,
    stop: &OwnedFd,
) -> Result<(TakenOver, SlotTable)> {
    let mut copy = ValueCopy::new(listening.path(), files)?;
    // The socket of the other keeper: if another one is there later, a third keeper was faster.
    let replaced = listening.found();
    let mut listed = Vec::new();
    for _ in 0..MAX_ROUNDS {
        let (values, copied) = copy.round(stop)?;
        listed = values;
        if copied <= LITTLE {
            break;
        }
    }
    check_stop(stop)?;
    copy.replace(&listed, listening, replaced, stop, AGREEING)
}

/// Has the other keeper end, whose socket is `replaced`, and takes its path. After an error, the other keeper has its path and its
/// values, whenever it reads the request, unless it has agreed to end before, or a third keeper has taken the path.
fn replace(
    other: &Observer,
    listening: &ListeningPath,
    replaced: Option<FileNumbers>,
    stop: &OwnedFd,
    time: Duration,
) -> Result<()> {
    let asked = other.ask_to_end(answer());
    let time = match &asked {
        Ok(()) => time,
        // It may be ending by itself.
        Err(error) if error.kind() == ErrorKind::NotLinked => time.min(ANSWER),
        Err(error) => return Err(error.clone()),
    };
    let (end, mut agreed) = (Instant::now() + time, false);
    loop {
        let next = Instant::now() + ALIVE;
        let taken = take_path(listening, replaced, stop, Some(if agreed { next } else { next.min(end) }));
        if matches!(taken, Ok(true)) {
            return Ok(());
        }
        let late = end <= Instant::now();
        if late || taken.is_err() {
            // If it has agreed, nobody else has the values now. It first frees its memory.
            agreed |= other.take_back();
        }
        taken?;
        let why = if late && !agreed {
            format!("the keeper has not agreed to end within {} s", time.as_secs())
        } else if other.has_ended() && serves(listening.path()) {
            "the process that was to end was killed, and its holder has started another one".into()
        } else {
            continue;
        };
        return Err(asked.err().unwrap_or_else(|| goes_on(listening, &why)));
    }
}

/// Takes the path once the keeper whose socket is `replaced` has ended. Returns whether it has by `end`, if that is given. Returns
/// `Err(Closed)` once `stop` is readable, and `Err(System)` if another keeper takes the path first, with its process.
fn take_path(
    listening: &ListeningPath,
    replaced: Option<FileNumbers>,
    stop: &OwnedFd,
    end: Option<Instant>,
) -> Result<bool> {
    loop {
        let lock = flock(&listening.lock, FlockOperation::NonBlockingLockExclusive);
        let another = listening.found().is_some_and(|found| Some(found) != replaced);
        if another || !matches!(lock, Err(Errno::WOULDBLOCK | Errno::INTR)) {
            return listening.take(replaced, Duration::ZERO).map(|()| true);
        }
        check_stop(stop)?;
        if end.is_some_and(|end| end <= Instant::now()) {
            return Ok(false);
        }
        sleep(LOOK);
    }
}

/// Returns whether the keeper at a path answers. One that is ending, or was stopped, does not.
fn serves(path: &Path) -> bool {
    let opened = Observer::open(path, Deadline::after(ALIVE));
    !matches!(opened.map_err(|error| error.kind()), Err(ErrorKind::NotLinked | ErrorKind::Timeout))
}

fn goes_on(listening: &ListeningPath, why: &str) -> Error {
    let text = format!("{why}; it goes on with its values");
    let error = Error::new(ErrorKind::System, text).with("socket", listening.path().display());
    let socket = connect_to(listening.path(), None).ok();
    let process = socket.and_then(|socket| peer_credentials(socket.as_fd())?.pid);
    process.map_or(error.clone(), |process| error.with("pid", process))
}

fn answer() -> Deadline {
    Deadline::after(ANSWER).named("the limit for an answer of the other keeper")
}

fn check_stop(stop: &OwnedFd) -> Result<()> {
    if is_readable(stop) {
        return Err(Error::new(ErrorKind::Closed, "the keeper that was to take over has been stopped"));
    }
    Ok(())
}

/// A copy of the values of another keeper.
struct ValueCopy {
    other: Observer,
    table: SlotTable,
    /// For each slot here, the place from which its value was copied.
    places: Vec<Place>,
    /// For each namespace of the other keeper, the number that it has here, and the bytes of its values.
    namespaces: HashMap<u32, (u32, u64)>,
}

impl ValueCopy {
    /// Attaches to the keeper at `path`.
    fn new(path: &Path, files: &Arc<SharedFiles>) -> Result<ValueCopy> {
        let other = Observer::with_memory(path, answer())?;
        // No value has the generation 0.
        let nowhere = Place { slot: 0, generation: 0 };
        let places = fallible::collect("the places of values", (0..files.slots).map(|_| nowhere))?;
        Ok(ValueCopy { other, table: SlotTable::over(files.clone())?, places, namespaces: HashMap::new() })
    }

    /// Makes the values those that the other keeper has, the most recently used ones as far as the memory goes. Returns all values of
    /// the other keeper, and how many bytes were copied.
    ///
    /// What clients do meanwhile is found by the next round: the list is not one of a single moment.
    fn round(&mut self, stop: &OwnedFd) -> Result<(Vec<ListedValue>, u64)> {
        let listed = self.list()?;
        let fit = listed.iter().enumerate().filter(|(_, value)| self.key(value).is_some());
        let most = fit.take(self.table.slots() as usize).last().map_or(0, |(last, _)| last + 1);
        let latest = &listed[..most];
        self.drop_changed(latest)?;
        let mut copied = 0;
        for values in latest.chunks(BATCH) {
            check_stop(stop)?;
            for value in values {
                copied += self.copy(value)?;
            }
        }
        self.touch(latest);
        Ok((listed, copied))
    }

    /// Has the other keeper end, and takes its path. Returns what was copied of the values that were listed.
    fn replace(
        mut self,
        listed: &[ListedValue],
        listening: &ListeningPath,
        replaced: Option<FileNumbers>,
        stop: &OwnedFd,
        time: Duration,
    ) -> Result<(TakenOver, SlotTable)> {
        replace(&self.other, listening, replaced, stop, time)?;
        // The other keeper changes nothing any more. Until it ended, it has answered its clients.
        self.drop_changed(listed)?;
        let values = listed.iter().filter(|value| self.slot_of(value).is_some()).count() as u64;
        self.forget_namespaces();
        Ok((TakenOver { values, left: listed.len() as u64 - values }, self.table))
    }

    /// Drops the values that are not listed, and those that the other keeper has no more, or has at another place: clients may have
    /// dropped them meanwhile, and put other bytes under the same keys.
    fn drop_changed(&mut self, listed: &[ListedValue]) -> Result<()> {
        let changed = self.table.keys.iter().map(|_| true);
        let mut changed: Vec<bool> = fallible::collect("the values that have changed", changed)?;
        let other = self.other.memory()?;
        for value in listed {
            if let Some(slot) = self.slot_of(value)
                && other.place(value.namespace, &value.key) == Some(self.places[slot as usize])
            {
                changed[slot as usize] = false;
            }
        }
        for (at, _) in changed.iter().enumerate().filter(|(_, changed)| **changed) {
            if let Some(key) = self.table.keys[at] {
                self.table.drop_value(&key);
            }
        }
        Ok(())
    }

    /// Returns the values of the other keeper, the most recently used ones first, once their namespaces are known here.
    fn list(&mut self) -> Result<Vec<ListedValue>> {
        let listed = self.other.all_values(answer)?;
        for ListedNamespace { number, text, value, checksums, .. } in self.other.namespaces(answer())? {
            // A namespace that there is no room for is left.
            if !self.namespaces.contains_key(&number)
                && let Ok(here) = self.table.namespaces.attach(&text, ValueTerms { value, checksums })
            {
                self.namespaces.insert(number, (here, value));
            }
        }
        Ok(listed)
    }

    /// Copies a value that fits and is not here yet, unless it is replaced meanwhile. Returns how many bytes were copied.
    fn copy(&mut self, value: &ListedValue) -> Result<u64> {
        let Some((key, bytes)) = self.key(value) else { return Ok(0) };
        let other = self.other.memory()?;
        let Some(place) = other.place(value.namespace, &value.key) else { return Ok(0) };
        let from = other.values.window(0, u64::from(place.slot) * other.geometry.slot_bytes, bytes)?;
        let stored = self.table.put_value(&key, from, other.index.checksum(place.slot))?;
        let Some(slot) = self.table.slot_of(&key).filter(|_| stored == Stored::Stored) else { return Ok(0) };
        self.places[slot as usize] = place;
        if !other.generations.still(place.slot, place.generation) {
            self.table.drop_value(&key);
        }
        Ok(bytes)
    }

    /// Makes the order of use here that of values that are listed, the most recently used one first.
    fn touch(&mut self, listed: &[ListedValue]) {
        let slots: Vec<u32> = listed.iter().filter_map(|value| self.slot_of(value)).collect();
        self.table.touch(slots.into_iter());
    }

    fn slot_of(&self, value: &ListedValue) -> Option<u32> {
        self.table.slot_of(&self.key(value)?.0)
    }

    /// Returns the key that a value has here, and its bytes; `None` if it does not fit.
    fn key(&self, value: &ListedValue) -> Option<(IndexKey, u64)> {
        let &(namespace, bytes) = self.namespaces.get(&value.namespace)?;
        (bytes <= self.table.slot_bytes()).then(|| (IndexKey::of(namespace, &value.key), bytes))
    }

    /// Forgets the namespaces of which no value was copied.
    fn forget_namespaces(&mut self) {
        for (_, (here, _)) in self.namespaces.drain() {
            self.table.namespaces.detach(here);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};

    use llm_datadist_core::bindings::keeper::{Copy, Kernel, Window, copy_all};

    use super::*;
    use crate::attachment::tests::SilentPath;
    use crate::holder::{Holder, KeeperOptions};
    use crate::keeper::Keeper;
    use crate::keeper_link::StoreOptions;
    use crate::key::StoreKey;
    use crate::sizes::{MESSAGE_BYTES, PAGE_VALUES};
    use crate::socket::connect_to;
    use crate::store::Store;

    fn key(number: u32) -> StoreKey {
        let mut bytes = [7; 28];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        StoreKey::read(0, &bytes).unwrap()
    }

    fn keeper(path: &SilentPath, slots: u64) -> Keeper {
        Keeper::open(&KeeperOptions {
            memory: 64 * slots,
            value: 64,
            socket: path.socket(),
            ..KeeperOptions::default()
        })
        .unwrap()
    }

    fn store(path: &SilentPath, namespace: &str) -> Store {
        let options = StoreOptions {
            socket: path.socket(),
            namespace: namespace.into(),
            value: 64,
            ..StoreOptions::default()
        };
        Store::open(options, Deadline::after(Duration::from_secs(30))).unwrap()
    }

    fn put(store: &Store, number: u32, byte: u8) {
        let stored = store.put(&[key(number)], &[Window::of_slice(&[byte; 64])], answer()).unwrap();
        assert_eq!(stored, [Stored::Stored]);
    }

    fn files(slots: u32) -> Arc<SharedFiles> {
        Arc::new(SharedFiles::new(slots, 64).unwrap())
    }

    /// Returns the first byte of a value of the namespace "a", the first one.
    fn copied(copy: &ValueCopy, number: u32) -> Option<u8> {
        let &(here, _) = copy.namespaces.get(&0)?;
        let slot = copy.table.slot_of(&IndexKey::of(here, &key(number)))?;
        let mut byte = [0];
        let from = copy.table.shared.tensor().unwrap();
        let from = from.window(0, u64::from(slot) * copy.table.slot_bytes(), 1).unwrap();
        copy_all(&[Copy::one(from, Window::of_slice_mut(&mut byte))], Kernel::PLAIN).unwrap();
        Some(byte[0])
    }

    /// A socket that is not readable, with its other end.
    fn running() -> (OwnedFd, OwnedFd) {
        let (stop, other) = UnixStream::pair().unwrap();
        (stop.into(), other.into())
    }

    #[test]
    fn values_that_are_put_or_used_meanwhile_replace_the_oldest() {
        let (path, (stop, _other)) = (SilentPath::new(), running());
        let _keeper = keeper(&path, 100);
        let (one, other) = (store(&path, "a"), store(&path, "b"));
        (0..6).for_each(|number| put(&one, number, 1));
        let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
        assert_eq!(copy.round(&stop).unwrap().1, 4 * 64);
        // In the new memory are 2 to 5, the oldest one first.
        put(&other, 9, 1);
        let mut bytes = [0; 64];
        assert_eq!(one.get(&[key(3)], &[Window::of_slice_mut(&mut bytes)]).unwrap(), [true]);
        assert_eq!(one.drop_values(&[key(5)], answer()).unwrap(), 1);
        // The message that the value was used arrives before this answer.
        assert_eq!(one.stats(answer()).unwrap().keeper.unwrap().values, 6);
        let (listed, bytes) = copy.round(&stop).unwrap();
        assert_eq!((listed.len(), bytes), (6, 64), "9 was copied, and the others are there");
        let has: Vec<bool> = listed.iter().map(|value| copy.slot_of(value).is_some()).collect();
        // 3 was used last, then 9 was put, then 4, 2, 1 and 0.
        assert_eq!(has, [true, true, true, true, false, false]);
        assert_eq!(copy.table.values(), 4, "5 was dropped");
        let order: Vec<u64> =
            listed[..4].iter().map(|value| copy.table.recency.used(copy.slot_of(value).unwrap())).collect();
        assert!(order.is_sorted_by(|later, earlier| later > earlier), "{order:?}");
    }

    #[test]
    fn a_value_that_is_dropped_and_put_again_has_its_new_bytes() {
        let (path, (stop, _other)) = (SilentPath::new(), running());
        let _keeper = keeper(&path, 100);
        let one = store(&path, "a");
        put(&one, 1, 1);
        let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
        copy.round(&stop).unwrap();
        assert_eq!(copied(&copy, 1), Some(1));
        one.drop_values(&[key(1)], answer()).unwrap();
        put(&one, 1, 2);
        let (listed, _) = copy.round(&stop).unwrap();
        assert_eq!(copied(&copy, 1), Some(2));
        one.drop_values(&[key(1)], answer()).unwrap();
        put(&one, 1, 3);
        copy.drop_changed(&listed).unwrap();
        assert_eq!(copied(&copy, 1), None, "a miss, and not the bytes from before");
    }

    #[test]
    fn values_that_are_put_while_several_pages_are_listed_are_found_by_the_next_round() {
        let (path, (stop, _other)) = (SilentPath::new(), running());
        let count = u32::try_from(PAGE_VALUES * 20).unwrap();
        let _keeper = keeper(&path, u64::from(count) + 1);
        let one = store(&path, "a");
        let numbers: Vec<u32> = (0..count).collect();
        for numbers in numbers.chunks(1000) {
            let keys: Vec<StoreKey> = numbers.iter().copied().map(key).collect();
            one.put(&keys, &vec![Window::of_slice(&[1; 64]); keys.len()], answer()).unwrap();
        }
        let mut copy = ValueCopy::new(&path.socket(), &files(count + 1)).unwrap();
        let listing = AtomicBool::new(true);
        let replaced = std::thread::scope(|scope| {
            // Each value takes the slot of another one, which is on the first page. Then one on the last page is used.
            let putting = scope.spawn(|| {
                let (mut replaced, mut bytes) = (100, [0; 64]);
                while replaced < 900 && (replaced == 100 || listing.load(Ordering::SeqCst)) {
                    assert_eq!(one.drop_values(&[key(replaced)], answer()).unwrap(), 1);
                    put(&one, count + replaced, 2);
                    one.get(&[key(count - 1)], &[Window::of_slice_mut(&mut bytes)]).unwrap();
                    replaced += 1;
                }
                replaced
            });
            copy.round(&stop).unwrap();
            listing.store(false, Ordering::SeqCst);
            putting.join().unwrap()
        });
        copy.round(&stop).unwrap();
        for number in 0..count {
            let has = (copied(&copy, number), copied(&copy, count + number));
            let was_replaced = (100..replaced).contains(&number);
            assert_eq!(has, if was_replaced { (None, Some(2)) } else { (Some(1), None) }, "{number}");
        }
        assert_eq!(copy.table.values(), count);
    }

    #[test]
    fn values_that_change_before_the_other_keeper_ends_are_misses() {
        let (path, (stop, _other)) = (SilentPath::new(), running());
        let _keeper = keeper(&path, 100);
        let one = store(&path, "a");
        (1..=3).for_each(|number| put(&one, number, 1));
        let newer = ListeningPath::open_beside(&path.socket()).unwrap();
        let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
        let (listed, _) = copy.round(&stop).unwrap();
        assert_eq!(one.drop_values(&[key(1), key(2)], answer()).unwrap(), 2);
        put(&one, 1, 2);
        let here = copy.namespaces[&0].0;
        let (taken, table) = copy.replace(&listed, &newer, newer.found(), &stop, AGREEING).unwrap();
        let has = [1, 2, 3].map(|number| table.slot_of(&IndexKey::of(here, &key(number))).is_some());
        assert_eq!((has, taken), ([false, false, true], TakenOver { values: 1, left: 2 }));
    }

    #[test]
    fn nothing_is_copied_once_it_is_stopped() {
        let (path, (stop, other)) = (SilentPath::new(), running());
        let _keeper = keeper(&path, 100);
        put(&store(&path, "a"), 1, 1);
        let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
        drop(other);
        assert_eq!(copy.round(&stop).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(copy.table.values(), 0);
    }

    #[test]
    fn the_slower_one_of_two_keepers_that_take_over_fails_at_once() {
        let (path, (stop, _other)) = (SilentPath::new(), running());
        let first = keeper(&path, 100);
        put(&store(&path, "a"), 1, 1);
        // Both have the same process id, and so would have the same path beside the first one.
        let slower = ListeningPath::open_beside(&path.socket()).unwrap();
        let copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
        let found = slower.found();
        std::fs::rename(slower.beside().unwrap(), path.socket().with_extension("slower")).unwrap();
        let faster = ListeningPath::open_beside(&path.socket()).unwrap();
        let (taken, _) = take_over(&files(4), &faster, &stop).unwrap();
        assert_eq!((taken, first.running()), (TakenOver { values: 1, left: 0 }, false));
        let refused = replace(&copy.other, &slower, found, &stop, AGREEING).unwrap_err();
        assert_eq!(refused.reason(), "another program listens at the socket");
        assert_eq!(refused.fact("pid"), Some(&*std::process::id().to_string()));
        assert_eq!(slower.found(), faster.found(), "the path is that of the faster one");
        // Once the path is free, another socket beside it is not taken for its own.
        drop(faster);
        std::fs::write(slower.beside().unwrap(), "another file").unwrap();
        let refused = slower.take(slower.found(), Duration::ZERO).unwrap_err();
        assert!(refused.reason().contains("cannot take over the path"), "{refused}");
        assert_eq!(slower.found(), None);
    }

    /// A keeper whose process can be stopped and goes on later.
    struct StoppableKeeper<'a> {
        path: &'a SilentPath,
        paused: AtomicBool,
        /// Whether it reads nothing now.
        parked: AtomicBool,
        /// Whether it has ended, because another one takes over.
        replaced: AtomicBool,
        /// Whether it keeps its memory and its path when it ends.
        lingers: AtomicBool,
    }

    impl StoppableKeeper<'_> {
        /// Serves until it is replaced, or `stop` is readable.
        fn serve(&self, stop: OwnedFd) {
            let options = KeeperOptions {
                memory: 64 * 100,
                value: 64,
                socket: self.path.socket(),
                ..KeeperOptions::default()
            };
            let mut keeper = Holder::open(&options, false).unwrap().keeper_loop(stop).unwrap();
            let (mut events, mut buffer) = (Vec::new(), vec![0; MESSAGE_BYTES]);
            loop {
                while self.paused.load(Ordering::SeqCst) {
                    self.parked.store(true, Ordering::SeqCst);
                    sleep(Duration::from_millis(1));
                }
                self.parked.store(false, Ordering::SeqCst);
                if !keeper.round(&mut events, &mut buffer).unwrap() {
                    break;
                }
            }
            while self.lingers.load(Ordering::SeqCst) {
                self.parked.store(true, Ordering::SeqCst);
                sleep(Duration::from_millis(1));
            }
            self.replaced.store(keeper.end(), Ordering::SeqCst);
        }

        fn wait_until_parked(&self) {
            while !self.parked.load(Ordering::SeqCst) {
                sleep(Duration::from_millis(1));
            }
        }

        fn pause(&self) {
            self.paused.store(true, Ordering::SeqCst);
            // A connection ends its wait, if it waits.
            let _stranger = connect_to(&self.path.socket(), None).unwrap();
            self.wait_until_parked();
        }

        fn resume(&self) {
            self.paused.store(false, Ordering::SeqCst);
            self.lingers.store(false, Ordering::SeqCst);
        }
    }

    /// Lets a keeper go on when a test ends or fails.
    struct Resume<'a>(&'a StoppableKeeper<'a>);

    impl Drop for Resume<'_> {
        fn drop(&mut self) {
            self.0.resume();
        }
    }

    fn with_stoppable_keeper(test: impl Fn(&StoppableKeeper<'_>, &Store)) {
        let (path, (stop, other)) = (SilentPath::new(), running());
        let [paused, parked, replaced, lingers] = [(); 4].map(|()| AtomicBool::new(false));
        let keeper = StoppableKeeper { path: &path, paused, parked, replaced, lingers };
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| keeper.serve(stop));
            let resume = Resume(&keeper);
            while !path.socket().exists() {
                sleep(Duration::from_millis(1));
            }
            let store = store(&path, "a");
            // The path is there before the keeper listens.
            while store.stats(answer()).unwrap().keeper.is_none() {
                sleep(Duration::from_millis(1));
            }
            put(&store, 1, 1);
            test(&keeper, &store);
            drop((resume, other));
            serving.join().unwrap();
        });
    }

    #[test]
    fn a_stopped_keeper_goes_on_once_the_other_one_has_given_up() {
        with_stoppable_keeper(|keeper, store| {
            let newer = ListeningPath::open_beside(&keeper.path.socket()).unwrap();
            let (found, copy) = (newer.found(), ValueCopy::new(&keeper.path.socket(), &files(4)).unwrap());
            keeper.pause();
            let (stop, time) = (running(), Duration::from_millis(20));
            let refused = replace(&copy.other, &newer, found, &stop.0, time).unwrap_err();
            let text = "the keeper has not agreed to end within 0 s; it goes on with its values";
            assert_eq!(refused.reason(), text);
            assert_eq!(refused.fact("pid"), Some(&*std::process::id().to_string()));
            keeper.resume();
            assert_eq!(store.stats(answer()).unwrap().keeper.unwrap().values, 1);
            put(store, 2, 2);
            let mut bytes = [0; 64];
            assert_eq!(store.get(&[key(1)], &[Window::of_slice_mut(&mut bytes)]).unwrap(), [true]);
            let stats = store.stats(answer()).unwrap();
            assert_eq!((bytes, stats.attached, stats.keeper.unwrap().observers), ([1; 64], 1, 0));
            assert_eq!(newer.found(), found);
            assert!(!keeper.replaced.load(Ordering::SeqCst));
        });
    }

    #[test]
    fn a_request_to_end_is_taken_back_or_agreed_to_and_never_both() {
        for agrees in [false, true] {
            with_stoppable_keeper(|keeper, store| {
                let other = Observer::with_memory(&keeper.path.socket(), answer()).unwrap();
                if !agrees {
                    keeper.pause();
                }
                other.ask_to_end(answer()).unwrap();
                let ended = || store.stats(answer()).unwrap().keeper.is_none();
                while agrees && !ended() {}
                assert_eq!(other.take_back(), agrees);
                keeper.resume();
                // In the first round, it may answer before it reads the request to end.
                assert_eq!([ended(), ended()], [agrees; 2]);
            });
        }
    }

    #[test]
    fn a_stopped_keeper_that_goes_on_in_time_is_replaced() {
        with_stoppable_keeper(|keeper, _| {
            let newer = ListeningPath::open_beside(&keeper.path.socket()).unwrap();
            let (found, copy) = (newer.found(), ValueCopy::new(&keeper.path.socket(), &files(4)).unwrap());
            keeper.pause();
            copy.other.ask_to_end(answer()).unwrap();
            keeper.resume();
            assert!(take_path(&newer, found, &running().0, Some(Instant::now() + AGREEING)).unwrap());
            assert!(newer.found().is_some() && newer.found() != found);
        });
    }

    /// Runs `replace` against a keeper that has agreed to end and keeps its path, and `meanwhile` once it has begun.
    fn replaced_by_lingering(
        keeper: &StoppableKeeper<'_>,
        stop: &OwnedFd,
        meanwhile: impl FnOnce(&dyn Fn() -> bool),
    ) -> Result<()> {
        let newer = ListeningPath::open_beside(&keeper.path.socket()).unwrap();
        let (found, copy) = (newer.found(), ValueCopy::new(&keeper.path.socket(), &files(4)).unwrap());
        keeper.lingers.store(true, Ordering::SeqCst);
        copy.other.ask_to_end(answer()).unwrap();
        keeper.wait_until_parked();
        std::thread::scope(|scope| {
            let _resume = Resume(keeper);
            let time = Duration::from_millis(20);
            let replacing = scope.spawn(move || replace(&copy.other, &newer, found, stop, time));
            // Many times the limit.
            sleep(Duration::from_millis(400));
            meanwhile(&|| replacing.is_finished());
            replacing.join().unwrap()
        })
    }

    #[test]
    fn a_keeper_that_has_agreed_is_waited_for_without_a_limit() {
        with_stoppable_keeper(|keeper, _| {
            let (stop, _other) = running();
            let replaced = replaced_by_lingering(keeper, &stop, |finished| {
                assert!(!finished());
                keeper.resume();
            });
            replaced.unwrap();
        });
    }

    #[test]
    fn stop_ends_the_wait_for_a_keeper_that_has_agreed() {
        with_stoppable_keeper(|keeper, _| {
            let (stop, other) = running();
            let replaced = replaced_by_lingering(keeper, &stop, |_| drop(other));
            assert_eq!(replaced.unwrap_err().kind(), ErrorKind::Closed);
        });
    }

    #[test]
    fn stop_ends_the_wait_for_a_stopped_keeper_which_goes_on() {
        with_stoppable_keeper(|keeper, store| {
            let newer = ListeningPath::open_beside(&keeper.path.socket()).unwrap();
            let (found, copy) = (newer.found(), ValueCopy::new(&keeper.path.socket(), &files(4)).unwrap());
            keeper.pause();
            let (stop, other) = running();
            drop(other);
            let refused = replace(&copy.other, &newer, found, &stop, Duration::from_secs(5)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Closed);
            keeper.resume();
            assert_eq!(store.stats(answer()).unwrap().keeper.unwrap().values, 1);
            assert_eq!(newer.found(), found);
        });
    }

    #[test]
    fn a_keeper_that_has_ended_the_connection_is_not_waited_for_long() {
        with_stoppable_keeper(|keeper, _| {
            let newer = ListeningPath::open_beside(&keeper.path.socket()).unwrap();
            let (found, copy) = (newer.found(), ValueCopy::new(&keeper.path.socket(), &files(4)).unwrap());
            copy.other.take_back();
            let (stop, time) = (running(), Duration::from_millis(20));
            let refused = replace(&copy.other, &newer, found, &stop.0, time).unwrap_err();
            assert_eq!(refused.reason(), "the keeper has ended the connection");
            assert_eq!(newer.found(), found);
        });
    }
}
