//! What goes wrong with a layer-wise transfer: destinations that break, hang, are unlinked or freed, sources that go, and
//! peers that lie. Whatever happens to one destination, the others get every byte.
//!
//! Not for: the bytes of a sound transfer (`layerwise`), or the task alone (`task`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::testing::device::{DeviceSet, HostReach};
use llm_datadist_core::testing::net::{Fault, Faults, Faulty, Tcp, Unix};
use llm_datadist_core::testing::protocol::{
    self, AddressLocation, Location, MAX_ADDRS, Place, Record, Reply, Request,
};
use llm_datadist_core::testing::session::Transports;
use llm_datadist_core::{
    CacheDesc, CacheId, CacheKey, CacheKind, ClusterId, CopyArgs, DataDist, Deadline, Destination, Error,
    ErrorKind, LayerRange, Layers, LayerwiseArgs, Name, Outcome, Placement, PullRows, PushRows, Target, Task,
    TransportChoice,
};

use super::fake::{Fake, hear, say, soon};
use super::{
    Held, LONG, Pair, WAYS, Way, address, config, eventually, link, of, open, request, row, times, unlink,
};
use crate::bed::{Buffer, Gated, adopt, desc};
use crate::heap;

use CacheKind::{Batch, Blocks};

const SLOT: LayerwiseArgs =
    LayerwiseArgs { src_blocks: vec![], dst_blocks: vec![], dst_block_bytes: None, tensors_per_layer: 2 };

const WHOLE: CopyArgs = CopyArgs { dst_batch_index: 0, src_batch_index: 0, offset: 0, size: -1 };

fn blocks(src: &[u64], dst: &[u64]) -> LayerwiseArgs {
    LayerwiseArgs { src_blocks: src.to_vec(), dst_blocks: dst.to_vec(), ..SLOT }
}

fn to(cluster: u64, target: Target, layers: u32) -> Destination {
    let src_layers = LayerRange { first: 0, end: layers };
    Destination { cluster: ClusterId(cluster), target, src_layers, src_row: 0 }
}

fn named(held: &Held) -> Target {
    Target::Cache { name: row(held, 0), first_layer: 0 }
}

fn addressed(held: &Held) -> Target {
    Target::Addresses(held.cache.addrs().to_vec())
}

fn ended(task: &Arc<Task>) {
    assert!(task.wait(Deadline::after(LONG)).unwrap(), "{:?}", task.outcomes());
}

fn all_ready(task: &Arc<Task>) {
    task.layers().into_iter().for_each(|layer| task.ready(layer));
}

fn failure(task: &Task, at: usize) -> Arc<Error> {
    match &task.outcomes()[at] {
        Outcome::Failed(error) => error.clone(),
        other => panic!("{other:?}"),
    }
}

fn is_done(task: &Task, at: usize) -> bool {
    matches!(task.outcomes()[at], Outcome::Done)
}

fn device(tensors: u32, rows: usize, bytes: usize) -> CacheDesc {
    desc(Placement::Device, tensors, rows, bytes)
}

/// The stream to one of two peers breaks, stalls or garbles at any byte.
#[test]
fn a_stream_that_breaks_ends_its_own_destination() {
    const BYTES: usize = 3000;
    for way in [Way::Tcp, Way::Shm] {
        let armed: Arc<Mutex<VecDeque<Faults>>> = Arc::default();
        let next = armed.clone();
        let faults = move |_| next.lock().unwrap().pop_front().unwrap_or_default();
        let mut local = config(1, way);
        local.sync_timeout = Duration::from_millis(500);
        let transports = if way == Way::Shm {
            local.links.transport = TransportChoice::Shm;
            Transports { tcp: Arc::new(Tcp), unix: Arc::new(Faulty::new(Arc::new(Unix), faults)) }
        } else {
            Transports { tcp: Arc::new(Faulty::new(Arc::new(Tcp), faults)), unix: Arc::new(Unix) }
        };
        let local = DataDist::open_over(local, DeviceSet::host_only(), transports).unwrap();
        let (bad, good) = (open(config(2, way), way), open(config(3, way), way));
        link(&local, &good).unwrap();
        let shape = device(8, 1, BYTES);
        let source = Held::new(&local, false, &shape, Batch, &[]);
        let into = [&bad, &good].map(|remote| Held::new(remote, true, &shape, Batch, &[]));
        let kinds: [(&str, fn(u64) -> Faults); 6] = [
            ("cut out", |at| Faults { sending: Some(Fault::Cut(at)), ..Faults::default() }),
            ("cut in", |at| Faults { receiving: Some(Fault::Cut(at)), ..Faults::default() }),
            ("stall out", |at| Faults { sending: Some(Fault::Stall(at)), ..Faults::default() }),
            ("stall in", |at| Faults { receiving: Some(Fault::Stall(at)), ..Faults::default() }),
            ("garble out", |at| Faults { sending: Some(Fault::Garble(at)), ..Faults::default() }),
            ("garble in", |at| Faults { receiving: Some(Fault::Garble(at)), ..Faults::default() }),
        ];
        let (mut failed, mut partly) = (0, 0);
        for (name, fault) in kinds {
            let step = if times(1) > 1 { 7 } else { 83 };
            for at in (150..700).step_by(step).chain([2 * BYTES as u64, 5 * BYTES as u64]) {
                let what = format!("{way:?}, {name} at {at}");
                link(&local, &bad).unwrap();
                // The stream to the good one is open already, so the fault is the other's.
                local.check_link(ClusterId(3)).unwrap();
                let bytes = source.fill(1);
                let before = into.each_ref().map(|held| held.fill(2));
                *armed.lock().unwrap() = [fault(at)].into();
                let aims = vec![to(2, addressed(&into[0]), 4), to(3, named(&into[1]), 4)];
                let task = local.transfer_async(&source.end(), &SLOT, aims, None).unwrap();
                all_ready(&task);
                ended(&task);
                // Nobody may see what is written once it is done.
                let got = into[0].read();
                source.fill(9);
                assert!(is_done(&task, 1), "{what}: {:?}", task.outcomes());
                assert!(into[1].read() == bytes, "{what}");
                let carried = task.progress()[0];
                assert_eq!(carried.bytes, u64::from(carried.layers) * 2 * BYTES as u64);
                if !is_done(&task, 0) {
                    let error = failure(&task, 0);
                    let fits = matches!(error.kind(), ErrorKind::NotLinked | ErrorKind::Timeout);
                    assert!(fits || name.starts_with("garble"), "{what}: {error}");
                    assert_eq!(error.fact("cluster"), Some("2"), "{what}: {error}");
                    assert!(carried.layers < 4);
                    failed += 1;
                    partly += usize::from(carried.layers > 0);
                }
                armed.lock().unwrap().clear();
                local.unlink_clusters(&[address(&bad)], LONG, true).remove(0).unwrap();
                eventually("the end of the link", || bad.stats().links.is_empty());
                let late = into[0].read();
                for tensor in 0..8 {
                    if tensor < 2 * carried.layers as usize && !name.starts_with("garble") {
                        assert!(got[tensor] == bytes[tensor], "{what}: layer {} is not there", tensor / 2);
                    }
                    let known =
                        |at: usize, byte: u8| byte == bytes[tensor][at] || byte == before[0][tensor][at];
                    let strange = (0..BYTES).find(|&at| !known(at, late[tensor][at]));
                    assert!(strange.is_none() || name.starts_with("garble"), "{what}: {tensor} {strange:?}");
                }
            }
        }
        assert!(failed > 8, "{way:?}: only {failed} failed");
        assert!(partly > 0, "{way:?}: none got on before it broke");
    }
}

/// A peer whose row is held by a copy of its own, and one that is not.
pub(super) struct Slow {
    pub(super) local: DataDist,
    pub(super) remote: DataDist,
    good: DataDist,
    gate: Arc<Gated>,
}

impl Slow {
    pub(super) fn new(way: Way, limit: Duration) -> Slow {
        let gate = Gated::new(HostReach::Direct);
        let mut local = config(1, way);
        local.sync_timeout = limit;
        let devices = DeviceSet::with_device(gate.clone());
        let remote = DataDist::open_over(config(2, way), devices, way.transports()).unwrap();
        let slow = Slow { local: open(local, way), remote, good: open(config(3, way), way), gate };
        link(&slow.local, &slow.remote).unwrap();
        link(&slow.local, &slow.good).unwrap();
        slow
    }

    /// Runs `judge` while a swap holds block 1 of `into`.
    pub(super) fn holding(&self, into: &Held, judge: impl FnOnce(&dyn Fn())) {
        let desc = desc(Placement::Device, into.cache.geometry().num_tensors(), 4, 64);
        let device = Held::new(&self.remote, false, &desc, Blocks, &[]);
        let opened = AtomicBool::new(false);
        self.gate.shut();
        thread::scope(|scope| {
            let copy = scope.spawn(|| self.remote.swap_blocks(&device.end(), &into.end(), &[(0, 1)]));
            self.gate.wait_for(1);
            let (copy, opened) = (Mutex::new(Some(copy)), &opened);
            judge(&move || {
                opened.store(true, Ordering::SeqCst);
                self.gate.open();
                copy.lock().unwrap().take().unwrap().join().unwrap().unwrap();
            });
        });
        assert!(opened.load(Ordering::SeqCst));
    }
}

/// While one peer holds the row, the other gets every layer; then the held one does, whole.
#[test]
fn a_slow_destination_holds_nobody_back() {
    for way in WAYS {
        let slow = Slow::new(way, LONG);
        let shape = desc(Placement::Host, 4, 4, 64);
        let source = Held::new(&slow.local, false, &device(4, 4, 64), Blocks, &[]);
        let held = Held::new(&slow.remote, false, &shape, Blocks, &[]);
        let free = Held::new(&slow.good, false, &shape, Blocks, &[]);
        let bytes = source.fill(1);
        slow.holding(&held, |release| {
            let aims = vec![to(2, named(&held), 2), to(3, named(&free), 2), to(2, addressed(&held), 2)];
            let task = slow.local.transfer_async(&source.end(), &blocks(&[2], &[1]), aims, None).unwrap();
            all_ready(&task);
            eventually("the free one", || is_done(&task, 1));
            assert!((0..4).all(|tensor| free.read()[tensor][64..128] == bytes[tensor][128..192]), "{way:?}");
            let under_way = |at: usize| matches!(task.outcomes()[at], Outcome::UnderWay);
            assert!(under_way(0) && under_way(2) && !task.done());
            assert_eq!(task.progress()[0].layers + task.progress()[2].layers, 0);
            release();
            ended(&task);
            assert!((0..3).all(|at| is_done(&task, at)), "{way:?}: {:?}", task.outcomes());
            assert!((0..4).all(|tensor| held.read()[tensor][64..128] == bytes[tensor][128..192]), "{way:?}");
        });
    }
}

/// A layer that runs out of time ends its own destination, and does not arrive afterwards.
#[test]
fn a_layer_that_is_late_never_arrives() {
    for way in WAYS {
        let slow = Slow::new(way, Duration::from_millis(600));
        let shape = desc(Placement::Host, 4, 4, 64);
        let source = Held::new(&slow.local, false, &device(4, 4, 64), Blocks, &[]);
        let held = Held::new(&slow.remote, true, &shape, Blocks, &[]);
        let free = Held::new(&slow.good, true, &shape, Blocks, &[]);
        let bytes = source.fill(1);
        let before = held.fill(2);
        slow.holding(&held, |release| {
            let aims = vec![to(2, named(&held), 2), to(3, named(&free), 2)];
            let task = slow.local.transfer_async(&source.end(), &blocks(&[2], &[1]), aims, None).unwrap();
            all_ready(&task);
            ended(&task);
            let error = failure(&task, 0);
            assert_eq!(error.kind(), ErrorKind::Timeout, "{way:?}: {error}");
            assert_eq!((error.fact("cluster"), error.fact("layer")), (Some("2"), Some("0")), "{error}");
            assert!(is_done(&task, 1), "{:?}", task.outcomes());
            release();
        });
        assert!((0..4).all(|tensor| free.read()[tensor][64..128] == bytes[tensor][128..192]), "{way:?}");
        // A request that was waiting for the row is gone once the row can be had by another.
        let again =
            slow.local.transfer_async(&source.end(), &blocks(&[3], &[3]), vec![to(2, named(&held), 2)], None);
        let again = again.unwrap();
        all_ready(&again);
        ended(&again);
        let now = held.read();
        for tensor in 0..4 {
            assert_eq!(now[tensor][..64], before[tensor][..64]);
            assert_eq!(now[tensor][64..128], [0; 64], "{way:?}: it came late");
            assert_eq!(now[tensor][192..], bytes[tensor][192..]);
        }
    }
}

/// Layers have the limit each, not together.
#[test]
fn each_layer_has_a_deadline_of_its_own() {
    let pair = Pair::with(Way::Tcp, |config| config.sync_timeout = Duration::from_millis(700));
    let source = Held::new(&pair.local, false, &device(12, 1, 100), Batch, &[]);
    let into = Held::new(&pair.remote, false, &device(12, 1, 100), Batch, &[]);
    let bytes = source.fill(1);
    let aims = vec![to(2, named(&into), 6)];
    let task = pair.local.transfer_async(&source.end(), &SLOT, aims, None).unwrap();
    let started = Instant::now();
    for layer in task.layers() {
        thread::sleep(Duration::from_millis(150));
        task.ready(layer);
    }
    ended(&task);
    assert!(started.elapsed() > Duration::from_millis(700));
    assert!(is_done(&task, 0), "{:?}", task.outcomes());
    assert!(into.read() == bytes);
}

#[test]
fn a_destination_that_is_unlinked_between_layers() {
    for way in WAYS {
        let (local, remote, good) =
            (open(config(1, way), way), open(config(2, way), way), open(config(3, way), way));
        link(&local, &remote).unwrap();
        link(&local, &good).unwrap();
        let source = Held::new(&local, false, &device(6, 1, 100), Batch, &[]);
        let into = [&remote, &good].map(|remote| Held::new(remote, true, &device(6, 1, 100), Batch, &[]));
        let (bytes, before) = (source.fill(1), into[0].fill(2));
        let aims = vec![to(2, addressed(&into[0]), 3), to(3, named(&into[1]), 3), to(4, named(&into[1]), 3)];
        let task = local.transfer_async(&source.end(), &SLOT, aims, None).unwrap();
        task.ready(0);
        eventually("layer 0", || task.progress()[..2].iter().all(|carried| carried.layers == 1));
        unlink(&local, &remote).unwrap();
        // One that is made anew is another link: nobody knows who is there.
        link(&local, &remote).unwrap();
        task.ready(2);
        ended(&task);
        let error = failure(&task, 0);
        assert_eq!(error.kind(), ErrorKind::NotLinked, "{way:?}: {error}");
        assert_eq!((error.fact("layer"), error.fact("cluster")), (Some("1"), Some("2")), "{error}");
        assert!(is_done(&task, 1) && into[1].read() == bytes);
        let error = failure(&task, 2);
        assert_eq!((error.kind(), error.fact("cluster")), (ErrorKind::NotLinked, Some("4")), "{error}");
        assert_eq!(into[0].read(), [&bytes[..2], &before[2..]].concat());
    }
}

/// Dropped with a layer on the way: the task has ended once the engine has, whoever holds it, and nothing that is written
/// to the source then is seen by the peer.
#[test]
fn an_engine_that_closes_ends_its_transfers() {
    for way in WAYS {
        let slow = Slow::new(way, LONG);
        let source = Held::new(&slow.local, true, &device(4, 4, 64), Blocks, &[]);
        let held = Held::new(&slow.remote, true, &desc(Placement::Host, 4, 4, 64), Blocks, &[]);
        source.fill(1);
        let before = held.fill(2);
        let Slow { local, remote, good, gate } = slow;
        let aims = vec![to(2, named(&held), 2), to(2, named(&held), 2)];
        let task = local.transfer_async(&source.end(), &blocks(&[2], &[1]), aims, Some(LONG * 9)).unwrap();
        assert!(task.wanted(0));
        let rest = Slow { local: open(config(9, way), way), remote, good, gate };
        rest.holding(&held, |release| {
            task.ready(0);
            eventually("the request", || {
                rest.remote.stats().links.iter().any(|link| link.cluster == ClusterId(1))
            });
            thread::sleep(Duration::from_millis(50));
            drop(local);
            assert!(task.done(), "{way:?}: the engine closed, and a transfer goes on");
            for at in 0..2 {
                assert_eq!(failure(&task, at).kind(), ErrorKind::Closed);
            }
            source.fill(9);
            assert!(!task.wanted(1) && !task.cancel());
            task.ready(1);
            release();
        });
        drop(rest.remote);
        let now = held.read();
        for tensor in 0..4 {
            assert_eq!(now[tensor][..64], before[tensor][..64]);
            assert_eq!(now[tensor][64..128], [0; 64], "{way:?}: a layer of an engine that is gone");
            assert_eq!(now[tensor][128..], before[tensor][128..]);
        }
    }
}

#[test]
fn the_source_lives_until_the_end() {
    for way in WAYS {
        let pair = Pair::new(way);
        let used = || pair.local.stats().device_pool.unwrap().pool.used_bytes;
        let into = Held::new(&pair.remote, false, &device(4, 1, 5000), Batch, &[]);
        for cancel in [false, true] {
            let source = Held::new(&pair.local, false, &device(4, 1, 5000), Batch, &[]);
            let (bytes, end) = (source.fill(1), source.end());
            let aims = vec![to(2, named(&into), 2), to(2, addressed(&into), 2)];
            let task = pair.local.transfer_async(&end, &SLOT, aims, Some(LONG)).unwrap();
            pair.local.deallocate(source.cache.id()).unwrap();
            drop(source);
            // Whoever comes now gets other memory.
            let other = Held::new(&pair.local, false, &device(4, 1, 5000), Batch, &[]);
            other.fill(7);
            pair.local.deallocate(other.cache.id()).unwrap();
            drop(other);
            assert!(used() > 0, "the transfer holds its source");
            if cancel {
                task.cancel();
            } else {
                all_ready(&task);
            }
            ended(&task);
            assert_eq!(used(), 0, "{way:?}: done, and the source is still held");
            assert!(cancel || (is_done(&task, 0) && is_done(&task, 1) && into.read() == bytes));
        }
    }
}

#[test]
fn a_source_that_is_unregistered_is_read_no_more() {
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = device(4, 1, 500);
        let memory = Buffer::new(2000, |_| 1);
        let addrs: Vec<_> = (0..4).map(|tensor| memory.addr() + tensor * 500).collect();
        let source = pair.local.register(adopt(&shape, Batch, &addrs), &[], Some(true)).unwrap();
        let into = Held::new(&pair.remote, true, &shape, Batch, &[]);
        let before = into.fill(2);
        let end = llm_datadist_core::End::Managed(source.id());
        let task = pair.local.transfer_async(&end, &SLOT, vec![to(2, named(&into), 2)], None).unwrap();
        task.ready(0);
        eventually("layer 0", || task.progress()[0].layers == 1);
        pair.local.unregister(source.id()).unwrap();
        memory.write(0, &[9; 2000]);
        task.ready(1);
        ended(&task);
        assert_eq!(failure(&task, 0).kind(), ErrorKind::CacheNotFound, "{way:?}");
        assert_eq!(failure(&task, 0).fact("layer"), Some("1"));
        assert_eq!(into.read(), [vec![vec![1; 500]; 2], before[2..].to_vec()].concat());
        // A source that was never there: every destination says so, and there is nothing to wait for.
        let mut far_off = to(2, named(&into), 2);
        far_off.src_layers.end = u32::MAX;
        let task = pair.local.transfer_async(&end, &SLOT, vec![far_off, to(9, named(&into), 1)], Some(LONG));
        let task = task.unwrap();
        assert!(task.layers().is_empty());
        ended(&task);
        for at in 0..2 {
            assert_eq!(failure(&task, at).kind(), ErrorKind::CacheNotFound);
            assert_eq!(failure(&task, at).fact("cache_id"), Some(source.id().to_string().as_str()));
        }
    }
}

/// A remote cache that is freed and another in its place, under its key: what is left of the transfer fails.
#[test]
fn a_far_cache_that_is_freed_is_never_another() {
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = device(6, 1, 3000);
        let source = Held::new(&pair.local, false, &shape, Batch, &[]);
        let bytes = source.fill(1);
        for by in 0..3 {
            let key = request(by);
            let remote = Held::new(&pair.remote, false, &shape, Batch, &[Some(key)]);
            remote.fill(2);
            let target = match by {
                0 => named(&remote),
                1 => addressed(&remote),
                _ => Target::Cache { name: Name::Key(key), first_layer: 0 },
            };
            let task = pair.local.transfer_async(&source.end(), &SLOT, vec![to(2, target, 3)], None).unwrap();
            task.ready(0);
            eventually("layer 0", || task.progress()[0].layers == 1);
            assert_eq!(remote.read()[..2], bytes[..2]);
            let addrs = remote.cache.addrs().to_vec();
            // The key alone does not hold a transfer that has begun: the cache is what was found.
            pair.remote.remove_key(key).unwrap();
            task.ready(1);
            eventually("layer 1", || task.progress()[0].layers == 2);
            assert_eq!(remote.read()[..4], bytes[..4]);
            pair.remote.deallocate(remote.cache.id()).unwrap();
            drop(remote);
            let other = Held::new(&pair.remote, false, &shape, Batch, &[Some(key)]);
            assert_eq!(other.cache.addrs(), addrs, "the same memory");
            let before = other.fill(3);
            task.ready(2);
            ended(&task);
            assert_eq!(failure(&task, 0).kind(), ErrorKind::CacheNotFound, "{way:?}: {}", failure(&task, 0));
            assert_eq!(failure(&task, 0).fact("layer"), Some("2"));
            assert!(other.read() == before, "{way:?}: another cache was written");
            pair.remote.deallocate(other.cache.id()).unwrap();
            pair.remote.remove_key(key).unwrap();
        }
    }
}

/// A key that leads elsewhere from the second layer on: the transfer stays where it began.
#[test]
fn a_transfer_does_not_spread_over_two_caches() {
    for way in WAYS {
        let pair = Pair::new(way);
        let key = CacheKey::Blocks { model: 5 };
        let shape = device(4, 2, 100);
        let source = Held::new(&pair.local, false, &shape, Blocks, &[]);
        let first = Held::new(&pair.remote, true, &shape, Blocks, &[Some(key)]);
        let bytes = source.fill(1);
        first.fill(2);
        let aims = vec![to(2, Target::Cache { name: Name::Key(key), first_layer: 0 }, 2)];
        let task = pair.local.transfer_async(&source.end(), &blocks(&[0, 1], &[0, 1]), aims, None).unwrap();
        task.ready(0);
        eventually("layer 0", || task.progress()[0].layers == 1);
        let second = Held::new(&pair.remote, true, &shape, Blocks, &[Some(key)]);
        let before = second.fill(3);
        task.ready(1);
        ended(&task);
        assert!(is_done(&task, 0), "{:?}", task.outcomes());
        assert!(first.read() == bytes && second.read() == before, "{way:?}");
    }
}

/// Layers of two tasks, pushes, copies at the remote end and pulls of the same slot, and copies into the sources, all at once:
/// whoever reads it sees one version, in both tensors.
#[test]
fn rows_never_mix() {
    const BYTES: usize = 96 << 10;
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = device(2, 1, BYTES);
        let held = |engine: &DataDist| Held::new(engine, false, &shape, Batch, &[]);
        let into = held(&pair.remote);
        into.write(&[vec![1; BYTES], vec![1; BYTES]]);
        let until = Instant::now() + Duration::from_millis(u64::from(times(250)));
        let stop = AtomicBool::new(false);
        let looked = AtomicBool::new(false);
        let going = || {
            !stop.load(Ordering::SeqCst)
                && Instant::now() < until + LONG
                && (Instant::now() < until || !looked.load(Ordering::SeqCst))
        };
        thread::scope(|scope| {
            for target in [named(&into), addressed(&into)] {
                let (pair, held, going) = (&pair, &held, &going);
                let source = held(&pair.local);
                let fresh = held(&pair.local);
                source.write(&[vec![2; BYTES], vec![2; BYTES]]);
                scope.spawn(move || {
                    for version in (2..100u8).cycle() {
                        if !going() {
                            break;
                        }
                        let aims = vec![to(2, target.clone(), 1), to(2, target.clone(), 1)];
                        let task = pair.local.transfer_async(&source.end(), &SLOT, aims, None).unwrap();
                        task.ready(0);
                        // Into the source, while it is read.
                        fresh.write(&[vec![version; BYTES], vec![version; BYTES]]);
                        pair.local.copy_cache(&source.end(), &fresh.end(), WHOLE).unwrap();
                        ended(&task);
                        assert!(is_done(&task, 0) && is_done(&task, 1), "{:?}", task.outcomes());
                    }
                });
            }
            scope.spawn(|| {
                let own = held(&pair.local);
                own.write(&[vec![101; BYTES], vec![101; BYTES]]);
                while going() {
                    let pushed = PushRows::Slot { local: 0 };
                    pair.local.push(&own.end(), of(2, row(&into, 0)), &pushed, Layers::ALL).unwrap();
                }
            });
            scope.spawn(|| {
                let own = held(&pair.remote);
                own.write(&[vec![102; BYTES], vec![102; BYTES]]);
                while going() {
                    pair.remote.copy_cache(&into.end(), &own.end(), WHOLE).unwrap();
                    thread::sleep(Duration::from_micros(300));
                }
            });
            let probe = held(&pair.remote);
            let own = held(&pair.local);
            let mut seen = std::collections::BTreeSet::new();
            let mut mixed = None;
            let mut look = |got: &[u8]| {
                seen.insert(got[0]);
                mixed = mixed.or_else(|| got.iter().position(|byte| *byte != got[0]));
                (mixed.is_none(), seen.len())
            };
            while going() {
                pair.remote.copy_cache(&probe.end(), &into.end(), WHOLE).unwrap();
                let (mut whole, mut versions) = look(&probe.read().concat());
                // Where memory is shared a pull reads in place, and does not see who writes there.
                if !way.shares() {
                    let slot = PullRows::Slot { local: 0, size: -1 };
                    pair.local.pull(of(2, row(&into, 0)), &own.end(), &slot, Layers::ALL).unwrap();
                    (whole, versions) = look(&own.read().concat());
                }
                looked.store(versions > 2 || !whole, Ordering::SeqCst);
                if !whole {
                    break;
                }
            }
            stop.store(true, Ordering::SeqCst);
            assert_eq!(mixed, None, "{way:?}: a slot of two versions");
            eprintln!("{way:?}: {} versions", seen.len());
        });
    }
}

/// Between the look-up and the pin an `unregister` may come: then nothing of the caller's memory is touched.
#[test]
fn what_is_unregistered_while_it_is_waited_for_is_not_touched() {
    type Call = fn(&DataDist, &Held, &Held, &Held) -> llm_datadist_core::Result<()>;
    let layer: Call = |local, taken, _, remote| {
        let aim = Destination { src_row: 1, ..to(2, named(remote), 1) };
        let task = local.transfer_async(&taken.end(), &SLOT, vec![aim], None)?;
        task.ready(0);
        ended(&task);
        let error = failure(&task, 0);
        Err(Error::new(error.kind(), error.to_string()))
    };
    const INTO: CopyArgs = CopyArgs { dst_batch_index: 1, ..WHOLE };
    const OUT_OF: CopyArgs = CopyArgs { src_batch_index: 1, ..WHOLE };
    let calls: [(&str, Call); 5] = [
        ("copy out", |local, taken, own, _| local.copy_cache(&own.end(), &taken.end(), OUT_OF)),
        ("copy in", |local, taken, own, _| local.copy_cache(&taken.end(), &own.end(), INTO)),
        ("pull", |local, taken, _, remote| {
            let rows = PullRows::Slot { local: 1, size: -1 };
            local.pull(of(2, row(remote, 0)), &taken.end(), &rows, Layers::ALL)
        }),
        ("push", |local, taken, _, remote| {
            local.push(&taken.end(), of(2, row(remote, 0)), &PushRows::Slot { local: 1 }, Layers::ALL)
        }),
        ("layer", layer),
    ];
    for way in WAYS {
        let gate = Gated::new(HostReach::Direct);
        let devices = DeviceSet::with_device(gate.clone());
        let local = DataDist::open_over(config(1, way), devices, way.transports()).unwrap();
        let remote = open(config(2, way), way);
        link(&local, &remote).unwrap();
        for (name, call) in calls {
            let shape = device(2, 2, 64);
            let taken = Held::new(&local, true, &shape, Batch, &[]);
            let pool = Held::new(&local, false, &shape, Batch, &[]);
            let own = Held::new(&local, true, &shape, Batch, &[]);
            let into = Held::new(&remote, true, &shape, Batch, &[]);
            taken.fill(1);
            let (theirs, ours) = (into.fill(2), own.fill(3));
            gate.shut();
            thread::scope(|scope| {
                // Holds slot 1 of what is to be taken away.
                let copy = scope.spawn(|| local.copy_cache(&taken.end(), &pool.end(), INTO));
                gate.wait_for(1);
                let waiting = scope.spawn(|| call(&local, &taken, &own, &into));
                thread::sleep(Duration::from_millis(30));
                let gone = scope.spawn(|| local.unregister(taken.cache.id()));
                eventually("the end of its id", || local.find(taken.cache.id()).is_err());
                gate.open();
                copy.join().unwrap().unwrap();
                gone.join().unwrap().unwrap();
                // From here on it is the caller's.
                let mine = taken.fill(7);
                let error = waiting.join().unwrap().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{way:?} {name}: {error}");
                assert!(taken.read() == mine, "{way:?} {name}: it was written");
            });
            assert!(into.read() == theirs && own.read() == ours, "{way:?} {name}: it was read");
            for engine in [&local, &remote] {
                for held in [&pool, &own, &into] {
                    engine.deallocate(held.cache.id()).unwrap();
                    engine.unregister(held.cache.id()).unwrap();
                }
            }
        }
    }
}

/// Addresses in the middle of tensors, of several caches, in any order, and of caches that share memory.
#[test]
fn addresses_may_lie_anywhere() {
    for way in WAYS {
        let pair = Pair::new(way);
        let source = Held::new(&pair.local, false, &device(6, 1, 100), Batch, &[]);
        let bytes = source.fill(1);
        let memory = Buffer::new(3000, |_| 0xEE);
        let at = |offset: u64| memory.addr() + offset;
        let entered = |adopted| pair.remote.register(adopted, &[], Some(true)).unwrap();
        // Two that are too small hide a larger one, which was entered between them.
        let _small = entered(adopt(&device(2, 1, 50), Batch, &[at(200), at(600)]));
        let _large = entered(adopt(&device(1, 4, 250), Blocks, &[at(100)]));
        let _late = entered(adopt(&device(2, 1, 60), Batch, &[at(195), at(595)]));
        let _other = entered(adopt(&device(3, 1, 130), Batch, &[at(1500), at(1200), at(1800)]));
        let addrs = [at(1830), at(200), at(1500), at(601), at(1215), at(950)];
        let task = pair.local.transfer_async(
            &source.end(),
            &SLOT,
            vec![to(2, Target::Addresses(addrs.to_vec()), 3)],
            None,
        );
        let task = task.unwrap();
        all_ready(&task);
        ended(&task);
        assert!(is_done(&task, 0), "{way:?}: {:?}", task.outcomes());
        let mut expected = vec![0xEE; 3000];
        for (tensor, place) in addrs.iter().map(|addr| (addr - memory.addr()) as usize).enumerate() {
            expected[place..place + 100].copy_from_slice(&bytes[tensor]);
        }
        assert!(memory.read(0, 3000) == expected, "{way:?}");
    }
}

/// What a peer may answer to the question where addresses lie.
#[test]
fn a_peer_that_lies_about_addresses() {
    let local = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 1);
    let source = Held::new(&local, false, &device(4, 1, 100), Batch, &[]);
    let spot = |cache, tensor, offset| AddressLocation { cache, tensor, offset };
    let record = |rows, row_bytes| Record {
        at: Place { place: 0, generation: 0 },
        cache: 7,
        row: 0,
        num_tensors: 4,
        rows,
        row_bytes,
        blocks: false,
        placement: 1,
        allocated: true,
        accessible: true,
        location: Location::Hidden,
    };
    let remote = |tensor| spot(7, tensor, 0);
    let max = u32::MAX;
    let cases: [(Vec<AddressLocation>, ErrorKind); 8] = [
        (vec![], ErrorKind::System),
        (vec![remote(0); 3], ErrorKind::System),
        (vec![remote(0); 5], ErrorKind::System),
        (vec![spot(7, 0, u64::MAX); 4], ErrorKind::InvalidArgument),
        (vec![spot(7, 0, u64::MAX - 50); 4], ErrorKind::InvalidArgument),
        (vec![remote(max - 1), remote(max), remote(max), remote(0)], ErrorKind::CacheNotFound),
        (vec![remote(max); 4], ErrorKind::CacheNotFound),
        (vec![spot(-1, 0, 0), spot(0, 0, 0), spot(i64::MIN, 1, 1), remote(0)], ErrorKind::CacheNotFound),
    ];
    for (spots, kind) in cases {
        let aims = vec![to(2, Target::Addresses(vec![1, 2, 3, 4]), 2)];
        let told = Reply::Located(spots.clone());
        let task = thread::scope(|scope| {
            let control = scope.spawn(|| fake.linked());
            local.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
            let _control = control.join().unwrap();
            scope.spawn(|| {
                let (stream, _) = fake.greet();
                while let Ok(request) = hear::<Request>(&stream) {
                    if let Request::Write { ahead: true, from, to, .. } = request {
                        stream.pass_over(to - from, soon()).unwrap();
                    }
                    let reply = match request {
                        Request::Locate { .. } => told.clone(),
                        Request::Describe { .. } => Reply::Described(record(1, 200)),
                        _ => Reply::Stale,
                    };
                    say(&stream, &reply);
                }
            });
            let task = local.transfer_async(&source.end(), &SLOT, aims, None).unwrap();
            all_ready(&task);
            ended(&task);
            local.unlink_clusters(&[fake.address()], LONG, true).remove(0).unwrap();
            task
        });
        assert_eq!(failure(&task, 0).kind(), kind, "{spots:?}: {}", failure(&task, 0));
    }
}

/// More addresses than any transfer has, however short they are written, cost the peer its stream and nothing else.
#[test]
fn a_peer_that_asks_for_too_many_addresses() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 1);
    let _control = fake.link(&engine, 7).unwrap();
    let stream = fake.call(&engine, 7).unwrap();
    say(&stream, &Request::Locate { addrs: vec![1; MAX_ADDRS + 1], limit_ms: 1000 });
    assert!(hear::<Reply>(&stream).is_err());
    let stream = fake.call(&engine, 7).unwrap();
    say(&stream, &Request::Locate { addrs: vec![], limit_ms: 1000 });
    assert_eq!(hear::<Reply>(&stream).unwrap(), Reply::Located(vec![]));
    say(&stream, &Request::Locate { addrs: vec![1; MAX_ADDRS], limit_ms: 1000 });
    let Reply::Failed { message, .. } = hear(&stream).unwrap() else { panic!() };
    assert!(message.contains("dst_addrs[0]"), "{message}");
    // What it takes in memory is bounded by its bytes.
    for count in [MAX_ADDRS, 20 * MAX_ADDRS] {
        let request = protocol::encode(&Request::Locate { addrs: vec![1; count], limit_ms: 0 }).unwrap();
        let (ok, peak) = heap::peak(|| protocol::decode::<Request>(&request[protocol::HEADER..]).is_ok());
        assert_eq!(ok, count == MAX_ADDRS);
        assert!(peak <= 32 * MAX_ADDRS, "{peak} for {count}");
        let spot = AddressLocation { cache: 1, tensor: 1, offset: 1 };
        let reply = protocol::encode(&Reply::Located(vec![spot; count])).unwrap();
        let (ok, peak) = heap::peak(|| protocol::decode::<Reply>(&reply[protocol::HEADER..]).is_ok());
        assert_eq!(ok, count == MAX_ADDRS);
        assert!(peak <= 96 * MAX_ADDRS, "{peak} for {count}");
    }
}

/// Among very many caches every address is found, as by hand, while others use the table.
#[test]
fn addresses_are_found_among_many_caches() {
    const CACHES: u64 = 100_000;
    let engine = open(config(2, Way::Tcp), Way::Tcp);
    let fake = Fake::new(1, 1);
    let _control = fake.link(&engine, 7).unwrap();
    let shape = device(2, 1, 64);
    // Nobody touches these: two tensors of 64 bytes in every 256, every third cache closed to peers.
    let base = |cache: u64| (1 << 40) + cache * 256;
    for cache in 0..CACHES {
        let adopted = adopt(&shape, Batch, &[base(cache) + 128, base(cache)]);
        engine.register(adopted, &[], Some(cache % 3 != 0)).unwrap();
    }
    let stop = AtomicBool::new(false);
    let found = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                assert!(engine.find(CacheId(1)).is_ok() && engine.find(CacheId(-3)).is_err());
            }
        });
        let wanted = |at: u64| (at * 7919 % CACHES, at * 31 % 256);
        let sound = |&(cache, offset): &(u64, u64)| cache % 3 != 0 && offset % 128 < 64;
        let (all, lost): (Vec<_>, Vec<_>) = (0..4000).map(wanted).partition(sound);
        let stream = fake.call(&engine, 7).unwrap();
        let addrs = all.iter().map(|(cache, offset)| base(*cache) + offset).collect();
        say(&stream, &Request::Locate { addrs, limit_ms: 10_000 });
        let Reply::Located(spots) = hear(&stream).unwrap() else { panic!() };
        assert_eq!(spots.len(), all.len());
        for (spot, (cache, offset)) in spots.iter().zip(&all) {
            let (tensor, inside) = (u32::from(*offset < 64), offset % 128);
            let by_hand = AddressLocation { cache: *cache as i64 + 1, tensor, offset: inside };
            assert_eq!(*spot, by_hand);
        }
        for (cache, offset) in lost.iter().take(20) {
            let addrs = vec![base(all[0].0) + all[0].1, base(*cache) + offset];
            say(&stream, &Request::Locate { addrs, limit_ms: 10_000 });
            let Reply::Failed { message, .. } = hear(&stream).unwrap() else { panic!() };
            assert!(message.contains("dst_addrs[1]"), "{message}");
        }
        stop.store(true, Ordering::SeqCst);
        spots.len()
    });
    assert!(found > 1000);
}
