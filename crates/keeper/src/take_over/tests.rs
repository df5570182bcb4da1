//! Taking over: what is copied while clients go on, and who has the values if one of both keepers stops or ends.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};

use llm_datadist_core::bindings::keeper::{Copy, Kernel, Token, Window, copy_all};

use super::*;
use crate::attachment::tests::{SilentPath, numbered_key, soon};
use crate::connection::KeeperAccess;
use crate::holder::{Holder, KeeperOptions};
use crate::keeper::Keeper;
use crate::keeper_link::StoreOptions;
use crate::roles::RoleTokens;
use crate::sizes::{MAX_OBSERVERS, MESSAGE_BYTES, PAGE_VALUES};
use crate::socket::connect_to;
use crate::store::Store;

fn store(path: &SilentPath, namespace: &str) -> Store {
    Store::open(StoreOptions { namespace: namespace.into(), ..path.store_options(64) }, soon()).unwrap()
}

fn put(store: &Store, number: u32, byte: u8) {
    let stored = store.put(&[numbered_key(number)], &[Window::of_slice(&[byte; 64])], answer()).unwrap();
    assert_eq!(stored, [Stored::Stored]);
}

fn files(slots: u32) -> Arc<SharedFiles> {
    Arc::new(SharedFiles::new(slots, 64).unwrap())
}

/// Returns the first byte of a value of the namespace "a", the first one.
fn copied(copy: &ValueCopy, number: u32) -> Option<u8> {
    let &(here, _) = copy.namespaces.get(&0)?;
    let slot = copy.table.slot_of(&IndexKey::of(here, &numbered_key(number)))?;
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
    let _keeper = path.keeper(100, 64);
    let (one, other) = (store(&path, "a"), store(&path, "b"));
    (0..6).for_each(|number| put(&one, number, 1));
    let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
    assert_eq!(copy.round(&stop).unwrap().1, 4 * 64);
    // In the new memory are 2 to 5, the oldest one first.
    put(&other, 9, 1);
    let mut bytes = [0; 64];
    assert_eq!(one.get(&[numbered_key(3)], &[Window::of_slice_mut(&mut bytes)]).unwrap(), [true]);
    assert_eq!(one.drop_values(&[numbered_key(5)], answer()).unwrap(), 1);
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

/// Returns where a value of the first key is here, if it is listed in the last round.
fn slot_after_round(copy: &mut ValueCopy, stop: &OwnedFd) -> Option<u32> {
    let (listed, _) = copy.round(stop).unwrap();
    let [value] = &listed[..] else { panic!("one value was put: {listed:?}") };
    assert_eq!(value.key, numbered_key(1));
    copy.slot_of(value)
}

#[test]
fn readers_do_not_fix_the_terms_of_a_namespace_that_is_taken_over() {
    const TOKEN: &str = "the-token-of-readers";
    let (path, (stop, _other)) = (SilentPath::new(), running());
    let file = path.socket().with_extension("tokens");
    std::fs::write(&file, format!("read {TOKEN}")).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    let (memory, socket, tokens) = (64 * 100, path.socket(), RoleTokens::read(&file).unwrap());
    let _keeper = Keeper::open(&KeeperOptions { memory, value: 64, socket, tokens, group: None }).unwrap();
    let access = KeeperAccess { token: Some(Token::new(TOKEN)), keeper_user: None };
    let read = StoreOptions { access, ..path.store_options(1) };
    let _reader = Store::open(read, soon()).unwrap();
    let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
    assert_eq!(copy.round(&stop).unwrap().0, []);
    assert_eq!(copy.namespaces.len(), 1, "that of the reader");
    put(&store(&path, "n"), 1, 1);
    assert!(slot_after_round(&mut copy, &stop).is_some());
}

#[test]
fn a_namespace_that_has_other_terms_later_is_taken_over() {
    let (path, (stop, _other)) = (SilentPath::new(), running());
    let _keeper = path.keeper(100, 64);
    let one = path.store(32);
    let stored = one.put(&[numbered_key(1)], &[Window::of_slice(&[1; 32])], answer()).unwrap();
    assert_eq!(stored, [Stored::Stored]);
    let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
    assert!(slot_after_round(&mut copy, &stop).is_some());
    // The keeper forgets the namespace once it has no values and no stores.
    assert_eq!(one.drop_values(&[numbered_key(1)], answer()).unwrap(), 1);
    drop(one);
    while !copy.other.namespaces(answer()).unwrap().is_empty() {
        sleep(Duration::from_millis(1));
    }
    put(&store(&path, "n"), 1, 1);
    assert!(slot_after_round(&mut copy, &stop).is_some());
}

#[test]
fn a_value_that_is_dropped_and_put_again_has_its_new_bytes() {
    let (path, (stop, _other)) = (SilentPath::new(), running());
    let _keeper = path.keeper(100, 64);
    let one = store(&path, "a");
    put(&one, 1, 1);
    let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
    copy.round(&stop).unwrap();
    assert_eq!(copied(&copy, 1), Some(1));
    one.drop_values(&[numbered_key(1)], answer()).unwrap();
    put(&one, 1, 2);
    let (listed, _) = copy.round(&stop).unwrap();
    assert_eq!(copied(&copy, 1), Some(2));
    one.drop_values(&[numbered_key(1)], answer()).unwrap();
    put(&one, 1, 3);
    copy.drop_changed(&listed).unwrap();
    assert_eq!(copied(&copy, 1), None, "a miss, and not the bytes from before");
}

#[test]
fn values_that_are_put_while_several_pages_are_listed_are_found_by_the_next_round() {
    let (path, (stop, _other)) = (SilentPath::new(), running());
    let count = u32::try_from(PAGE_VALUES * 20).unwrap();
    let _keeper = path.keeper(u64::from(count) + 1, 64);
    let one = store(&path, "a");
    let numbers: Vec<u32> = (0..count).collect();
    for numbers in numbers.chunks(1000) {
        let keys: Vec<_> = numbers.iter().copied().map(numbered_key).collect();
        one.put(&keys, &vec![Window::of_slice(&[1; 64]); keys.len()], answer()).unwrap();
    }
    let mut copy = ValueCopy::new(&path.socket(), &files(count + 1)).unwrap();
    let listing = AtomicBool::new(true);
    let replaced = std::thread::scope(|scope| {
        // Each value takes the slot of another one, which is on the first page. Then one on the last page is used.
        let putting = scope.spawn(|| {
            let (mut replaced, mut bytes) = (100, [0; 64]);
            while replaced < 900 && (replaced == 100 || listing.load(Ordering::SeqCst)) {
                assert_eq!(one.drop_values(&[numbered_key(replaced)], answer()).unwrap(), 1);
                put(&one, count + replaced, 2);
                one.get(&[numbered_key(count - 1)], &[Window::of_slice_mut(&mut bytes)]).unwrap();
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
    let _keeper = path.keeper(100, 64);
    let one = store(&path, "a");
    (1..=3).for_each(|number| put(&one, number, 1));
    let newer = ListeningPath::open_beside(&path.socket()).unwrap();
    let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
    let (listed, _) = copy.round(&stop).unwrap();
    assert_eq!(one.drop_values(&[numbered_key(1), numbered_key(2)], answer()).unwrap(), 2);
    put(&one, 1, 2);
    let here = copy.namespaces[&0].0;
    let (taken, table) = copy.replace(&listed, &newer, newer.found(), &stop, AGREEING).unwrap();
    let has = [1, 2, 3].map(|number| table.slot_of(&IndexKey::of(here, &numbered_key(number))).is_some());
    assert_eq!((has, taken), ([false, false, true], TakenOver { values: 1, left: 2 }));
}

#[test]
fn nothing_is_copied_once_it_is_stopped() {
    let (path, (stop, other)) = (SilentPath::new(), running());
    let _keeper = path.keeper(100, 64);
    put(&store(&path, "a"), 1, 1);
    let mut copy = ValueCopy::new(&path.socket(), &files(4)).unwrap();
    drop(other);
    assert_eq!(copy.round(&stop).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(copy.table.values(), 0);
}

#[test]
fn the_slower_one_of_two_keepers_that_take_over_fails_at_once() {
    let (path, (stop, _other)) = (SilentPath::new(), running());
    let first = path.keeper(100, 64);
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
        assert_eq!(store.get(&[numbered_key(1)], &[Window::of_slice_mut(&mut bytes)]).unwrap(), [true]);
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

#[test]
fn only_an_answer_shows_that_a_keeper_serves() {
    let path = SilentPath::new();
    assert!(!serves(&path.socket()), "nobody listens");
    {
        // The system refuses the connection, because the socket is one of another type.
        let _other = UnixListener::bind(path.socket()).unwrap();
        let refused = Observer::open(&path.socket(), answer()).unwrap_err();
        assert_eq!((refused.kind(), serves(&path.socket())), (ErrorKind::System, false), "{refused}");
    }
    std::fs::remove_file(path.socket()).unwrap();
    let _keeper = path.keeper(100, 64);
    assert!(serves(&path.socket()));
    let observers: Vec<_> =
        (0..MAX_OBSERVERS).map_while(|_| Observer::open(&path.socket(), answer()).ok()).collect();
    let refused = Observer::open(&path.socket(), answer()).unwrap_err();
    assert!(refused.reason().contains("observers are attached, which is the limit"), "{refused}");
    assert!(serves(&path.socket()), "it has refused");
    drop(observers);
}
