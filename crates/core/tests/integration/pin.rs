//! Pins: many readers or one writer of a row, until the deadline, without circles.
//!
//! The protocol itself is also run under loom (`loom_pin.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use llm_datadist_core::testing::cache::{Pin, pin, pin_reads_for, pin_writes};
use llm_datadist_core::{Cache, CacheKind, Deadline, ErrorKind, Placement};

use crate::bed::{adopt, desc};

/// A cache whose memory nobody touches.
fn cache(rows: usize) -> Arc<Cache> {
    Cache::loose(adopt(&desc(Placement::Host, 1, rows, 1), CacheKind::Blocks, &[4096]))
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(30))
}

fn remote() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

type Pins = [Option<Pin>; 2];

fn within(
    cache: &Arc<Cache>,
    reads: &[u64],
    writes: &[u64],
    deadline: Deadline,
) -> Result<Pins, llm_datadist_core::Error> {
    pin((cache, reads.to_vec()), (cache, writes.to_vec()), deadline)
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    let cache = cache(16);
    let readers: Vec<Pins> = (0..50).map(|_| within(&cache, &[3, 4, 3], &[], soon()).unwrap()).collect();
    let error = within(&cache, &[], &[4], soon()).unwrap_err();
    assert_eq!(
        (error.kind(), error.fact("row"), error.fact("cache_id")),
        (ErrorKind::Timeout, Some("4"), Some("-1"))
    );
    assert_eq!(error.fact("limit_ms"), Some("30"));
    let writer = within(&cache, &[], &[5], soon()).unwrap();
    assert!(within(&cache, &[5], &[], soon()).is_err());
    assert!(within(&cache, &[], &[5], soon()).is_err());
    drop(readers);
    let also = within(&cache, &[], &[3, 4], soon()).unwrap();
    assert!(within(&cache, &[1, 2, 3], &[], soon()).is_err());
    drop((writer, also));
    drop(within(&cache, &[], &(0..16).collect::<Vec<_>>(), soon()).unwrap());
}

#[test]
fn a_refused_call_holds_nothing() {
    let (a, b) = (cache(8), cache(8));
    let held = within(&b, &[], &[7], soon()).unwrap();
    for _ in 0..3 {
        assert!(pin((&a, vec![1, 2]), (&b, vec![0, 7]), soon()).is_err());
        assert!(pin((&b, vec![0, 7]), (&a, vec![1, 2]), soon()).is_err());
    }
    drop(within(&a, &[], &(0..8).collect::<Vec<_>>(), soon()).expect("nothing of a is held"));
    drop(within(&b, &[], &(0..7).collect::<Vec<_>>(), soon()).expect("only row 7 of b is held"));
    drop(held);
    drop(within(&b, &[], &(0..8).collect::<Vec<_>>(), soon()).unwrap());
}

#[test]
fn one_call_may_read_and_write_the_same_row() {
    let cache = cache(8);
    for (reads, writes) in [(vec![2], vec![2]), (vec![0, 1, 2, 2], vec![1, 2, 3, 3])] {
        let pins = within(&cache, &reads, &writes, soon()).unwrap();
        assert!(pins[0].is_some() && pins[1].is_none());
        assert!(Arc::ptr_eq(pins[0].as_ref().unwrap().cache(), &cache));
        assert!(within(&cache, &[2], &[], soon()).is_err());
        drop(pins);
        drop(within(&cache, &[], &(0..8).collect::<Vec<_>>(), soon()).expect("all rows are free again"));
    }
}

#[test]
fn a_free_row_is_had_even_if_the_deadline_has_passed() {
    let cache = cache(8);
    let passed = Deadline::after(Duration::ZERO);
    assert!(passed.passed());
    drop(within(&cache, &[1], &[2], passed).unwrap());
}

#[test]
fn rows_beyond_a_million_share_numbers() {
    // 3 · 2^20 rows: four neighbours share a number.
    let rows = 3u64 << 20;
    let cache = cache(rows as usize);
    let held = within(&cache, &[], &[0, rows - 1], soon()).unwrap();
    assert!(within(&cache, &[1], &[], soon()).is_err(), "shares a number with row 0");
    assert!(within(&cache, &[], &[rows - 2], soon()).is_err());
    drop(within(&cache, &[8, rows / 2], &[16, rows - 9], soon()).unwrap());
    drop(held);
    // Row 0 read and row 1 written by one call: one number in both lists.
    let both = within(&cache, &[0, 1, 2], &[1, 3], soon()).unwrap();
    assert!(within(&cache, &[0], &[], soon()).is_err());
    drop(both);
    let readers =
        [within(&cache, &[0, 1], &[], soon()).unwrap(), within(&cache, &[2, 3], &[], soon()).unwrap()];
    drop(readers);
    drop(within(&cache, &[], &[0, 1, 2, 3, rows - 1], soon()).unwrap());
    // As many rows as a cache can have: the table of pins stays small.
    let huge = Cache::loose(adopt(&desc(Placement::Host, 1, 1 << 60, 1), CacheKind::Blocks, &[4096]));
    let held = within(&huge, &[], &[0, (1 << 60) - 1], soon()).unwrap();
    assert!(within(&huge, &[(1 << 60) - 1], &[], soon()).is_err());
    drop(held);
}

#[test]
fn exclusion_holds_under_many_threads() {
    // Per row: the number of readers, or −1 for a writer, kept by the threads themselves.
    let cache = cache(6);
    let rows: Vec<AtomicI64> = (0..6).map(|_| AtomicI64::new(0)).collect();
    let checked = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (cache, rows, checked) = (&cache, &rows, &checked);
            scope.spawn(move || {
                for round in 0..400 {
                    let (read, write) = ((thread + round) % 6, (thread * 5 + round * round) % 6);
                    let pins = within(cache, &[read, (read + 1) % 6], &[write], remote()).unwrap();
                    assert_eq!(rows[write as usize].swap(-1, Ordering::SeqCst), 0, "somebody is there");
                    for row in [read, (read + 1) % 6] {
                        assert!(row == write || rows[row as usize].fetch_add(1, Ordering::SeqCst) >= 0);
                    }
                    std::thread::yield_now();
                    for row in [read, (read + 1) % 6] {
                        assert!(row == write || rows[row as usize].fetch_sub(1, Ordering::SeqCst) > 0);
                    }
                    assert_eq!(rows[write as usize].swap(0, Ordering::SeqCst), -1);
                    drop(pins);
                    checked.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(checked.load(Ordering::Relaxed), 8 * 400);
    drop(within(&cache, &[], &(0..6).collect::<Vec<_>>(), soon()).expect("all is free in the end"));
}

#[test]
fn two_caches_in_opposite_order_never_wait_in_a_circle() {
    let (a, b) = (cache(2), cache(2));
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (a, b, done) = (&a, &b, &done);
            scope.spawn(move || {
                let (src, dst) = if thread % 2 == 0 { (a, b) } else { (b, a) };
                for _ in 0..500 {
                    drop(pin((src, vec![0, 1]), (dst, vec![0, 1]), remote()).unwrap());
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.load(Ordering::Relaxed), 8 * 500);
}

#[test]
fn a_waiting_call_goes_on_as_soon_as_the_row_is_free() {
    let cache = cache(4);
    let held = within(&cache, &[], &[1], soon()).unwrap();
    let got = std::thread::scope(|scope| {
        let waiting: Vec<_> =
            (0..6).map(|_| scope.spawn(|| within(&cache, &[1], &[], remote()).is_ok())).collect();
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
        waiting.into_iter().map(|thread| thread.join().unwrap()).filter(|ok| *ok).count()
    });
    assert_eq!(got, 6);
}

#[test]
fn later_readers_wait_behind_a_waiting_writer() {
    let cache = cache(4);
    let first = within(&cache, &[1], &[], soon()).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| within(&cache, &[], &[1], remote()).map(drop));
        // Until the writer waits, readers still get in; from then on none does.
        let brief = || Deadline::after(Duration::from_millis(5));
        let given_up = Deadline::after(Duration::from_secs(20));
        while within(&cache, &[1], &[], brief()).is_ok() {
            assert!(!given_up.passed(), "readers kept overtaking the writer");
            std::thread::yield_now();
        }
        assert!(!writer.is_finished());
        drop(within(&cache, &[2], &[3], soon()).expect("other rows are free"));
        drop(first);
        writer.join().unwrap().expect("the writer comes next");
    });
    drop(within(&cache, &[1], &[], soon()).unwrap());
}

/// A peer that this side has written reads past a writer that only waits, and the writer still gets its turn; no other peer
/// does, and nobody reads past one that writes.
#[test]
fn a_read_ahead_passes_only_writers_that_wait() {
    let cache = cache(4);
    let first = within(&cache, &[1], &[], soon()).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| pin_writes(&cache, vec![1], remote()));
        // Until the writer waits, readers still get in.
        let brief = || Deadline::after(Duration::from_millis(5));
        let given_up = Deadline::after(Duration::from_secs(20));
        while pin_reads_for(&cache, vec![1], false, brief()).is_ok() {
            assert!(!given_up.passed(), "a read that is not ahead passes a writer that waits");
            std::thread::yield_now();
        }
        let behind = pin_reads_for(&cache, vec![0, 1], false, soon()).unwrap_err();
        assert_eq!((behind.kind(), behind.fact("row")), (ErrorKind::Timeout, Some("1")));
        let ahead = pin_reads_for(&cache, vec![0, 1], true, soon()).expect("the writer only waits");
        // Both read: the first of them to go does not let the writer in.
        drop(first);
        assert!(pin_reads_for(&cache, vec![1], false, soon()).is_err() && !writer.is_finished());
        drop(ahead);
        let writing = writer.join().unwrap().expect("the writer comes next");
        for ahead in [false, true] {
            let held = pin_reads_for(&cache, vec![2, 1], ahead, soon()).unwrap_err();
            assert_eq!((held.kind(), held.fact("row")), (ErrorKind::Timeout, Some("1")), "ahead: {ahead}");
            drop(pin_reads_for(&cache, vec![0, 2], ahead, soon()).expect("nobody is at these"));
        }
        drop(writing);
    });
    for ahead in [false, true] {
        drop(pin_reads_for(&cache, vec![1], ahead, soon()).expect("all is free"));
    }
    drop(within(&cache, &[], &[0, 1, 2, 3], soon()).expect("nothing is left behind"));
}

#[test]
fn a_call_that_gave_up_is_in_nobodys_way() {
    let cache = cache(4);
    let reader = within(&cache, &[1], &[], soon()).unwrap();
    within(&cache, &[], &[0, 1], soon()).unwrap_err();
    drop(within(&cache, &[0, 1], &[2], soon()).expect("nobody waits any more"));
    // Nor in the way of one that came while it waited.
    std::thread::scope(|scope| {
        let writer =
            scope.spawn(|| within(&cache, &[], &[1], Deadline::after(Duration::from_millis(300))).map(drop));
        let behind = scope.spawn(|| within(&cache, &[1], &[], remote()).map(drop));
        writer.join().unwrap().unwrap_err();
        behind.join().unwrap().unwrap();
    });
    drop(reader);
}
