//! Asynchronous pulls and pushes: when they end, and that they leave nothing behind.
//!
//! `pull_and_push` covers their bytes, `async_copies` order, limits and the event queue, `tests/native/test_transfers.py` many
//! at once.

use std::time::Duration;

use llm_datadist_core::bindings::{CacheKey, Layers, Name};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{CacheKind, Deadline, ErrorKind, Placement, Transfer};

use super::{
    Held, LONG, Pair, Way, block_rows, config, device, fails_with, link, of, open, open_gated, pairs, row,
};
use crate::fixtures::{Gated, desc, eventually, pin_writes};

use CacheKind::Blocks;

const KEY: CacheKey = CacheKey::Blocks { model: 7 };

/// The number of bytes, or the failure.
pub(super) fn outcome(transfer: &Transfer) -> Result<u64, llm_datadist_core::Error> {
    assert!(transfer.wait(Deadline::after(LONG)).unwrap(), "the transfer did not end");
    transfer.outcome().expect("it has ended")
}

/// A short pull from a mapped pool needs no answer of the peer once the cache is known, so it has ended when it is returned. It
/// waits in turn for local rows that another call uses, and it never brings bytes of a cache that was freed.
#[test]
fn a_short_pull_has_ended_when_it_is_returned() {
    let pair = Pair::with(Way::Shm, |config| config.remote_accessible = true);
    let [into, source] = pair.pools(&device(2, 8, 4096), Blocks);
    let Pair { local, remote } = &pair;
    let (bytes, mut expected) = (source.fill(1), into.fill(2));
    let pull = |from: i64, to: i64| {
        let rows = block_rows(&[from], &[to]);
        local.pull(of(2, row(&source, 0)), &into.end(), rows, Layers::ALL).start().unwrap()
    };
    let mut moved = |from: usize, to: usize| {
        (0..2).for_each(|tensor| {
            expected[tensor][to * 4096..][..4096].copy_from_slice(&bytes[tensor][from * 4096..][..4096]);
        });
        into.read() == expected
    };
    // The first pull asks for the description of the cache.
    assert_eq!(outcome(&pull(1, 2)).unwrap(), 2 * 4096);
    assert!(moved(1, 2));
    let asked = local.stats().links[0].requests.calls;
    let second = pull(3, 4);
    assert!(second.done());
    assert!(moved(3, 4));
    assert_eq!(outcome(&second).unwrap(), 2 * 4096);
    assert_eq!(local.stats().links[0].requests.calls, asked);

    let held = pin_writes(&into.cache, vec![5], Deadline::after(LONG)).unwrap();
    let waiting = pull(5, 5);
    assert!(!waiting.done());
    drop(held);
    assert_eq!(outcome(&waiting).unwrap(), 2 * 4096);
    assert!(moved(5, 5));

    source.free(remote);
    let other = Held::pool(remote, &device(2, 8, 4096), Blocks);
    other.fill(9);
    fails_with(outcome(&pull(6, 6)), ErrorKind::CacheNotFound);
}

/// What the arguments decide is an error of the call; what the peer decides is an outcome.
#[test]
fn refusals_come_at_once_and_failures_as_outcomes() {
    for pair in pairs() {
        let into = Held::pool(&pair.local, &device(1, 4, 64), Blocks);
        let pull = |cluster, local: i64| {
            let rows = block_rows(&[0], &[local]);
            pair.local.pull(of(cluster, Name::Key(KEY)), &into.end(), rows, Layers::ALL).start()
        };
        assert_eq!(pull(2, 4).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(pull(1, 0).unwrap_err().kind(), ErrorKind::InvalidArgument, "itself");
        assert_eq!(pair.local.events().open_transfers(), 0);
        assert_eq!(outcome(&pull(2, 0).unwrap()).unwrap_err().kind(), ErrorKind::CacheNotFound);
        assert_eq!(outcome(&pull(9, 0).unwrap()).unwrap_err().kind(), ErrorKind::NotLinked);
    }
}

/// A pull that waits for the owner is cancelled, or runs into its own limit. Afterwards the rows are free at once.
#[test]
fn a_running_pull_is_cancelled_or_late() {
    for way in [Way::Shm, Way::Tcp] {
        let gate = Gated::new(HostReach::Direct);
        let remote = open_gated(config(2, way), way, &gate);
        let local = open(config(1, way), way);
        link(&local, &remote).unwrap();
        let source = Held::new(&remote, false, &desc(Placement::Host, 1, 4, 64), Blocks, &[Some(KEY)]);
        let other = Held::pool(&remote, &device(1, 4, 64), Blocks);
        let into = Held::pool(&local, &device(1, 4, 64), Blocks);
        // The owner writes block 0 for as long as the gate is shut, so a pull through sockets waits there.
        gate.shut();
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| remote.swap_blocks(&other.end(), &source.end(), &[(1, 0)]).run());
            gate.wait_for(1);
            let pull = |limit| {
                let rows = block_rows(&[0], &[3]);
                let pull = local.pull(of(2, Name::Key(KEY)), &into.end(), rows, Layers::ALL);
                pull.within(limit).start().unwrap()
            };
            let late = pull(Some(Duration::from_millis(50)));
            if way == Way::Tcp {
                let error = fails_with(outcome(&late), ErrorKind::Timeout);
                // The owner's own answer, that it could not read in time, may come first.
                let told = error.fact("reported_by").is_some() || error.fact("limit_ms") == Some("50");
                assert!(told, "{error}");
                let cancelled = pull(None);
                eventually("the pull has begun", || local.stats().links[0].requests.calls > 1);
                assert!(cancelled.cancel());
                assert_eq!(outcome(&cancelled).unwrap_err().kind(), ErrorKind::Cancelled);
                assert!(!cancelled.cancel());
            }
            gate.open();
            writing.join().unwrap().unwrap();
        });
        local.copy_blocks(&into.end(), &[(0, 3)]).run().expect("the rows are free");
    }
}

/// An engine that closes ends transfers that run, and those that wait.
#[test]
fn closing_ends_all() {
    for pair in pairs() {
        let Pair { local, remote } = pair;
        let source = Held::new(&remote, false, &device(1, 4, 64), Blocks, &[Some(KEY)]);
        let into = Held::pool(&local, &device(1, 4, 64), Blocks);
        source.fill(1);
        let start = |_| {
            let rows = block_rows(&[1], &[1]);
            local.pull(of(2, Name::Key(KEY)), &into.end(), rows, Layers::ALL).start().unwrap()
        };
        let transfers: Vec<_> = (0..200).map(start).collect();
        drop(local);
        for transfer in transfers {
            let ended = transfer.outcome().expect("nothing runs after the engine has closed");
            assert!(ended.is_ok() || ended.as_ref().unwrap_err().kind() == ErrorKind::Closed, "{ended:?}");
        }
    }
}

#[test]
fn a_push_and_a_pull_that_meet_do_not_deadlock() {
    for pair in pairs() {
        let make = |engine| Held::new(engine, false, &device(1, 4, 4096), Blocks, &[Some(KEY)]);
        let (here, there) = (make(&pair.local), make(&pair.remote));
        here.fill(1);
        there.fill(2);
        let ends = [(&pair.local, &here, 2), (&pair.remote, &there, 1)];
        let mut transfers = Vec::new();
        for _ in 0..50 {
            for (engine, cache, peer) in ends {
                let rows = block_rows(&[0], &[1]);
                let pull =
                    engine.pull(of(peer, Name::Key(KEY)), &cache.end(), rows.clone(), Layers::ALL).start();
                let push = engine.push(&cache.end(), of(peer, Name::Key(KEY)), rows, Layers::ALL).start();
                let copy = engine.copy_blocks(&cache.end(), &[(0, 1)]).start();
                transfers.extend([pull.unwrap(), push.unwrap(), copy.unwrap()]);
            }
        }
        for transfer in transfers {
            outcome(&transfer).unwrap();
        }
    }
}
