//! Lifetimes of caches, keys and memory: ids, and releases while the memory is in use.
//!
//! `remote_table.rs` compares random calls of the table with a naive twin.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::{CacheKey, Config, CopyArgs, DataDist, End, SwapInPath};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::testing::tensors;
use llm_datadist_core::{CacheId, CacheKind, Deadline, ErrorKind, Placement};
use llm_datadist_testing::SimDevice;

use crate::fixtures::{Gated, Own, adopt, config, desc, engine_on, pin_reads, pin_writes};
use CacheKind::{Batch, Blocks};
use Placement::{Device, Host};

fn request(model: u64, id: u64) -> CacheKey {
    CacheKey::Request { model, id }
}

fn used(engine: &DataDist) -> u64 {
    engine.stats().device_pool.unwrap().pool.used_bytes
}

#[test]
fn keys_and_ids() {
    assert_eq!(CacheKey::new(u64::MAX, u64::MAX, 0), None);
    assert_eq!(CacheKey::new(5, u64::MAX, 1), Some(request(1, 5)));
    assert_eq!(CacheKey::new(u64::MAX, 5, 1), Some(CacheKey::Prefix { model: 1, id: 5 }));
    let engine = DataDist::open(config(2 << 16)).unwrap();
    let allocate = |tensors| engine.allocate(&desc(Device, tensors, 4, 8), Batch, &[Some(request(0, 1))]);
    assert_eq!(allocate(1).unwrap().id(), CacheId(1));
    let taken = allocate(1).unwrap_err();
    assert_eq!((taken.kind(), taken.fact("cache_id")), (ErrorKind::KeyTaken, Some("1")));
    assert_eq!(used(&engine), 1 << 16, "a refused call returns its memory");
    assert_eq!(allocate(2).unwrap_err().kind(), ErrorKind::OutOfMemory, "memory comes before keys");
    engine.deallocate(CacheId(1)).unwrap();
    engine.remove_key(request(0, 1)).unwrap();
    assert_eq!((used(&engine), allocate(2).unwrap().id()), (0, CacheId(2)));
}

/// A second call must not report success while the memory is still in use.
#[test]
fn unregister_waits_each_time_while_the_cache_is_in_use() {
    let config = Config { sync_timeout: Duration::from_millis(20), ..config(1 << 16) };
    let engine = DataDist::open(config).unwrap();
    let long = || Deadline::after(Duration::from_secs(9));
    for pin in [pin_reads, pin_writes] {
        let register = |adopted| engine.register(adopted, &[], Some(true)).unwrap();
        let own = Own::new(&desc(Host, 1, 4, 8), Batch, register);
        let id = own.cache.id();
        let pinned = pin(&own.cache, vec![2], long()).unwrap();
        for _ in 0..3 {
            let error = engine.unregister(id).unwrap_err();
            assert_eq!((error.kind(), error.fact("cache_id")), (ErrorKind::Timeout, Some(&*id.to_string())));
            assert_eq!(engine.find(id).unwrap_err().kind(), ErrorKind::CacheNotFound, "it left at once");
            let late = pin(&own.cache, vec![1], long()).unwrap_err();
            assert_eq!(late.kind(), ErrorKind::CacheNotFound, "nor does it admit a call that had found it");
        }
        drop(pinned);
        engine.unregister(id).unwrap();
        engine.unregister(id).unwrap();
    }
    assert_eq!(engine.stats().table.caches, 0);
}

/// What registered memory belongs to is kept by each reference to the cache, and by nothing else.
#[test]
fn the_owner_of_registered_memory_is_kept_as_long_as_the_cache() {
    let engine = DataDist::open(config(1 << 16)).unwrap();
    let owner = Arc::new(());
    let own = Own::new(&desc(Host, 1, 4, 8), Batch, |adopted| {
        engine.register(adopted.owned_by(owner.clone()), &[], Some(true)).unwrap()
    });
    let view = own.cache.clone();
    engine.unregister(view.id()).unwrap();
    assert_eq!(Arc::strong_count(&owner), 2, "the cache is still in use");
    drop(own);
    assert_eq!(Arc::strong_count(&owner), 2, "a view is left");
    drop(view);
    assert_eq!(Arc::strong_count(&owner), 1, "the last view is gone");
    let refused = adopt(&desc(Host, 1, 4, 8), Blocks, &[4096]).owned_by(owner.clone());
    engine.register_named("", refused, true).unwrap_err();
    assert_eq!(Arc::strong_count(&owner), 1, "a refused call keeps nothing");
}

#[test]
fn memory_released_during_a_copy_returns_when_the_copy_ends() {
    for (kind, key) in [(Blocks, None), (Batch, None), (Batch, Some(request(0, 1)))] {
        let device = Gated::new(HostReach::Direct);
        let engine = engine_on(config(1 << 20), device.clone());
        let id = engine.allocate(&desc(Device, 1, 4, 64), kind, &[key]).unwrap().id();
        let end = End::Managed(id);
        device.shut();
        std::thread::scope(|scope| {
            let copy = scope.spawn(|| match kind {
                Blocks => engine.copy_blocks(&end, &[(0, 1)]).run(),
                Batch => {
                    let args = CopyArgs { dst_batch_index: 1, src_batch_index: 0, offset: 0, size: -1 };
                    engine.copy_cache(&end, &end, args).run()
                }
            });
            device.wait_for(1);
            engine.deallocate(id).unwrap();
            key.into_iter().for_each(|key| engine.remove_key(key).unwrap());
            assert!(engine.find(id).is_err());
            // No other cache gets the memory: 15 of the 16 pages are free.
            assert_eq!(used(&engine), 1 << 16);
            let all = engine.allocate(&desc(Device, 16, 1, 8), Batch, &[]);
            assert_eq!(all.unwrap_err().kind(), ErrorKind::OutOfMemory);
            device.open();
            copy.join().unwrap().unwrap();
        });
        assert_eq!(used(&engine), 0);
        assert_eq!(engine.copy_blocks(&end, &[(0, 1)]).run().unwrap_err().kind(), ErrorKind::CacheNotFound);
    }
}

/// Copies of several units on several workers, and the ring, keep no reference after the call.
#[test]
fn memory_is_free_when_the_call_returns() {
    for (reach, swap_in) in [(HostReach::Direct, SwapInPath::Direct), (HostReach::Staged, SwapInPath::Ring)] {
        let config = Config { copy_workers: Some(4), swap_in, ..config(16 << 20) };
        let engine = engine_on(config, Arc::new(SimDevice::new(reach)));
        let own = Own::loose(&desc(Host, 2, 64, 40_000), Blocks);
        let rows: Vec<_> = (0..64).map(|row| (row, 63 - row)).collect();
        for _ in 0..60 {
            let id = engine.allocate(&desc(Device, 2, 64, 40_000), Blocks, &[]).unwrap().id();
            engine.swap_blocks(&End::Loose(own.cache.clone()), &End::Managed(id), &rows).run().unwrap();
            engine.swap_blocks(&End::Managed(id), &End::Loose(own.cache.clone()), &rows).run().unwrap();
            engine.deallocate(id).unwrap();
            assert_eq!(used(&engine), 0);
        }
        assert_eq!(Arc::strong_count(tensors(&own.cache)), 1, "the caller's memory is still referenced");
    }
}
