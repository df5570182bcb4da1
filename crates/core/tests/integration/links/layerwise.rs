//! Layer-wise transfers to caches and to addresses: which bytes arrive, over every transport.
//!
//! `tests/test_layerwise.py` covers every layout. Not for: tasks alone (`transfer/task/tests.rs`).

use std::sync::Arc;

use llm_datadist_core::{
    CacheKind, ClusterId, DataDist, Deadline, Destination, Error, ErrorKind, LayerRange, LayerwiseArgs,
    Outcome, Placement, Target, Task,
};

use super::{Held, LONG, Pair, WAYS, device, each, row};

use CacheKind::Batch;

/// Whole slots, in layers of two tensors.
pub(super) const SLOTS: LayerwiseArgs =
    LayerwiseArgs { src_blocks: vec![], dst_blocks: vec![], dst_block_bytes: None, tensors_per_layer: 2 };

pub(super) fn blocks(src: &[u64], dst: &[u64]) -> LayerwiseArgs {
    LayerwiseArgs { src_blocks: src.to_vec(), dst_blocks: dst.to_vec(), ..SLOTS }
}

/// A destination for the first `layers` layers of row 0.
pub(super) fn to(cluster: u64, target: Target, layers: u32) -> Destination {
    let src_layers = LayerRange { first: 0, end: layers };
    Destination { cluster: ClusterId(cluster), target, src_layers, src_row: 0 }
}

pub(super) fn named(held: &Held) -> Target {
    Target::Cache { name: row(held, 0), first_layer: 0 }
}

pub(super) fn addressed(held: &Held) -> Target {
    Target::Addresses(held.cache.addrs().to_vec())
}

/// Starts a transfer that waits for its layers as long as the engine's limit for calls.
pub(super) fn start(local: &DataDist, source: &Held, args: &LayerwiseArgs, to: &[Destination]) -> Arc<Task> {
    local.transfer_async(&source.end(), args, to.to_vec(), None).unwrap()
}

pub(super) fn wait(task: &Arc<Task>) {
    assert!(task.wait(Deadline::after(LONG)).unwrap(), "{:?}", task.outcomes());
}

/// Marks every layer ready.
pub(super) fn all_ready(task: &Arc<Task>) {
    task.layers().into_iter().for_each(|layer| task.ready(layer));
}

/// Marks every layer ready and waits for the end.
pub(super) fn finish(task: &Arc<Task>) {
    all_ready(task);
    wait(task);
}

pub(super) fn is_done(task: &Task, at: usize) -> bool {
    matches!(task.outcomes()[at], Outcome::Done)
}

pub(super) fn failure(task: &Task, at: usize) -> Arc<Error> {
    match &task.outcomes()[at] {
        Outcome::Failed(error) => error.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn slots_arrive_by_name_and_by_address() {
    each(|_, pair, local, remote| {
        if local.placement == Placement::Host {
            return;
        }
        let local = local.held(&pair.local, (8, 3, 100), Batch, &[]);
        let remote = remote.held(&pair.remote, (10, 4, 128), Batch, &[]);
        let (bytes, mut expected) = (local.fill(1), remote.fill(2));
        // Layers 1 to 3 of slot 2 go to layers 2 to 4 of slot 1.
        let mut by_name = to(2, Target::Cache { name: row(&remote, 1), first_layer: 2 }, 4);
        (by_name.src_layers.first, by_name.src_row) = (1, 2);
        for tensor in 0..6 {
            expected[4 + tensor][128..228].copy_from_slice(&bytes[2 + tensor][200..300]);
        }
        // Layers 0 and 1 of slot 0 go to other tensors in this order, 9 bytes into slot 3.
        let order = [9usize, 0, 3, 2];
        let addrs = order.map(|tensor| remote.cache.addrs()[tensor] + 3 * 128 + 9);
        for (tensor, &there) in order.iter().enumerate() {
            expected[there][3 * 128 + 9..3 * 128 + 109].copy_from_slice(&bytes[tensor][..100]);
        }
        let by_address = to(2, Target::Addresses(addrs.to_vec()), 2);
        let task = start(&pair.local, &local, &SLOTS, &[by_name, by_address]);
        finish(&task);
        assert!(is_done(&task, 0) && is_done(&task, 1), "{:?}", task.outcomes());
        assert!(remote.read() == expected);
        assert!(local.read() == bytes, "the source changed");
        let progress = task.progress();
        assert_eq!((progress[0].layers, progress[0].of_layers, progress[0].bytes), (3, 3, 600));
        assert_eq!((progress[1].layers, progress[1].of_layers, progress[1].bytes), (2, 2, 400));
        local.free(&pair.local);
        remote.free(&pair.remote);
    });
}

#[test]
fn addresses_outside_every_cache_are_refused() {
    for way in WAYS {
        let pair = Pair::new(way);
        let local = Held::pool(&pair.local, &device(2, 1, 100), Batch);
        let remote = Held::pool(&pair.remote, &device(2, 1, 100), Batch);
        let (before, addrs) = (remote.fill(7), remote.cache.addrs());
        let aims = [[addrs[0], 4096], [addrs[0], addrs[1] + 1], [addrs[0] - 1, addrs[1]]]
            .map(|addrs| to(2, Target::Addresses(addrs.to_vec()), 1));
        let task = start(&pair.local, &local, &SLOTS, &aims);
        finish(&task);
        for at in 0..aims.len() {
            let error = failure(&task, at);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert_eq!(error.fact("cluster"), Some("2"), "{error}");
        }
        assert!(remote.read() == before);
    }
}
