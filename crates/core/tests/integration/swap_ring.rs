//! The ring of swap-ins, whose two stages fill and empty buffers: its memory, its failures, and its waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{DataDist, End};
use llm_datadist_core::testing::device::{self, Copier, Copy, HostReach};
use llm_datadist_core::testing::memory::Region;
use llm_datadist_core::testing::memory::kernels::Kernel;
use llm_datadist_core::{CacheKind, Error, ErrorKind, Placement};
use llm_datadist_testing::SimDevice;

use crate::fixtures::{Gated, Own, config, copied_bytes, desc, end, engine_on, patterned, same_rows};
use CacheKind::Blocks;
use Placement::{Device, Host};

const BLOCK: usize = 4096;

/// A host cache with patterns.
fn patterned_host(tensors: u32, rows: usize, row_bytes: usize) -> Own {
    let cache = Own::loose(&desc(Host, tensors, rows, row_bytes), Blocks);
    cache.write(&patterned(1, tensors as usize, rows * row_bytes));
    cache
}

/// Returns whether swapping these rows in from `device` restores their bytes in `host`.
fn swap_in_restores_rows(engine: &DataDist, device: &End, host: &Own, pairs: &[(i64, i64)]) -> bool {
    let geometry = host.cache.geometry();
    let (rows, row_bytes) = (geometry.rows() as usize, geometry.row_bytes() as usize);
    let back = Own::loose(&desc(Host, geometry.num_tensors(), rows, row_bytes), Blocks);
    engine.swap_blocks(device, &back.end(), pairs).run().unwrap();
    back.read() == host.read()
}

#[test]
fn the_failure_of_either_stage_fails_the_call() {
    let sim = Arc::new(SimDevice::new(HostReach::Staged));
    let engine = engine_on(config(16 << 20), sim.clone());
    let host = patterned_host(2, 24, BLOCK);
    let device = engine.allocate(&desc(Device, 2, 24, BLOCK), Blocks, &[]).unwrap();
    // 48 blocks, each filled and emptied: whichever stage makes the n-th copy fails.
    for copies in 0..95 {
        sim.fail_after(copies);
        let error = engine.swap_blocks(&host.end(), &end(&device), &same_rows(24)).run().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System, "{error}");
        assert!(error.to_string().contains("failed as requested"), "after {copies}: {error}");
        assert!(copied_bytes(&error).0 < 2 * 24 * BLOCK as u64);
    }
    sim.fail_after(u64::MAX);
    engine.swap_blocks(&host.end(), &end(&device), &same_rows(24)).run().unwrap();
    assert!(swap_in_restores_rows(&engine, &end(&device), &host, &same_rows(24)));
    let stats = engine.stats();
    assert_eq!((stats.swap_in_ring, stats.swap_in_direct, stats.ring_bytes), (1, 0, 4 * BLOCK as u64));
}

#[test]
fn the_ring_is_kept_and_grows() {
    let engine = engine_on(config(64 << 20), Arc::new(SimDevice::new(HostReach::Staged)));
    assert_eq!(engine.stats().ring_bytes, 0, "no call has needed it yet");
    for (block, ring) in
        [(4096, 4 * 4096), (4096, 4 * 4096), (1000, 4 * 4096), (1 << 20, 4 << 20), (7, 4 << 20)]
    {
        let host = patterned_host(3, 6, block);
        let device = engine.allocate(&desc(Device, 3, 6, block), Blocks, &[]).unwrap();
        engine.swap_blocks(&host.end(), &end(&device), &same_rows(6)).run().unwrap();
        assert_eq!(engine.stats().ring_bytes, ring, "{block}");
        assert!(swap_in_restores_rows(&engine, &end(&device), &host, &same_rows(6)));
        engine.deallocate(device.id()).unwrap();
    }
}

/// An engine on a [`Gated`] device, with a host cache and a device cache of 64 blocks.
fn gated(timeout: Duration) -> (Arc<Gated>, DataDist, [End; 2]) {
    let device = Gated::new(HostReach::Staged);
    let mut config = config(64 << 20);
    (config.copy_workers, config.sync_timeout) = (Some(2), timeout);
    let engine = engine_on(config, device.clone());
    let ends = [Host, Device]
        .map(|placement| end(&engine.allocate(&desc(placement, 1, 64, 64 << 10), Blocks, &[]).unwrap()));
    (device, engine, ends)
}

#[test]
fn a_ring_that_cannot_be_allocated_fails_that_call_only() {
    let (device, engine, [host, remote]) = gated(Duration::from_secs(60));
    device.no_memory.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        let error = engine.swap_blocks(&host, &remote, &[(0, 0)]).run().unwrap_err();
        assert_eq!((error.kind(), copied_bytes(&error)), (ErrorKind::OutOfMemory, (0, 64 << 10)));
    }
    device.no_memory.store(false, Ordering::SeqCst);
    engine.swap_blocks(&host, &remote, &[(0, 0)]).run().unwrap();
}

#[test]
fn without_threads_the_caller_also_empties_the_ring() {
    let engine = engine_on(config(16 << 20), Arc::new(SimDevice::new(HostReach::Staged)));
    let host = patterned_host(2, 24, BLOCK);
    let device = engine.allocate(&desc(Device, 2, 24, BLOCK), Blocks, &[]).unwrap();
    engine.refuse_copy_threads(true);
    engine.swap_blocks(&host.end(), &end(&device), &same_rows(24)).run().unwrap();
    assert!(swap_in_restores_rows(&engine, &end(&device), &host, &same_rows(24)));
    assert_eq!(engine.stats().swap_in_ring, 1);
}

#[test]
fn a_swap_in_that_waits_for_the_ring_ends_at_its_limit() {
    let (device, engine, [host, remote]) = gated(Duration::from_secs(2));
    device.shut();
    thread::scope(|scope| {
        let first = scope.spawn(|| engine.swap_blocks(&host, &remote, &[(0, 0)]).run());
        device.wait_for(1);
        // It names other blocks, so that it waits for the ring alone.
        let error = engine.swap_blocks(&host, &remote, &[(1, 1)]).run().unwrap_err();
        assert_eq!((error.kind(), copied_bytes(&error)), (ErrorKind::Timeout, (0, 64 << 10)));
        assert!(error.to_string().contains("swap-in ring"), "{error}");
        device.open();
        let _ = first.join().unwrap();
    });
    engine.swap_blocks(&host, &remote, &[(1, 1)]).run().unwrap();
}

/// A device whose copies sometimes pause for so long that an idle worker falls asleep.
#[derive(Debug)]
struct Uneven(SimDevice, AtomicU64);

impl device::Device for Uneven {
    fn allocate(&self, name: &str, len: u64) -> Result<Region, Error> {
        self.0.allocate(name, len)
    }

    fn host_reach(&self) -> HostReach {
        self.0.host_reach()
    }
}

impl Copier for Uneven {
    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<(), Error> {
        let round = self.1.fetch_add(1, Ordering::SeqCst).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60;
        if round < 3 {
            thread::sleep(Duration::from_micros(20 << round));
        }
        self.0.copy(batch, kernel)
    }
}

#[test]
fn copies_that_pause_pass_the_ring() {
    const ROWS: i64 = 1500;
    let device = Uneven(SimDevice::new(HostReach::Staged), AtomicU64::new(0));
    let engine = engine_on(config(16 << 20), Arc::new(device));
    let host = patterned_host(2, ROWS as usize, 96);
    let device = engine.allocate(&desc(Device, 2, ROWS as usize, 96), Blocks, &[]).unwrap();
    // No row joins its neighbour, so that each takes a buffer of its own; 13 and 1,500 are coprime.
    let pairs: Vec<(i64, i64)> = (0..ROWS).map(|row| (row, row * 13 % ROWS)).collect();
    let back: Vec<(i64, i64)> = pairs.iter().map(|&(from, to)| (to, from)).collect();
    for _ in 0..2 {
        engine.swap_blocks(&host.end(), &end(&device), &pairs).run().unwrap();
        // Short calls as well, whose stages end at once.
        for pairs in pairs.chunks(7).take(50) {
            engine.swap_blocks(&host.end(), &end(&device), pairs).run().unwrap();
        }
    }
    assert_eq!(engine.stats().swap_in_ring, 2 * 51);
    assert!(swap_in_restores_rows(&engine, &end(&device), &host, &back));
}
