//! Counters report what was done. Of durations, only their presence is checked.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::{
    CacheKey, CallExtras, CopyArgs, DataDist, End, GroupMember, Layers, Name, RemoteName, Rows, Side,
    SwapInPath,
};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::testing::memory::kernels::Kernel;
use llm_datadist_core::testing::stats::{BUCKETS, Counters};
use llm_datadist_core::{CacheId, CacheKind, ClusterId, ErrorKind, OpState, Placement};
use llm_datadist_testing::SimDevice;

use crate::fixtures::{Own, adopt, config, desc, engine_on};
use CacheKind::{Batch, Blocks};
use Placement::{Device, Host};

fn ops(engine: &DataDist) -> Vec<(&'static str, u64, u64, u64)> {
    let check = |state: &OpState| {
        assert!(state.max_nanos <= state.total_nanos && state.p50_nanos <= state.p99_nanos);
        assert!(state.p99_nanos <= state.max_nanos, "{state:?}");
        assert_eq!(state.calls == 0, state.p99_nanos == 0);
        assert_eq!(state.buckets.iter().sum::<u64>(), state.calls);
    };
    let all = engine.stats().ops;
    all.into_iter()
        .map(|(name, state)| {
            check(&state);
            (name, state.calls, state.failures, state.bytes)
        })
        .collect()
}

#[test]
fn every_call_is_counted_under_its_name() {
    let engine = DataDist::open(config(4 << 20)).unwrap();
    let args = CopyArgs { dst_batch_index: 0, src_batch_index: 1, offset: 4, size: 10 };
    assert!(ops(&engine).iter().all(|(_, calls, failures, bytes)| calls + failures + bytes == 0));

    let key = CacheKey::Request { model: 0, id: 1 };
    let batch = engine.allocate(&desc(Device, 3, 4, 64), Batch, &[Some(key)]).unwrap();
    let blocks = engine.allocate(&desc(Device, 2, 8, 100), Blocks, &[]).unwrap();
    engine.allocate(&desc(Device, 2, 8, 100), Batch, &[Some(key)]).unwrap_err();
    let own = Own::loose(&desc(Host, 2, 8, 100), Blocks);
    let registered = engine.register(adopt(&desc(Host, 1, 1, 1), Batch, &[4096]), &[], Some(false)).unwrap();
    engine.unregister(registered.id()).unwrap();
    engine.unregister(CacheId(99)).unwrap();

    let (local, slots, remote) =
        (End::Loose(own.cache.clone()), End::Managed(batch.id()), End::Managed(blocks.id()));
    engine.copy_cache(&slots, &slots, args).run().unwrap(); // 3 × 10
    engine.copy_kv_cache(&slots, &slots, args).run().unwrap(); // 3 × 10
    engine.copy_cache(&slots, &slots, CopyArgs { size: 0, ..args }).run().unwrap_err();
    engine.copy_cache(&slots, &End::Managed(CacheId(99)), args).run().unwrap_err();
    engine.copy_blocks(&remote, &[(0, 1), (0, 2), (5, 5)]).run().unwrap(); // 2 × 200, the last moves nothing
    engine.copy_blocks(&remote, &[]).run().unwrap();
    engine.copy_blocks(&remote, &[(8, 0)]).run().unwrap_err();
    engine.copy_blocks(&End::Managed(CacheId(99)), &[]).run().unwrap_err();
    engine.swap_blocks(&local, &remote, &[(0, 1), (1, 1), (7, 0)]).run().unwrap(); // 2 × 200: the first write of block 1 is overwritten
    engine.swap_blocks(&remote, &local, &[(3, 3)]).run().unwrap(); // 200
    engine.swap_blocks(&remote, &local, &[(3, 8)]).run().unwrap_err();
    engine.remove_key(key).unwrap();
    engine.remove_key(key).unwrap();
    engine.deallocate(batch.id()).unwrap();
    engine.deallocate(CacheId(-5)).unwrap();

    let expected = vec![
        ("allocate", 3, 1, 0),
        ("deallocate", 2, 0, 0),
        ("remove_key", 2, 0, 0),
        ("register", 3, 0, 0),
        ("copy_cache", 4, 2, 60),
        ("copy_blocks", 4, 2, 400),
        ("swap_in", 1, 0, 400),
        ("swap_out", 2, 1, 200),
        ("link", 0, 0, 0),
        ("unlink", 0, 0, 0),
        ("pull", 0, 0, 0),
        ("push", 0, 0, 0),
        ("transfer_layer", 0, 0, 0),
        ("served", 0, 0, 0),
    ];
    assert_eq!(ops(&engine), expected);
    let stats = engine.stats();
    assert_eq!((stats.swap_in_direct, stats.swap_in_ring, stats.ring_bytes), (1, 0, 0));
    assert_eq!(
        (stats.plain_bytes, stats.streaming_bytes),
        (60 + 400 + 400 + 200, 0),
        "small copies use plain stores"
    );
    let pool = stats.device_pool.unwrap();
    assert_eq!(pool.pool.used_bytes, 5 * 65_536, "the cache is held by this test until it drops it");
    assert_eq!((stats.table.caches, stats.table.keys), (1, 0));
    drop(batch);
    assert_eq!(engine.stats().device_pool.unwrap().pool.used_bytes, 2 * 65_536);
    assert!(pool.committed_bytes > 0);
}

/// A group that is refused or does not start is not counted, whoever waits for it. Other calls are counted.
#[test]
fn groups_that_do_not_begin_are_not_counted() {
    let mut config = config(1 << 20);
    config.max_transfers = 0;
    let engine = DataDist::open(config).unwrap();
    let blocks = engine.allocate(&desc(Device, 2, 8, 100), Blocks, &[]).unwrap();
    let remote = RemoteName { cluster: ClusterId(77), name: Name::Key(CacheKey::Blocks { model: 1 }) };
    let rows = |block| Rows::Blocks { local: vec![block], remote: vec![0] };
    let local = End::Managed(blocks.id());
    let kind_of_group = |block| {
        let part =
            GroupMember { remote, local: local.clone(), rows: rows(block), layers: Layers::ALL, grant: None };
        engine
            .transfer_group(Side::Destination, vec![part], false, CallExtras::default(), None)
            .unwrap_err()
            .kind()
    };
    let counted = || ops(&engine).into_iter().find(|(name, ..)| *name == "pull").unwrap();
    assert_eq!(kind_of_group(8), ErrorKind::InvalidArgument);
    assert_eq!(kind_of_group(0), ErrorKind::Busy);
    assert_eq!(counted(), ("pull", 0, 0, 0));
    engine.pull(remote, &local, rows(8), Layers::ALL).run().unwrap_err();
    assert_eq!(counted(), ("pull", 1, 1, 0));
}

#[test]
fn swap_ins_are_counted_by_their_way() {
    for (reach, swap_in, direct, ring) in [
        (HostReach::Direct, SwapInPath::Auto, 3, 0),
        (HostReach::Direct, SwapInPath::Direct, 3, 0),
        (HostReach::Direct, SwapInPath::Ring, 0, 3),
        (HostReach::Staged, SwapInPath::Auto, 0, 3),
        (HostReach::Staged, SwapInPath::Ring, 0, 3),
    ] {
        let mut config = config(1 << 20);
        config.swap_in = swap_in;
        let engine = engine_on(config, Arc::new(SimDevice::new(reach)));
        let device = engine.allocate(&desc(Device, 1, 8, 50), Blocks, &[]).unwrap();
        let host = engine.allocate(&desc(Host, 1, 8, 50), Blocks, &[]).unwrap();
        let (local, remote) = (End::Managed(host.id()), End::Managed(device.id()));
        for _ in 0..3 {
            engine.swap_blocks(&local, &remote, &[(0, 1), (3, 3)]).run().unwrap();
            engine.swap_blocks(&remote, &local, &[(0, 1)]).run().unwrap();
        }
        let stats = engine.stats();
        assert_eq!((stats.swap_in_direct, stats.swap_in_ring), (direct, ring), "{reach:?} {swap_in:?}");
        assert_eq!(stats.ring_bytes, if ring > 0 { 200 } else { 0 });
        let moved = |name| stats.ops.iter().find(|op| op.0 == name).unwrap().1.bytes;
        assert_eq!((moved("swap_in"), moved("swap_out")), (300, 150));
        assert_eq!(stats.plain_bytes + stats.streaming_bytes, 450, "each byte once, whatever the way");
    }
}

#[test]
fn large_calls_use_streaming_stores() {
    let streams = Kernel::all().iter().any(|kernel| kernel.streams());
    let engine = DataDist::open(config(32 << 20)).unwrap();
    let cache = engine.allocate(&desc(Device, 2, 64, 128 << 10), Blocks, &[]).unwrap();
    let mut expected = [0_u64; 2];
    // The calls copy 3.75, 4 and 8 MiB.
    for (rows, large) in [(15, false), (16, true), (32, true)] {
        let pairs: Vec<_> = (0..rows).map(|row| (row, 63 - row)).collect();
        engine.copy_blocks(&End::Managed(cache.id()), &pairs).run().unwrap();
        expected[usize::from(large && streams)] += 2 * (pairs.len() as u64) * (128 << 10);
        let stats = engine.stats();
        assert_eq!([stats.plain_bytes, stats.streaming_bytes], expected, "{rows} rows");
    }
}

/// Counted again from the durations themselves.
#[test]
fn percentiles_lie_between_the_calls_and_the_longest_of_them() {
    for nanos in [
        vec![5],
        vec![0, 0, 0],
        vec![1000, 1000, 1100],
        vec![1, 2, 3, 4, 5, 6, 7, 8, 1_000_000],
        (0..1000).map(|at| at * at).collect(),
        vec![u64::MAX, 3],
    ] {
        let counters = Counters::default();
        nanos.iter().for_each(|&nanos| counters.count(Duration::from_nanos(nanos), true));
        let state = counters.state();
        let mut sorted = nanos.clone();
        sorted.sort_unstable();
        let rank = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100) - 1];
        for (shown, least) in [(state.p50_nanos, rank(50)), (state.p99_nanos, rank(99))] {
            // The last bucket has no upper bound, so only its lower bound is checked.
            let least = least.min(1 << 39);
            assert!(least <= shown && shown <= least.max(1).saturating_mul(2), "{shown} for {least}");
            assert!(shown <= sorted[sorted.len() - 1], "{shown} is above the longest of {nanos:?}");
        }
        for (bucket, &count) in state.buckets.iter().enumerate() {
            let low = if bucket == 0 { 0 } else { 1_u64 << (bucket - 1) };
            let high = if bucket == BUCKETS - 1 { u64::MAX } else { (1 << bucket) - 1 };
            let expected = nanos.iter().filter(|nanos| (low..=high).contains(nanos)).count();
            assert_eq!(count, expected as u64, "bucket {bucket} of {nanos:?}");
        }
    }
}
