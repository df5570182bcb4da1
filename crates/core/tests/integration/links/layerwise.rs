//! The layer-wise transfer: the bytes of a copy made by hand, over every transport, to caches and to addresses.
//!
//! Not for: the task alone (`task`), or what goes wrong.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::{
    CacheKey, CacheKind, ClusterId, Deadline, Destination, ErrorKind, LayerRange, LayerwiseArgs, Name,
    Outcome, Placement, Target, Task,
};

use super::{Held, LONG, Pair, WAYS, each, row};
use crate::bed::desc;

use CacheKind::{Batch, Blocks};

fn args(src: &[u64], dst: &[u64], bytes: Option<u64>, tensors_per_layer: u32) -> LayerwiseArgs {
    LayerwiseArgs {
        src_blocks: src.to_vec(),
        dst_blocks: dst.to_vec(),
        dst_block_bytes: bytes,
        tensors_per_layer,
    }
}

fn to(target: Target, layers: (u32, u32), src_row: u32) -> Destination {
    let src_layers = LayerRange { first: layers.0, end: layers.1 };
    Destination { cluster: ClusterId(2), target, src_layers, src_row }
}

/// Says that every layer is ready, and waits for the end.
fn finish(task: &Arc<Task>) {
    for layer in task.layers() {
        if task.wanted(layer) {
            task.ready(layer);
        }
    }
    assert!(task.wait(Deadline::after(LONG)).unwrap());
}

fn done(task: &Arc<Task>) {
    finish(task);
    let outcomes = task.outcomes();
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done)), "{outcomes:?}");
}

#[test]
fn slots_go_to_slots_and_addresses() {
    each(|_, _, pair, ends| {
        if ends.local.1 == Placement::Host {
            return;
        }
        let local = Held::new(&pair.local, ends.local.0, &desc(ends.local.1, 8, 3, 100), Batch, &[]);
        let remote = Held::new(&pair.remote, ends.remote.0, &desc(ends.remote.1, 10, 4, 128), Batch, &[]);
        let (bytes, mut expected) = (local.fill(1), remote.fill(2));
        // Layers 1 to 3 of slot 2 by name, to layers 2 to 4 of slot 1; layers 0 and 1 of slot 0 by address, tensor by
        // tensor in an order of its own, 9 bytes into slot 3.
        let by_name = to(Target::Cache { name: row(&remote, 1), first_layer: 2 }, (1, 4), 2);
        let order = [9usize, 0, 3, 2];
        let at = |tensor: &usize| remote.cache.addrs()[*tensor] + 3 * 128 + 9;
        let by_address = to(Target::Addresses(order.iter().map(at).collect()), (0, 2), 0);
        for tensor in 0..6 {
            expected[4 + tensor][128..228].copy_from_slice(&bytes[2 + tensor][200..300]);
        }
        for (tensor, &there) in order.iter().enumerate() {
            expected[there][3 * 128 + 9..3 * 128 + 109].copy_from_slice(&bytes[tensor][..100]);
        }
        let task = pair.local.transfer_async(
            &local.end(),
            &args(&[], &[], None, 2),
            vec![by_name, by_address],
            None,
        );
        let task = task.unwrap();
        done(&task);
        assert!(remote.read() == expected);
        assert!(local.read() == bytes, "the source changed");
        let progress = task.progress();
        assert_eq!((progress[0].layers, progress[0].of_layers, progress[0].bytes), (3, 3, 600));
        assert_eq!((progress[1].layers, progress[1].of_layers, progress[1].bytes), (2, 2, 400));
        for (engine, held) in [(&pair.remote, &remote), (&pair.local, &local)] {
            engine.deallocate(held.cache.id()).unwrap();
            engine.unregister(held.cache.id()).unwrap();
        }
    });
}

#[test]
fn blocks_go_to_blocks() {
    let model = std::cell::Cell::new(0);
    each(|_, _, pair, ends| {
        if ends.local.1 == Placement::Host {
            return;
        }
        let key = CacheKey::Blocks { model: model.replace(model.get() + 1) };
        let local = Held::new(&pair.local, ends.local.0, &desc(ends.local.1, 6, 8, 100), Blocks, &[]);
        let remote =
            Held::new(&pair.remote, ends.remote.0, &desc(ends.remote.1, 6, 9, 100), Blocks, &[Some(key)]);
        let (bytes, mut expected) = (local.fill(3), remote.fill(4));
        let (ours, theirs) = ([0, 1, 2, 7, 6, 3, 3, 5], [2, 3, 4, 1, 0, 8, 5, 2]);
        for (tensor, there) in [(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)] {
            for (from, to) in ours.into_iter().zip(theirs) {
                let (from, to) = (from as usize * 100, to as usize * 100);
                expected[there][to..to + 100].copy_from_slice(&bytes[tensor][from..from + 100]);
            }
        }
        let by_key = to(Target::Cache { name: Name::Key(key), first_layer: 1 }, (0, 2), 0);
        let addrs = [0, 1].map(|tensor: usize| remote.cache.addrs()[tensor]).to_vec();
        let by_address = to(Target::Addresses(addrs), (2, 3), 0);
        let args = args(&ours, &theirs, None, 2);
        done(&pair.local.transfer_async(&local.end(), &args, vec![by_key, by_address], None).unwrap());
        assert!(remote.read() == expected);
        for (engine, held) in [(&pair.remote, &remote), (&pair.local, &local)] {
            engine.deallocate(held.cache.id()).unwrap();
            engine.unregister(held.cache.id()).unwrap();
        }
    });
}

#[test]
fn a_slot_is_cut_into_blocks() {
    let model = std::cell::Cell::new(0);
    each(|_, _, pair, ends| {
        if ends.local.1 == Placement::Host {
            return;
        }
        let key = CacheKey::Blocks { model: model.replace(model.get() + 1) };
        let local = Held::new(&pair.local, ends.local.0, &desc(ends.local.1, 2, 2, 250), Batch, &[]);
        let remote =
            Held::new(&pair.remote, ends.remote.0, &desc(ends.remote.1, 2, 9, 100), Blocks, &[Some(key)]);
        let (bytes, mut expected) = (local.fill(5), remote.fill(6));
        // 250 bytes of slot 1: two whole blocks, and half of a third.
        for tensor in 0..2 {
            for (at, block, len) in [(0, 7, 100), (100, 0, 100), (200, 4, 50)] {
                let to = block * 100;
                expected[tensor][to..to + len].copy_from_slice(&bytes[tensor][250 + at..250 + at + len]);
            }
        }
        let by_key = to(Target::Cache { name: Name::Key(key), first_layer: 0 }, (0, 2), 1);
        let args = args(&[], &[7, 0, 4], Some(100), 1);
        done(&pair.local.transfer_async(&local.end(), &args, vec![by_key], None).unwrap());
        assert!(remote.read() == expected);
        for (engine, held) in [(&pair.remote, &remote), (&pair.local, &local)] {
            engine.deallocate(held.cache.id()).unwrap();
            engine.unregister(held.cache.id()).unwrap();
        }
    });
}

#[test]
fn addresses_outside_of_every_cache_are_refused() {
    for way in WAYS {
        let pair = Pair::new(way);
        let local = Held::new(&pair.local, false, &desc(Placement::Device, 2, 1, 100), Batch, &[]);
        let remote = Held::new(&pair.remote, false, &desc(Placement::Device, 2, 1, 100), Batch, &[]);
        let (before, addrs) = (remote.fill(7), remote.cache.addrs());
        let aims = [vec![addrs[0], 4096], vec![addrs[0], addrs[1] + 1], vec![addrs[0] - 1, addrs[1]]];
        let aims = aims.map(|addrs| to(Target::Addresses(addrs), (0, 1), 0));
        let task =
            pair.local.transfer_async(&local.end(), &args(&[], &[], None, 2), aims.to_vec(), None).unwrap();
        finish(&task);
        for outcome in task.outcomes() {
            let Outcome::Failed(error) = outcome else { panic!("{outcome:?}") };
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert_eq!(error.fact("cluster"), Some("2"), "{error}");
        }
        assert!(remote.read() == before);
    }
}

#[test]
fn a_layer_waits_until_it_is_ready() {
    let pair = Pair::new(super::Way::Shm);
    let local = Held::new(&pair.local, false, &desc(Placement::Device, 4, 1, 100), Batch, &[]);
    let remote = Held::new(&pair.remote, false, &desc(Placement::Device, 4, 1, 100), Batch, &[]);
    let before = remote.fill(9);
    let bytes = local.fill(8);
    let aim = to(Target::Cache { name: row(&remote, 0), first_layer: 0 }, (0, 2), 0);
    let task = pair.local.transfer_async(&local.end(), &args(&[], &[], None, 2), vec![aim], None).unwrap();
    assert_eq!(task.layers(), [0, 1]);
    assert!(!task.wait(Deadline::after(Duration::from_millis(30))).unwrap());
    assert!(remote.read() == before);
    task.ready(0);
    super::eventually("the first layer", || task.progress()[0].layers == 1);
    assert!(!task.wait(Deadline::after(Duration::from_millis(30))).unwrap());
    assert_eq!(remote.read(), [&bytes[0], &bytes[1], &before[2], &before[3]].map(Clone::clone));
    task.ready(1);
    assert!(task.wait(Deadline::after(LONG)).unwrap());
    assert!(remote.read() == bytes);
}
