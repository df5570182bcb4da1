//! Copies on a device that fails or panics, and by many threads at once.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{Config, DataDist, SwapInPath};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{CacheKind, ErrorKind, Placement, Snapshot};
use llm_datadist_testing::SimDevice;

use crate::arguments::refused_as;
use crate::fixtures::{Gated, Own, config, copied_bytes, desc, end, engine_on, same_rows};
use CacheKind::Blocks;
use Placement::{Device, Host};

const ROW: usize = 64 << 10;

/// Pairs of which no two merge, so that each block is a copy of its own.
fn scattered(rows: i64) -> Vec<(i64, i64)> {
    let mut targets = HashSet::new();
    (0..rows)
        .map(|row| (row, rows + (row * row * 7 + row * 3) % rows))
        .filter(|(_, to)| targets.insert(*to))
        .collect()
}

/// Returns the memory and the tables of an engine, without the counters of calls.
fn resources(stats: &Snapshot) -> (u64, u64, u64, u64, u64) {
    let (device, host) = (stats.device_pool.unwrap().pool, stats.host_pool.unwrap().pool);
    (device.used_bytes, device.used_ranges, host.used_bytes, stats.table.caches, stats.table.keys)
}

#[test]
fn a_failed_copy_says_how_far_it_got_and_holds_nothing() {
    const BLOCK: u64 = 16 << 10;
    for workers in [1, 4] {
        let sim = Arc::new(SimDevice::new(HostReach::Direct));
        let engine = engine_on(Config { copy_workers: Some(workers), ..config(64 << 20) }, sim.clone());
        let cache = engine.allocate(&desc(Device, 4, 512, BLOCK as usize), Blocks, &[]).unwrap();
        let pairs = scattered(100);
        let all = pairs.len() as u64 * 4 * BLOCK;
        let before = resources(&engine.stats());
        for allowed in [0, 1, 60, pairs.len() as u64 * 4 - 1] {
            sim.fail_after(allowed);
            let earlier = sim.copies();
            let failed = engine.copy_blocks(&end(&cache), &pairs).run();
            let made = sim.copies() - earlier;
            let error = refused_as(ErrorKind::System, failed, &["failed as requested"]);
            let (copied, of) = copied_bytes(&error);
            assert_eq!(of, all);
            assert!(copied < of && copied <= made * BLOCK, "{error}");
            assert!(made <= allowed, "no copy starts after the failure");
        }
        sim.fail_after(u64::MAX);
        engine.copy_blocks(&end(&cache), &pairs).run().unwrap();
        assert_eq!(resources(&engine.stats()), before);
        let op = engine.stats().ops.into_iter().find(|(name, _)| *name == "copy_blocks").unwrap().1;
        assert_eq!((op.calls, op.failures, op.bytes), (5, 4, all));
        engine.deallocate(cache.id()).unwrap();
        drop(cache);
        assert_eq!(engine.stats().device_pool.unwrap().pool.used_bytes, 0);
    }
}

#[test]
fn a_device_that_panics_on_a_worker_fails_the_call() {
    let device = Gated::new(HostReach::Staged);
    let engine = engine_on(config(64 << 20), device.clone());
    let [host, remote] =
        [Host, Device].map(|placement| engine.allocate(&desc(placement, 1, 64, ROW), Blocks, &[]).unwrap());
    // In the ring. A worker may come too late to take part in a call.
    *device.panics.lock().unwrap() = Some("llm-copy".into());
    let swap_in = || engine.swap_blocks(&end(&host), &end(&remote), &same_rows(20)).run();
    let failed = (0..10_000).map(|_| swap_in()).find(Result::is_err).expect("no worker empties a buffer");
    refused_as(ErrorKind::System, failed, &["panicked"]);
    assert!(device.panics.lock().unwrap().is_none(), "nothing panicked");
    swap_in().unwrap();

    // In a direct copy. The calling thread waits at the gate until a worker has panicked.
    *device.panics.lock().unwrap() = Some("llm-copy".into());
    device.shut();
    thread::scope(|scope| {
        let call = scope.spawn(|| engine.swap_blocks(&end(&remote), &end(&host), &same_rows(64)).run());
        while device.panics.lock().unwrap().is_some() {
            thread::yield_now();
        }
        device.open();
        refused_as(ErrorKind::System, call.join().unwrap(), &["panicked"]);
    });
    engine.swap_blocks(&end(&remote), &end(&host), &same_rows(64)).run().unwrap();
}

#[test]
fn a_panic_on_the_calling_thread_leaves_no_worker_copying() {
    let device = Gated::new(HostReach::Direct);
    let engine = engine_on(config(64 << 20), device.clone());
    let remote = engine.allocate(&desc(Device, 1, 128, ROW), Blocks, &[]).unwrap();
    let pairs: Vec<_> = (0..64).map(|row| (row, 64 + row)).collect();
    device.shut();
    // The caller panics as soon as it enters the device, while a worker waits at the gate.
    *device.panics.lock().unwrap() = Some("caller".into());
    thread::scope(|scope| {
        let caller = thread::Builder::new().name("caller".into());
        let call = caller.spawn_scoped(scope, || {
            let outcome = catch_unwind(AssertUnwindSafe(|| engine.copy_blocks(&end(&remote), &pairs).run()));
            (outcome.map_err(|_| ()), device.inside.load(Ordering::SeqCst))
        });
        device.wait_for(1);
        thread::sleep(Duration::from_millis(100));
        device.open();
        let (outcome, inside) = call.unwrap().join().unwrap();
        assert!(!matches!(outcome, Ok(Ok(()))), "a panic is no success");
        assert_eq!(inside, 0, "workers still copied for a call that had ended");
    });
    engine.copy_blocks(&end(&remote), &pairs).run().expect("no pin is left");
}

/// Blocks 0..8 hold one letter each. Sixteen threads copy letters over blocks 8..16, in fan-outs and chains.
#[test]
fn sixteen_threads_on_the_same_blocks_never_tear_one() {
    const BLOCK: usize = 40_000;
    let host_cache = || Own::loose(&desc(Host, 4, 16, BLOCK), Blocks);
    for swap_in in [SwapInPath::Auto, SwapInPath::Ring] {
        let engine = DataDist::open(Config { swap_in, ..config(64 << 20) }).unwrap();
        let cache = engine.allocate(&desc(Device, 4, 16, BLOCK), Blocks, &[]).unwrap();
        let letters = host_cache();
        let tensor: Vec<u8> = (0..16u8).flat_map(|row| vec![row % 8; BLOCK]).collect();
        letters.write(&vec![tensor; 4]);
        let fill = || engine.swap_blocks(&letters.end(), &end(&cache), &same_rows(16)).run().unwrap();
        fill();
        let check_blocks = || {
            let copy = host_cache();
            engine.swap_blocks(&end(&cache), &copy.end(), &same_rows(16)).run().unwrap();
            let tensors = copy.read();
            for row in 0..16 {
                let letter = tensors[0][row * BLOCK];
                for tensor in &tensors {
                    let block = &tensor[row * BLOCK..][..BLOCK];
                    assert!(block.iter().all(|&byte| byte == letter), "block {row} is torn");
                }
                assert!(letter < 8 && (row >= 8 || usize::from(letter) == row));
            }
        };
        thread::scope(|scope| {
            for number in 0..16i64 {
                let (engine, cache) = (&engine, &cache);
                scope.spawn(move || {
                    for round in 0..20 {
                        let (from, to) = ((number + round) % 8, 8 + (number * 3 + round) % 4);
                        let chain = (to + 4, 8 + (to + 1) % 4);
                        let pairs = [(from, to), (from, to + 4), chain, ((from + 1) % 8, to)];
                        engine.copy_blocks(&end(cache), &pairs).run().unwrap();
                        match round % 10 {
                            4 => fill(),
                            9 => check_blocks(),
                            _ => (),
                        }
                    }
                });
            }
        });
    }
}
