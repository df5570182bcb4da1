//! Pins of rows: many readers or one writer, up to the deadline, without deadlocks.
//!
//! `row_queues` compares the queues with a naive twin, and `../loom_pins.rs` checks the same protocol in every order of
//! two or three threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use llm_datadist_core::bindings::Cache;
use llm_datadist_core::testing::cache::{CallRows, Pin, RowUse, WaitingCall, all_rows};
use llm_datadist_core::{CacheKind, Deadline, Error, ErrorKind, Placement};

use crate::fixtures::{adopt, desc, pin_reads, pin_writes};

/// A cache whose memory no test touches.
fn cache(rows: usize) -> Arc<Cache> {
    Cache::loose(adopt(&desc(Placement::Host, 1, rows, 1), CacheKind::Blocks, &[4096]))
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(30))
}

fn late() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn pin(src: (&Arc<Cache>, Vec<u64>), dst: (&Arc<Cache>, Vec<u64>), deadline: Deadline) -> Result<Pin, Error> {
    CallRows::copy((src.0.clone(), src.1.into()), (dst.0.clone(), dst.1.into())).pin(deadline)
}

fn within(cache: &Arc<Cache>, reads: &[u64], writes: &[u64], deadline: Deadline) -> Result<Pin, Error> {
    pin((cache, reads.to_vec()), (cache, writes.to_vec()), deadline)
}

fn pin_for_peer(cache: &Arc<Cache>, reads: &[u64], deadline: Deadline) -> Result<Pin, Error> {
    let rows = RowUse { reads: reads.into(), ..RowUse::default() };
    CallRows::of(cache.clone(), rows).pin_for_peer(deadline, || true)
}

/// A call that will write rows, in its place in their queues.
fn entered(cache: &Arc<Cache>, writes: &[u64]) -> WaitingCall {
    let rows = RowUse { writes: writes.into(), ..RowUse::default() };
    CallRows::of(cache.clone(), rows).enter(false, None).unwrap()
}

fn reads(cache: &Arc<Cache>, rows: &[u64]) -> Result<Pin, Error> {
    within(cache, rows, &[], soon())
}

fn writes(cache: &Arc<Cache>, rows: impl IntoIterator<Item = u64>) -> Result<Pin, Error> {
    within(cache, &[], &rows.into_iter().collect::<Vec<_>>(), soon())
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    let cache = cache(16);
    let readers: Vec<Pin> = (0..50).map(|_| reads(&cache, &[3, 4, 3]).unwrap()).collect();
    let error = writes(&cache, [4]).unwrap_err();
    let facts = ["row", "cache_id", "limit_ms"].map(|name| error.fact(name));
    assert_eq!((error.kind(), facts), (ErrorKind::Timeout, [Some("4"), Some("-1"), Some("30")]));
    let writer = writes(&cache, [5]).unwrap();
    assert!(reads(&cache, &[5]).is_err());
    assert!(writes(&cache, [5]).is_err());
    drop(readers);
    let second = writes(&cache, [3, 4]).unwrap();
    assert!(reads(&cache, &[1, 2, 3]).is_err());
    drop((writer, second));
    writes(&cache, 0..16).unwrap();
}

#[test]
fn rows_beyond_a_million_share_counters() {
    // 3 · 2^20 rows: four neighbours share a counter.
    let rows = 3u64 << 20;
    let cache = cache(rows as usize);
    let held = writes(&cache, [0, rows - 1]).unwrap();
    assert!(reads(&cache, &[1]).is_err(), "it shares a counter with row 0");
    assert!(writes(&cache, [rows - 2]).is_err());
    within(&cache, &[8, rows / 2], &[16, rows - 9], soon()).unwrap();
    drop(held);
    // Row 0 is read and row 1 written by one call: one counter in both lists.
    let both = within(&cache, &[0, 1, 2], &[1, 3], soon()).unwrap();
    assert!(reads(&cache, &[0]).is_err());
    drop(both);
    drop([reads(&cache, &[0, 1]).unwrap(), reads(&cache, &[2, 3]).unwrap()]);
    writes(&cache, [0, 1, 2, 3, rows - 1]).unwrap();
    // The number of counters stays small for the largest number of rows.
    let huge = self::cache(1 << 60);
    let held = writes(&huge, [0, (1 << 60) - 1]).unwrap();
    assert!(reads(&huge, &[(1 << 60) - 1]).is_err());
    drop(held);
}

/// Threads pin two caches in opposite order. `users` has the number of readers of each row, or −1 for a writer.
#[test]
fn exclusion_holds_under_many_threads_without_a_deadlock() {
    let caches = [cache(6), cache(6)];
    let users: [[AtomicI64; 6]; 2] = Default::default();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (caches, users) = (&caches, &users);
            scope.spawn(move || {
                let (src, dst) = (thread % 2, 1 - thread % 2);
                for round in 0..400 {
                    let (read, write) = ((thread + round) % 6, (thread * 5 + round * round) % 6);
                    let read = [read, (read + 1) % 6];
                    let rows = read.map(|row| row as u64).to_vec();
                    let pins = pin((&caches[src], rows), (&caches[dst], vec![write as u64]), late()).unwrap();
                    assert_eq!(users[dst][write].swap(-1, Ordering::SeqCst), 0, "another user");
                    assert!(read.iter().all(|&row| users[src][row].fetch_add(1, Ordering::SeqCst) >= 0));
                    std::thread::yield_now();
                    assert!(read.iter().all(|&row| users[src][row].fetch_sub(1, Ordering::SeqCst) > 0));
                    assert_eq!(users[dst][write].swap(0, Ordering::SeqCst), -1);
                    drop(pins);
                }
            });
        }
    });
    caches.iter().for_each(|cache| drop(writes(cache, 0..6).expect("a row is still pinned")));
}

/// Only requests of peers pass a waiting writer. Nobody passes a writer that uses the row.
#[test]
fn only_a_request_of_a_peer_passes_a_waiting_writer() {
    let cache = cache(4);
    let read = |rows: &[u64]| pin_reads(&cache, rows.to_vec(), soon());
    let read_for_peer = |rows: &[u64]| pin_for_peer(&cache, rows, soon());
    let first = reads(&cache, &[1]).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| pin_writes(&cache, vec![1], late()));
        // Readers succeed until the writer waits.
        let give_up = Deadline::after(Duration::from_secs(20));
        while pin_reads(&cache, vec![1], Deadline::after(Duration::from_millis(5))).is_ok() {
            assert!(!give_up.passed(), "readers keep passing the waiting writer");
            std::thread::yield_now();
        }
        assert_eq!(read(&[0, 1]).unwrap_err().fact("row"), Some("1"));
        within(&cache, &[2], &[3], soon()).expect("other rows are free");
        let passing = read_for_peer(&[0, 1]).expect("the writer only waits");
        // Both readers must finish before the writer continues.
        drop(first);
        assert!(read(&[1]).is_err() && !writer.is_finished());
        drop(passing);
        let writing = writer.join().unwrap().expect("the writer is next");
        for error in [read(&[2, 1]).unwrap_err(), read_for_peer(&[2, 1]).unwrap_err()] {
            assert_eq!((error.kind(), error.fact("row")), (ErrorKind::Timeout, Some("1")));
        }
        read(&[0, 2]).unwrap();
        drop(writing);
    });
    read(&[1]).unwrap();
    read_for_peer(&[1]).unwrap();
    writes(&cache, 0..4).unwrap();
}

/// Requests of peers keep no call waiting for ever.
#[test]
fn a_waiting_call_is_passed_a_limited_number_of_times() {
    let cache = cache(4);
    let request = || pin_for_peer(&cache, &[1], soon());
    let mut held = request().unwrap();
    let writer = entered(&cache, &[1]);
    let mut passed = 0;
    let error = loop {
        match request() {
            Ok(next) => held = next,
            Err(error) => break error,
        }
        passed += 1;
    };
    assert_eq!((passed, error.kind(), error.fact("row")), (1024, ErrorKind::Timeout, Some("1")));
    assert!(!writer.is_ready());
    drop(held);
    assert!(writer.is_ready());
    drop(writer.pin(soon()).unwrap());
    request().unwrap();
}

/// A request that may not pass a call in one row passes it in none. Otherwise each would wait for the other.
#[test]
fn a_request_passes_a_call_in_all_rows_or_in_none() {
    let cache = cache(4);
    let held = pin_for_peer(&cache, &[2], soon()).unwrap();
    let call = entered(&cache, &[1, 2]);
    while pin_for_peer(&cache, &[2], soon()).is_ok() {}
    std::thread::scope(|scope| {
        let request = scope.spawn(|| pin_for_peer(&cache, &[1, 2], late()));
        // Until it waits, a request for row 3 and then row 1 shows nothing, so give it time to do the wrong thing.
        std::thread::sleep(Duration::from_millis(50));
        drop(held);
        drop(call.pin(soon()).expect("the request waits behind the call in both rows"));
        request.join().unwrap().unwrap();
    });
}

#[test]
fn writer_that_timed_out_blocks_no_reader() {
    let cache = cache(4);
    let reader = reads(&cache, &[1]).unwrap();
    writes(&cache, [0, 1]).unwrap_err();
    within(&cache, &[0, 1], &[2], soon()).expect("no writer waits any more");
    // A reader that arrived while the writer waited is not blocked either.
    let limit = Deadline::after(Duration::from_millis(300));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| within(&cache, &[], &[1], limit).map(drop));
        let behind = scope.spawn(|| within(&cache, &[1], &[], late()).map(drop));
        writer.join().unwrap().unwrap_err();
        behind.join().unwrap().unwrap();
    });
    drop(reader);
}

#[test]
fn a_freed_cache_admits_no_call() {
    let cache = cache(16);
    let reader = reads(&cache, &[3]).unwrap();
    let waiting = entered(&cache, &[3]);
    let last = all_rows(&cache).unwrap();
    let not_found = |result: Result<Pin, Error>| result.unwrap_err().kind() == ErrorKind::CacheNotFound;
    assert!(not_found(reads(&cache, &[0])) && not_found(pin_for_peer(&cache, &[0], soon())));
    assert!(
        CallRows::of(cache.clone(), RowUse { reads: [0].into(), ..RowUse::default() }).pin_now().is_none()
    );
    // The calls that were there before end first.
    assert_eq!(last.pin(soon()).unwrap_err().kind(), ErrorKind::Timeout);
    drop(reader);
    drop(waiting.pin(soon()).unwrap());
    all_rows(&cache).unwrap().pin(soon()).unwrap();
    assert!(not_found(writes(&cache, [0])));
    // Nor does one that no call has used.
    let unused = self::cache(16);
    all_rows(&unused).unwrap().pin(soon()).unwrap();
    assert!(not_found(reads(&unused, &[0])));
}

#[test]
fn calls_of_unordered_memory_exclude_only_its_end() {
    let adopted = adopt(&desc(Placement::Host, 1, 16, 1), CacheKind::Blocks, &[4096]);
    let cache = Cache::loose(adopted.unordered());
    let held = [reads(&cache, &[3]).unwrap(), writes(&cache, [3]).unwrap(), writes(&cache, [3, 5]).unwrap()];
    assert!(held.iter().all(Pin::may_write));
    assert_eq!(all_rows(&cache).unwrap().pin(soon()).unwrap_err().kind(), ErrorKind::Timeout);
    drop(held);
    all_rows(&cache).unwrap().pin(soon()).unwrap();
}
