//! The pin protocol under loom: every order of two or three threads over two caches.
//!
//! `RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=2 cargo test -p llm-datadist-core --test rust --target-dir target/loom`.
//! Loom's clock stands still, so a call that waits for ever is a deadlock that loom reports.
#![allow(unsafe_code, reason = "adopts addresses that nobody touches")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering as Std};
use std::time::Duration;

use llm_datadist_core::testing::cache::pin;
use llm_datadist_core::{Adopted, Cache, CacheDesc, CacheKind, DataType, Deadline, Placement};
use loom::sync::atomic::{AtomicI64, Ordering};
use loom::thread;

fn cache() -> Arc<Cache> {
    let desc = CacheDesc {
        num_tensors: 1,
        shape: vec![2, 1],
        data_type: DataType::Uint8,
        placement: Placement::Host,
    };
    // SAFETY: no byte of it is ever copied.
    Cache::loose(unsafe { Adopted::new(&desc, CacheKind::Blocks, &[4096]) }.unwrap())
}

fn remote() -> Deadline {
    Deadline::after(Duration::from_secs(3600))
}

/// Runs `model` under loom and makes sure that it looked at several orders.
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

/// Row 0 of a cache as its users see it: readers, or −1.
struct Row(AtomicI64);

impl Row {
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
        let (cache, row) = (cache(), Arc::new(Row(AtomicI64::new(0))));
        let threads: Vec<_> = [false, true]
            .into_iter()
            .map(|write| {
                let (cache, row) = (cache.clone(), row.clone());
                thread::spawn(move || {
                    let (reads, writes) = if write { (vec![], vec![0]) } else { (vec![0], vec![]) };
                    let pins = pin((&cache, reads), (&cache, writes), remote()).unwrap();
                    if write {
                        row.write()
                    } else {
                        row.read()
                    }
                    drop(pins);
                })
            })
            .collect();
        let pins = pin((&cache, vec![1]), (&cache, vec![0]), remote()).unwrap();
        row.write();
        drop(pins);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn two_caches_in_opposite_order() {
    explore(|| {
        let (a, b) = (cache(), cache());
        let (row_a, row_b) = (Arc::new(Row(AtomicI64::new(0))), Arc::new(Row(AtomicI64::new(0))));
        let other = {
            let (a, b, row_a, row_b) = (a.clone(), b.clone(), row_a.clone(), row_b.clone());
            thread::spawn(move || {
                let pins = pin((&a, vec![0]), (&b, vec![0]), remote()).unwrap();
                (row_a.read(), row_b.write());
                drop(pins);
            })
        };
        let pins = pin((&b, vec![0]), (&a, vec![0]), remote()).unwrap();
        (row_b.read(), row_a.write());
        drop(pins);
        other.join().unwrap();
    });
}

#[test]
fn nobody_who_waits_is_forgotten() {
    explore(|| {
        let cache = cache();
        let held = pin((&cache, vec![]), (&cache, vec![0]), remote()).unwrap();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let cache = cache.clone();
                thread::spawn(move || drop(pin((&cache, vec![0]), (&cache, vec![1]), remote()).unwrap()))
            })
            .collect();
        drop(held);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
