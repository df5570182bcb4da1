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
use llm_datadist_keeper::{Keeper, KeeperOptions, MAX_KEYS, Store, StoreKey, StoreOptions, Stored};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType, connect, recv, sendmsg, socket,
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

fn keeper(socket: &Path, values: usize) -> Keeper {
    let options = KeeperOptions { memory: (values * 1024) as u64, value: 1024, socket: socket.into() };
    Keeper::open(&options).unwrap()
}

fn options(socket: &Path, namespace: &str) -> StoreOptions {
    StoreOptions { socket: socket.into(), namespace: namespace.into(), value: VALUE as u64 }
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
    let memory =
        |memory, value| Keeper::open(&KeeperOptions { memory, value, socket: folder.0.join("other") });
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
    let open = || Keeper::open(&KeeperOptions { memory: 4096, value: 1024, socket: folder.socket() });
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
    let long =
        Keeper::open(&KeeperOptions { memory: 4096, value: 64, socket: folder.0.join("x".repeat(108)) });
    assert_eq!(long.unwrap_err().argument_name(), Some("socket"));
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
    assert_eq!(leased(), 6);
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

/// An attach request for values of 64 bytes, as version 1 has it.
fn attach_request() -> Vec<u8> {
    vec![0, 1, 1, b'n', 64]
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
    stranger.send(&[0, 9, 1, b'n', 64], &[good.as_fd()]).unwrap();
    assert!(
        String::from_utf8_lossy(&stranger.received()[0]).contains("speaks version 1, the client version 9")
    );
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
