//! Reads through a stand-in for NIXL that fails on request: `crates/fake-nixl` in a file of its own, as the real library is.

#![allow(unsafe_code, reason = "addresses of buffers")]
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small numbers")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod fake;
#[path = "../../fabric/tests/shared/pair.rs"]
mod pair;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fake::{fake, fake_of_version, library, map_target, new_pair, open_handles, pair_with, refuse};
use llm_datadist_fabric::{Error, Peer, Piece};
use llm_datadist_nixl::{Fabric, Library, Options};
use pair::{LONG, PIECE, resident_pages, runs_alone};

#[test]
fn bytes_arrive_in_any_order_and_beyond_one_request() {
    for (pieces, settings) in [(1, &[][..]), (5000, &[][..]), (1500, &[("AT_ONCE", "1")][..])] {
        let mut pair = new_pair(pieces, settings);
        let peer = pair.peer();
        for mapped in [false, true] {
            map_target(&mut pair, mapped);
            pair.target.fill(0);
            pair.read(&*peer, LONG).unwrap();
            assert!(pair.arrived(), "{pieces} pieces, mapped {mapped}");
        }
        let counts = pair.reader.counts();
        assert_eq!((counts.reads, counts.bytes), (2, 2 * (pieces * PIECE) as u64));
        assert_eq!((counts.failures, counts.forced_closes), (0, 0));
    }
}

#[test]
fn long_and_empty_pieces_are_cut_into_requests() {
    let pair = new_pair(40_000, &[]);
    let lens = [0, 1, 20 << 20, 7, 0, 12 << 20, 0];
    let (mut pieces, mut at) = (Vec::new(), 0);
    for len in lens {
        let (local, remote) = (pair.target.as_ptr() as u64 + at, pair.source.as_ptr() as u64 + at);
        pieces.push(Piece { local, remote, len });
        at += len;
    }
    // SAFETY: the destinations are the target, which lives longer.
    unsafe { pair.peer().read(&pair.key(), pieces, Some(Instant::now() + LONG), &|| false) }.unwrap();
    let at = at as usize;
    assert!(pair.target[..at] == pair.source[..at]);
    assert!(pair.target[at..].iter().all(|&byte| byte == 0));
    assert_eq!(pair.reader.counts().bytes, at as u64);
}

#[test]
fn a_read_that_is_late_ends_at_its_deadline_and_no_byte_arrives_afterwards() {
    let mut pair = new_pair(2000, &[]);
    for end in [0, 1, 700, 1999] {
        let peer = pair.peer();
        pair.set("STALL", end);
        assert_eq!(pair.read(&*peer, Duration::from_secs(1)), Err(Error::DeadlinePassed));
        // Whatever arrives from now on is noticed.
        pair.target.fill(0xEE);
        pair.set("STALL", i64::MAX);
        thread::sleep(Duration::from_millis(100));
        assert!(pair.target.iter().all(|&byte| byte == 0xEE), "a byte came after the end");
        // The peer is still usable.
        pair.read(&*peer, LONG).unwrap();
        assert!(pair.arrived());
    }
    let counts = pair.reader.counts();
    assert_eq!((counts.reads, counts.failures, counts.forced_closes), (4, 4, 4));
}

/// Requests in flight that end soon after the deadline cost no agent.
#[test]
fn a_read_that_is_given_up_waits_shortly_for_its_requests() {
    let mut pair = pair_with(10, &[("STALL", "5")], &Options { drain: LONG, ..Options::default() });
    let peer = pair.peer();
    thread::scope(|scope| {
        let late = scope.spawn(|| pair.read(&*peer, Duration::from_millis(30)));
        thread::sleep(Duration::from_millis(100));
        assert!(!late.is_finished());
        pair.set("STALL", i64::MAX);
        assert_eq!(late.join().unwrap(), Err(Error::DeadlinePassed));
    });
    assert_eq!((pair.reader.counts().failures, pair.reader.counts().forced_closes), (1, 0));
    pair.target.fill(0);
    pair.read(&*peer, LONG).unwrap();
    assert!(pair.arrived());
}

/// Negative control of `a_read_that_is_late_ends_at_its_deadline_and_no_byte_arrives_afterwards`: a library that writes late is noticed.
#[test]
fn late_bytes_are_noticed() {
    let mut pair = new_pair(100, &[("LATE", "1"), ("STALL", "10")]);
    let noticed = (0..10).any(|_| {
        pair.read(&*pair.peer(), Duration::from_millis(300)).unwrap_err();
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
fn the_deadline_is_checked_between_requests() {
    // Ten requests, each of which takes 40 ms to post, so the deadline passes before the last one is posted.
    let pair = new_pair(5000, &[("SLOW_POST", "40")]);
    assert_eq!(pair.read(&*pair.peer(), Duration::from_millis(100)), Err(Error::DeadlinePassed));
    // Pieces are requested backwards, so the first one belongs to the last request.
    assert!(pair.target[..PIECE].iter().all(|&byte| byte == 0), "every request was posted");
}

#[test]
fn a_deadline_that_has_passed_costs_no_agent() {
    let pair = new_pair(1, &[]);
    let peer = pair.peer();
    pair.read(&*peer, LONG).unwrap();
    assert_eq!(pair.read(&*peer, Duration::ZERO), Err(Error::DeadlinePassed));
    assert_eq!(pair.reader.counts().forced_closes, 0);
}

#[test]
fn a_read_that_waits_sleeps() {
    let pair = new_pair(10, &[("STALL", "0")]);
    let used = || {
        // SAFETY: zeros are a time.
        let mut time: libc::timespec = unsafe { std::mem::zeroed() };
        // SAFETY: `time` is written.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
    };
    let before = used();
    pair.read(&*pair.peer(), Duration::from_millis(500)).unwrap_err();
    let used = used().saturating_sub(before);
    assert!(used < Duration::from_millis(100), "{used:?}");
}

#[test]
fn giving_up_one_read_leaves_the_others_of_the_same_peer_alone() {
    let pair = new_pair(50, &[("STALL", "0")]);
    let peer = pair.peer();
    thread::scope(|scope| {
        let late = scope.spawn(|| pair.read(&*peer, Duration::from_millis(50)));
        let other = scope.spawn(|| pair.read(&*peer, LONG));
        assert_eq!(late.join().unwrap(), Err(Error::DeadlinePassed));
        pair.set("STALL", i64::MAX);
        other.join().unwrap().unwrap();
    });
    assert!(pair.arrived());
}

#[test]
fn reads_beyond_the_agents_of_a_peer_wait() {
    let pair = pair_with(20, &[("STALL", "0")], &Options { readers: 2, ..Options::default() });
    let peer = pair.peer();
    thread::scope(|scope| {
        let reads: Vec<_> = (0..6).map(|_| scope.spawn(|| pair.read(&*peer, LONG))).collect();
        thread::sleep(Duration::from_millis(50));
        let waiting = pair.read(&*peer, Duration::from_millis(50));
        assert_eq!(waiting, Err(Error::DeadlinePassed));
        pair.set("STALL", i64::MAX);
        for read in reads {
            read.join().unwrap().unwrap();
        }
    });
    let counts = pair.reader.counts();
    assert_eq!((counts.reads, counts.forced_closes), (6, 0));
}

#[test]
fn a_peer_that_is_lost_fails_its_reads() {
    let pair = new_pair(500, &[("STALL", "20")]);
    let peer = pair.peer();
    thread::scope(|scope| {
        let read = scope.spawn(|| pair.read(&*peer, LONG));
        thread::sleep(Duration::from_millis(50));
        pair.set("RESET", 1);
        let error = read.join().unwrap().unwrap_err().to_string();
        assert_eq!(error, "the peer cannot be read: the peer has disconnected (NIXL status -13)");
    });
    pair.set("RESET", 0);
    pair.set("STALL", i64::MAX);
    pair.read(&*peer, LONG).unwrap();
    assert!(pair.arrived());
}

#[test]
fn memory_that_was_not_mapped_cannot_be_read() {
    let pair = new_pair(10, &[]);
    let mut beyond = pair.pieces();
    beyond[3].remote += (10 * PIECE) as u64;
    // SAFETY: the destinations live longer.
    let read = unsafe { pair.peer().read(&pair.key(), beyond, None, &|| false) };
    let error = read.unwrap_err().to_string();
    assert_eq!(error, "nixl_capi_create_xfer_req failed: not found (NIXL status -6)");
    let nowhere = pair.reader.peer(vec![7; 24]);
    let error = pair.read(&*nowhere, LONG).unwrap_err().to_string();
    assert_eq!(error, "nixl_capi_load_remote_md failed: mismatch (NIXL status -8)");
}

#[test]
fn a_fabric_that_is_dropped_ends_its_reads() {
    let mut pair = new_pair(100, &[("STALL", "10")]);
    let (peer, key, pieces) = (pair.peer(), pair.key(), pair.pieces());
    let again = pair.pieces();
    thread::scope(|scope| {
        // SAFETY: the destinations live longer.
        let read = scope.spawn(move || {
            // SAFETY: as above.
            let first = unsafe { peer.read(&key, pieces, None, &|| false) };
            // SAFETY: as above.
            (first, unsafe { peer.read(&key, again, None, &|| false) })
        });
        thread::sleep(Duration::from_millis(50));
        let other = Fabric::open(&library(), &Options::default()).unwrap();
        let dropped = std::mem::replace(&mut pair.reader, Box::new(other));
        assert!(!read.is_finished());
        drop(dropped);
        assert_eq!(read.join().unwrap(), (Err(Error::Closed), Err(Error::Closed)));
    });
}

#[test]
fn a_thousand_give_ups_leave_nothing() {
    if runs_alone("a_thousand_give_ups_leave_nothing") {
        return;
    }
    let options = Options { drain: Duration::ZERO, ..Options::default() };
    let pair = pair_with(4, &[("STALL", "0")], &options);
    let give_up = |times: usize| {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let peer = pair.peer();
                    for _ in 0..times / 4 {
                        let read = pair.read(&*peer, Duration::from_micros(300));
                        assert_eq!(read, Err(Error::DeadlinePassed));
                    }
                });
            }
        });
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        (open_handles(false), descriptors, resident_pages())
    };
    let (handles, descriptors, pages) = give_up(1_000);
    let after = give_up(4_000);
    assert_eq!((after.0, after.1), (handles, descriptors));
    // The address sanitizer keeps memory that was freed, and reports memory that was not.
    assert!(cfg!(sanitized) || after.2 < pages + 512, "{pages} pages, then {}", after.2);
    assert!(pair.reader.counts().forced_closes > 100, "{:?}", pair.reader.counts());
}

#[test]
fn an_agent_is_kept_for_the_next_read_and_ends_with_its_peer_or_a_mapping() {
    if runs_alone("an_agent_is_kept_for_the_next_read_and_ends_with_its_peer_or_a_mapping") {
        return;
    }
    let mut pair = new_pair(10, &[]);
    assert_eq!(open_handles(true), 2);
    let peer = pair.peer();
    for _ in 0..3 {
        pair.read(&*peer, LONG).unwrap();
        assert_eq!(open_handles(true), 3);
    }
    // The idle agent may have registered memory that is unmapped now.
    map_target(&mut pair, true);
    pair.read(&*peer, LONG).unwrap();
    map_target(&mut pair, false);
    assert_eq!(open_handles(true), 2);
    pair.read(&*peer, LONG).unwrap();
    assert_eq!(open_handles(true), 3);
    drop(peer);
    assert_eq!(open_handles(true), 2);
    drop(pair);
    assert_eq!(open_handles(false), 0);
}

/// Every function that a read calls, in turn. The read names it, leaves no handle, and the next one works.
#[test]
fn calls_that_the_library_refuses_are_named_and_leave_no_handle() {
    if runs_alone("calls_that_the_library_refuses_are_named_and_leave_no_handle") {
        return;
    }
    let calls = [
        "nixl_capi_create_configured_agent",
        "nixl_capi_create_params",
        "nixl_capi_params_add",
        "nixl_capi_create_backend",
        "nixl_capi_load_remote_md",
        "nixl_capi_create_reg_dlist",
        "nixl_capi_reg_dlist_add_desc",
        "nixl_capi_register_mem",
        "nixl_capi_create_xfer_dlist",
        "nixl_capi_xfer_dlist_add_desc",
        "nixl_capi_create_xfer_req",
        "nixl_capi_post_xfer_req",
        "nixl_capi_get_xfer_status",
    ];
    let pair = new_pair(10, &[]);
    let handles = open_handles(false);
    for call in calls {
        let peer = pair.peer();
        refuse(call, -2);
        let error = pair.read(&*peer, LONG).unwrap_err();
        refuse(call, 0);
        assert_eq!(error.to_string(), format!("{call} failed: the backend failed (NIXL status -2)"));
        pair.read(&*peer, LONG).unwrap();
        drop(peer);
        assert_eq!(open_handles(false), handles, "{call}");
    }
    // All bytes have arrived, so the read has succeeded. Its agent is destroyed.
    refuse("nixl_capi_deregister_mem", -2);
    pair.read(&*pair.peer(), LONG).unwrap();
    refuse("nixl_capi_deregister_mem", 0);
    assert_eq!(open_handles(false), handles);
    let (all, library) = (open_handles(false), library());
    let settings = vec![("TLS".to_owned(), "tcp".to_owned())];
    let options = Options { settings, ..Options::default() };
    for call in &calls[..4] {
        refuse(call, -2);
        let error = Fabric::open(&library, &options).unwrap_err().to_string();
        refuse(call, 0);
        assert!(error.starts_with(&format!("{call} failed")), "{error}");
        assert_eq!(open_handles(false), all, "{call}");
    }
    refuse("nixl_capi_register_mem", -2);
    // SAFETY: refused.
    let mapped = unsafe { pair.reader.map(4096, 4096) };
    refuse("nixl_capi_register_mem", 0);
    assert!(mapped.unwrap_err().to_string().contains("nixl_capi_register_mem failed"));
    refuse("nixl_capi_get_local_md", -2);
    assert!(pair.reader.address().unwrap_err().to_string().contains("nixl_capi_get_local_md failed"));
    refuse("nixl_capi_get_local_md", 0);
    assert_eq!(open_handles(false), all);
}

#[test]
fn settings_that_nixl_cannot_take_are_refused() {
    for (name, value) in [("TLS", "rc,ud"), ("A,B", "1"), ("A=B", "1"), ("A", "\0")] {
        let settings = vec![(name.to_owned(), value.to_owned())];
        let error = Fabric::open(&library(), &Options { settings, ..Options::default() }).unwrap_err();
        assert!(error.to_string().starts_with("NIXL cannot be used: the setting"), "{error}");
    }
}

#[test]
fn files_that_are_no_library_are_refused() {
    for (path, reason) in
        [("/nowhere/libnixl_capi.so", "cannot open shared"), ("libc.so.6", "it has no nixl_capi_is_stub")]
    {
        // SAFETY: neither runs code of its own.
        let error = unsafe { Library::open(path.as_ref()) }.unwrap_err().to_string();
        // The loader's text begins with the path, which the message has already.
        assert!(error.starts_with(&format!("NIXL cannot be used: {path}: {reason}")), "{error}");
    }
    for (call, reasons) in [
        ("nixl_capi_is_stub", ["it is a stub", "no implementation of NIXL"]),
        (
            "nixl_capi_get_plugin_params",
            ["it has no usable plugin for UCX: nixl_capi_get_pl", "NIXL_PLUGIN_DIR"],
        ),
    ] {
        refuse(call, -6);
        // SAFETY: the stand-in.
        let error = unsafe { Library::open(&fake()) }.unwrap_err().to_string();
        refuse(call, 0);
        assert!(reasons.iter().all(|reason| error.contains(reason)), "{error}");
    }
}

#[test]
fn the_version_is_that_of_the_file() {
    assert_eq!(library().version().to_string(), "1.5.1");
    for (version, reason) in
        [("1.4.9", None), ("0.9.9", Some("0.9.9")), ("2.0.0", Some("2.0.0")), ("x", Some("unknown"))]
    {
        let file = fake_of_version(version);
        // SAFETY: the stand-in.
        let opened = unsafe { Library::open(&file) };
        std::fs::remove_file(&file).unwrap();
        match reason {
            None => assert_eq!(opened.unwrap().version().to_string(), version),
            Some(reason) => assert!(opened.unwrap_err().to_string().contains(reason)),
        }
    }
}

/// Only for the types of the interface.
#[test]
fn a_peer_can_be_shared() {
    let pair = new_pair(3, &[]);
    let peer: Arc<dyn Peer> = pair.peer().into();
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| pair.read(&*peer, LONG).unwrap());
        }
    });
    assert!(pair.arrived());
}
