//! Several engines of one process share their threads: they end none of each other's transfers, and do not wait for each other.
//!
//! The tests of `threads`, `copy/workers.rs` and `transfer/executor` check each set of threads alone.
#![allow(unsafe_code, reason = "a fork")]

use std::sync::Arc;

use llm_datadist_core::bindings::{Config, DataDist, Layers, Rows};
use llm_datadist_core::{CacheKind, Transfer};

use super::asynchronous::outcome;
use super::{Held, Way, block_rows, device, link, of, open_with, row};
use crate::child_process::{self, report};
use crate::fixtures::{self, eventually};

use CacheKind::Blocks;

const BLOCK: usize = 32 << 10;
/// Blocks of each cache that others read.
const SOURCES: usize = 16;
/// More bytes than one stream moves.
const LARGE: usize = 16 << 20;

/// An engine, what others read of it, what it pulls into, and what others push into.
struct Party {
    engine: DataDist,
    source: Held,
    pulled: Held,
    pushed: Held,
}

impl Party {
    /// Checks the blocks that were pulled from and pushed by the engine with this index.
    fn check(&self, other: usize, each: usize) {
        let sent = fixtures::patterned(other as u8 + 1, 1, SOURCES * BLOCK).remove(0);
        for cache in [&self.pulled, &self.pushed] {
            let arrived = cache.read().remove(0);
            for number in 0..each {
                let (from, to) = (number % SOURCES * BLOCK, (other * each + number) * BLOCK);
                let equal = arrived[to..][..BLOCK] == sent[from..][..BLOCK];
                assert!(equal, "block {number} of engine {other}");
            }
        }
    }
}

/// Engines of this process that are all linked with each other.
struct Parties {
    all: Vec<Party>,
    /// Transfers of each kind between two of them.
    each: usize,
}

/// A transfer of an engine with another one.
struct Started {
    engine: usize,
    other: usize,
    transfer: Arc<Transfer>,
}

impl Parties {
    fn new(count: usize, transfers: usize, way: Way) -> Parties {
        let each = transfers.div_ceil(2 * count * (count - 1));
        let party = |index| {
            let engine = open_with(index as u64 + 1, way, |config| {
                (config.remote_accessible, config.copy_workers) = (true, Some(1));
            });
            let cache = |blocks| Held::pool(&engine, &device(1, blocks, BLOCK), Blocks);
            let (source, pulled, pushed) = (cache(SOURCES), cache(count * each), cache(count * each));
            source.fill(index as u8 + 1);
            for cache in [&pulled, &pushed] {
                cache.write(&[vec![0; count * each * BLOCK]]);
            }
            Party { engine, source, pulled, pushed }
        };
        let all: Vec<_> = (0..count).map(party).collect();
        for (index, local) in all.iter().enumerate() {
            all[index + 1..].iter().for_each(|remote| link(&local.engine, &remote.engine).unwrap());
        }
        Parties { all, each }
    }

    /// Starts all pulls and pushes, each of one block that no other transfer writes.
    fn start(&self) -> Vec<Started> {
        let mut started = Vec::new();
        for number in 0..self.each {
            for (engine, own) in self.all.iter().enumerate() {
                for (other, peer) in self.all.iter().enumerate().filter(|(other, _)| *other != engine) {
                    let block = |index: usize| vec![index as i64];
                    let (from, to) = (block(number % SOURCES), block(other * self.each + number));
                    let name = |cache| of(other as u64 + 1, row(cache, 0));
                    let rows = Rows::Blocks { remote: from.clone(), local: to };
                    let pull =
                        own.engine.pull(name(&peer.source), &own.pulled.end(), rows, Layers::ALL).start();
                    let rows = Rows::Blocks { local: from, remote: block(engine * self.each + number) };
                    let push =
                        own.engine.push(&own.source.end(), name(&peer.pushed), rows, Layers::ALL).start();
                    let both = [pull, push].map(|transfer| transfer.unwrap());
                    started.extend(both.map(|transfer| Started { engine, other, transfer }));
                }
            }
        }
        started
    }
}

#[test]
fn engines_of_one_process_do_not_deadlock() {
    for (count, way) in [(2, Way::Shm), (2, Way::Tcp), (2, Way::TcpDevice), (8, Way::Shm), (8, Way::Tcp)] {
        let parties = Parties::new(count, 600, way);
        let started = parties.start();
        assert!(started.len() >= 600, "{count} {way:?}");
        for Started { transfer, .. } in &started {
            assert_eq!(outcome(transfer).unwrap(), BLOCK as u64);
        }
        for (index, party) in parties.all.iter().enumerate() {
            (0..count).filter(|other| *other != index).for_each(|other| party.check(other, parties.each));
        }
    }
}

/// Each transfer of two engines takes several streams, which the engines read and write in both directions at once.
#[test]
fn transfers_over_several_streams_do_not_deadlock() {
    let parties = Parties::new(2, 4, Way::Tcp);
    let large = |party: &Party| Held::pool(&party.engine, &device(1, 2, LARGE), Blocks);
    let caches: Vec<_> = parties.all.iter().map(large).collect();
    let bytes: Vec<_> = (0_u8..).zip(&caches).map(|(seed, cache)| cache.fill(seed).remove(0)).collect();
    for _ in 0..3 {
        let started = [0, 1].map(|index| {
            let (other, party) = (1 - index, &parties.all[index]);
            let name = of(other as u64 + 1, row(&caches[other], 0));
            let rows = block_rows(&[0], &[1]);
            party.engine.pull(name, &caches[index].end(), rows, Layers::ALL).start().unwrap()
        });
        for transfer in &started {
            assert_eq!(outcome(transfer).unwrap(), LARGE as u64);
        }
    }
    for index in [0, 1] {
        assert!(caches[index].read()[0][LARGE..] == bytes[1 - index][..LARGE]);
    }
}

/// The first of three engines closes while all three transfer. Its transfers end; those of the other two succeed, except with it.
#[test]
fn an_engine_that_closes_ends_its_own_transfers_only() {
    for way in [Way::Shm, Way::Tcp] {
        let mut parties = Parties::new(3, 600, way);
        let started = parties.start();
        let closes = parties.all.remove(0);
        drop(closes);
        for Started { engine, other, transfer } in &started {
            match (*engine, *other) {
                (0, _) => assert!(transfer.outcome().is_some(), "a transfer outlives its engine: {way:?}"),
                (_, 0) => _ = outcome(transfer),
                _ => assert_eq!(outcome(transfer).unwrap(), BLOCK as u64, "{way:?}"),
            }
        }
        let [second, third] = &parties.all[..] else { panic!() };
        second.check(2, parties.each);
        third.check(1, parties.each);
    }
}

/// Names of the threads of this process.
fn thread_names() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread may have ended meanwhile.
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).map(|name| name.trim().to_owned()).collect()
}

fn named(role: &str) -> usize {
    thread_names().iter().filter(|name| *name == role).count()
}

/// An engine without links, with four copy workers and a cache.
fn alone() -> (DataDist, Held) {
    let config = Config { copy_workers: Some(4), ..fixtures::config(64 << 20) };
    let engine = DataDist::open(config).unwrap();
    let cache = Held::pool(&engine, &device(1, 64, 256 << 10), Blocks);
    (engine, cache)
}

/// Copies 8 MiB on the calling thread and its helpers, and as much on a thread of the engines.
fn copy(engine: &DataDist, cache: &Held) {
    let bytes = cache.fill(7).remove(0);
    let pairs: Vec<_> = (0..32).map(|block| (block, 32 + block)).collect();
    engine.copy_blocks(&cache.end(), &pairs).run().unwrap();
    outcome(&engine.copy_blocks(&cache.end(), &pairs).start().unwrap()).unwrap();
    let half = bytes.len() / 2;
    assert!(cache.read()[0][half..] == bytes[..half]);
}

fn copies_of(engine: &DataDist) -> u64 {
    engine.stats().ops.into_iter().find(|(name, _)| *name == "copy_blocks").map_or(0, |(_, op)| op.calls)
}

#[test]
#[ignore = "started by the test below, as other tests start and end threads"]
fn opening_and_closing() {
    if child_process::role().is_none() {
        return;
    }
    let before = thread_names().len();
    let (first, cache) = alone();
    eventually("all threads that copy", || {
        copy(&first, &cache);
        named("llm-copy") == 3
    });
    let calls = copies_of(&first);
    let (second, other) = alone();
    for _ in 0..20 {
        copy(&second, &other);
    }
    assert_eq!((named("llm-copy"), named("llm-clock")), (3, 1), "{:?}", thread_names());
    assert_eq!((copies_of(&first), copies_of(&second)), (calls, 40));
    drop((first, cache));
    copy(&second, &other);
    assert_eq!((named("llm-copy"), named("llm-clock")), (3, 1), "{:?}", thread_names());
    drop((second, other));
    eventually("the end of all threads", || thread_names().len() == before);
    let (third, cache) = alone();
    copy(&third, &cache);
    drop((third, cache));
    eventually("the end of all threads", || thread_names().len() == before);
    report("done");
}

#[test]
fn a_second_engine_adds_no_worker_and_the_last_one_ends_them() {
    assert_eq!(child_process::run("links::several_engines::opening_and_closing", ""), ["done"]);
}

#[test]
#[ignore = "started by the test below, as a forked child has no threads of other tests"]
fn forking() {
    if child_process::role().is_none() {
        return;
    }
    let (engine, cache) = alone();
    copy(&engine, &cache);
    // SAFETY: no thread of this process holds a lock of the test, and the allocator is usable in a child.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: it takes a number. The alarm ends a child that waits for a thread of its parent.
        unsafe { libc::alarm(60) };
        let copied = std::panic::catch_unwind(|| {
            let (engine, cache) = alone();
            copy(&engine, &cache);
            drop((engine, cache));
            // By their names, because an emulator has a thread of its own.
            eventually("the end of all threads", || {
                !thread_names().iter().any(|name| name.starts_with("llm-"))
            });
        });
        // SAFETY: nothing of the parent needs to be unwound.
        unsafe { libc::_exit(i32::from(copied.is_err())) };
    }
    let mut status = -1;
    // SAFETY: the child belongs to this test, and the status is a valid pointer.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    copy(&engine, &cache);
    report("done");
}

#[test]
fn a_forked_child_has_threads_of_its_own() {
    assert_eq!(child_process::run("links::several_engines::forking", ""), ["done"]);
}
