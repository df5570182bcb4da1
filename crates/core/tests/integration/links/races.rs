//! Pulls, pushes, layers, releases and links at the same time, on both sides.
//!
//! Not for: broken peers (`broken_streams`), races for one key (`tests/test_keys_remote.py`).

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{Config, CopyArgs, LayerRange, Layers, Name, Rows, Target};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{CacheId, CacheKind, ClusterId, Error, ErrorKind};

use super::layerwise::{SLOTS, finish, is_done, start, to, wait};
use super::{
    Held, LONG, Pair, WAYS, Way, address, bytes_by, check_pull, config, device, eventually, link, of, open,
    open_gated, pairs, pull_slot, push_slot, request, row, times, unlink,
};
use crate::emulation::PROCESS_READS;
use crate::fixtures::{self, Buffer, Gated, StopOnDrop, adopt};

use CacheKind::Batch;

/// A copy of slot 1 to slot 0.
const FROM_1: CopyArgs = CopyArgs { src_batch_index: 1, dst_batch_index: 0, offset: 0, size: -1 };

/// Runs `work` on `count` threads at once.
fn together(count: usize, work: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        for index in 0..count {
            let work = &work;
            scope.spawn(move || work(index));
        }
    });
}

fn until(millis: u32) -> Instant {
    Instant::now() + Duration::from_millis(u64::from(times(millis)))
}

/// Runs `owner` again and again for a while, with the number of the round and a function that waits until the round may end.
/// Meanwhile two threads call what `reader` returns, which says whether it got bytes. The first round does not end before that,
/// however busy the machine is.
pub(super) fn replaced_while_read<R: FnMut() -> bool>(
    owner: impl Fn(u32, &dyn Fn()) + Sync,
    reader: impl Fn() -> R + Sync,
) {
    let (stop, good) = (AtomicBool::new(false), AtomicBool::new(false));
    let until = until(150);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _stop = StopOnDrop(&stop);
            for round in 1.. {
                owner(round, &|| {
                    while round == 1 && !good.load(Ordering::Relaxed) && Instant::now() < until + LONG {
                        thread::sleep(Duration::from_millis(1));
                    }
                    thread::sleep(Duration::from_micros(u64::from(round % 5) * 100));
                });
                if Instant::now() > until {
                    break;
                }
            }
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let mut read = reader();
                while !stop.load(Ordering::Relaxed) {
                    if read() {
                        good.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert!(good.into_inner(), "nothing was ever pulled");
}

/// Slots are pulled concurrently, whole or a layer at a time. The last layer of a slot releases its key, and
/// so changes the cache during all other pulls. None of them fails.
#[test]
fn last_layer_of_each_slot_releases_its_key() {
    const COUNT: usize = 64;
    for (way, layers) in WAYS.into_iter().flat_map(|way| [1, 8].map(|layers| (way, layers))) {
        let pair = Pair::new(way);
        let tensors = 8 / layers as u32;
        for round in 0..times(3) {
            let keys: Vec<_> = (0..=COUNT as u64).map(|id| Some(request(id))).collect();
            let remote = Held::new(&pair.remote, false, &device(8, COUNT + 1, 512), Batch, &keys);
            let bytes = remote.fill(round as u8);
            together(16, |index| {
                let local = Held::pool(&pair.local, &device(tensors, 1, 512), Batch);
                for pull in (index..COUNT * layers).step_by(16) {
                    let (slot, layer) = (pull / layers, pull % layers);
                    let src = Some(LayerRange { first: layer as u32, end: layer as u32 + 1 });
                    let name = if layer % 2 == 0 {
                        Name::Key(request(slot as u64))
                    } else {
                        row(&remote, slot as u32)
                    };
                    let rows = Rows::slot(0, -1);
                    let layers = Layers { src, dst: None, tensors_per_layer: tensors };
                    pair.local.pull(of(2, name), &local.end(), rows, layers).run().unwrap();
                    let source = &bytes[layer * tensors as usize..];
                    assert!(
                        local.read().iter().zip(source).all(|(got, all)| *got == all[slot * 512..][..512])
                    );
                }
                local.free(&pair.local);
            });
            remote.free(&pair.remote);
            let table = || (pair.remote.stats().table.caches, pair.remote.stats().table.keys);
            assert_eq!(table(), (1, 1), "the slot that was not pulled keeps its key, which holds the cache");
            pair.remote.remove_key(request(COUNT as u64)).unwrap();
            assert_eq!(table(), (0, 0));
        }
    }
}

/// The owner frees caches and makes new ones at the same address: a pull returns one of them whole, or fails.
#[test]
fn pull_never_mixes_generations() {
    // Two tensors are longer than what rings carry, so registered memory is read by process id.
    const BYTES: usize = (1 << 20) + 4096;
    for (way, registered) in WAYS.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let what = format!("{way:?}, registered {registered}");
        let pair = Pair::new(way);
        let shape = device(2, 1, BYTES);
        let memory = Buffer::new(2 * BYTES, |_| 0);
        let make = || {
            if !registered {
                return Held::pool(&pair.remote, &shape, Batch);
            }
            let adopted = adopt(&shape, Batch, &[memory.addr(), memory.addr() + BYTES as u64]);
            Held { cache: pair.remote.register(adopted, &[], Some(true)).unwrap(), own: None }
        };
        let images = |id: i64| [vec![id as u8; BYTES], vec![!(id as u8); BYTES]];
        let live = AtomicI64::new(0);
        let owner = |_, last: &dyn Fn()| {
            let held = make();
            let id = held.cache.id().0;
            held.write(&images(id));
            live.store(id, Ordering::Release);
            last();
            held.free(&pair.remote);
        };
        let reader = || {
            let (local, what, live, pair) = (Held::pool(&pair.local, &shape, Batch), &what, &live, &pair);
            move || {
                let id = live.load(Ordering::Acquire);
                local.write(&images(0));
                let name = Name::Row { cache: CacheId(id), row: 0 };
                if let Err(error) = pull_slot(&pair.local, of(2, name), &local) {
                    assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{what}: {error}");
                    return false;
                }
                assert!(local.read() == images(id), "{what}: {id} is mixed");
                true
            }
        };
        replaced_while_read(owner, reader);
    }
}

/// Rows that were read after their cache had been freed are not reported as arrived.
#[test]
fn nothing_arrives_from_a_cache_freed_meanwhile() {
    let gate = Gated::new(HostReach::Direct);
    let remote = open(config(2, Way::Shm), Way::Shm);
    let local = open_gated(config(1, Way::Shm), Way::Shm, &gate);
    link(&local, &remote).unwrap();
    let shape = device(1, 4, 4096);
    let into = Held::pool(&local, &shape, Batch);
    let source = Held::pool(&remote, &shape, Batch);
    source.fill(1);
    let (id, name) = (source.cache.id(), row(&source, 0));
    drop(source);
    gate.shut();
    let failed = thread::scope(|scope| {
        let pull = scope.spawn(|| pull_slot(&local, of(2, name), &into).unwrap_err());
        gate.wait_for(1);
        remote.deallocate(id).unwrap();
        Held::pool(&remote, &shape, Batch).fill(2);
        gate.open();
        pull.join().unwrap()
    });
    assert_eq!(failed.kind(), ErrorKind::CacheNotFound, "{failed}");
    assert!(failed.arrived().is_empty(), "{failed}");
}

/// Once `unregister` has returned, no push in progress writes to the memory.
#[test]
fn unregistered_memory_is_not_written_by_a_peer() {
    const BYTES: usize = 24 << 20;
    for pair in pairs() {
        let shape = device(1, 1, BYTES);
        let source = Held::pool(&pair.local, &shape, Batch);
        source.write(&[vec![1; BYTES]]);
        let memory = Buffer::new(BYTES, |_| 0);
        for _ in 0..times(3) {
            memory.write(0, &vec![0; BYTES]);
            let adopted = adopt(&shape, Batch, &[memory.addr()]);
            let into = pair.remote.register(adopted, &[], Some(true)).unwrap();
            let name = Name::Row { cache: into.id(), row: 0 };
            thread::scope(|scope| {
                // It may fail, because the cache is being removed.
                scope.spawn(|| _ = push_slot(&pair.local, &source, 0, of(2, name)));
                eventually("the first byte", || memory.read(0, 1) == [1]);
                pair.remote.unregister(into.id()).unwrap();
                memory.write(0, &vec![2; BYTES]);
            });
            let pushed = memory.read(0, BYTES).iter().position(|&byte| byte != 2);
            assert_eq!(pushed, None, "pushed over the caller's bytes");
        }
    }
}

#[test]
fn both_sides_may_unlink_at_once() {
    for pair in pairs() {
        let ends = [&pair.local, &pair.remote];
        for round in 0..times(60) {
            together(2, |index| {
                unlink(ends[index], ends[1 - index]).unwrap_or_else(|error| panic!("round {round}: {error}"));
            });
            eventually("the end of the link", || ends.iter().all(|end| end.stats().links.is_empty()));
            link(ends[0], ends[1]).unwrap();
        }
    }
}

/// Links, unlinks, pulls and pushes run concurrently on both sides. Every call ends, and nothing is left over.
#[test]
fn everything_at_once_leaves_nothing() {
    use ErrorKind::{AlreadyLinked, LinkFailed, NotLinked, UnlinkFailed};
    for way in WAYS {
        let (local, remote) = (open(config(1, way), way), open(config(2, way), way));
        let shape = device(2, 1, 4096);
        let source = Held::pool(&remote, &shape, Batch);
        let bytes = source.fill(9);
        let until = until(400);
        together(16, |index| {
            let into = Held::pool(&local, &shape, Batch);
            while Instant::now() < until {
                let result = match index {
                    0 => link(&local, &remote),
                    1 => link(&remote, &local),
                    2 => unlink(&local, &remote),
                    3 => remote.unlink_clusters(&[address(&local)], LONG, true).remove(0),
                    4 => local.check_link(ClusterId(2)),
                    5..8 => push_slot(&remote, &source, 0, of(1, row(&into, 0))),
                    _ => pull_slot(&local, of(2, row(&source, 0)), &into),
                };
                if index < 4 {
                    // Links live long enough for calls, and end under some of them.
                    thread::sleep(Duration::from_millis(3 + 2 * index as u64));
                }
                let allowed: &[ErrorKind] = match index {
                    0 | 1 => &[AlreadyLinked, LinkFailed],
                    2 => &[UnlinkFailed],
                    _ => &[NotLinked],
                };
                match result {
                    Ok(()) => assert!(index < 5 || into.read() == bytes),
                    Err(error) => assert!(allowed.contains(&error.kind()), "{way:?} {index}: {error:?}"),
                }
            }
        });
        let _ = remote.unlink_clusters(&[address(&local)], LONG, true);
        eventually("the end of all links", || {
            local.stats().links.is_empty() && remote.stats().links.is_empty()
        });
        link(&local, &remote).unwrap();
        check_pull(&local, &remote);
    }
}

/// Pushes and layers write a row while this side pulls it and its owner copies it: every reader sees one version of it.
#[test]
fn readers_see_one_version_of_a_row() {
    const BYTES: usize = 128 << 10;
    for (way, one_sided) in WAYS.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let pair = Pair::with(way, |config| config.remote_accessible = one_sided);
        let shape = device(2, 2, BYTES);
        let [into, remote, probe] =
            [&pair.local, &pair.remote, &pair.remote].map(|engine| Held::pool(engine, &shape, Batch));
        let written = row(&remote, 1);
        let addrs = remote.cache.addrs().iter().map(|addr| addr + BYTES as u64).collect();
        let writers = AtomicU64::new(3);
        thread::scope(|scope| {
            scope.spawn(|| {
                let source = Held::pool(&pair.local, &shape, Batch);
                source.write(&vec![[vec![1; BYTES], vec![2; BYTES]].concat(); 2]);
                for step in 0..times(60) {
                    push_slot(&pair.local, &source, step % 2, of(2, written)).unwrap();
                    // Pushes to another row do not disturb the pulls.
                    push_slot(&pair.local, &source, step % 2, of(2, row(&remote, 0))).unwrap();
                }
                writers.fetch_sub(1, Ordering::Relaxed);
            });
            for target in
                [Target::Cache { name: written.into(), first_layer: Some(0) }, Target::Addresses(addrs)]
            {
                let (pair, shape, writers) = (&pair, &shape, &writers);
                scope.spawn(move || {
                    let [source, fresh] = [(); 2].map(|()| Held::pool(&pair.local, shape, Batch));
                    let aims = vec![to(2, target, 1); 2];
                    for step in 0..times(60) {
                        fresh.write(&vec![vec![step as u8; 2 * BYTES]; 2]);
                        let task = start(&pair.local, &source, &SLOTS, &aims);
                        task.ready(0).unwrap();
                        // The source changes while the layer is sent.
                        pair.local.copy_cache(&source.end(), &fresh.end(), FROM_1).run().unwrap();
                        wait(&task);
                        assert!(is_done(&task, 0) && is_done(&task, 1), "{:?}", task.outcomes());
                    }
                    writers.fetch_sub(1, Ordering::Relaxed);
                });
            }
            let mut reads = 0;
            while writers.load(Ordering::Relaxed) > 0 || reads < 3 {
                pull_slot(&pair.local, of(2, written), &into).unwrap();
                pair.remote.copy_cache(&probe.end(), &remote.end(), FROM_1).run().unwrap();
                reads += 1;
                for (what, tensors) in [("pulled", into.read()), ("copied", probe.read())] {
                    let version = tensors[0][0];
                    let one =
                        tensors.iter().all(|tensor| tensor[..BYTES].iter().all(|&byte| byte == version));
                    assert!(one, "{way:?}, one-sided {one_sided}: {what} two versions, read {reads}");
                }
            }
        });
    }
}

/// Peers that read a row continuously do not keep a copy from writing it.
#[test]
fn endless_readers_let_a_copy_in() {
    const BYTES: usize = 8 << 20;
    const READERS: u64 = 12;
    let remote = open(config(9, Way::Tcp), Way::Tcp);
    let hot = Held::new(&remote, true, &device(1, 2, BYTES), Batch, &[]);
    let (rounds, over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        for at in 0..READERS {
            let (remote, rounds, over, hot) = (&remote, &rounds, &over, &hot);
            let local = open(config(10 + at, Way::Tcp), Way::Tcp);
            link(&local, remote).unwrap();
            scope.spawn(move || {
                let into = Held::pool(&local, &device(1, 1, BYTES), Batch);
                while !over.load(Ordering::SeqCst) {
                    pull_slot(&local, of(9, row(hot, 0)), &into).unwrap();
                    rounds.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        eventually("the readers", || rounds.load(Ordering::SeqCst) >= 2 * READERS);
        // Reads that have begun finish first. More pulls pass the ten copies only if later readers overtake a copy.
        let before = rounds.load(Ordering::SeqCst);
        let copied = (0..10).try_for_each(|_| remote.copy_cache(&hot.end(), &hot.end(), FROM_1).run());
        let passed = rounds.load(Ordering::SeqCst) - before;
        over.store(true, Ordering::SeqCst);
        assert!(copied.is_ok() && passed <= 50 * READERS, "{passed} pulls passed: {copied:?}");
    });
}

/// A push pins `local` and waits for `remote`, the peer's pull pins `remote` and waits for `local`, and a
/// copy into `local` waits in between. None of them waits forever.
#[test]
fn push_pull_and_copy_do_not_deadlock() {
    const BYTES: usize = 512 << 10;
    let rows = fixtures::patterned(5, 2, BYTES).iter().map(|row| row.repeat(2)).collect::<Vec<_>>();
    for way in WAYS {
        let pair = Pair::with(way, |config: &mut Config| {
            (config.remote_accessible, config.sync_timeout) = (true, Duration::from_secs(5));
        });
        let [local, remote] = pair.pools(&device(2, 2, BYTES), Batch);
        local.write(&rows);
        remote.write(&rows);
        together(3, |index| {
            for _ in 0..times(300) {
                match index {
                    0 => push_slot(&pair.local, &local, 0, of(2, row(&remote, 0))),
                    1 => pull_slot(&pair.remote, of(1, row(&local, 0)), &remote),
                    _ => pair.local.copy_cache(&local.end(), &local.end(), FROM_1).run(),
                }
                .unwrap();
            }
        });
        assert!(remote.read() == rows);
    }
}

/// Both sides push registered memory to each other through rings. Pushes in opposite directions that use different rows do not
/// wait for each other. Two pushes that each write the row that the other one reads may time out; the rows are then free.
#[test]
fn crossing_pushes_through_rings_free_their_rows() {
    const BYTES: usize = 512 << 10;
    struct Sides {
        pair: Pair,
        caches: [Held; 2],
    }
    impl Sides {
        fn new(change: impl Fn(&mut Config)) -> Sides {
            let pair = Pair::with(Way::Shm, change);
            let caches = pair.registered(&device(2, 2, BYTES), Batch);
            Sides { pair, caches }
        }

        /// Pushes row 0 of `side` to a row of the other side.
        fn push(&self, side: usize, to_row: u32) -> Result<(), Error> {
            let engine = [&self.pair.local, &self.pair.remote][side];
            let target = row(&self.caches[1 - side], to_row);
            push_slot(engine, &self.caches[side], 0, of(2 - side as u64, target))
        }

        fn row(&self, side: usize, row: usize) -> Vec<Vec<u8>> {
            self.caches[side].read().iter().map(|tensor| tensor[row * BYTES..][..BYTES].to_vec()).collect()
        }
    }
    let sides = Sides::new(|_| ());
    (0..2).for_each(|side| _ = sides.caches[side].fill(side as u8));
    let sources = [0, 1].map(|side| sides.row(side, 0));
    together(4, |index| (0..times(100)).for_each(|_| sides.push(index % 2, 1).unwrap()));
    for side in [0, 1] {
        assert!(sides.row(side, 1) == sources[1 - side], "row 1 of side {side}");
        assert!(sides.row(side, 0) == sources[side], "row 0 of side {side}");
    }
    assert!(bytes_by("rings", &sides.pair.local) > 0);

    let sides = Sides::new(|config| config.sync_timeout = Duration::from_secs(1));
    let both = || sides.push(0, 1).is_ok() && sides.push(1, 1).is_ok();
    eventually("the call streams", both);
    for round in 0..3 {
        (0..2).for_each(|side| _ = sides.caches[side].fill(2 + 2 * round + side as u8));
        together(2, |side| {
            if let Err(error) = sides.push(side, 0) {
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            }
        });
        // A push that timed out may still be writing row 0. This one waits for it.
        eventually("the rows are free", || sides.push(0, 0).is_ok());
        assert!(sides.row(1, 0) == sides.row(0, 0), "round {round}");
        eventually("the other rows are free", both);
    }
}

/// More layers of registered memory are pushed at once than there are call streams with rings. The peer reads the other layers
/// by process id.
#[test]
fn layers_are_pushed_through_rings_and_by_process() {
    const TASKS: usize = 12;
    const BYTES: usize = 300 << 10;
    let pair = Pair::new(Way::Shm);
    let shape = device(8, 1, BYTES);
    let held = |engine| (0..TASKS).map(|_| Held::new(engine, true, &shape, Batch, &[])).collect::<Vec<_>>();
    let (sources, targets) = (held(&pair.local), held(&pair.remote));
    for round in 0..5 {
        let bytes: Vec<_> =
            sources.iter().zip(0..).map(|(source, at)| source.fill(round * 20 + at)).collect();
        let start = |at: usize| {
            let into = Target::Cache { name: row(&targets[at], 0).into(), first_layer: Some(0) };
            start(&pair.local, &sources[at], &SLOTS, &[to(2, into, 4)])
        };
        let tasks: Vec<_> = (0..TASKS).map(start).collect();
        together(TASKS, |at| finish(&tasks[at]));
        for (at, task) in tasks.iter().enumerate() {
            assert!(is_done(task, 0), "{:?}", task.outcomes());
            assert!(targets[at].read() == bytes[at], "round {round}, task {at}");
        }
    }
    let link = pair.local.stats().links.remove(0);
    let moved: u64 = link.paths.iter().map(|(_, path)| path.bytes).sum();
    assert_eq!(moved, 5 * TASKS as u64 * 8 * BYTES as u64);
    let expected = ["rings", if PROCESS_READS.missing().is_none() { "process" } else { "sockets" }];
    assert!(link.paths.iter().all(|(name, path)| path.bytes == 0 || expected.contains(name)));
    assert!(bytes_by("rings", &pair.local) > 0);
}
