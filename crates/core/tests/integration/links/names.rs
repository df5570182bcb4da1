//! Names of engines and of caches over links.
//!
//! `protocol` covers which texts a message may carry as a name, and `tests/test_hostile_links.py` peers that send others.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{
    CallExtras, DataDist, GroupMember, Layers, Outcome, RemoteCacheName, RemoteName, Rows, Side, Target,
};
use llm_datadist_core::testing::model::MAX_NAME;
use llm_datadist_core::{
    ClusterId, Deadline, ErrorKind, Event, GrantUse, PeerInfo, Result, Transfer, WhileRefused,
};

use super::layerwise::{all_ready, blocks, start, to, wait};
use super::{Held, LONG, Pair, WAYS, Way, check_pull, config, device, eventually, link, open, pairs, unlink};
use crate::fixtures::{Buffer, adopt};

use llm_datadist_core::CacheKind::Blocks;

const ROWS: i64 = 8;

/// The cache that cluster `cluster` calls `name`.
fn text(cluster: u64, name: &str) -> RemoteName<Arc<str>> {
    RemoteName { cluster: ClusterId(cluster), name: name.into() }
}

/// A cache that peers find by `name`, and its bytes.
fn named(engine: &DataDist, name: &str, seed: u8) -> (Held, Vec<Vec<u8>>) {
    let cache = engine.allocate_named(name, &device(2, 8, 64), false).unwrap();
    let held = Held { cache, own: None };
    let bytes = held.fill(seed);
    (held, bytes)
}

fn unnamed(engine: &DataDist) -> Held {
    Held::pool(engine, &device(2, 8, 64), Blocks)
}

fn all_rows() -> Rows {
    Rows::Blocks { remote: (0..ROWS).collect(), local: (0..ROWS).collect() }
}

/// Pulls all blocks of the cache that cluster 2 calls `name`.
fn pull(local: &DataDist, name: &str, into: &Held) -> Result<()> {
    local.pull(text(2, name), &into.end(), all_rows(), Layers::ALL).run()
}

fn ended(transfer: &Transfer) -> Result<u64> {
    assert!(transfer.wait(Deadline::after(LONG)).unwrap(), "the call did not end");
    transfer.outcome().expect("it has ended")
}

#[test]
fn caches_are_pulled_and_pushed_by_their_names() {
    for pair in pairs() {
        let Pair { local, remote } = &pair;
        let ((kv, first), (other, second)) = (named(remote, "kv", 1), named(remote, "漢字/🦀 e\u{301}", 2));
        let into = unnamed(local);
        pull(local, "kv", &into).unwrap();
        assert!(into.read() == first);
        let pulled = local.pull(text(2, "漢字/🦀 e\u{301}"), &into.end(), all_rows(), Layers::ALL).start();
        ended(&pulled.unwrap()).unwrap();
        assert!(into.read() == second);
        // A push, a group and layers find the same caches.
        let source = unnamed(local);
        let pushed = source.fill(3);
        local.push(&source.end(), text(2, "kv"), all_rows(), Layers::ALL).run().unwrap();
        assert!(kv.read() == pushed && other.read() == second);
        let ours = [unnamed(local), unnamed(local)];
        let member = |(name, into): (&str, &Held)| {
            let (remote, local) = (text(2, name), into.end());
            GroupMember { remote, local, rows: all_rows(), layers: Layers::ALL, grant: None }
        };
        let members = ["kv", "漢字/🦀 e\u{301}"].into_iter().zip(&ours).map(member).collect();
        ended(&local.transfer_group(Side::Destination, members, false, CallExtras::default(), None).unwrap())
            .unwrap();
        assert!(ours[0].read() == pushed && ours[1].read() == second);
        let layers = source.fill(4);
        let target = Target::Cache { name: RemoteCacheName::Text("kv".into()), first_layer: Some(0) };
        let rows: Vec<u64> = (0..8).collect();
        let task = start(local, &source, &blocks(&rows, &rows), &[to(2, target, 1)]);
        all_ready(&task);
        wait(&task);
        assert!(matches!(task.outcomes()[..], [Outcome::Done]), "{:?}", task.outcomes());
        assert!(kv.read() == layers && other.read() == second);
    }
}

/// Whichever calls the peer has made with the name before, it gets the bytes of the cache that has the name now.
#[test]
fn a_name_that_was_freed_names_its_next_cache() {
    for pair in pairs() {
        let Pair { local, remote } = &pair;
        let into = unnamed(local);
        let (mut old, bytes) = named(remote, "kv", 1);
        pull(local, "kv", &into).unwrap();
        assert!(into.read() == bytes);
        for seed in 2..6 {
            old.free(remote);
            if seed % 2 == 0 {
                for missing in ["kv", "never"] {
                    let error = pull(local, missing, &into).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{error}");
                    assert!(error.to_string().contains(&format!("'{missing}'")), "{error}");
                    assert_eq!(error.fact("cluster"), Some("2"));
                }
            }
            let other = unnamed(remote);
            other.fill(200);
            let (next, bytes) = named(remote, "kv", seed);
            assert!(next.cache.id() > old.cache.id());
            let source = unnamed(local);
            if seed > 3 {
                let pushed = source.fill(seed + 10);
                local.push(&source.end(), text(2, "kv"), all_rows(), Layers::ALL).run().unwrap();
                assert!(next.read() == pushed);
                next.write(&bytes);
            }
            pull(local, "kv", &into).unwrap();
            assert!(into.read() == bytes, "seed {seed}");
            other.free(remote);
            old = next;
        }
    }
}

/// The owner gives the name to one cache after the other at the same addresses, and between two of them uses the memory for a
/// cache without a name: a pull by the name returns one of the named ones whole, or fails.
#[test]
fn a_pull_by_a_name_never_gets_other_bytes() {
    const WORDS: usize = 16 << 10;
    let images =
        |first: u32, second: u32| [first, second].map(|word| word.to_le_bytes().repeat(WORDS)).to_vec();
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = device(2, 1, 4 * WORDS);
        let memory = Buffer::new(8 * WORDS, |_| 0);
        let adopted = |images: &[Vec<u8>]| {
            memory.write(0, &images.concat());
            adopt(&shape, Blocks, &[memory.addr(), memory.addr() + 4 * WORDS as u64])
        };
        // The version whose cache has left last.
        let (left, stop, good) = (AtomicU32::new(0), AtomicBool::new(false), AtomicBool::new(false));
        let until = Instant::now() + Duration::from_millis(150);
        thread::scope(|scope| {
            scope.spawn(|| {
                for version in 1.. {
                    let cache =
                        pair.remote.register_named("kv", adopted(&images(version, !version)), true).unwrap();
                    // The first cache lives until it was pulled, however busy the machine is.
                    while version == 1 && !good.load(Ordering::Relaxed) && Instant::now() < until + LONG {
                        thread::sleep(Duration::from_millis(1));
                    }
                    thread::sleep(Duration::from_micros(u64::from(version % 5) * 100));
                    pair.remote.unregister(cache.id()).unwrap();
                    left.store(version, Ordering::Release);
                    let other = adopted(&images(version, version));
                    let other = pair.remote.register(other, &[], Some(true)).unwrap();
                    pair.remote.unregister(other.id()).unwrap();
                    if Instant::now() > until {
                        break;
                    }
                }
                stop.store(true, Ordering::Relaxed);
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let into = Held::pool(&pair.local, &shape, Blocks);
                    while !stop.load(Ordering::Relaxed) {
                        let before = left.load(Ordering::Acquire);
                        let rows = Rows::Blocks { remote: vec![0], local: vec![0] };
                        let pulled = pair.local.pull(text(2, "kv"), &into.end(), rows, Layers::ALL).run();
                        if let Err(error) = pulled {
                            assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{way:?}: {error}");
                            continue;
                        }
                        let got = into.read();
                        let version = u32::from_le_bytes(got[0][..4].try_into().unwrap());
                        assert!(got == images(version, !version), "{way:?}: {version} is mixed");
                        assert!(version > before, "{way:?}: {version} had left, as {before}");
                        good.store(true, Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(good.into_inner(), "{way:?}: nothing was ever pulled");
    }
}

#[test]
fn a_name_is_asked_for_once_over_each_link() {
    // Each pull over TCP asks for the bytes. Shared memory is read in place.
    for (way, first, next) in [(Way::Tcp, 3, 1), (Way::Shm, 2, 0)] {
        let pair = Pair::new(way);
        let (_, bytes) = named(&pair.remote, "kv", 1);
        let into = unnamed(&pair.local);
        let requests = || {
            let calls = || pair.local.stats().links[0].requests.calls;
            let before = calls();
            pull(&pair.local, "kv", &into).unwrap();
            assert!(into.read() == bytes);
            calls() - before
        };
        assert_eq!([requests(), requests(), requests()], [first, next, next], "{way:?}");
        // Another link knows nothing of what this one knew.
        unlink(&pair.local, &pair.remote).unwrap();
        link(&pair.local, &pair.remote).unwrap();
        assert_eq!([requests(), requests()], [first, next], "{way:?}");
    }
}

#[test]
fn a_grant_and_a_name_must_be_of_one_cache() {
    for pair in pairs() {
        let Pair { local, remote } = &pair;
        let (kv, bytes) = named(remote, "kv", 1);
        let (other, _) = named(remote, "other", 2);
        let into = unnamed(local);
        let rows: Vec<i64> = (0..ROWS).collect();
        let lend = |held: &Held| {
            let grant = remote.grant(&held.end(), &rows, Duration::from_secs(3600), 9).unwrap();
            let token = remote.grant_token(&grant);
            CallExtras { grant: Some(GrantUse { token, done: false }), ..CallExtras::default() }
        };
        let (granted, of_other) = (lend(&kv), lend(&other));
        let pull = |extras: &CallExtras| {
            let extras = extras.clone();
            local
                .transfer(Side::Destination, text(2, "kv"), &into.end(), (all_rows(), Layers::ALL), extras)
                .run()
        };
        pull(&granted).unwrap();
        assert!(into.read() == bytes);
        assert_eq!(pull(&of_other).unwrap_err().kind(), ErrorKind::InvalidArgument);
        // The name is now that of another cache, and the grant has ended with the first one.
        kv.free(remote);
        let (_, bytes) = named(remote, "kv", 3);
        assert_eq!(pull(&granted).unwrap_err().kind(), ErrorKind::GrantEnded);
        pull(&CallExtras::default()).unwrap();
        assert!(into.read() == bytes);
    }
}

/// A cache that peers may not use is reported like one that does not exist.
#[test]
fn peers_find_only_caches_that_they_may_access() {
    for pair in pairs() {
        let shape = device(2, 8, 64);
        let memory = Buffer::new(2 * 8 * 64, |_| 0);
        let adopted = || adopt(&shape, Blocks, &[memory.addr(), memory.addr() + 8 * 64]);
        let hidden = pair.remote.register_named("kv", adopted(), false).unwrap();
        let into = unnamed(&pair.local);
        let refused = |name: &str| {
            let error = pull(&pair.local, name, &into).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CacheNotFound);
            error.to_string().replace(name, "NAME")
        };
        assert_eq!(refused("kv"), refused("no such cache"));
        // Its name is taken nevertheless.
        let taken = pair.remote.allocate_named("kv", &shape, false).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::KeyTaken);
        pair.remote.unregister(hidden.id()).unwrap();
        let shared = pair.remote.register_named("kv", adopted(), true).unwrap();
        pull(&pair.local, "kv", &into).unwrap();
        pair.remote.unregister(shared.id()).unwrap();
    }
}

#[test]
fn a_name_belongs_to_one_live_cache() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let (shape, beyond) = (device(2, 8, 64), device(1, 1 << 10, 1 << 17));
    let used = || engine.stats().device_pool.unwrap().pool.used_bytes;
    let longest = "é".repeat(MAX_NAME / 2);
    for bad in ["", "a\nb", "\u{1b}[2J", "\u{202e}", &(longest.clone() + "x")] {
        let error = engine.allocate_named(bad, &shape, false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = error.to_string();
        assert!(text.starts_with("name='") && text.contains("1 to 128 bytes"), "{text}");
        assert!(!text.chars().any(|letter| letter.is_control() || letter == '\u{202e}'), "{text:?}");
    }
    assert_eq!(used(), 0);
    engine.deallocate(engine.allocate_named(&longest, &shape, true).unwrap().id()).unwrap();
    let first = engine.allocate_named("kv", &shape, true).unwrap();
    assert!(first.one_range().is_ok(), "its tensors follow one another");
    assert_eq!(first.name(), Some("kv"));
    // A taken name is refused before memory is taken, of which there is not enough.
    let one = used();
    let taken = engine.allocate_named("kv", &beyond, false).unwrap_err();
    assert_eq!((taken.kind(), taken.fact("cache_id")), (ErrorKind::KeyTaken, Some("2")));
    assert!(taken.to_string().starts_with("name='kv' must be"), "{taken}");
    let memory = Buffer::new(2 * 8 * 64, |_| 0);
    let adopted = || adopt(&shape, Blocks, &[memory.addr(), memory.addr() + 8 * 64]);
    assert_eq!(engine.register_named("kv", adopted(), true).unwrap_err().kind(), ErrorKind::KeyTaken);
    assert_eq!(engine.allocate_named("other", &beyond, false).unwrap_err().kind(), ErrorKind::OutOfMemory);
    assert_eq!(used(), one);
    let other = engine.register_named("other", adopted(), true).unwrap();
    // A name is free once its cache was freed, even if something still uses the memory.
    engine.deallocate(first.id()).unwrap();
    engine.unregister(other.id()).unwrap();
    let next = engine.register_named("kv", adopted(), true).unwrap();
    assert!(next.id() > other.id() && other.id() > first.id());
    let last = engine.allocate_named("other", &shape, false).unwrap();
    engine.unregister(next.id()).unwrap();
    engine.deallocate(last.id()).unwrap();
}

#[test]
fn one_of_several_threads_gets_a_name() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    for round in 0..50 {
        let start = Barrier::new(4);
        let results: Vec<_> = thread::scope(|scope| {
            let race = || {
                start.wait();
                engine.allocate_named("kv", &device(2, 8, 64), false).map_err(|error| error.kind())
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(race)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (made, refused): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        assert_eq!((made.len(), refused.len()), (1, 3), "round {round}");
        assert!(refused.iter().all(|result| *result.as_ref().unwrap_err() == ErrorKind::KeyTaken));
        for cache in made.into_iter().flatten() {
            engine.deallocate(cache.id()).unwrap();
        }
        assert_eq!(engine.stats().device_pool.unwrap().pool.used_bytes, 0, "round {round}");
    }
}

fn engines(way: Way) -> [DataDist; 2] {
    [(1, "prefill 1"), (2, "デコード")].map(|(cluster, name)| {
        let mut config = config(cluster, way);
        config.name = name.into();
        open(config, way)
    })
}

#[test]
fn peers_and_their_messages_have_the_names_of_engines() {
    for way in WAYS {
        let [local, remote] = engines(way);
        let name_of_peer = |engine: &DataDist| engine.peers()[0].name.to_string();
        link(&local, &remote).unwrap();
        assert_eq!([name_of_peer(&local), name_of_peer(&remote)], ["デコード", "prefill 1"]);
        let peer = remote.peers().remove(0);
        // A message says who sent it, also after the link has ended.
        let (source, into) = (unnamed(&local), unnamed(&remote));
        let to = super::of(2, super::row(&into, 0));
        let extras = CallExtras { notify: Some(b"done".to_vec()), ..CallExtras::default() };
        local.transfer(Side::Source, to, &source.end(), (all_rows(), Layers::ALL), extras).run().unwrap();
        unlink(&local, &remote).unwrap();
        eventually("the end of the link", || remote.peers().is_empty());
        let events = remote.poll(9).unwrap();
        let [Event::Notification(message)] = &events[..] else { panic!("{events:?}") };
        assert_eq!((&*message.peer, &message.payload[..]), (&peer, &b"done"[..]));
    }
    let refused = |name: &str| {
        let mut config = config(1, Way::Tcp);
        config.name = name.into();
        DataDist::open(config).unwrap_err()
    };
    for bad in ["\n", "\u{2028}", &"x".repeat(MAX_NAME + 1)] {
        let error = refused(bad);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("must be 0 to 128 bytes of printable text"), "{error}");
    }
}

#[test]
fn ensure_link_checks_the_name_of_the_engine() {
    for way in WAYS {
        let [local, remote] = engines(way);
        let ensure = |name: &str| -> Result<PeerInfo> {
            let call = local.ensure_link(
                remote.listening().unwrap(),
                LONG,
                Some(name.into()),
                WhileRefused::Retry,
            )?;
            ended(&call).map(|_| call.peer().expect("the peer of a success").clone())
        };
        let refused = || {
            let error = ensure("prefill 1").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::LinkFailed, "{error}");
            let text = error.to_string();
            assert!(text.contains(" is named 'デコード', not 'prefill 1'"), "{text}");
            assert!(text.contains(&format!("address={}", remote.listening().unwrap())), "{text}");
        };
        refused();
        assert!(local.peers().is_empty());
        eventually("the end of the link there", || remote.peers().is_empty());
        assert_eq!(&*ensure("デコード").unwrap().name, "デコード");
        // A link that exists stays.
        refused();
        assert_eq!([local.peers().len(), remote.peers().len()], [1, 1]);
        check_pull(&local, &remote);
        let error = ensure("a\nb").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}
