//! Reads through a stand-in for UCX that fails on request: `crates/fake-ucp` in a file of its own, as the real library is.

#![allow(unsafe_code, reason = "addresses of buffers")]
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small numbers")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

#[path = "shared/pair.rs"]
mod pair;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_ucx::{Error, Fabric, Library, Options, Peer, Piece};
use pair::{LONG, PIECE, Pair, control, named, resident_pages, runs_alone, stand_in};

const FILE: &str = "libfake_ucp.so";

// The tests need the file, and no symbol of it.
use fake_ucp as _;

fn library() -> Library {
    // SAFETY: the stand-in, and no test uses the environment by functions of C.
    unsafe { Library::open(&stand_in(FILE)) }.unwrap()
}

fn new_pair(pieces: usize, settings: &[(&str, &str)]) -> Pair {
    pair_with(pieces, settings, &Options::default())
}

fn pair_with(pieces: usize, settings: &[(&str, &str)], options: &Options) -> Pair {
    let (name, settings) = named(settings);
    let open = |options| Fabric::open(&library(), options).unwrap();
    let fabrics = [open(Options { settings, ..options.clone() }), open(Options::default())];
    Pair::of((FILE, "fake_ucp_set"), name, fabrics, pieces)
}

/// Returns the number of handles of the stand-in that are open in this process.
fn open_handles() -> usize {
    control(FILE, "fake_ucp_open_handles", |open: extern "C" fn() -> usize| open())
}

#[test]
fn bytes_arrive_in_any_order_and_beyond_the_window() {
    for (pieces, window, settings) in
        [(1, 1024, &[][..]), (5000, 1024, &[][..]), (300, 7, &[][..]), (3000, 100, &[("REORDER", "1")][..])]
    {
        let pair = pair_with(pieces, settings, &Options { window, ..Options::default() });
        let peer = pair.peer();
        pair.read(&peer, LONG).unwrap();
        assert!(pair.arrived(), "{pieces} pieces");
        let counts = pair.reader.counts();
        assert_eq!((counts.reads, counts.bytes), (1, (pieces * PIECE) as u64));
        assert_eq!((counts.failures, counts.forced_closes), (0, 0));
    }
}

#[test]
fn a_read_that_is_late_ends_at_its_deadline_and_no_byte_arrives_afterwards() {
    let mut pair = new_pair(2000, &[]);
    for end in [0, 1, 700, 1999] {
        let peer = pair.peer();
        pair.set("STALL", end);
        // So long that the read has begun.
        assert_eq!(pair.read(&peer, Duration::from_secs(1)), Err(Error::DeadlinePassed));
        // Whatever arrives from now on is noticed.
        pair.target.fill(0xEE);
        pair.set("STALL", i64::MAX);
        thread::sleep(Duration::from_millis(100));
        assert!(pair.target.iter().all(|&byte| byte == 0xEE), "a byte came after the end");
        // The peer is still usable.
        pair.read(&peer, LONG).unwrap();
        assert!(pair.arrived());
    }
    let counts = pair.reader.counts();
    assert_eq!((counts.reads, counts.failures, counts.forced_closes), (4, 4, 4));
}

/// The negative control of the test above: a library that writes late is noticed.
#[test]
fn late_bytes_are_noticed() {
    let mut pair = new_pair(100, &[("LATE", "1"), ("STALL", "10")]);
    // The bytes may come before the target is filled, or long afterwards.
    let noticed = (0..10).any(|_| {
        pair.read(&pair.peer(), Duration::from_millis(300)).unwrap_err();
        pair.target.fill(0xEE);
        thread::sleep(Duration::from_millis(300));
        pair.target.iter().any(|&byte| byte != 0xEE)
    });
    assert!(noticed);
}

#[test]
fn a_caller_can_cancel() {
    let pair = new_pair(10, &[("STALL", "3")]);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let read = scope.spawn(|| {
            // SAFETY: the destinations live longer.
            unsafe { pair.peer().read(&pair.key(), pair.pieces(), None, &|| stop.load(Ordering::Relaxed)) }
        });
        thread::sleep(Duration::from_millis(50));
        assert!(!read.is_finished());
        stop.store(true, Ordering::Relaxed);
        assert_eq!(read.join().unwrap(), Err(Error::Cancelled));
    });
}

#[test]
fn giving_up_one_read_leaves_the_others_of_the_same_peer_alone() {
    let pair = new_pair(50, &[("STALL", "0")]);
    let peer = pair.peer();
    thread::scope(|scope| {
        let late = scope.spawn(|| pair.read(&peer, Duration::from_millis(50)));
        let other = scope.spawn(|| pair.read(&peer, LONG));
        assert_eq!(late.join().unwrap(), Err(Error::DeadlinePassed));
        pair.set("STALL", i64::MAX);
        other.join().unwrap().unwrap();
    });
    assert!(pair.arrived());
}

#[test]
fn a_peer_that_does_not_respond_leaves_room_for_other_reads() {
    let pair = pair_with(80, &[], &Options { window: 8, ..Options::default() });
    // The second half of the pieces has the lower addresses.
    let (free, held) = {
        let mut pieces = pair.pieces();
        let held = pieces.split_off(40);
        (pieces, held)
    };
    pair.set("HOLD", free.last().unwrap().remote as i64);
    let (silent, other) = (pair.peer(), pair.peer());
    let read = |peer: &Peer, pieces: &[Piece]| {
        // SAFETY: the destinations are the target, which lives longer.
        unsafe { peer.read(&pair.key(), pieces.to_vec(), Some(Instant::now() + LONG), &|| false) }
    };
    thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&silent, &held));
        // The first read takes the whole window before the second one begins.
        thread::sleep(Duration::from_millis(50));
        assert_eq!(read(&other, &free), Ok(()));
        pair.set("HOLD", 0);
        assert_eq!(waiting.join().unwrap(), Ok(()));
    });
    assert!(pair.arrived());
}

#[test]
fn reads_beyond_the_endpoints_of_a_peer_wait() {
    let options = Options { endpoints: 2, ..Options::default() };
    let pair = pair_with(20, &[("STALL", "0")], &options);
    let peer = pair.peer();
    thread::scope(|scope| {
        let reads: Vec<_> = (0..6).map(|_| scope.spawn(|| pair.read(&peer, LONG))).collect();
        let waiting = pair.read(&peer, Duration::from_millis(50));
        assert_eq!(waiting, Err(Error::DeadlinePassed));
        pair.set("STALL", i64::MAX);
        for read in reads {
            read.join().unwrap().unwrap();
        }
    });
    assert_eq!(pair.reader.counts().reads, 6);
}

#[test]
fn a_peer_that_is_lost_fails_its_reads() {
    let pair = new_pair(500, &[("STALL", "20")]);
    let peer = pair.peer();
    thread::scope(|scope| {
        let read = scope.spawn(|| pair.read(&peer, LONG));
        thread::sleep(Duration::from_millis(50));
        pair.set("RESET", 1);
        let error = read.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Peer(status) if status.number == -25), "{error}");
    });
    pair.set("RESET", 0);
    pair.set("STALL", i64::MAX);
    pair.read(&peer, LONG).unwrap();
    assert!(pair.arrived());
}

#[test]
fn requests_that_are_refused_fail_the_read() {
    for (setting, status) in
        [("REFUSE_ucp_get_nbx", -2), ("REFUSE_ucp_ep_rkey_unpack", -5), ("REFUSE_ucp_ep_create", -6)]
    {
        let pair = new_pair(10, &[]);
        let peer = pair.peer();
        pair.set(setting, status);
        let error = pair.read(&peer, LONG).unwrap_err().to_string();
        assert!(error.contains(&format!("UCX status {status}")), "{setting}: {error}");
        pair.set(setting, 0);
    }
    // The library has room for fewer requests than the window.
    let pair = new_pair(100, &[("REQUESTS", "10"), ("STALL", "0")]);
    let error = pair.read(&pair.peer(), LONG).unwrap_err();
    assert!(matches!(error, Error::Peer(status) if status.number == -2), "{error}");
}

#[test]
fn memory_that_was_not_mapped_cannot_be_read() {
    let pair = new_pair(10, &[]);
    let mut beyond = pair.pieces();
    beyond[3].remote += (10 * PIECE) as u64;
    // SAFETY: the destinations live longer.
    let read = unsafe { pair.peer().read(&pair.key(), beyond, None, &|| false) };
    assert!(matches!(read, Err(Error::Peer(_))));
    let nonsense = Arc::new(vec![7; 40]);
    // SAFETY: as above.
    let read = unsafe { pair.peer().read(&nonsense, pair.pieces(), None, &|| false) };
    assert!(matches!(read, Err(Error::Refused { call: "ucp_ep_rkey_unpack", .. })));
    let nowhere = pair.reader.peer(vec![7; 24]);
    assert!(matches!(pair.read(&nowhere, LONG), Err(Error::Refused { call: "ucp_ep_create", .. })));
}

#[test]
fn requests_that_a_closed_endpoint_does_not_end_cost_the_worker() {
    let pair = new_pair(100, &[("STALL", "10"), ("STUCK", "1")]);
    let peer = pair.peer();
    assert_eq!(pair.read(&peer, Duration::from_secs(1)), Err(Error::DeadlinePassed));
    assert_eq!(pair.reader.counts().renewals, 1);
    pair.set("STALL", i64::MAX);
    pair.read(&peer, LONG).unwrap();
    assert!(pair.arrived());
}

#[test]
fn the_worker_is_replaced_after_many_give_ups() {
    let options = Options { renew_after: 5, ..Options::default() };
    let pair = pair_with(10, &[("STALL", "0")], &options);
    let peer = pair.peer();
    for renewals in 1..4 {
        // A read that gets no endpoint in time closes none.
        while pair.reader.counts().forced_closes < renewals * 5 {
            assert_eq!(pair.read(&peer, Duration::from_millis(2)), Err(Error::DeadlinePassed));
        }
        // The thread sleeps when the next read arrives, for which it replaces the worker. It must not sleep again then.
        thread::sleep(Duration::from_millis(20));
        pair.set("STALL", i64::MAX);
        pair.read(&peer, LONG).unwrap();
        pair.set("STALL", 0);
        assert!(pair.arrived());
        assert_eq!(pair.reader.counts().renewals, renewals);
    }
}

#[test]
fn a_fabric_that_is_dropped_ends_its_reads() {
    let mut pair = new_pair(100, &[("STALL", "10")]);
    let (peer, key, pieces) = (pair.peer(), pair.key(), pair.pieces());
    thread::scope(|scope| {
        // SAFETY: the destinations live longer.
        let read = scope.spawn(move || unsafe { peer.read(&key, pieces, None, &|| false) });
        thread::sleep(Duration::from_millis(50));
        let other = Fabric::open(&library(), Options::default()).unwrap();
        let dropped = std::mem::replace(&mut pair.reader, other);
        assert!(!read.is_finished());
        drop(dropped);
        assert_eq!(read.join().unwrap(), Err(Error::Closed));
    });
}

#[test]
fn ten_thousand_give_ups_leave_nothing() {
    if runs_alone("ten_thousand_give_ups_leave_nothing") {
        return;
    }
    let pair = new_pair(4, &[("STALL", "0")]);
    let give_up = |times: usize| {
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let peer = pair.peer();
                    for _ in 0..times / 8 {
                        let read = pair.read(&peer, Duration::from_micros(300));
                        assert_eq!(read, Err(Error::DeadlinePassed));
                    }
                });
            }
        });
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        (open_handles(), descriptors, resident_pages())
    };
    let (handles, descriptors, pages) = give_up(2_000);
    let after = give_up(8_000);
    assert_eq!((after.0, after.1), (handles, descriptors));
    // The address sanitizer keeps memory that was freed, and reports memory that was not.
    assert!(cfg!(sanitized) || after.2 < pages + 512, "{pages} pages, then {}", after.2);
    let counts = pair.reader.counts();
    assert_eq!(counts.failures, 10_000);
    // A worker is replaced after 100 forced closes, and those of the reads that are in progress then.
    assert!(counts.forced_closes > 100 && counts.renewals >= counts.forced_closes / 108, "{counts:?}");
    pair.set("STALL", i64::MAX);
    pair.read(&pair.peer(), LONG).unwrap();
    assert!(pair.arrived());
    drop(pair);
    assert_eq!(open_handles(), 0);
}

#[test]
fn nothing_is_left_open() {
    if runs_alone("nothing_is_left_open") {
        return;
    }
    for round in 0..20 {
        let pair = new_pair(50, &[("STALL", "10")]);
        let peer = pair.peer();
        pair.read(&peer, Duration::from_millis(5)).unwrap_err();
        pair.set("STALL", i64::MAX);
        pair.read(&peer, LONG).unwrap();
        drop(peer);
        drop(pair);
        assert_eq!(open_handles(), 0, "after round {round}");
    }
}

#[test]
fn calls_that_the_library_refuses_are_named() {
    let refused = |setting: &str| {
        let settings = vec![(format!("REFUSE_{setting}"), "-14".to_owned())];
        Fabric::open(&library(), Options { settings, ..Options::default() }).unwrap_err().to_string()
    };
    for call in ["ucp_init_version", "ucp_worker_create", "ucp_worker_get_efd", "ucp_worker_get_address"] {
        assert_eq!(refused(call), format!("{call} failed: no such device (UCX status -14)"));
    }
    let settings = vec![("NONSENSE".to_owned(), "text".to_owned())];
    let error = Fabric::open(&library(), Options { settings, ..Options::default() }).unwrap_err();
    assert!(error.to_string().contains("it refuses the setting NONSENSE=text"), "{error}");
    for call in ["ucp_mem_map", "ucp_rkey_pack"] {
        let pair = new_pair(1, &[(&format!("REFUSE_{call}"), "-4")]);
        // SAFETY: refused.
        let mapped = unsafe { pair.reader.map(4096, 4096) };
        assert_eq!(mapped.unwrap_err().to_string(), format!("{call} failed: out of memory (UCX status -4)"));
    }
}

#[test]
fn files_that_are_no_library_are_refused() {
    for (path, reason) in [("/nowhere/libucp.so.0", "cannot open shared"), ("libc.so.6", "it has no ucp_")] {
        // SAFETY: neither runs code of its own.
        let error = unsafe { Library::open(path.as_ref()) }.unwrap_err().to_string();
        // The loader's text begins with the path, which the message has already.
        assert!(error.starts_with(&format!("UCX cannot be used: {path}: {reason}")), "{error}");
    }
}
