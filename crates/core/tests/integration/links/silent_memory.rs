//! Pulls and pushes between engines, one of which has memory that does not respond to the kernel.
//!
//! Not for: the threads that read (`reader_threads`).

use std::time::Duration;

use llm_datadist_core::bindings::DataDist;
use llm_datadist_core::testing::copy::STILL_READING;
use llm_datadist_core::{CacheKind, Error, ErrorKind, Placement, Result};

use super::{Held, Pair, Way, eventually, fails_with, of, pull_blocks, push_blocks, row};
use llm_datadist_testing::Stall;

use crate::emulation::PROCESS_READS;
use crate::fixtures::desc;

const ROWS: usize = 4;
/// Long enough that the peer reads a row by process id, even if the link has rings.
const ROW: usize = (2 << 20) + PAGE;
const PAGE: usize = 4096;

/// Calls of both engines end soon.
fn pair() -> Pair {
    Pair::with(Way::Shm, |config| {
        config.remote_accessible = true;
        config.sync_timeout = Duration::from_millis(300);
    })
}

fn blocks(engine: &DataDist, registered: bool) -> Held {
    Held::new(engine, registered, &desc(Placement::Host, 1, ROWS, ROW), CacheKind::Blocks, &[])
}

fn stall(held: &Held) -> Stall {
    let at = held.cache.addrs()[0];
    Stall::new(at..at + held.cache.geometry().tensor_bytes())
}

fn pull(pair: &Pair, from: &Held, to: &Held, block: i64) -> Result<()> {
    pull_blocks(&pair.local, of(2, row(from, 0)), to, &[block], &[block])
}

fn push(pair: &Pair, from: &Held, to: &Held, block: i64) -> Result<()> {
    push_blocks(&pair.local, from, &[block], of(2, row(to, 0)), &[block])
}

fn timed_out<T: std::fmt::Debug>(result: Result<T>) -> Error {
    fails_with(result, ErrorKind::Timeout)
}

/// Repeats the call until it times out while the kernel is reading. On a busy machine, it may time out before that.
fn lose(mut call: impl FnMut() -> Result<()>) -> Error {
    loop {
        let error = timed_out(call());
        if error.fact(STILL_READING).is_some() {
            return error;
        }
    }
}

#[test]
fn pull_from_silent_memory_leaves_its_rows_pinned_until_the_kernel_is_done() {
    if PROCESS_READS.skips() {
        return;
    }
    for registered in [false, true] {
        let pair = pair();
        let (silent, loud) = (blocks(&pair.remote, true), blocks(&pair.remote, true));
        let (bytes, loud_bytes) = (silent.fill(1), loud.fill(2));
        let local = blocks(&pair.local, registered);
        let before = local.fill(3);
        let used = || pair.local.stats().host_pool.unwrap().pool.used_bytes;
        let used_before = used();
        let stalled = stall(&silent);
        let error = lose(|| pull(&pair, &silent, &local, 1));
        assert_eq!(error.fact(STILL_READING), Some(std::process::id().to_string().as_str()), "{error}");
        assert!(error.to_string().contains("may still write to the destination rows"), "{error}");
        assert!(error.arrived().is_empty(), "{error}");
        assert!(local.read() == before);
        // Calls on that row wait. Calls on other rows do not wait, nor do pulls of memory that responds.
        timed_out(pair.local.copy_blocks(&local.end(), &[(0, 1)]).run());
        timed_out(pull(&pair, &loud, &local, 1));
        eventually("a copy", || pair.local.copy_blocks(&local.end(), &[(0, 3)]).run().is_ok());
        eventually("a pull", || pull(&pair, &loud, &local, 2).is_ok());
        assert!(local.read()[0][2 * ROW..3 * ROW] == loud_bytes[0][2 * ROW..3 * ROW]);
        // The memory returns neither to the caller nor to the pool.
        let id = local.cache.id();
        if registered {
            timed_out(pair.local.unregister(id));
        } else {
            pair.local.deallocate(id).unwrap();
        }
        let own = local.own;
        drop(local.cache);
        assert_eq!(used(), used_before);
        drop(stalled);
        if registered {
            eventually("the end of the kernel's call", || pair.local.unregister(id).is_ok());
            let late = own.unwrap().read();
            // The kernel ends the calls that it was in, which read a part of the row.
            assert!(late[0][ROW..][..PAGE] == bytes[0][ROW..][..PAGE], "what the error warned of");
        } else {
            eventually("the return of the memory", || used() == 0);
        }
    }
}

#[test]
fn push_of_silent_memory_leaves_the_peer_free_to_serve() {
    if PROCESS_READS.skips() {
        return;
    }
    let pair = pair();
    let (silent, loud) = (blocks(&pair.local, true), blocks(&pair.local, true));
    let loud_bytes = loud.fill(2);
    silent.fill(1);
    let remote = blocks(&pair.remote, false);
    let stalled = stall(&silent);
    while stalled.waiting() == 0 {
        timed_out(push(&pair, &silent, &remote, 1));
    }
    // The serving thread is free again, but its row stays pinned.
    eventually("the end of the request", || {
        let stats = pair.remote.stats();
        let served = stats.ops.iter().find(|(name, _)| *name == "served").unwrap();
        served.1.failures > 0
    });
    timed_out(pair.remote.copy_blocks(&remote.end(), &[(0, 1)]).run());
    eventually("a push", || push(&pair, &loud, &remote, 2).is_ok());
    assert!(remote.read()[0][2 * ROW..3 * ROW] == loud_bytes[0][2 * ROW..3 * ROW]);
    drop(stalled);
    eventually("the end of the kernel's call", || {
        pair.remote.copy_blocks(&remote.end(), &[(0, 1)]).run().is_ok()
    });
}

#[test]
fn push_of_silent_memory_takes_no_thread_of_the_peer_for_as_long_as_it_says() {
    if PROCESS_READS.skips() {
        return;
    }
    let pair = Pair::with(Way::Shm, |config| {
        config.remote_accessible = true;
        // The push has a deadline of one hour.
        config.sync_timeout = Duration::from_secs(3600);
        config.links.heartbeat = Duration::from_millis(200);
        config.links.silence = Duration::from_secs(2);
    });
    let silent = blocks(&pair.local, true);
    let remote = blocks(&pair.remote, false);
    let stalled = stall(&silent);
    let error = timed_out(push(&pair, &silent, &remote, 1));
    assert!(error.to_string().contains("option=silence"), "{error}");
    assert!(error.to_string().contains("may still write to the destination rows"), "{error}");
    drop(stalled);
}

#[test]
fn engine_that_is_finalized_meanwhile_keeps_its_pool_mapped() {
    if PROCESS_READS.skips() {
        return;
    }
    let pair = pair();
    let silent = blocks(&pair.remote, true);
    let to = blocks(&pair.local, false);
    let at = to.cache.addrs()[0];
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (range, rest) = line.split_once(' ').unwrap();
            let mut ends = range.split('-').map(|text| u64::from_str_radix(text, 16).unwrap());
            let range = ends.next().unwrap()..ends.next().unwrap();
            range.contains(&at) && rest.contains("llm_datadist host pool")
        })
    };
    let stalled = stall(&silent);
    lose(|| pull(&pair, &silent, &to, 0));
    let Pair { local, remote: _remote } = pair;
    drop(to);
    drop(local);
    assert!(mapped(), "the kernel may still write there");
    drop(stalled);
    eventually("the end of the kernel's call", || !mapped());
}
