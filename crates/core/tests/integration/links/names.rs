//! Names of caches over links.
//!
//! `protocol` covers which texts a message may carry as a name, `tests/test_hostile_links.py` peers that send others, and
//! `tests/native/test_caches.py` and `test_peers.py` every call that takes the name of a cache or of an engine.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use llm_datadist_core::bindings::{DataDist, Layers, RemoteName, Rows};
use llm_datadist_core::testing::model::MAX_NAME;
use llm_datadist_core::{ClusterId, ErrorKind, Result};

use super::races::replaced_while_read;
use super::{
    Held, Pair, WAYS, Way, block_rows, config, device, fails_saying, fails_with, link, open, pairs, unlink,
};
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
                let missing = fails_saying(pull(local, "kv", &into), ErrorKind::CacheNotFound, "'kv'");
                assert_eq!(missing.fact("cluster"), Some("2"), "{missing}");
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
        let left = AtomicU32::new(0);
        let owner = |version, last: &dyn Fn()| {
            let cache = pair.remote.register_named("kv", adopted(&images(version, !version)), true).unwrap();
            last();
            pair.remote.unregister(cache.id()).unwrap();
            left.store(version, Ordering::Release);
            let other = pair.remote.register(adopted(&images(version, version)), &[], Some(true)).unwrap();
            pair.remote.unregister(other.id()).unwrap();
        };
        let reader = || {
            let (into, left, pair) = (Held::pool(&pair.local, &shape, Blocks), &left, &pair);
            move || {
                let before = left.load(Ordering::Acquire);
                let rows = block_rows(&[0], &[0]);
                let pulled = pair.local.pull(text(2, "kv"), &into.end(), rows, Layers::ALL).run();
                if let Err(error) = pulled {
                    assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{way:?}: {error}");
                    return false;
                }
                let got = into.read();
                let version = u32::from_le_bytes(got[0][..4].try_into().unwrap());
                assert!(got == images(version, !version), "{way:?}: {version} is mixed");
                assert!(version > before, "{way:?}: {version} had left, as {before}");
                true
            }
        };
        replaced_while_read(owner, reader);
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

/// A name that is wrong or taken is refused before memory is taken, of which there is not enough.
#[test]
fn a_refused_name_takes_no_memory() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let beyond = device(1, 1 << 10, 1 << 17);
    let used = || engine.stats().device_pool.unwrap().pool.used_bytes;
    for bad in ["", "a\nb", "\u{1b}[2J", "\u{202e}", &"é".repeat(MAX_NAME / 2 + 1)] {
        let error = fails_with(engine.allocate_named(bad, &beyond, false), ErrorKind::InvalidArgument);
        let text = error.to_string();
        assert!(text.starts_with("name='") && text.contains("1 to 128 bytes"), "{text}");
        assert!(!text.chars().any(|letter| letter.is_control() || letter == '\u{202e}'), "{text:?}");
    }
    assert_eq!(used(), 0);
    // Also a cache that peers may not access has its name for itself.
    engine.allocate_named("kv", &device(2, 8, 64), false).unwrap();
    let one = used();
    let taken = engine.allocate_named("kv", &beyond, false).unwrap_err();
    assert_eq!((taken.kind(), taken.fact("cache_id")), (ErrorKind::KeyTaken, Some("1")));
    assert!(taken.to_string().starts_with("name='kv' must be"), "{taken}");
    assert_eq!(engine.allocate_named("other", &beyond, false).unwrap_err().kind(), ErrorKind::OutOfMemory);
    assert_eq!(used(), one);
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
