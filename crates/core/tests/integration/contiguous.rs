//! Caches whose tensors are one range of bytes of a pool.
//!
//! Views and peers: `tests/native/test_buffers.py`. Copies: `tests/native/test_strides.py`. Failed allocations: `allocation_failures.rs`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use llm_datadist_core::bindings::{Cache, DataDist};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::testing::memory::{Region, Tensors};
use llm_datadist_core::testing::pool::PoolState;
use llm_datadist_core::{CacheDesc, CacheKind, DataType, ErrorKind, Placement, Result};
use llm_datadist_testing::SimDevice;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::fixtures::{config, contents, desc, engine_on, fill, for_all, patterned, pools};
use CacheKind::{Batch, Blocks};
use Placement::Device;

const PAGE: u64 = 1 << 12;

fn engine(pages: u64) -> DataDist {
    DataDist::open(pools(pages * PAGE, 12)).unwrap()
}

fn pool(engine: &DataDist) -> PoolState {
    engine.stats().device_pool.unwrap().pool
}

fn allocate_contiguous(engine: &DataDist, spec: &CacheDesc) -> Result<Arc<Cache>> {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let name = LAST.fetch_add(1, Ordering::Relaxed).to_string();
    engine.allocate_named(&name, spec, true)
}

/// The address ranges of the tensors.
fn ranges(cache: &Cache) -> Vec<Range<u64>> {
    let bytes = cache.geometry().tensor_bytes();
    cache.addrs().iter().map(|&addr| addr..addr + bytes).collect()
}

#[test]
fn elements_need_no_gap_for_their_alignment() {
    let engine = engine(64);
    for &data_type in DataType::ALL {
        let spec = CacheDesc { data_type, ..desc(Device, 7, 3, 5) };
        let cache = allocate_contiguous(&engine, &spec).unwrap();
        assert!(cache.addrs().iter().all(|addr| addr % data_type.bytes() == 0), "{data_type:?}");
    }
}

#[test]
fn free_runs_that_are_too_short_are_not_joined() {
    let engine = engine(8);
    let caches: Vec<_> =
        (0..8).map(|_| engine.allocate(&desc(Device, 1, 1, 4096), Batch, &[]).unwrap()).collect();
    for cache in caches.iter().step_by(2) {
        engine.deallocate(cache.id()).unwrap();
    }
    drop(caches);
    let before = pool(&engine);
    assert_eq!((before.free_bytes, before.largest_free_run_bytes), (4 * PAGE, PAGE));
    let two_pages = desc(Device, 2, 1, 4096);
    let error = allocate_contiguous(&engine, &two_pages).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    for fact in ["asked_bytes=8192", "free_bytes=16384", "largest_free_run_bytes=4096", "pool=device"] {
        assert!(error.to_string().contains(fact), "{error}");
    }
    assert_eq!(pool(&engine), PoolState { failures: before.failures + 1, ..before });
    engine.allocate(&two_pages, Batch, &[]).unwrap();
    // Together they fill one page.
    allocate_contiguous(&engine, &desc(Device, 64, 1, 64)).unwrap();
}

#[test]
fn a_single_tensor_is_one_range() {
    let single = engine(64).allocate(&desc(Device, 1, 4, 64), Blocks, &[]).unwrap();
    assert_eq!(single.one_range().unwrap(), single.addrs()[0]);
}

#[test]
fn memory_of_a_device_has_no_range_that_the_cpu_addresses() {
    let engine = engine_on(config(1 << 20), Arc::new(SimDevice::new(HostReach::Direct)));
    let cache = allocate_contiguous(&engine, &desc(Device, 2, 1, 64)).unwrap();
    assert_eq!(cache.addrs()[1] - cache.addrs()[0], 64);
    assert_eq!(cache.one_range().unwrap_err().kind(), ErrorKind::NotEnabled);
}

#[test]
fn tensors_outside_their_region_are_refused() {
    let region = Arc::new(Region::shared("test", 1 << 20).unwrap());
    let made = |offset, count, bytes| {
        Tensors::contiguous(region.clone(), offset, count, bytes, ()).map(|made| made.addrs().to_vec())
    };
    assert_eq!(made((1 << 20) - 30, 3, 10).unwrap()[2], region.base() + (1 << 20) - 10);
    for (offset, count, bytes) in [
        ((1 << 20) - 29, 3, 10),
        (0, 2, 1 << 20),
        (1 << 20, 1, 1),
        (0, 3, u64::MAX / 2),
        (u64::MAX, 1, 1),
        (u64::MAX - 5, 4, 2),
    ] {
        assert_eq!(
            made(offset, count, bytes).unwrap_err().kind(),
            ErrorKind::System,
            "{offset} {count} {bytes}"
        );
    }
}

/// Allocations of both kinds, and releases of the cache with an index, in any order.
#[test]
fn live_caches_share_no_byte() {
    let step =
        (any::<bool>(), any::<bool>(), 1..6_u32, 1..9_usize, 1..2000_usize, any::<prop::sample::Index>());
    let run = |steps: Vec<(bool, bool, u32, usize, usize, prop::sample::Index)>| {
        let engine = engine(40);
        let mut live: Vec<(Arc<Cache>, Vec<Vec<u8>>)> = Vec::new();
        for (seed, (contiguous, release, tensors, rows, row_bytes, which)) in steps.into_iter().enumerate() {
            if release && !live.is_empty() {
                let (cache, bytes) = live.swap_remove(which.index(live.len()));
                prop_assert!(contents(&cache) == bytes);
                engine.deallocate(cache.id()).unwrap();
                continue;
            }
            let (spec, before) = (desc(Device, tensors, rows, row_bytes), pool(&engine));
            let allocated = if contiguous {
                allocate_contiguous(&engine, &spec)
            } else {
                engine.allocate(&spec, Blocks, &[])
            };
            match allocated {
                Ok(cache) => {
                    // Tensors that follow one another by chance do not count.
                    let one_range = (contiguous || tensors == 1).then(|| cache.addrs()[0]);
                    prop_assert_eq!(cache.one_range().ok(), one_range);
                    if contiguous {
                        prop_assert!(ranges(&cache).windows(2).all(|two| two[0].end == two[1].start));
                        prop_assert_eq!(pool(&engine).used_ranges, before.used_ranges + 1);
                    }
                    let bytes = patterned(seed as u8, tensors as usize, rows * row_bytes);
                    fill(&cache, &bytes);
                    live.push((cache, bytes));
                }
                Err(error) => {
                    prop_assert_eq!(error.kind(), ErrorKind::OutOfMemory);
                    prop_assert_eq!(pool(&engine), PoolState { failures: before.failures + 1, ..before });
                }
            }
        }
        let mut all: Vec<Range<u64>> = live.iter().flat_map(|(cache, _)| ranges(cache)).collect();
        all.sort_by_key(|range| range.start);
        prop_assert!(all.windows(2).all(|two| two[0].end <= two[1].start));
        prop_assert!(live.iter().all(|(cache, bytes)| contents(cache) == *bytes));
        for (cache, _) in live.drain(..) {
            engine.deallocate(cache.id()).unwrap();
        }
        prop_assert_eq!(pool(&engine).used_bytes, 0);
        Ok(())
    };
    for_all(24, &vec(step, 1..60), run);
}
