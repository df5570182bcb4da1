//! Keepers and stores of one process: values that others put, replaced values, keepers that come and go, and hostile clients.
//! Processes that are killed are in `tests/native/test_store.py`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::HashMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::Window;
use llm_datadist_core::{Deadline, ErrorKind};
use llm_datadist_keeper::{
    Holder, Keeper, KeeperOptions, ListedChange, MAX_KEYS, Observer, Store, StoreKey, StoreOptions, Stored,
    TakenOver,
};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket, socketpair,
};

const VALUE: usize = 1000;

/// A folder of its own, removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("keeper-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("socket")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

fn keeper_options(socket: &Path, values: usize) -> KeeperOptions {
    KeeperOptions {
        memory: (values * 1024) as u64,
        value: 1024,
        socket: socket.into(),
        ..KeeperOptions::default()
    }
}

fn keeper(socket: &Path, values: usize) -> Keeper {
    Keeper::open(&keeper_options(socket, values)).unwrap()
}

fn options(socket: &Path, namespace: &str) -> StoreOptions {
    StoreOptions {
        socket: socket.into(),
        namespace: namespace.into(),
        value: VALUE as u64,
        ..StoreOptions::default()
    }
}

fn store(socket: &Path, namespace: &str) -> Store {
    Store::open(options(socket, namespace), soon()).unwrap()
}

/// A key from which its value follows, so that a reader can tell whether it got the right bytes.
fn key(number: u32) -> StoreKey {
    let mut bytes = [7; 28];
    bytes[8..12].copy_from_slice(&number.to_le_bytes());
    StoreKey::read(0, &bytes).unwrap()
}

fn put(store: &Store, numbers: &[u32], values: &[Vec<u8>]) -> Vec<Stored> {
    let keys: Vec<StoreKey> = numbers.iter().copied().map(key).collect();
    let windows: Vec<_> = values.iter().map(|value| Window::of_slice(value)).collect();
    store.put(&keys, &windows, soon()).unwrap()
}

/// Returns the bytes of the values that the store has.
fn get(store: &Store, numbers: &[u32]) -> Vec<Option<Vec<u8>>> {
    let keys: Vec<StoreKey> = numbers.iter().copied().map(key).collect();
    let mut values = vec![vec![0; VALUE]; keys.len()];
    let windows: Vec<_> = values.iter_mut().map(|value| Window::of_slice_mut(value)).collect();
    let hits = store.get(&keys, &windows).unwrap();
    values.into_iter().zip(hits).map(|(value, hit)| hit.then_some(value)).collect()
}

fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(30), "waited for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[derive(Clone, Debug)]
enum Call {
    Put(usize, Vec<(u32, u8)>),
    Get(usize, Vec<u32>),
    Drop(usize, Vec<u32>),
}

fn call() -> impl Strategy<Value = Call> {
    let (of, number) = (0usize..3, 0u32..200);
    let pairs = prop::collection::vec((number.clone(), any::<u8>()), 0..90);
    prop_oneof![
        (of.clone(), pairs).prop_map(|(of, pairs)| Call::Put(of, pairs)),
        (of.clone(), prop::collection::vec(number.clone(), 0..90))
            .prop_map(|(of, numbers)| Call::Get(of, numbers)),
        (of, prop::collection::vec(number, 0..20)).prop_map(|(of, numbers)| Call::Drop(of, numbers)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    /// Stores 0 and 1 have one namespace, and store 2 another one. The memory holds all values.
    #[test]
    fn stores_have_what_a_map_has(calls in prop::collection::vec(call(), 1..25)) {
        let folder = Folder::new();
        let _keeper = keeper(&folder.socket(), 400);
        let stores = ["a", "a", "b"].map(|namespace| store(&folder.socket(), namespace));
        let mut models = [HashMap::new(), HashMap::new()];
        for call in calls {
            match call {
                Call::Put(of, pairs) => {
                    let (numbers, bytes): (Vec<u32>, Vec<u8>) = pairs.into_iter().unzip();
                    let values: Vec<_> = bytes.iter().map(|&byte| vec![byte; VALUE]).collect();
                    let stored = put(&stores[of], &numbers, &values);
                    // If a call has a key twice, the last value counts.
                    for ((number, value), stored) in numbers.into_iter().zip(values).zip(stored).rev() {
                        let known = models[of / 2].contains_key(&number);
                        prop_assert_eq!(stored, if known { Stored::Present } else { Stored::Stored });
                        models[of / 2].entry(number).or_insert(value);
                    }
                }
                Call::Get(of, numbers) => {
                    let expected: Vec<_> = numbers.iter().map(|number| models[of / 2].get(number).cloned()).collect();
                    prop_assert_eq!(get(&stores[of], &numbers), expected.clone());
                    let keys: Vec<StoreKey> = numbers.into_iter().map(key).collect();
                    let found: Vec<_> = expected.iter().map(Option::is_some).collect();
                    prop_assert_eq!(stores[of].exists(&keys).unwrap(), found);
                }
                Call::Drop(of, numbers) => {
                    let keys: Vec<StoreKey> = numbers.iter().copied().map(key).collect();
                    let known = numbers.iter().filter(|&number| models[of / 2].remove(number).is_some()).count();
                    prop_assert_eq!(stores[of].drop_values(&keys, soon()).unwrap(), known as u64);
                }
            }
        }
        let stats = stores[0].stats(soon()).unwrap().keeper.unwrap();
        let values = models.iter().map(HashMap::len).sum::<usize>();
        prop_assert_eq!((stats.values as usize, stats.clients, stats.namespaces), (values, 3, 2));
    }
}

/// Sets a flag at the end of a scope.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn readers_beside_writers_get_the_right_bytes_or_none() {
    let folder = Folder::new();
    let _keeper = keeper(&folder.socket(), 16);
    let (stop, mut hits) = (AtomicBool::new(false), 0);
    let value = |number: u32| number.to_le_bytes().repeat(VALUE / 4);
    thread::scope(|scope| {
        for begin in [0u32, 17] {
            let (socket, stop) = (folder.socket(), &stop);
            scope.spawn(move || {
                let store = store(&socket, "a");
                for number in (begin..)
                    .step_by(5)
                    .map(|number| number % 48)
                    .take_while(|_| !stop.load(Ordering::SeqCst))
                {
                    put(&store, &[number], &[value(number)]);
                }
            });
        }
        // Also ends the writers if an assertion fails.
        let _stopping = SetOnDrop(&stop);
        let store = store(&folder.socket(), "a");
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(2) || hits < 1000 {
            let numbers: Vec<u32> = (0..48).collect();
            for (number, found) in numbers.iter().zip(get(&store, &numbers)) {
                if let Some(found) = found {
                    assert_eq!(found, value(*number), "the bytes of another key");
                    hits += 1;
                }
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "hardly any hits");
        }
        assert!(store.stats(soon()).unwrap().keeper.unwrap().evicted > 0);
    });
}

#[test]
fn values_of_several_messages_are_those_that_were_put() {
    let folder = Folder::new();
    for (at, bytes) in [3 << 20, 2 << 20, 700 << 10].into_iter().enumerate() {
        let socket = folder.0.join(at.to_string());
        let options = KeeperOptions {
            memory: 9 * bytes as u64,
            value: bytes as u64,
            socket: socket.clone(),
            ..KeeperOptions::default()
        };
        let _keeper = Keeper::open(&options).unwrap();
        let options =
            StoreOptions { socket, namespace: "a".into(), value: bytes as u64, ..StoreOptions::default() };
        let store = Store::open(options, soon()).unwrap();
        let keys: Vec<_> = (0..9).map(key).collect();
        let values: Vec<_> = (1u8..10).map(|number| vec![number; bytes]).collect();
        let windows: Vec<_> = values.iter().map(|value| Window::of_slice(value)).collect();
        assert_eq!(store.put(&keys, &windows, soon()).unwrap(), [Stored::Stored; 9]);
        let mut found = vec![vec![0; bytes]; 9];
        let windows: Vec<_> = found.iter_mut().map(|value| Window::of_slice_mut(value)).collect();
        assert_eq!(store.get(&keys, &windows).unwrap(), [true; 9]);
        assert!(found == values, "values of {bytes} bytes");
    }
}

#[test]
fn arguments_out_of_range_are_refused() {
    let folder = Folder::new();
    let _keeper = keeper(&folder.socket(), 4);
    let store = store(&folder.socket(), "a");
    let wrong = |error: llm_datadist_core::Error| {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    let short = [1; VALUE - 1];
    let put = store.put(&[key(1)], &[Window::of_slice(&short)], soon()).unwrap_err();
    assert_eq!(wrong(put), "values[0]=999 bytes must be 1000 bytes, a value of the store");
    assert_eq!(wrong(store.get(&[key(1)], &[]).unwrap_err()), "len(into)=0 must be 1, one for each key");
    let many = vec![key(1); MAX_KEYS + 1];
    assert_eq!(wrong(store.exists(&many).unwrap_err()), "len(keys)=4097 must be at most 4096");
    assert_eq!(wrong(store.drop_values(&many, soon()).unwrap_err()), "len(keys)=4097 must be at most 4096");
    assert_eq!(store.exists(&many[..MAX_KEYS]).unwrap(), vec![false; MAX_KEYS]);
    let open = |value, namespace: &str| {
        Store::open(StoreOptions { value, ..options(&folder.socket(), namespace) }, soon())
    };
    assert!(wrong(open(1025, "b").unwrap_err()).contains("value=1025 must be at most 1024"));
    assert!(wrong(open(999, "a").unwrap_err()).contains("value=999 must be 1000"));
    assert!(wrong(open(0, "a").unwrap_err()).contains("value=0 is out of range"));
    assert!(wrong(open(1, "").unwrap_err()).contains("namespace=0 bytes must be"));
    let memory = |memory, value| {
        Keeper::open(&KeeperOptions {
            memory,
            value,
            socket: folder.0.join("other"),
            ..KeeperOptions::default()
        })
    };
    assert_eq!(
        wrong(memory(1023, 1024).unwrap_err()),
        "memory=1023 must be at least 1024 bytes, the slot of one value"
    );
    let too_large = memory(1 << 45, 64 << 20).unwrap_err();
    assert_eq!(too_large.kind(), ErrorKind::OutOfMemory);
    assert!(!folder.0.join("other").exists(), "the memory is refused before anything is made");
}

#[test]
fn a_path_in_use_is_named_and_that_of_a_dead_keeper_is_taken_over() {
    let folder = Folder::new();
    let open = || {
        Keeper::open(&KeeperOptions {
            memory: 4096,
            value: 1024,
            socket: folder.socket(),
            ..KeeperOptions::default()
        })
    };
    let first = open().unwrap();
    let refused = open().unwrap_err();
    assert_eq!(refused.reason(), "another program listens at the socket");
    assert_eq!(refused.fact("pid"), Some(&*std::process::id().to_string()));
    drop(first);
    assert!(!folder.socket().exists());
    // A socket whose process has ended, and that of a program that is no keeper.
    drop(std::os::unix::net::UnixListener::bind(folder.socket()).unwrap());
    drop(open().unwrap());
    let other = std::os::unix::net::UnixListener::bind(folder.socket()).unwrap();
    assert_eq!(open().unwrap_err().reason(), "another program listens at the socket");
    drop(other);
    std::fs::remove_file(folder.socket()).unwrap();
    std::fs::write(folder.socket(), "a file").unwrap();
    assert_eq!(open().unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(std::fs::read(folder.socket()).unwrap(), b"a file");
    let long = Keeper::open(&KeeperOptions {
        memory: 4096,
        value: 64,
        socket: folder.0.join("x".repeat(108)),
        ..KeeperOptions::default()
    });
    assert_eq!(long.unwrap_err().argument_name(), Some("socket"));
}

#[test]
fn a_path_that_another_keeper_has_taken_stays() {
    let folder = Folder::new();
    let first = keeper(&folder.socket(), 4);
    let other = folder.0.join("other");
    let _second = keeper(&other, 4);
    std::fs::rename(&other, folder.socket()).unwrap();
    first.close();
    let store = store(&folder.socket(), "a");
    assert_eq!(put(&store, &[1], &[vec![1; VALUE]]), [Stored::Stored]);
}

fn byte(number: u32) -> u8 {
    number.try_into().unwrap()
}

fn stop_pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// Serves on a thread, as a child of the holder does, while `call` runs.
fn serving<T>(holder: &Holder, empty: bool, call: impl FnOnce() -> T) -> T {
    let (stop, child) = stop_pair();
    thread::scope(|scope| {
        let served = scope.spawn(|| holder.serve(child, empty).unwrap());
        // Also dropped, so that the thread ends, if an assertion fails.
        let stopping = stop;
        let result = call();
        drop(stopping);
        assert!(!served.join().unwrap());
        result
    })
}

#[test]
fn a_holder_serves_the_same_values_again() {
    let folder = Folder::new();
    let holder = Holder::open(&keeper_options(&folder.socket(), 40), false).unwrap();
    let values =
        |numbers: &[u32]| numbers.iter().map(|&number| vec![byte(number); VALUE]).collect::<Vec<_>>();
    let numbers: Vec<u32> = (0..30).collect();
    // Nobody answers yet.
    let store =
        Store::open(options(&folder.socket(), "a"), Deadline::after(Duration::from_millis(1))).unwrap();
    let kept = || get(&store, &numbers).into_iter().flatten().collect::<Vec<_>>();
    serving(&holder, false, || {
        wait_for("the store to attach", || put(&store, &[0], &values(&[0])) != [Stored::Away]);
        put(&store, &numbers, &values(&numbers));
        assert!(store.lease(&[key(3)], Duration::from_secs(10), soon()).unwrap()[0]);
    });
    assert!(kept().is_empty());
    serving(&holder, false, || {
        wait_for("the store to attach", || store_attached(&store));
        assert_eq!(kept(), values(&numbers));
        let stats = store.stats(soon()).unwrap().keeper.unwrap();
        assert_eq!((stats.values, stats.leased, stats.namespaces, stats.clients), (30, 0, 1, 1));
    });
    serving(&holder, true, || {
        wait_for("the store to attach", || store_attached(&store));
        assert!(kept().is_empty());
        assert_eq!(put(&store, &[1], &values(&[1])), [Stored::Stored]);
        assert_eq!(kept(), values(&[1]));
    });
}

#[test]
fn another_keeper_takes_over_what_fits() {
    let folder = Folder::new();
    let old =
        KeeperOptions { memory: 60 * 2048, value: 2048, socket: folder.socket(), ..KeeperOptions::default() };
    let old = Keeper::open(&old).unwrap();
    let [one, large] = [("a", VALUE), ("large", 2000)].map(|(namespace, value)| {
        Store::open(StoreOptions { value: value as u64, ..options(&folder.socket(), namespace) }, soon())
            .unwrap()
    });
    let numbers: Vec<u32> = (0..40).collect();
    let values: Vec<_> = numbers.iter().map(|&number| vec![byte(number); VALUE]).collect();
    put(&one, &numbers, &values);
    // Used last, and too large for the other keeper.
    large.put(&[key(0)], &[Window::of_slice(&[9; 2000])], soon()).unwrap();
    let smaller =
        KeeperOptions { memory: 30 * 1000, value: 1000, socket: folder.socket(), ..KeeperOptions::default() };
    let alone = Holder::open(&smaller, false).unwrap_err();
    assert_eq!(alone.reason(), "another program listens at the socket");
    let holder = Holder::open(&smaller, true).unwrap();
    assert!(holder.takes_over());
    let slots = u64::from(holder.slots());
    let (stop, child) = stop_pair();
    drop(stop);
    assert_eq!(holder.take_over(&child).unwrap_err().kind(), ErrorKind::Closed);
    assert!(old.running(), "nobody is left to take over");
    let (_stop, child) = stop_pair();
    assert_eq!(holder.take_over(&child).unwrap(), TakenOver { values: slots, left: 41 - slots });
    assert!(!old.running(), "it was asked to end");
    serving(&holder, false, || {
        wait_for("the store to attach", || store_attached(&one));
        // The start of the chain was used last.
        let found = get(&one, &numbers);
        for (number, (found, value)) in found.into_iter().zip(values).enumerate() {
            assert!(found == ((number as u64) < slots).then_some(value), "{number}");
        }
        let stats = one.stats(soon()).unwrap().keeper.unwrap();
        assert_eq!((u64::from(stats.values), stats.namespaces), (slots, 1));
    });
    drop(holder);
    assert!(!folder.socket().exists());
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "only the lock file is left");
    // Without another keeper, there is nothing to take over.
    assert!(!Holder::open(&smaller, true).unwrap().takes_over());
}

fn store_attached(store: &Store) -> bool {
    store.stats(soon()).unwrap().keeper.is_some()
}

#[test]
fn memory_is_prepared_in_parts() {
    let folder = Folder::new();
    let options = KeeperOptions {
        memory: 300 << 20,
        value: 1 << 20,
        socket: folder.socket(),
        ..KeeperOptions::default()
    };
    let holder = Holder::open(&options, false).unwrap();
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssShmem:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    };
    let before = resident();
    holder.prepare(0..100 << 20).unwrap();
    holder.prepare(100 << 20..u64::MAX).unwrap();
    // Other tests of this process use little.
    assert!(resident() >= before + (200 << 20));
}

#[test]
fn a_namespace_without_clients_and_values_is_forgotten() {
    let folder = Folder::new();
    let _keeper = keeper(&folder.socket(), 4);
    let watcher = store(&folder.socket(), "watcher");
    let namespaces = || watcher.stats(soon()).unwrap().keeper.unwrap().namespaces;
    drop(store(&folder.socket(), "empty"));
    wait_for("the end of a namespace without values", || namespaces() == 1);
    let filled = store(&folder.socket(), "filled");
    put(&filled, &[1], &[vec![1; VALUE]]);
    drop(filled);
    wait_for("the end of a client", || watcher.stats(soon()).unwrap().keeper.unwrap().clients == 1);
    assert_eq!(namespaces(), 2);
    put(&watcher, &[1, 2, 3, 4], &vec![vec![2; VALUE]; 4]);
    assert_eq!(namespaces(), 1, "its value was replaced");
}

#[test]
fn a_keeper_that_is_away_means_misses_until_it_is_back() {
    let folder = Folder::new();
    let store = store(&folder.socket(), "a");
    let value = vec![vec![3; VALUE]];
    assert_eq!(put(&store, &[1], &value), [Stored::Away]);
    assert_eq!((get(&store, &[1]), store.exists(&[key(1)]).unwrap()), (vec![None], vec![false]));
    assert_eq!(store.drop_values(&[key(1)], soon()).unwrap_err().kind(), ErrorKind::NotLinked);
    assert_eq!(store.stats(soon()).unwrap().keeper, None);
    for _ in 0..2 {
        let keeper = keeper(&folder.socket(), 4);
        wait_for("the store to attach", || put(&store, &[1], &value) != [Stored::Away]);
        assert_eq!(get(&store, &[1]), [Some(value[0].clone())]);
        keeper.close();
        assert_eq!((get(&store, &[1]), store.exists(&[key(1)]).unwrap()), (vec![None], vec![false]));
    }
    let stats = store.stats(soon()).unwrap();
    assert_eq!((stats.attached, stats.hits, stats.misses_away), (2, 2, 3));
    store.close();
    assert_eq!(store.exists(&[key(1)]).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn leases_end_with_their_time_and_with_their_store() {
    let folder = Folder::new();
    let _keeper = keeper(&folder.socket(), 40);
    let [one, other] = ["a", "a"].map(|namespace| store(&folder.socket(), namespace));
    let leased = || other.stats(soon()).unwrap().keeper.unwrap().leased;
    let fill = |begin: u32| {
        let numbers: Vec<u32> = (begin..begin + 40).collect();
        put(&other, &numbers, &vec![vec![9; VALUE]; 40])
    };
    fill(0);
    let chain: Vec<u32> = (1000..1060).collect();
    put(&other, &chain, &vec![vec![9; VALUE]; 60]);
    let there = get(&other, &chain).iter().map(Option::is_some).collect::<Vec<_>>();
    assert_eq!(
        there,
        [vec![true; 40], vec![false; 20]].concat(),
        "the start of a chain that is too long stays"
    );
    fill(0);
    let keys: Vec<StoreKey> = (0..12).map(key).collect();
    let hour = Duration::from_secs(10);
    let granted = one.lease(&keys, hour, soon()).unwrap();
    assert_eq!(granted.iter().filter(|&&granted| granted).count(), 10, "a quarter of the slots");
    fill(100);
    assert_eq!(one.exists(&keys).unwrap(), granted);
    one.unlease(&keys[..4], soon()).unwrap();
    wait_for("the end of 4 leases", || leased() == 6);
    fill(200);
    assert_eq!(one.exists(&keys).unwrap(), [vec![false; 4], vec![true; 6], vec![false; 2]].concat());
    drop(one);
    let ended = Instant::now();
    wait_for("the leases of a store that has ended", || leased() == 0);
    assert!(ended.elapsed() < Duration::from_secs(3), "they ended with their time");
    let short = Duration::from_millis(1);
    assert_eq!(other.lease(&[key(200), key(0)], short, soon()).unwrap(), [true, false]);
    wait_for("the end of a lease", || leased() == 0);
    for wrong in [Duration::ZERO, Duration::from_secs(11)] {
        assert_eq!(other.lease(&keys, wrong, soon()).unwrap_err().argument_name(), Some("ttl"));
    }
}

/// A connection that sends what it likes.
struct Stranger(OwnedFd);

impl Stranger {
    fn connect(path: &Path) -> Stranger {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Stranger(socket)
    }

    fn send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
        sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    }

    /// Returns the messages of the keeper until it ends the connection.
    fn received(&self) -> Vec<Vec<u8>> {
        let mut messages = Vec::new();
        loop {
            let mut bytes = vec![0; 1 << 16];
            match recv(&self.0, &mut bytes[..], RecvFlags::empty()).map(|(received, _)| received) {
                Ok(0) | Err(_) => return messages,
                Ok(received) => messages.push(bytes[..received].to_vec()),
            }
        }
    }
}

/// An attach request for values of 64 bytes without checksums, as version 3 has it.
fn attach_request() -> Vec<u8> {
    vec![0, 3, 1, b'n', 64, 0]
}

fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("a test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn hostile_clients_cost_only_themselves() {
    let folder = Folder::new();
    let _keeper = keeper(&folder.socket(), 4);
    let store = store(&folder.socket(), "a");
    put(&store, &[1], &[vec![1; VALUE]]);
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    let (good, short) = (memory(2 << 20, sealed), memory(4096, sealed));
    let (open, file) =
        (memory(2 << 20, SealFlags::SHRINK), OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
    let garbage = vec![0xff; 60_000];
    let refused: [(&[u8], &[&OwnedFd]); 10] = [
        (b"\xff\xff\xff\xff", &[]),
        (&garbage, &[]),
        (b"\x06", &[]),
        (b"\x01\x00", &[]),
        (&attach_request(), &[]),
        (&attach_request(), &[&good, &good]),
        (&attach_request(), &[&good, &good, &good, &good, &good]),
        (&attach_request(), &[&short]),
        (&attach_request(), &[&open]),
        (&attach_request(), &[&file]),
    ];
    for (at, (bytes, files)) in refused.iter().enumerate() {
        let stranger = Stranger::connect(&folder.socket());
        stranger.send(bytes, &files.iter().map(|file| file.as_fd()).collect::<Vec<_>>()).unwrap();
        let replies = stranger.received();
        assert!(replies.len() == 1 && replies[0][0] == 1, "case {at}: no refusal but {replies:?}");
        assert_eq!(store.stats(soon()).unwrap().keeper.unwrap().refused, at as u64 + 1);
    }
    // A version that nobody has is refused with both numbers.
    let stranger = Stranger::connect(&folder.socket());
    stranger.send(&[0, 9, 1, b'n', 64, 0], &[good.as_fd()]).unwrap();
    assert!(
        String::from_utf8_lossy(&stranger.received()[0]).contains("speaks version 3, the client version 9")
    );
    // A value behind the end of its memory.
    let stranger = Stranger::connect(&folder.socket());
    stranger.send(&attach_request(), &[good.as_fd()]).unwrap();
    stranger.send(&[&[1, 0x80, 8, 1][..], &[7; 28], &[0]].concat(), &[]).unwrap();
    let replies = stranger.received();
    assert!(replies.len() == 2 && replies[1][0] == 1, "{replies:?}");
    // A checksum that the namespace does not have.
    let stranger = Stranger::connect(&folder.socket());
    stranger.send(&attach_request(), &[good.as_fd()]).unwrap();
    stranger.send(&[&[1, 0, 1][..], &[7; 28], &[1, 5]].concat(), &[]).unwrap();
    let replies = stranger.received();
    assert!(replies.len() == 2 && String::from_utf8_lossy(&replies[1]).contains("number of checksums"));
    // One that never takes its replies is disconnected once its queue is full.
    let deaf = Stranger::connect(&folder.socket());
    deaf.send(&attach_request(), &[good.as_fd()]).unwrap();
    wait_for("the end of a client that reads nothing", || deaf.send(b"\x06", &[]).is_err());
    assert_eq!(get(&store, &[1]), [Some(vec![1; VALUE])]);
    wait_for("the keeper to forget them", || store.stats(soon()).unwrap().keeper.unwrap().clients == 1);
}

#[test]
fn clients_beyond_the_limit_are_refused_and_idle_connections_give_way() {
    let folder = Folder::new();
    let _keeper = keeper(&folder.socket(), 4);
    let strangers: Vec<_> = (0..70).map(|_| Stranger::connect(&folder.socket())).collect();
    let stores: Vec<_> = (0..64).map(|_| store(&folder.socket(), "a")).collect();
    assert_eq!(stores[0].stats(soon()).unwrap().keeper.unwrap().clients, 64);
    drop(strangers);
    let refused = Store::open(options(&folder.socket(), "a"), soon()).unwrap_err();
    assert!(refused.kind() == ErrorKind::System && refused.reason().contains("64 clients"), "{refused}");
    drop(stores);
    wait_for("room for a client", || Store::open(options(&folder.socket(), "a"), soon()).is_ok());
}

#[test]
fn observers_list_values_by_use_and_namespaces() {
    let folder = Folder::new();
    let gone = Observer::open(&folder.socket(), soon()).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotLinked);
    let keeper = keeper(&folder.socket(), 3000);
    let [first, second] = ["a", "b"].map(|namespace| store(&folder.socket(), namespace));
    let numbers: Vec<u32> = (0..2500).collect();
    put(&first, &numbers, &vec![vec![1; VALUE]; 2500]);
    put(&second, &[7], &[vec![2; VALUE]]);
    get(&first, &[1000, 1001]);
    // So that the keeper has heard of it.
    first.stats(soon()).unwrap();
    second.lease(&[key(7)], Duration::from_secs(10), soon()).unwrap();
    let observer = Observer::open(&folder.socket(), soon()).unwrap();
    assert_eq!(observer.stats(soon()).unwrap().clients, 2, "an observer is no client");
    let namespaces = observer.namespaces(soon()).unwrap();
    let rows: Vec<_> = namespaces.iter().map(|row| (row.number, &*row.text, row.value, row.values)).collect();
    assert_eq!(rows, [(0, "a", VALUE as u64, 2500), (1, "b", VALUE as u64, 1)]);
    let listed = |namespace, limit| observer.values(namespace, limit, soon()).unwrap();
    let all = listed(None, usize::MAX);
    // What was read last, then the other namespace, then the start of each call before its end.
    assert_eq!((all.len(), all[0].key, all[1].key, all[2].key), (2501, key(1000), key(1001), key(7)));
    assert_eq!((all[2].namespace, all[2].leased, all[3].key), (1, true, key(0)));
    assert_eq!(all.iter().filter(|value| value.leased).count(), 1);
    let keys: std::collections::HashSet<_> = all.iter().map(|value| (value.namespace, value.key)).collect();
    assert_eq!(keys.len(), 2501);
    for limit in [0, 1, 3, 959, 2501, 9999] {
        assert_eq!(listed(None, limit), all[..limit.min(2501)]);
    }
    assert_eq!(listed(Some(1), 9), all[2..3]);
    assert_eq!((listed(Some(0), 2), listed(Some(2), 9)), (all[..2].to_vec(), vec![]));
    assert_eq!(first.clear(soon()).unwrap(), 2500);
    assert_eq!((first.clear(soon()).unwrap(), listed(None, 9)), (0, all[2..3].to_vec()));
    assert_eq!(observer.stats(soon()).unwrap().dropped, 2500);
    keeper.close();
    assert_eq!(observer.values(None, 9, soon()).unwrap_err().kind(), ErrorKind::NotLinked);
    assert_eq!(first.clear(soon()).unwrap_err().kind(), ErrorKind::NotLinked);
    observer.close();
    assert_eq!(observer.stats(soon()).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn observers_follow_what_is_stored_and_removed() {
    let folder = Folder::new();
    let _keeper = keeper(&folder.socket(), 2);
    let store = store(&folder.socket(), "a");
    let [early, late] = [(); 2].map(|()| Observer::open(&folder.socket(), soon()).unwrap());
    let changes = |observer: &Observer| {
        let changes = observer.changes(soon()).unwrap();
        assert_eq!(changes.missed, 0);
        changes.changes.into_iter().map(|change| (change.key, change.stored)).collect::<Vec<_>>()
    };
    put(&store, &[0], &[vec![1; VALUE]]);
    assert_eq!(changes(&early), [], "the first call is the beginning");
    put(&store, &[1], &[vec![1; VALUE]]);
    put(&store, &[1, 2], &[vec![1; VALUE], vec![1; VALUE]]);
    let expected = [(key(1), true), (key(0), false), (key(2), true)];
    assert_eq!((changes(&early), changes(&early), changes(&late)), (expected.to_vec(), vec![], vec![]));
    store.clear(soon()).unwrap();
    let mut removed = changes(&late);
    removed.sort_by_key(|(key, _)| *key.bytes());
    assert_eq!(removed, [(key(1), false), (key(2), false)]);
    for number in 0..40_000 {
        put(&store, &[number], &[vec![1; VALUE]]);
        store.drop_values(&[key(number)], soon()).unwrap();
    }
    let last = late.changes(soon()).unwrap();
    assert_eq!((last.missed, last.changes.len()), (80_000 - 65_536, 65_536));
    assert_eq!(last.changes[65_535], ListedChange { namespace: 0, key: key(39_999), stored: false });
}

#[test]
fn counters_say_what_became_of_each_value() {
    let folder = Folder::new();
    let keeper = keeper(&folder.socket(), 4);
    let store = store(&folder.socket(), "a");
    let values = |count| vec![vec![1; VALUE]; count];
    put(&store, &[0, 1, 2, 3], &values(4));
    put(&store, &[3, 4], &values(2));
    store.lease(&[key(0), key(1), key(99)], Duration::from_secs(10), soon()).unwrap();
    assert_eq!(store.exists(&[key(2), key(3)]).unwrap(), [false, true], "what a call names is used last");
    get(&store, &[0, 4, 99]);
    assert_eq!(store.drop_values(&[key(0), key(99)], soon()).unwrap(), 1);
    let stats = store.stats(soon()).unwrap();
    let counted = stats.keeper.unwrap();
    assert_eq!((counted.stored, counted.stored_bytes, counted.evicted), (5, 5 * VALUE as u64, 1));
    assert_eq!((counted.leases, counted.leases_refused, counted.dropped), (1, 2, 1));
    // `put` has told of key 3 and then of both keys, and `get` of two.
    assert_eq!((counted.touched, counted.puts, counted.values), (5, 2, 3));
    assert!(counted.put_nanos > 0 && stats.put_nanos > counted.put_nanos && stats.get_nanos > 0);
    assert_eq!((stats.hits, stats.hit_bytes, stats.gets), (2, 2 * VALUE as u64, 1));
    assert_eq!((stats.misses_absent, stats.misses_changed, stats.misses_away), (1, 0, 0));
    assert_eq!((stats.puts_stored, stats.put_bytes, stats.puts_present), (5, 5 * VALUE as u64, 1));
    assert_eq!((stats.puts, stats.puts_no_room, stats.puts_away), (2, 0, 0));
    keeper.close();
    get(&store, &[0, 4]);
    put(&store, &[7], &values(1));
    let stats = store.stats(soon()).unwrap();
    assert_eq!((stats.misses_away, stats.gets, stats.puts_away, stats.puts), (2, 2, 1, 3));
    assert!(stats.to_json().contains(r#""puts_away":1"#) && stats.to_json().contains(r#""keeper":null"#));
}

#[test]
fn observers_put_nothing_and_are_limited() {
    let folder = Folder::new();
    let _keeper = keeper(&folder.socket(), 4);
    let observers: Vec<_> = (0..8).map(|_| Observer::open(&folder.socket(), soon()).unwrap()).collect();
    let refused = Observer::open(&folder.socket(), soon()).unwrap_err();
    assert!(refused.kind() == ErrorKind::System && refused.reason().contains("8 observers"), "{refused}");
    drop(observers);
    wait_for("room for an observer", || Observer::open(&folder.socket(), soon()).is_ok());
    let message = |bytes: &[u8]| {
        let stranger = Stranger::connect(&folder.socket());
        stranger.send(b"\x07\x03\x00", &[]).unwrap();
        stranger.send(bytes, &[]).unwrap();
        String::from_utf8_lossy(&stranger.received()[1]).into_owned()
    };
    let with_key = |begin: &[u8]| [begin, &[1; 28]].concat();
    let (put, drop, lease, unlease) = (
        [&*with_key(b"\x01\x00\x01"), b"\x00"].concat(),
        with_key(b"\x03\x01"),
        [&*with_key(b"\x04\x01"), b"\x64"].concat(),
        with_key(b"\x05\x01"),
    );
    let (touch, clear, corrupt) = (b"\x02\x01\x00", b"\x0a\x00", b"\x0f\x00\x00");
    for request in [&*put, touch, &*drop, &*lease, &*unlease, clear, corrupt] {
        let answer = message(request);
        assert!(answer.contains("an observer may not change anything"), "{request:?}: {answer}");
    }
    assert!(message(b"\x07\x03\x00").contains("has attached already"));
    let stranger = Stranger::connect(&folder.socket());
    stranger.send(b"\x07\x09\x00", &[]).unwrap();
    assert!(String::from_utf8_lossy(&stranger.received()[0]).contains("the client version 9"));
    for request in [b"\x06", b"\x0c"] {
        let stranger = Stranger::connect(&folder.socket());
        stranger.send(request, &[]).unwrap();
        assert!(String::from_utf8_lossy(&stranger.received()[0]).contains("first message must be an attach"));
    }
    assert!(Observer::open(&folder.socket(), soon()).is_ok(), "a stranger cannot end the keeper");
}

#[test]
fn threads_of_an_observer_share_all_changes_in_order() {
    let folder = Folder::new();
    let _keeper = keeper(&folder.socket(), 20_000);
    let store = store(&folder.socket(), "a");
    let [shared, alone] = [(); 2].map(|()| Observer::open(&folder.socket(), soon()).unwrap());
    for observer in [&shared, &alone] {
        assert_eq!(observer.changes(soon()).unwrap().changes, []);
    }
    let (numbers, values): (Vec<u32>, _) = ((0..20_000).collect(), vec![vec![1; VALUE]; MAX_KEYS]);
    let seen = AtomicU64::new(0);
    let mut parts: Vec<Vec<ListedChange>> = thread::scope(|scope| {
        let follow = || {
            let mut parts = Vec::new();
            let (begin, all) = (Instant::now(), numbers.len() as u64);
            while seen.load(Ordering::Relaxed) < all && begin.elapsed() < Duration::from_secs(30) {
                let new = shared.changes(soon()).unwrap();
                assert_eq!(new.missed, 0);
                seen.fetch_add(new.changes.len() as u64, Ordering::Relaxed);
                parts.push(new.changes);
            }
            parts
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(follow)).collect();
        for numbers in numbers.chunks(MAX_KEYS) {
            put(&store, numbers, &values[..numbers.len()]);
        }
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .filter(|part| !part.is_empty())
            .collect()
    });
    let expected = alone.changes(soon()).unwrap().changes;
    assert_eq!(expected.len(), numbers.len());
    let position: HashMap<_, _> = expected.iter().enumerate().map(|(at, change)| (change.key, at)).collect();
    parts.sort_by_key(|part| position[&part[0].key]);
    assert!(parts.concat() == expected, "a change is missing, is there twice, or is not in order");
}
