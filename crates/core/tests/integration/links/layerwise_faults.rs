//! Layer-wise transfers whose destination breaks, hangs, is unlinked or freed, or whose source is released.
//! The other destinations of the same transfer receive every byte.
//!
//! `layerwise` covers transfers without faults, `task.rs` tasks alone.

use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{
    CacheTask, CopyArgs, DataDist, Destination, Layers, Name, Outcome, Rows, Target,
};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{CacheKind, ClusterId, Error, ErrorKind, Placement};

use super::broken_streams::{Fixture, faults};
use super::layerwise::{
    SLOTS, addressed, all_ready, blocks, check_failed, failure, finish, is_done, named, start, to, wait,
};
use super::{
    Held, LONG, Pair, SOCKETS, WAYS, Way, config, device, eventually, link, of, open, open_gated, pairs,
    push_slot, request, row, times, unlink,
};
use crate::fixtures::{Gated, desc};

use CacheKind::{Batch, Blocks};

/// A stream to one of two peers is cut, stalls or is garbled at any byte.
#[test]
fn stream_fault_ends_only_its_own_destination() {
    const BYTES: usize = 3000;
    // If the peer reads the memory itself, the request for the layers after the first one ends before byte 310. There are more
    // cuts there.
    let steps = if times(1) > 1 { (7, 7) } else { (20, 97) };
    let offsets = (150..310)
        .step_by(steps.0)
        .chain((310..700).step_by(steps.1))
        .chain([2 * BYTES as u64, 5 * BYTES as u64]);
    for way in SOCKETS {
        let pair = Fixture::new(way, Duration::from_millis(500));
        let (local, bad, good) = (&pair.local, &pair.remote, open(config(3, way), way));
        link(local, &good).unwrap();
        let shape = device(8, 1, BYTES);
        let source = Held::pool(local, &shape, Batch);
        let into = [bad, &good].map(|remote| Held::new(remote, true, &shape, Batch, &[]));
        let (mut failed, mut partly) = (0, 0);
        for broken in faults(way, offsets.clone()) {
            let what = &broken.what;
            link(local, bad).unwrap();
            // This opens the stream to the good peer, so that the fault hits the other one.
            eventually("an answer", || local.check_link(ClusterId(3)).is_ok());
            let bytes = source.fill(1);
            let before = into.each_ref().map(|held| held.fill(2));
            pair.arm(&broken);
            let aims = [to(2, addressed(&into[0]), 4), to(3, named(&into[1]), 4)];
            let task = start(local, &source, &SLOTS, &aims);
            finish(&task);
            let got = into[0].read();
            // The source may be overwritten as soon as the task is done.
            source.fill(9);
            if !is_done(&task, 1) {
                // On a busy machine, the time of a layer may not be enough.
                assert_eq!(failure(&task, 1).kind(), ErrorKind::Timeout, "{what}");
                pair.clean();
                continue;
            }
            assert!(into[1].read() == bytes, "{what}");
            let arrived = task.progress()[0];
            assert_eq!(arrived.bytes, u64::from(arrived.layers) * 2 * BYTES as u64);
            if !is_done(&task, 0) {
                let error = failure(&task, 0);
                broken.explains(&error, [ErrorKind::NotLinked, ErrorKind::Timeout]);
                assert_eq!(error.fact("cluster"), Some("2"), "{what}: {error}");
                assert!(arrived.layers < 4);
                failed += 1;
                partly += usize::from(arrived.layers > 0);
            }
            pair.clean();
            if broken.garbles {
                continue;
            }
            let tensors = 2 * arrived.layers as usize;
            assert!(got[..tensors] == bytes[..tensors], "{what}: a layer that is done is not there");
            for (tensor, late) in into[0].read().iter().enumerate() {
                let known = |&at: &usize| [bytes[tensor][at], before[0][tensor][at]].contains(&late[at]);
                assert_eq!((0..BYTES).find(|at| !known(at)), None, "{what}: tensor {tensor}");
            }
        }
        assert!(failed > 8, "{way:?}: only {failed} failed");
        assert!(partly > 0, "{way:?}: none failed after a layer had arrived");
    }
}

/// A local engine linked to `remote`, whose copies can be stopped with a row pinned, and to `good`.
pub(super) struct Slow {
    pub(super) local: DataDist,
    pub(super) remote: DataDist,
    good: DataDist,
    gate: Arc<Gated>,
}

impl Slow {
    /// `limit` is the timeout of calls of the local engine.
    pub(super) fn new(way: Way, limit: Duration) -> Slow {
        Slow::with_pin_limit(way, limit, config(1, way).links.pin_limit)
    }

    /// `pin_limit` is that of the local engine.
    pub(super) fn with_pin_limit(way: Way, limit: Duration, pin_limit: Duration) -> Slow {
        let gate = Gated::new(HostReach::Direct);
        let mut local = config(1, way);
        (local.sync_timeout, local.links.pin_limit) = (limit, pin_limit);
        let remote = open_gated(config(2, way), way, &gate);
        let slow = Slow { local: open(local, way), remote, good: open(config(3, way), way), gate };
        link(&slow.local, &slow.remote).unwrap();
        link(&slow.local, &slow.good).unwrap();
        slow
    }

    /// Runs `judge` while a swap of zeros pins block 1 of `into`. `judge` calls its argument to let the swap finish.
    pub(super) fn holding(&self, into: &Held, judge: impl FnOnce(&dyn Fn())) {
        let zeros = Held::pool(&self.remote, &device(into.cache.geometry().num_tensors(), 4, 64), Blocks);
        self.gate.shut();
        thread::scope(|scope| {
            let swap = scope.spawn(|| self.remote.swap_blocks(&zeros.end(), &into.end(), &[(0, 1)]).run());
            self.gate.wait_for(1);
            let swap = Cell::new(Some(swap));
            judge(&|| {
                self.gate.open();
                swap.take().unwrap().join().unwrap().unwrap();
            });
            assert!(swap.take().is_none(), "the swap was not released");
        });
    }
}

/// Marks a layer ready, and waits until it has arrived.
fn send(task: &CacheTask, layer: u32) {
    task.ready(layer).unwrap();
    eventually("the layer", || task.progress()[0].layers == layer + 1);
}

/// Block `at` of each tensor, of 64 bytes.
fn block(tensors: &[Vec<u8>], at: usize) -> Vec<&[u8]> {
    tensors.iter().map(|tensor| &tensor[at * 64..][..64]).collect()
}

/// The free destination gets every layer meanwhile. The pinned one gets it afterwards, or never once it timed out.
#[test]
fn pinned_row_delays_only_its_own_destination() {
    for (way, times_out) in WAYS.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let slow = Slow::new(way, if times_out { Duration::from_secs(2) } else { LONG });
        let shape = desc(Placement::Host, 4, 4, 64);
        let source = Held::pool(&slow.local, &device(4, 4, 64), Blocks);
        let pinned = Held::new(&slow.remote, times_out, &shape, Blocks, &[]);
        let free = Held::new(&slow.good, times_out, &shape, Blocks, &[]);
        let (bytes, before) = (source.fill(1), pinned.fill(2));
        slow.holding(&pinned, |release| {
            let aims = [to(2, named(&pinned), 2), to(3, named(&free), 2), to(2, addressed(&pinned), 2)];
            let task = start(&slow.local, &source, &blocks(&[2], &[1]), &aims);
            all_ready(&task);
            eventually("the free destination", || is_done(&task, 1));
            assert!(block(&free.read(), 1) == block(&bytes, 2), "{way:?}");
            if times_out {
                wait(&task);
                [0, 2].into_iter().for_each(|at| check_failed(&task, at, ErrorKind::Timeout, 0));
                release();
                return;
            }
            let under_way = |at: usize| matches!(task.outcomes()[at], Outcome::UnderWay);
            assert!(under_way(0) && under_way(2) && !task.done());
            assert_eq!(task.progress()[0].layers + task.progress()[2].layers, 0);
            release();
            wait(&task);
            assert!((0..3).all(|at| is_done(&task, at)), "{way:?}: {:?}", task.outcomes());
        });
        // An earlier request that waited for the row leaves the queue before this one gets the row.
        let again = start(&slow.local, &source, &blocks(&[3], &[3]), &[to(2, named(&pinned), 2)]);
        finish(&again);
        let now = pinned.read();
        let zeros = vec![&[0; 64][..]; 4];
        assert!(block(&now, 1) == if times_out { zeros } else { block(&bytes, 2) }, "{way:?}");
        assert!(block(&now, 3) == block(&bytes, 3));
        assert!([0, 2].into_iter().all(|at| block(&now, at) == block(&before, at)));
    }
}

/// The transfer does not continue over a new link, because another process may have taken the cluster id.
#[test]
fn unlinking_between_layers_ends_the_destination() {
    for pair in pairs() {
        let source = Held::pool(&pair.local, &device(6, 1, 100), Batch);
        let into = Held::new(&pair.remote, true, &device(6, 1, 100), Batch, &[]);
        let (bytes, before) = (source.fill(1), into.fill(2));
        let task = start(&pair.local, &source, &SLOTS, &[to(2, addressed(&into), 3)]);
        send(&task, 0);
        unlink(&pair.local, &pair.remote).unwrap();
        link(&pair.local, &pair.remote).unwrap();
        finish(&task);
        check_failed(&task, 0, ErrorKind::NotLinked, 1);
        assert_eq!(into.read(), [&bytes[..2], &before[2..]].concat());
    }
}

/// An engine dropped with a layer in transit ends the task first. The peer never sees later source bytes.
#[test]
fn closing_the_engine_ends_its_transfers() {
    for way in WAYS {
        let mut slow = Slow::new(way, LONG);
        let source = Held::new(&slow.local, true, &device(4, 4, 64), Blocks, &[]);
        let held = Held::new(&slow.remote, true, &desc(Placement::Host, 4, 4, 64), Blocks, &[]);
        source.fill(1);
        let before = held.fill(2);
        let aims = vec![to(2, named(&held), 2); 2];
        let task = start(&slow.local, &source, &blocks(&[2], &[1]), &aims);
        assert!(task.wanted(0));
        let local = std::mem::replace(&mut slow.local, open(config(9, way), way));
        slow.holding(&held, |release| {
            task.ready(0).unwrap();
            thread::sleep(Duration::from_millis(50));
            drop(local);
            assert!(task.done(), "{way:?}: the engine closed, and a transfer goes on");
            assert!((0..2).all(|at| failure(&task, at).kind() == ErrorKind::Closed));
            source.fill(9);
            assert!(!task.wanted(1) && !task.cancel());
            task.ready(1).unwrap();
            release();
        });
        drop(slow);
        let now = held.read();
        assert!(block(&now, 1) == [[0; 64]; 4], "{way:?}: a layer arrived after its engine had closed");
        assert!([0, 2, 3].into_iter().all(|at| block(&now, at) == block(&before, at)));
    }
}

/// The engine may live on after that, because other threads are in calls of it.
#[test]
fn end_transfers_ends_a_task_that_waits_for_a_layer() {
    let pair = Pair::new(Way::Local);
    let [source, into] = pair.pools(&device(4, 1, 500), Batch);
    let aims = [to(2, named(&into), 2)];
    let task = start(&pair.local, &source, &SLOTS, &aims);
    send(&task, 0);
    pair.local.end_transfers();
    wait(&task);
    assert_eq!(failure(&task, 0).kind(), ErrorKind::Closed);
    let late = pair.local.transfer_async(&source.end(), &SLOTS, aims.to_vec(), None);
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Closed);
}

/// The transfer keeps the cache with which it began, even if its key then names another cache or the cache is freed.
#[test]
fn freed_destination_is_never_replaced_by_another() {
    for pair in pairs() {
        let shape = device(6, 1, 3000);
        let source = Held::pool(&pair.local, &shape, Batch);
        let bytes = source.fill(1);
        let keyed = || Held::new(&pair.remote, false, &shape, Batch, &[Some(request(5))]);
        let targets: [fn(&Held) -> Target; 3] = [named, addressed, |_| Target::Cache {
            name: Name::Key(request(5)).into(),
            first_layer: Some(0),
        }];
        for target in targets {
            let remote = keyed();
            let task = start(&pair.local, &source, &SLOTS, &[to(2, target(&remote), 3)]);
            send(&task, 0);
            pair.remote.remove_key(request(5)).unwrap();
            let second = keyed();
            let before = second.fill(2);
            send(&task, 1);
            assert_eq!(remote.read()[..4], bytes[..4]);
            assert!(second.read() == before, "the new cache of the key was written");
            pair.remote.remove_key(request(5)).unwrap();
            let addrs = remote.cache.addrs().to_vec();
            let used = || pair.remote.stats().device_pool.unwrap().pool.used_bytes;
            let before_free = used();
            remote.free(&pair.remote);
            drop(remote);
            // The owner answers a layer before it lets go of the cache.
            eventually("the return of its memory", || used() < before_free);
            let third = keyed();
            assert_eq!(third.cache.addrs(), addrs, "the test needs the same memory");
            let before = third.fill(3);
            task.ready(2).unwrap();
            wait(&task);
            check_failed(&task, 0, ErrorKind::CacheNotFound, 2);
            assert!(third.read() == before, "another cache was written");
            pair.remote.remove_key(request(5)).unwrap();
            second.free(&pair.remote);
            third.free(&pair.remote);
        }
    }
}

/// A call has found the cache and waits for a row when the cache is unregistered. The call touches none of the memory.
#[test]
fn unregistered_memory_is_not_touched_by_waiting_calls() {
    const INTO: CopyArgs = CopyArgs { dst_batch_index: 1, src_batch_index: 0, offset: 0, size: -1 };
    const OUT_OF: CopyArgs = CopyArgs { dst_batch_index: 0, src_batch_index: 1, ..INTO };
    for (way, name) in WAYS
        .into_iter()
        .flat_map(|way| ["copy out", "copy in", "pull", "push", "layer"].map(|name| (way, name)))
    {
        let gate = Gated::new(HostReach::Direct);
        let local = open_gated(config(1, way), way, &gate);
        let remote = open(config(2, way), way);
        link(&local, &remote).unwrap();
        let pool = Held::pool(&local, &device(2, 2, 64), Batch);
        let [taken, own, into] =
            [&local, &local, &remote].map(|engine| Held::new(engine, true, &device(2, 2, 64), Batch, &[]));
        let call = || match name {
            "copy out" => local.copy_cache(&own.end(), &taken.end(), OUT_OF).run(),
            "copy in" => local.copy_cache(&taken.end(), &own.end(), INTO).run(),
            "pull" => {
                let rows = Rows::slot(1, -1);
                local.pull(of(2, row(&into, 0)), &taken.end(), rows, Layers::ALL).run()
            }
            "push" => push_slot(&local, &taken, 1, of(2, row(&into, 0))),
            _ => {
                let aim = Destination { src_row: 1, ..to(2, named(&into), 1) };
                let task = local.transfer_async(&taken.end(), &SLOTS, vec![aim], None)?;
                finish(&task);
                let error = failure(&task, 0);
                Err(Error::new(error.kind(), error.to_string()))
            }
        };
        taken.fill(1);
        let (theirs, ours) = (into.fill(2), own.fill(3));
        gate.shut();
        thread::scope(|scope| {
            let pinning = scope.spawn(|| local.copy_cache(&taken.end(), &pool.end(), INTO).run());
            gate.wait_for(1);
            let waiting = scope.spawn(call);
            thread::sleep(Duration::from_millis(30));
            let gone = scope.spawn(|| local.unregister(taken.cache.id()));
            eventually("the end of its id", || local.find(taken.cache.id()).is_err());
            gate.open();
            pinning.join().unwrap().unwrap();
            gone.join().unwrap().unwrap();
            let mine = taken.fill(7);
            let error = waiting.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{way:?} {name}: {error}");
            assert!(taken.read() == mine, "{way:?} {name}: it was written");
        });
        assert!(into.read() == theirs && own.read() == ours, "{way:?} {name}: it was read");
    }
}
