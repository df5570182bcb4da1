//! The pin protocol under loom: every order of two or three threads over two caches.
//!
//! `make loom` runs it. Loom's clock does not move, so it reports a call that waits forever as a deadlock.
#![cfg(loom)]
#![allow(unsafe_code, reason = "adopts addresses that nobody touches")]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering as Std};
use std::time::Duration;

use llm_datadist_core::bindings::Cache;
use llm_datadist_core::testing::cache::{CallRows, RowUse};
use llm_datadist_core::{Adopted, CacheDesc, CacheKind, DataType, Deadline, Placement};
use loom::sync::atomic::{AtomicI64, Ordering};
use loom::thread;

fn cache() -> Arc<Cache> {
    let (shape, data_type, placement) = (vec![2, 1], DataType::Uint8, Placement::Host);
    let desc = CacheDesc { num_tensors: 1, shape, data_type, placement, row_stride: None, kv_layout: None };
    // SAFETY: no byte of it is ever copied.
    Cache::loose(unsafe { Adopted::new(&desc, CacheKind::Blocks, &[4096]) }.unwrap())
}

/// Pins rows of both caches, which may be one, and runs `body`.
fn pinned(reads: (&Arc<Cache>, &[u64]), writes: (&Arc<Cache>, &[u64]), body: impl FnOnce()) {
    let deadline = Deadline::after(Duration::from_secs(3600));
    let rows = CallRows::copy((reads.0.clone(), reads.1.into()), (writes.0.clone(), writes.1.into()));
    let pins = rows.pin(deadline).unwrap();
    body();
    drop(pins);
}

/// Runs `model` under loom, and checks that it explored several orders.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let ran = Arc::new(AtomicU64::new(0));
    let counted = ran.clone();
    loom::model(move || {
        counted.fetch_add(1, Std::Relaxed);
        model();
    });
    let ran = ran.load(Std::Relaxed);
    eprintln!("{ran} orders");
    assert!(ran > 3, "loom looked at {ran} orders");
}

/// The users of row 0 of a cache: the number of readers, or −1.
#[derive(Clone)]
struct Row(Arc<AtomicI64>);

impl Row {
    fn new() -> Row {
        Row(Arc::new(AtomicI64::new(0)))
    }

    fn read(&self) {
        assert!(self.0.fetch_add(1, Ordering::SeqCst) >= 0, "a writer is there");
        thread::yield_now();
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    fn write(&self) {
        assert_eq!(self.0.swap(-1, Ordering::SeqCst), 0, "somebody is there");
        thread::yield_now();
        assert_eq!(self.0.swap(0, Ordering::SeqCst), -1);
    }
}

#[test]
fn a_writer_is_alone() {
    explore(|| {
        let (cache, row) = (cache(), Row::new());
        let spawn = |reads: bool| {
            let (cache, row) = (cache.clone(), row.clone());
            thread::spawn(move || match reads {
                true => pinned((&cache, &[0]), (&cache, &[]), || row.read()),
                false => pinned((&cache, &[]), (&cache, &[0]), || row.write()),
            })
        };
        let threads = [true, false].map(spawn);
        pinned((&cache, &[1]), (&cache, &[0]), || row.write());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn two_caches_in_opposite_order() {
    explore(|| {
        let here = [(cache(), Row::new()), (cache(), Row::new())];
        let [(a, row_a), (b, row_b)] = here.clone();
        let other = thread::spawn(move || {
            pinned((&a, &[0]), (&b, &[0]), || (row_a.read(), row_b.write()).1);
        });
        let [(a, row_a), (b, row_b)] = here;
        pinned((&b, &[0]), (&a, &[0]), || (row_b.read(), row_a.write()).1);
        other.join().unwrap();
    });
}

#[test]
fn every_waiting_call_is_woken() {
    explore(|| {
        let cache = cache();
        let rows = CallRows::of(cache.clone(), RowUse { writes: [0].into(), ..RowUse::default() });
        let held = rows.pin(Deadline::after(Duration::from_secs(3600))).unwrap();
        let spawn = |_| {
            let cache = cache.clone();
            thread::spawn(move || pinned((&cache, &[0]), (&cache, &[1]), || ()))
        };
        let threads = [0, 1].map(spawn);
        drop(held);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// A call that waits without a thread is told that its rows are free, whatever happens at the same time.
#[test]
fn a_call_without_a_thread_gets_its_turn() {
    explore(|| {
        let (cache, other, row) = (cache(), cache(), Row::new());
        let hour = || Deadline::after(Duration::from_secs(3600));
        let rows = || RowUse { writes: [0].into(), ..RowUse::default() };
        let held = CallRows::of(cache.clone(), rows()).pin(hour()).unwrap();
        let (told, peer) = (Arc::new(AtomicI64::new(0)), cache.clone());
        let tell = told.clone();
        let of_both = CallRows::copy((other, [0].into()), (cache.clone(), [0].into()));
        let on_ready = Arc::new(move || _ = tell.fetch_add(1, Ordering::SeqCst));
        let waiting = of_both.enter(false, Some(on_ready)).unwrap();
        let used = row.clone();
        let peer = thread::spawn(move || {
            let pin = CallRows::of(peer, rows()).pin_for_peer(hour(), || true).unwrap();
            used.write();
            drop(pin);
        });
        drop(held);
        let pin = waiting.pin(hour()).unwrap();
        row.write();
        drop(pin);
        peer.join().unwrap();
        assert!(told.load(Ordering::SeqCst) > 0, "nobody told it");
    });
}
