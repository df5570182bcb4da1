//! Pins of rows: many readers or one writer, up to the deadline, without deadlocks.
//!
//! `../loom_pins.rs` checks the same protocol in every order of two or three threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use llm_datadist_core::testing::cache::{
    PendingPins, Pin, RowUse, RowsOfCall, pin, pin_for_peer, pin_when_free, pin_writes,
};
use llm_datadist_core::{Cache, CacheKind, Deadline, Error, ErrorKind, Placement};

use crate::fixtures::{adopt, desc};

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

type Pins = [Option<Pin>; 2];

fn within(cache: &Arc<Cache>, reads: &[u64], writes: &[u64], deadline: Deadline) -> Result<Pins, Error> {
    pin((cache, reads.to_vec()), (cache, writes.to_vec()), deadline)
}

fn reads(cache: &Arc<Cache>, rows: &[u64]) -> Result<Pins, Error> {
    within(cache, rows, &[], soon())
}

fn writes(cache: &Arc<Cache>, rows: impl IntoIterator<Item = u64>) -> Result<Pins, Error> {
    within(cache, &[], &rows.into_iter().collect::<Vec<_>>(), soon())
}

fn for_peer(cache: &Arc<Cache>, rows: &[u64], passes: bool, deadline: Deadline) -> Result<Pins, Error> {
    pin_for_peer(cache, RowUse { reads: rows.to_vec(), passes, ..RowUse::default() }, deadline)
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    let cache = cache(16);
    let readers: Vec<Pins> = (0..50).map(|_| reads(&cache, &[3, 4, 3]).unwrap()).collect();
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
fn failed_call_holds_no_row() {
    let (a, b) = (cache(8), cache(8));
    let held = writes(&b, [7]).unwrap();
    for _ in 0..3 {
        assert!(pin((&a, vec![1, 2]), (&b, vec![0, 7]), soon()).is_err());
        assert!(pin((&b, vec![0, 7]), (&a, vec![1, 2]), soon()).is_err());
    }
    writes(&a, 0..8).unwrap();
    writes(&b, 0..7).unwrap();
    drop(held);
    writes(&b, 0..8).unwrap();
}

#[test]
fn one_call_may_read_and_write_the_same_row() {
    let cache = cache(8);
    for (read, written) in [(&[2][..], &[2][..]), (&[0, 1, 2, 2], &[1, 2, 3, 3])] {
        let pins = within(&cache, read, written, soon()).unwrap();
        assert!(Arc::ptr_eq(pins[0].as_ref().unwrap().cache(), &cache) && pins[1].is_none());
        assert!(reads(&cache, &[2]).is_err());
        drop(pins);
        writes(&cache, 0..8).unwrap();
    }
}

#[test]
fn free_row_is_pinned_even_after_the_deadline() {
    let passed = Deadline::after(Duration::ZERO);
    assert!(passed.passed());
    within(&cache(8), &[1], &[2], passed).unwrap();
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

/// Only a read with `ahead` may pass a waiting writer. No reader passes a writer that holds the row, and the
/// writer gets its turn.
#[test]
fn only_a_read_ahead_passes_a_waiting_writer() {
    let cache = cache(4);
    let read = |rows: &[u64], ahead| for_peer(&cache, rows, ahead, soon());
    let first = reads(&cache, &[1]).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| pin_writes(&cache, vec![1], late()));
        // Readers succeed until the writer waits.
        let give_up = Deadline::after(Duration::from_secs(20));
        while for_peer(&cache, &[1], false, Deadline::after(Duration::from_millis(5))).is_ok() {
            assert!(!give_up.passed(), "readers keep passing the waiting writer");
            std::thread::yield_now();
        }
        assert_eq!(read(&[0, 1], false).unwrap_err().fact("row"), Some("1"));
        within(&cache, &[2], &[3], soon()).expect("other rows are free");
        let ahead = read(&[0, 1], true).expect("the writer only waits");
        // Both readers must finish before the writer continues.
        drop(first);
        assert!(read(&[1], false).is_err() && !writer.is_finished());
        drop(ahead);
        let writing = writer.join().unwrap().expect("the writer is next");
        for ahead in [false, true] {
            let error = read(&[2, 1], ahead).unwrap_err();
            assert_eq!((error.kind(), error.fact("row")), (ErrorKind::Timeout, Some("1")), "ahead: {ahead}");
            read(&[0, 2], ahead).unwrap();
        }
        drop(writing);
    });
    read(&[1], false).unwrap();
    read(&[1], true).unwrap();
    writes(&cache, 0..4).unwrap();
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

/// Rows of two caches that calls without a thread were handed, by the name of the call, in order.
#[derive(Clone, Default)]
struct Handed(Arc<std::sync::Mutex<Vec<(&'static str, Pins)>>>);

impl Handed {
    fn ask(&self, name: &'static str, read: (&Arc<Cache>, u64), written: (&Arc<Cache>, u64)) -> Option<Arc<PendingPins>> {
        let handed = self.0.clone();
        let rows = RowsOfCall::new((read.0.clone(), vec![read.1]), (written.0.clone(), vec![written.1]));
        pin_when_free(rows, move |pins| handed.lock().unwrap().push((name, pins))).unwrap()
    }

    fn names(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().iter().map(|(name, _)| *name).collect()
    }

    fn release(&self, name: &str) {
        let mut handed = self.0.lock().unwrap();
        let at = handed.iter().position(|(known, _)| *known == name).expect("it has its rows");
        let pins = handed.remove(at);
        drop(handed);
        drop(pins);
    }
}

/// Calls get their rows in the order in which they asked, in both caches, and those that meet nobody at once.
#[test]
fn calls_without_a_thread_take_turns_in_the_order_of_their_start() {
    let (a, b) = (cache(8), cache(8));
    let handed = Handed::default();
    assert!(handed.ask("first", (&a, 0), (&b, 0)).is_none());
    let second = handed.ask("second", (&b, 0), (&a, 1)).unwrap();
    // It meets only the second one, which still waits.
    let third = handed.ask("third", (&a, 1), (&b, 5)).unwrap();
    assert!(handed.ask("free", (&a, 0), (&b, 7)).is_none());
    assert_eq!(handed.names(), ["first", "free"]);
    assert_eq!(reads(&a, &[1]).unwrap_err().fact("row"), Some("1"), "a call that asks later waits as well");
    handed.release("first");
    assert_eq!(handed.names(), ["free", "second"]);
    assert!(!second.withdraw());
    handed.release("second");
    assert_eq!(handed.names(), ["free", "third"]);
    assert!(!third.withdraw());
    ["free", "third"].iter().for_each(|name| handed.release(name));
    writes(&a, 0..8).unwrap();
    writes(&b, 0..8).unwrap();
}

#[test]
fn a_claim_that_is_withdrawn_blocks_nobody() {
    let (a, b) = (cache(8), cache(8));
    let handed = Handed::default();
    let held = writes(&a, [0]).unwrap();
    let first = handed.ask("first", (&a, 0), (&b, 0)).unwrap();
    let second = handed.ask("second", (&a, 3), (&b, 0)).unwrap();
    assert!(first.withdraw());
    assert!(!first.withdraw(), "once");
    assert_eq!(handed.names(), ["second"]);
    assert!(!second.withdraw());
    drop(held);
    assert_eq!(handed.names(), ["second"]);
    handed.release("second");
    // A blocking call that waits is woken as well.
    let held = writes(&a, [0]).unwrap();
    let pending = handed.ask("third", (&a, 0), (&b, 1)).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| within(&b, &[], &[1], late()).map(drop));
        assert!(pending.withdraw());
        waiting.join().unwrap().unwrap();
    });
    drop(held);
}
