//! Pulls, pushes, releases and links at the same time, on both sides.
//!
//! Not for: broken peers (`broken`).

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::testing::device::{DeviceSet, HostReach};
use llm_datadist_core::{
    CacheId, CacheKey, CacheKind, ClusterId, CopyArgs, DataDist, Deadline, Destination, End, ErrorKind,
    LayerRange, Layers, LayerwiseArgs, Name, Outcome, PeerAddress, Placement, PullRows, PushRows, Target,
    Task,
};

use super::layer_faults::Slow;
use super::{
    Held, LONG, Pair, WAYS, Way, address, config, eventually, link, of, open, request, row, times, unlink,
};
use crate::bed::{self, Buffer, Gated, adopt, desc};

use CacheKind::{Batch, Blocks};

const KEY: CacheKey = CacheKey::Blocks { model: 7 };

const SLOT: PullRows = PullRows::Slot { local: 0, size: -1 };

/// Runs `work` on `count` threads at once.
fn together(count: usize, work: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        for index in 0..count {
            let work = &work;
            scope.spawn(move || work(index));
        }
    });
}

#[test]
fn of_two_pullers_of_one_key_one_wins() {
    for way in WAYS {
        let remote = open(config(2, way), way);
        let pullers: Vec<DataDist> = (0..2).map(|at| open(config(10 + at, way), way)).collect();
        for puller in &pullers {
            link(puller, &remote).unwrap();
        }
        let shape = desc(Placement::Device, 2, 1, 4096);
        let into: Vec<Held> =
            pullers.iter().map(|local| Held::new(local, false, &shape, Batch, &[])).collect();
        for round in 0..u64::from(times(60)) {
            let source = Held::new(&remote, false, &shape, Batch, &[Some(request(round))]);
            let bytes = source.fill(round as u8);
            remote.deallocate(source.cache.id()).unwrap();
            let won = AtomicU64::new(0);
            // Two threads of each of the two: the same link, and another.
            together(4, |index| {
                let (local, into) = (&pullers[index % 2], &into[index % 2]);
                match local.pull(of(2, Name::Key(request(round))), &into.end(), &SLOT, Layers::ALL) {
                    Ok(()) => _ = won.fetch_add(1 << (8 * (index % 2)), Ordering::Relaxed),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{error}"),
                }
            });
            let won = won.into_inner();
            assert!(won == 1 || won == 256, "{way:?}: {won:#x}");
            if round % 4 == 0 {
                // The winner has the bytes.
                assert!(into[usize::from(won == 256)].read() == bytes);
            }
        }
        assert_eq!(remote.stats().table.caches, 0);
    }
}

/// Each pull releases its own key and so changes the cache under all others: none of them may suffer.
#[test]
fn keys_of_one_cache_are_pulled_side_by_side() {
    for way in WAYS {
        let pair = Pair::new(way);
        for round in 0..u64::from(times(6)) {
            let keys: Vec<_> = (0..256).map(|id| Some(request(id))).collect();
            let remote = Held::new(&pair.remote, false, &desc(Placement::Device, 2, 256, 512), Batch, &keys);
            let bytes = remote.fill(round as u8);
            let failed = Mutex::new(Vec::new());
            together(16, |index| {
                let local = Held::new(&pair.local, false, &desc(Placement::Device, 2, 1, 512), Batch, &[]);
                for id in (index..256).step_by(16) {
                    let from = of(2, Name::Key(request(id as u64)));
                    match pair.local.pull(from, &local.end(), &SLOT, Layers::ALL) {
                        Ok(()) => assert!((0..2).all(|t| local.read()[t] == bytes[t][id * 512..][..512])),
                        Err(error) => failed.lock().unwrap().push(error),
                    }
                }
                pair.local.deallocate(local.cache.id()).unwrap();
            });
            let failed = failed.into_inner().unwrap();
            assert!(failed.is_empty(), "{way:?}: {} of 256 failed: {}", failed.len(), failed[0]);
            assert_eq!(pair.remote.stats().table.keys, 0);
            pair.remote.deallocate(remote.cache.id()).unwrap();
        }
    }
}

/// A partial pull counts per key, also when the parts come at once, and each part once.
#[test]
fn a_key_goes_with_its_last_layer() {
    for way in WAYS {
        let pair = Pair::new(way);
        for round in 0..u64::from(times(20)) {
            let keys = [Some(request(round * 2)), Some(request(round * 2 + 1))];
            let remote = Held::new(&pair.remote, false, &desc(Placement::Device, 8, 2, 64), Batch, &keys);
            remote.fill(1);
            together(8, |layer| {
                let local = Held::new(&pair.local, false, &desc(Placement::Device, 1, 1, 64), Batch, &[]);
                let src = Some(LayerRange { first: layer as u32, end: layer as u32 + 1 });
                let layers = Layers { src, dst: None, tensors_per_layer: 1 };
                let name = if layer % 2 == 0 { Name::Key(keys[0].unwrap()) } else { row(&remote, 0) };
                pair.local.pull(of(2, name), &local.end(), &SLOT, layers).unwrap();
                pair.local.deallocate(local.cache.id()).unwrap();
            });
            assert!(pair.remote.find_key(keys[0].unwrap()).is_err());
            assert!(pair.remote.find_key(keys[1].unwrap()).is_ok(), "the other slot keeps its own");
            pair.remote.deallocate(remote.cache.id()).unwrap();
            assert_eq!(pair.remote.stats().table.caches, 1, "the second key still holds it");
            pair.remote.remove_key(keys[1].unwrap()).unwrap();
            assert_eq!(pair.remote.stats().table.caches, 0);
        }
    }
}

/// Prefixes, registered caches and one-sided links: nothing is ever released by a pull.
#[test]
fn what_is_never_released_stays() {
    for way in WAYS {
        for one_sided in [false, true] {
            let pair = Pair::with(way, |config| config.remote_accessible = one_sided);
            let shape = desc(Placement::Device, 2, 1, 64);
            let local = Held::new(&pair.local, false, &shape, Batch, &[]);
            let prefix = CacheKey::Prefix { model: 0, id: 1 };
            let kept = [
                (Held::new(&pair.remote, false, &shape, Batch, &[Some(prefix)]), prefix),
                (Held::new(&pair.remote, true, &shape, Batch, &[Some(request(1))]), request(1)),
            ];
            for (held, key) in &kept {
                for name in [Name::Key(*key), row(held, 0), Name::Key(*key)] {
                    pair.local.pull(of(2, name), &local.end(), &SLOT, Layers::ALL).unwrap();
                    assert!(pair.remote.find_key(*key).is_ok());
                }
            }
            let held = Held::new(&pair.remote, false, &shape, Batch, &[Some(request(2))]);
            held.fill(3);
            pair.local.pull(of(2, row(&held, 0)), &local.end(), &SLOT, Layers::ALL).unwrap();
            assert_eq!(pair.remote.find_key(request(2)).is_ok(), one_sided);
            // A second pull of a key that is gone; of the id it still works.
            let again = pair.local.pull(of(2, Name::Key(request(2))), &local.end(), &SLOT, Layers::ALL);
            assert_eq!(again.is_ok(), one_sided);
            pair.local.pull(of(2, row(&held, 0)), &local.end(), &SLOT, Layers::ALL).unwrap();
            pair.remote.remove_key(request(2)).unwrap();
        }
    }
}

/// Caches are made, filled, freed and made again at the same place while others pull them: a pull brings one generation
/// whole, or fails.
#[test]
fn a_pull_never_mixes_generations() {
    const BYTES: usize = 256 << 10;
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = desc(Placement::Device, 2, 1, BYTES);
        let (live, stop) = (AtomicI64::new(0), AtomicBool::new(false));
        let (good, bad) = (AtomicU64::new(0), AtomicU64::new(0));
        let until = Instant::now() + Duration::from_millis(u64::from(times(150)));
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut first = true;
                while first || Instant::now() < until {
                    let held = Held::new(&pair.remote, false, &shape, Batch, &[]);
                    let id = held.cache.id().0;
                    held.write(&[vec![id as u8; BYTES], vec![!(id as u8); BYTES]]);
                    live.store(id, Ordering::Release);
                    // The first one lives until it was pulled, however busy the machine is; the others do not wait.
                    while first && good.load(Ordering::Relaxed) == 0 && Instant::now() < until + LONG {
                        thread::sleep(Duration::from_millis(1));
                    }
                    first = false;
                    thread::sleep(Duration::from_micros(id as u64 % 5 * 100));
                    pair.remote.deallocate(held.cache.id()).unwrap();
                }
                stop.store(true, Ordering::Relaxed);
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let local = Held::new(&pair.local, false, &shape, Batch, &[]);
                    while !stop.load(Ordering::Relaxed) {
                        let id = live.load(Ordering::Acquire);
                        if id == 0 {
                            thread::yield_now(); // nothing is filled yet
                            continue;
                        }
                        local.write(&[vec![0; BYTES], vec![0; BYTES]]);
                        let name = Name::Row { cache: CacheId(id), row: 0 };
                        match pair.local.pull(of(2, name), &local.end(), &SLOT, Layers::ALL) {
                            Ok(()) => {
                                let got = local.read();
                                assert!(got[0].iter().all(|&byte| byte == id as u8), "{way:?} {id}");
                                assert!(got[1].iter().all(|&byte| byte == !(id as u8)), "{way:?} {id}");
                                good.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{error}");
                                bad.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                });
            }
        });
        assert!(good.load(Ordering::Relaxed) > 0, "{way:?}: nothing was ever pulled");
        eprintln!("{way:?}: {good:?} whole, {bad:?} refused");
    }
}

/// What a failed pull says has arrived is of the cache that was asked for: rows read after it was freed are not.
#[test]
fn nothing_has_arrived_of_a_cache_that_was_freed_meanwhile() {
    let gate = Gated::new(HostReach::Direct);
    let remote = open(config(2, Way::Shm), Way::Shm);
    let local =
        DataDist::open_over(config(1, Way::Shm), DeviceSet::with_device(gate.clone()), Way::Shm.transports())
            .unwrap();
    link(&local, &remote).unwrap();
    let shape = desc(Placement::Device, 1, 4, 4096);
    let into = Held::new(&local, false, &shape, Batch, &[]);
    let source = Held::new(&remote, false, &shape, Batch, &[]);
    source.fill(1);
    let (id, name) = (source.cache.id(), row(&source, 0));
    drop(source);
    gate.shut();
    let failed = thread::scope(|scope| {
        let pull = scope.spawn(|| local.pull(of(2, name), &into.end(), &SLOT, Layers::ALL).unwrap_err());
        gate.wait_for(1);
        remote.deallocate(id).unwrap();
        Held::new(&remote, false, &shape, Batch, &[]).fill(2);
        gate.open();
        pull.join().unwrap()
    });
    assert_eq!(failed.kind(), ErrorKind::CacheNotFound, "{failed}");
    assert!(failed.arrived().is_empty(), "{failed}");
}

/// Once a registered cache is unregistered its memory is the caller's again: no peer writes there any more.
#[test]
fn no_peer_writes_into_memory_that_was_unregistered() {
    const BYTES: usize = 24 << 20;
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = desc(Placement::Device, 1, 1, BYTES);
        let source = Held::new(&pair.local, false, &shape, Batch, &[]);
        source.write(&[vec![1; BYTES]]);
        let memory = Buffer::new(BYTES, |_| 0);
        for _ in 0..times(3) {
            memory.write(0, &vec![0; BYTES]);
            let adopted = crate::bed::adopt(&shape, Batch, &[memory.addr()]);
            let into = pair.remote.register(adopted, &[], Some(true)).unwrap();
            let name = Name::Row { cache: into.id(), row: 0 };
            thread::scope(|scope| {
                scope.spawn(|| {
                    let layers = Layers { tensors_per_layer: 1, ..Layers::ALL };
                    // It may fail: the cache goes away.
                    _ = pair.local.push(&source.end(), of(2, name), &PushRows::Slot { local: 0 }, layers);
                });
                eventually("the first byte", || memory.read(0, 1) == [1]);
                pair.remote.unregister(into.id()).unwrap();
                memory.write(0, &vec![2; BYTES]);
            });
            let now = memory.read(0, BYTES);
            assert_eq!(
                now.iter().position(|&byte| byte != 2),
                None,
                "{way:?}: pushed over the caller's bytes"
            );
        }
    }
}

/// The same for reading: what a pull brings is what was registered, not what the caller puts there afterwards.
#[test]
fn a_pull_brings_nothing_that_was_written_after_unregistering() {
    const BYTES: usize = 8 << 20;
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = desc(Placement::Host, 1, 1, BYTES);
        let local = Held::new(&pair.local, false, &shape, Batch, &[]);
        let memory = Buffer::new(BYTES, |_| 0);
        let stop = AtomicBool::new(false);
        let mut whole = 0;
        thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0u64.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    memory.write(0, &vec![round as u8; BYTES]);
                    let adopted = crate::bed::adopt(&shape, Batch, &[memory.addr()]);
                    let cache = pair.remote.register(adopted, &[Some(request(1))], Some(true)).unwrap();
                    thread::sleep(Duration::from_micros(200 + round % 8 * 500));
                    pair.remote.unregister(cache.id()).unwrap();
                }
            });
            let until = Instant::now() + Duration::from_millis(u64::from(times(300)));
            let mut mixed = None;
            while Instant::now() < until && mixed.is_none() {
                if pair.local.pull(of(2, Name::Key(request(1))), &local.end(), &SLOT, Layers::ALL).is_ok() {
                    let got = local.read().remove(0);
                    whole += 1;
                    mixed = got.iter().position(|&byte| byte != got[0]);
                }
            }
            stop.store(true, Ordering::Relaxed);
            assert_eq!(
                mixed, None,
                "{way:?}: a success with bytes of two generations, after {whole} whole ones"
            );
        });
    }
}

/// Whichever side's clock is first, a call that runs out of time says so.
#[test]
fn a_call_that_runs_out_of_time_times_out() {
    for way in WAYS {
        for millis in [1u64, 2, 3, 5, 8, 13] {
            let pair = Pair::with(way, |config| config.sync_timeout = Duration::from_millis(millis));
            let shape = desc(Placement::Host, 1, 48, 1 << 20);
            let local = Held::new(&pair.local, false, &shape, Blocks, &[]);
            let remote =
                Held::new(&pair.remote, false, &shape, Blocks, &[Some(CacheKey::Blocks { model: 0 })]);
            drop(remote.fill(1));
            let all: Vec<i64> = (0..48).collect();
            for _ in 0..times(12) {
                let name = of(2, Name::Key(CacheKey::Blocks { model: 0 }));
                let rows = PullRows::Blocks { remote: all.clone(), local: all.clone() };
                let pulled = pair.local.pull(name, &local.end(), &rows, Layers::ALL);
                let rows = PushRows::Blocks { remote: all.clone(), local: all.clone() };
                let pushed = pair.local.push(
                    &local.end(),
                    name,
                    &rows,
                    Layers { tensors_per_layer: 1, ..Layers::ALL },
                );
                for (what, result) in [("pull", pulled), ("push", pushed)] {
                    if let Err(error) = result {
                        assert_eq!(error.kind(), ErrorKind::Timeout, "{way:?} {what} {millis} ms: {error}");
                    }
                }
            }
        }
    }
}

/// The owner's pins are waited for within the caller's limit.
#[test]
fn the_limit_holds_while_the_owner_holds_a_row() {
    let gate = Gated::new(HostReach::Direct);
    let local = open(
        {
            let mut c = config(1, Way::Tcp);
            c.sync_timeout = Duration::from_millis(150);
            c
        },
        Way::Tcp,
    );
    let remote =
        DataDist::open_over(config(2, Way::Tcp), DeviceSet::with_device(gate.clone()), Way::Tcp.transports())
            .unwrap();
    link(&local, &remote).unwrap();
    let key = CacheKey::Blocks { model: 0 };
    let shape = desc(Placement::Device, 1, 4, 64);
    // Only what the gated device writes can be held up: its own cache is swapped out into the one that is pulled from.
    let device = Held::new(&remote, false, &shape, Blocks, &[]);
    let shape = desc(Placement::Host, 1, 4, 64);
    let source = Held::new(&remote, false, &shape, Blocks, &[Some(key)]);
    let into = Held::new(&local, false, &shape, Blocks, &[]);
    let bytes = source.fill(1);
    let pull = |block| {
        let rows = PullRows::Blocks { remote: vec![block], local: vec![0] };
        local.pull(of(2, Name::Key(key)), &into.end(), &rows, Layers::ALL)
    };
    gate.shut();
    thread::scope(|scope| {
        let copy = scope.spawn(|| remote.swap_blocks(&device.end(), &source.end(), &[(0, 1)]));
        gate.wait_for(1);
        let started = Instant::now();
        let late = pull(1).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Timeout, "{late}");
        assert!(started.elapsed() < Duration::from_secs(10));
        pull(2).unwrap();
        assert_eq!(into.read()[0][..64], bytes[0][128..192]);
        gate.open();
        copy.join().unwrap().unwrap();
    });
    pull(1).unwrap();
    assert_eq!(into.read()[0][..64], [0; 64]);
}

static ASKED: Mutex<Vec<thread::ThreadId>> = Mutex::new(Vec::new());

fn note_who_asks() -> bool {
    ASKED.lock().unwrap().push(thread::current().id());
    false
}

/// `interrupted_by`: on their own thread. The binding runs the interpreter's signal handlers in it.
#[test]
fn only_the_caller_is_asked_whether_to_go_on() {
    // Two peers that accept and say nothing.
    let silent: Vec<_> = (0..2).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let peers: Vec<PeerAddress> = silent
        .iter()
        .enumerate()
        .map(|(at, listener)| PeerAddress {
            cluster: ClusterId(50 + at as u64),
            remote: vec![listener.local_addr().unwrap()],
            local: vec![],
        })
        .collect();
    let local = open(config(1, Way::Tcp), Way::Tcp).interrupted_by(note_who_asks);
    ASKED.lock().unwrap().clear();
    let results = local.link_clusters(&peers, Duration::from_millis(250));
    assert!(results.iter().all(|result| result.as_ref().unwrap_err().kind() == ErrorKind::Timeout));
    let asked = std::mem::take(&mut *ASKED.lock().unwrap());
    assert!(!asked.is_empty());
    assert!(asked.iter().all(|&id| id == thread::current().id()), "link_clusters asks on other threads");

    // And a large pull through several streams.
    let streams = |cluster| {
        let mut config = config(cluster, Way::Tcp);
        config.links.streams = 3;
        open(config, Way::Tcp)
    };
    let (local, remote) = (streams(1).interrupted_by(note_who_asks), streams(2));
    link(&local, &remote).unwrap();
    let shape = desc(Placement::Host, 1, 1, 40 << 20);
    let source = Held::new(&remote, false, &shape, Batch, &[]);
    let into = Held::new(&local, false, &shape, Batch, &[]);
    drop(source.fill(1));
    ASKED.lock().unwrap().clear();
    for _ in 0..times(10) {
        local.pull(of(2, row(&source, 0)), &into.end(), &SLOT, Layers::ALL).unwrap();
    }
    let asked = std::mem::take(&mut *ASKED.lock().unwrap());
    assert!(asked.iter().all(|&id| id == thread::current().id()), "pull asks on other threads");
}

static STOP: AtomicBool = AtomicBool::new(false);

/// Every wait of a call ends soon after it was interrupted: for a link, for a stream of the peer, and for its answer.
#[test]
fn an_interrupted_call_ends() {
    let silent = super::fake::Fake::new(2, 1);
    let engine = open(config(1, Way::Tcp), Way::Tcp).interrupted_by(|| STOP.load(Ordering::SeqCst));
    let into = Held::new(&engine, false, &desc(Placement::Host, 2, 1, 64), Batch, &[]);
    let ends = |call: &dyn Fn() -> ErrorKind| {
        STOP.store(false, Ordering::SeqCst);
        let started = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(120));
                STOP.store(true, Ordering::SeqCst);
            });
            assert_eq!(call(), ErrorKind::Interrupted);
        });
        assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
        STOP.store(false, Ordering::SeqCst);
    };
    let link = || engine.link_clusters(&[silent.address()], LONG).remove(0);
    let pull = || {
        let name = of(2, Name::Key(request(1)));
        engine.pull(name, &into.end(), &SLOT, Layers::ALL).unwrap_err().kind()
    };
    ends(&|| link().unwrap_err().kind());
    drop(silent.accept());
    for outgoing in [true, false] {
        let _control = if outgoing {
            thread::scope(|scope| {
                let peer = scope.spawn(|| silent.linked());
                link().unwrap();
                peer.join().unwrap()
            })
        } else {
            // The engine asks for a stream, and none comes.
            silent.link(&engine, 5).unwrap()
        };
        ends(&pull);
        ends(&|| engine.check_link(ClusterId(2)).unwrap_err().kind());
        if outgoing {
            // The peer takes the request, and does not answer; the first two streams were given up above.
            drop((silent.accept(), silent.accept()));
            thread::scope(|scope| {
                let peer = scope.spawn(|| silent.greet());
                ends(&pull);
                drop(peer.join().unwrap());
            });
        }
        engine.unlink_clusters(&[silent.address()], LONG, true).remove(0).unwrap();
    }
}

/// Both sides unlink at once: the link is gone, which is what both wanted.
#[test]
fn both_sides_may_unlink_at_once() {
    for way in WAYS {
        let (local, remote) = (open(config(1, way), way), open(config(2, way), way));
        for round in 0..times(60) {
            link(&local, &remote).unwrap();
            together(2, |index| {
                let (from, to) = if index == 0 { (&local, &remote) } else { (&remote, &local) };
                unlink(from, to).unwrap_or_else(|error| panic!("{way:?} round {round}: {error}"));
            });
            eventually("the end of the link", || {
                local.stats().links.is_empty() && remote.stats().links.is_empty()
            });
        }
    }
}

/// Links, unlinks, pulls and pushes at once, from both sides: every call ends, and nothing is left over.
#[test]
fn everything_at_once_ends_and_leaves_nothing() {
    for way in WAYS {
        let (local, remote) = (Arc::new(open(config(1, way), way)), Arc::new(open(config(2, way), way)));
        let shape = desc(Placement::Device, 2, 1, 4096);
        let source = Held::new(&remote, false, &shape, Batch, &[]);
        let bytes = source.fill(9);
        let until = Instant::now() + Duration::from_millis(u64::from(times(400)));
        together(16, |index| {
            let into = Held::new(&local, false, &shape, Batch, &[]);
            while Instant::now() < until {
                let result = match index {
                    0 => link(&local, &remote),
                    1 => link(&remote, &local),
                    2 => unlink(&local, &remote),
                    3 => remote.unlink_clusters(&[address(&local)], LONG, true).remove(0),
                    4 => local.check_link(ClusterId(2)),
                    5..8 => remote.push(
                        &source.end(),
                        of(1, row(&into, 0)),
                        &PushRows::Slot { local: 0 },
                        Layers::ALL,
                    ),
                    _ => local.pull(of(2, row(&source, 0)), &into.end(), &SLOT, Layers::ALL),
                };
                if index < 4 {
                    // Links live for a while: long enough for calls, short enough to end under them.
                    thread::sleep(Duration::from_millis(3 + 2 * index as u64));
                }
                match result {
                    Ok(()) if index >= 5 => assert!(into.read() == bytes),
                    Ok(()) => {}
                    Err(error) => {
                        let kind = error.kind();
                        use ErrorKind::{AlreadyLinked, LinkFailed, NotLinked, UnlinkFailed};
                        let fits = match index {
                            0 | 1 => matches!(kind, AlreadyLinked | LinkFailed),
                            2 => kind == UnlinkFailed,
                            _ => kind == NotLinked,
                        };
                        assert!(fits, "{way:?} {index}: {error:?}");
                    }
                }
            }
        });
        // Whatever is left works, or goes.
        let _ = remote.unlink_clusters(&[address(&local)], LONG, true);
        eventually("the end of all links", || {
            local.stats().links.is_empty() && remote.stats().links.is_empty()
        });
        link(&local, &remote).unwrap();
        let into = Held::new(&local, false, &shape, Batch, &[]);
        local.pull(of(2, row(&source, 0)), &into.end(), &SLOT, Layers::ALL).unwrap();
        assert!(into.read() == bytes);
        unlink(&local, &remote).unwrap();
    }
}

/// What this side has the peer write it never reads half-written, though a read in place asks nobody for leave.
#[test]
fn pulls_and_layers_of_the_same_rows() {
    for way in WAYS {
        let pair = Pair::with(way, |config| config.remote_accessible = true);
        let shape = desc(Placement::Device, 2, 2, 256 << 10);
        let source = Held::new(&pair.local, false, &shape, Batch, &[]);
        let images = [vec![1u8; 256 << 10], vec![2u8; 256 << 10]].concat();
        source.write(&[images.clone(), images]);
        let remote = Held::new(&pair.remote, false, &shape, Batch, &[]);
        remote.write(&[vec![1u8; 512 << 10], vec![1u8; 512 << 10]]);
        let (into, under_way) = (Held::new(&pair.local, false, &shape, Batch, &[]), AtomicU64::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..times(60) {
                    let rows = PushRows::Slot { local: turn % 2 };
                    pair.local.push(&source.end(), of(2, row(&remote, 1)), &rows, Layers::ALL).unwrap();
                    // Another row of the same cache, and another cache, are none of its business.
                    pair.local.push(&source.end(), of(2, row(&remote, 0)), &rows, Layers::ALL).unwrap();
                }
                under_way.fetch_sub(1, Ordering::Relaxed);
            });
            scope.spawn(|| {
                for turn in 0..times(60) {
                    let task = layers(&pair.local, &source, &remote, turn % 2);
                    assert!(task.wait(Deadline::after(LONG)).unwrap());
                    let outcomes = task.outcomes();
                    assert!(matches!(outcomes[..], [Outcome::Done]), "{way:?}: {outcomes:?}");
                }
                under_way.fetch_sub(1, Ordering::Relaxed);
            });
            let mut pulls = 0;
            while under_way.load(Ordering::Relaxed) > 0 || pulls < 3 {
                pair.local.pull(of(2, row(&remote, 1)), &into.end(), &SLOT, Layers::ALL).unwrap();
                pulls += 1;
                for tensor in into.read() {
                    let slot = &tensor[..256 << 10];
                    assert!(slot.iter().all(|&byte| byte == slot[0]), "{way:?}: a mixture, pull {pulls}");
                }
            }
        });
    }
}

/// The layer of both tensors of a row of `source`, on its way into row 1 of `remote`.
fn layers(local: &DataDist, source: &Held, remote: &Held, src_row: u32) -> Arc<Task> {
    let args =
        LayerwiseArgs { src_blocks: vec![], dst_blocks: vec![], dst_block_bytes: None, tensors_per_layer: 2 };
    let target = Target::Cache { name: row(remote, 1), first_layer: 0 };
    let src_layers = LayerRange { first: 0, end: 1 };
    let to = Destination { cluster: ClusterId(2), target, src_layers, src_row };
    let task = local.transfer_async(&source.end(), &args, vec![to], None).unwrap();
    task.ready(0);
    task
}

/// A push that nobody answered may still be carried out: until that is over no read is made in place, though the peer holds
/// the rows. One that the peer refused is over.
#[test]
fn a_push_without_an_answer() {
    for way in WAYS.into_iter().filter(|way| way.shares()) {
        let slow = Slow::new(way, Duration::from_secs(1));
        let shape = desc(Placement::Host, 2, 4, 64);
        let source = Held::new(&slow.local, false, &shape, Blocks, &[]);
        let into = Held::new(&slow.local, false, &shape, Blocks, &[]);
        let remote = Held::new(&slow.remote, false, &shape, Blocks, &[Some(KEY)]);
        let (bytes, before) = (source.fill(1), remote.fill(2));
        let name = of(2, Name::Key(KEY));
        let push = || {
            let rows = PushRows::Blocks { local: vec![1], remote: vec![1] };
            slow.local.push(&source.end(), name, &rows, Layers::ALL)
        };
        // This side gives up first; on a machine that stood still the peer may have said so in time.
        let unanswered = || {
            eventually("a push without an answer", || {
                let error = push().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{way:?}: {error}");
                error.fact("said_by").is_none()
            });
        };
        let pull = || {
            into.fill(3);
            let rows = PullRows::Blocks { remote: vec![1], local: vec![1] };
            slow.local.pull(name, &into.end(), &rows, Layers::ALL)
        };
        let pulled = |bytes: &[Vec<u8>], what: &str| {
            let got = into.read();
            assert!((0..2).all(|t| got[t][64..128] == bytes[t][64..128]), "{way:?}: {what}");
        };
        // While the peer holds the row: asked, it would let nobody read.
        let in_place = |what: &str| {
            pull().unwrap_or_else(|error| panic!("{way:?}: {what}: {error}"));
            pulled(&before, what);
        };
        pull().unwrap();
        slow.holding(&remote, |release| {
            in_place("nothing was pushed");
            release();
        });
        remote.write(&before);
        // Memory that is not there: the peer finds out, and says so.
        let hollow = adopt(&shape, Blocks, &[4096, 8192]);
        let hollow = slow.local.register(hollow, &[], Some(true)).unwrap();
        let rows = PushRows::Blocks { local: vec![1], remote: vec![1] };
        let error = slow.local.push(&End::Managed(hollow.id()), name, &rows, Layers::ALL).unwrap_err();
        assert_eq!((error.kind(), error.fact("said_by")), (ErrorKind::System, Some("the peer")), "{error}");
        slow.holding(&remote, |release| {
            in_place("the peer said that it failed");
            unanswered();
            // Not in place: behind the owner's pin.
            let error = pull().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{way:?}: {error}");
            eventually("a read in place", || pull().is_ok());
            in_place("the push can come no more");
            release();
        });
        remote.write(&before);
        slow.holding(&remote, |release| {
            in_place("as before");
            unanswered();
            thread::scope(|scope| {
                let behind = scope.spawn(pull);
                thread::sleep(Duration::from_millis(50));
                release();
                behind.join().unwrap().unwrap();
            });
            // Whole, as the owner's own copy left it, and nothing of the push.
            pulled(&remote.read(), "behind the owner");
            assert!(remote.read()[0][64..128] != bytes[0][64..128]);
        });
    }
}

/// Without a push of this side under way to them, peers that read a row over and over let a copy into it take its turn.
#[test]
fn endless_readers_let_a_copy_in() {
    const BYTES: usize = 8 << 20;
    const READERS: u64 = 12;
    let remote = open(config(9, Way::Tcp), Way::Tcp);
    let shape = desc(Placement::Device, 1, 2, BYTES);
    let hot = Held::new(&remote, true, &shape, Batch, &[]);
    let readers: Vec<_> = (0..READERS).map(|at| open(config(10 + at, Way::Tcp), Way::Tcp)).collect();
    readers.iter().for_each(|local| link(local, &remote).unwrap());
    let (turns, over) = (AtomicU64::new(0), AtomicBool::new(false));
    // Those that read go on when a copy comes. If more than these pass ten of them, those that came later went before.
    let most = 50 * READERS;
    thread::scope(|scope| {
        for local in &readers {
            let (turns, over, hot) = (&turns, &over, &hot);
            scope.spawn(move || {
                let into = Held::new(local, false, &desc(Placement::Device, 1, 1, BYTES), Batch, &[]);
                while !over.load(Ordering::SeqCst) {
                    local.pull(of(9, row(hot, 0)), &into.end(), &SLOT, Layers::ALL).unwrap();
                    turns.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        eventually("the readers", || turns.load(Ordering::SeqCst) >= 2 * READERS);
        let (mut passed, mut copied) = (0, Ok(()));
        for _ in 0..10 {
            let before = turns.load(Ordering::SeqCst);
            let args = CopyArgs { src_batch_index: 1, dst_batch_index: 0, offset: 0, size: -1 };
            copied = remote.copy_cache(&hot.end(), &hot.end(), args);
            passed += turns.load(Ordering::SeqCst) - before;
            if copied.is_err() || passed > most {
                break;
            }
        }
        over.store(true, Ordering::SeqCst);
        assert!(copied.is_ok() && passed <= most, "{passed} pulls passed: {copied:?}");
    });
}

/// Three who would each wait for the next: a push holds `a` and waits for `f`, a pull of the other side holds `f` and waits
/// for `a`, and a copy into `a` waits in between.
#[test]
fn a_pull_meets_a_transfer_and_a_writer() {
    for way in WAYS {
        let short = |config: &mut llm_datadist_core::Config| {
            (config.remote_accessible, config.sync_timeout) = (true, Duration::from_secs(5));
        };
        let pair = Pair::with(way, short);
        let shape = desc(Placement::Device, 2, 2, 512 << 10);
        let local = Held::new(&pair.local, false, &shape, Batch, &[]);
        let remote = Held::new(&pair.remote, false, &shape, Batch, &[]);
        local.write(&patterned_rows());
        remote.write(&patterned_rows());
        let turns = || 0..times(300);
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in turns() {
                    let rows = PushRows::Slot { local: 0 };
                    pair.local.push(&local.end(), of(2, row(&remote, 0)), &rows, Layers::ALL).unwrap();
                }
            });
            scope.spawn(|| {
                for _ in turns() {
                    pair.remote.pull(of(1, row(&local, 0)), &remote.end(), &SLOT, Layers::ALL).unwrap();
                }
            });
            for _ in turns() {
                let args = CopyArgs { src_batch_index: 1, dst_batch_index: 0, offset: 0, size: -1 };
                pair.local.copy_cache(&local.end(), &local.end(), args).unwrap();
            }
        });
        assert!(remote.read() == patterned_rows());
    }
}

/// Two rows alike in each of two tensors.
fn patterned_rows() -> Vec<Vec<u8>> {
    let row = |tensor| (0..512 << 10).map(|at| bed::pattern(5, tensor, at)).collect::<Vec<u8>>();
    (0..2).map(|tensor| [row(tensor), row(tensor)].concat()).collect()
}
