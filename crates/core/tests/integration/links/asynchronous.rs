//! Asynchronous pulls and pushes: they move the same bytes as the synchronous ones, end once, and leave nothing behind.
//!
//! `async_copies` covers order, limits and the event queue.

use std::time::Duration;

use llm_datadist_core::bindings::{CacheKey, Layers, Name, Rows};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{CacheKind, Deadline, ErrorKind, Event, Placement, Transfer};

use super::{Held, LONG, Pair, Way, config, device, each, link, of, open, open_gated, pairs, request, row};
use crate::fixtures::{Gated, desc, eventually, pin_writes};

use CacheKind::{Batch, Blocks};

const KEY: CacheKey = CacheKey::Blocks { model: 7 };

/// The number of bytes, or the failure.
pub(super) fn outcome(transfer: &Transfer) -> Result<u64, llm_datadist_core::Error> {
    assert!(transfer.wait(Deadline::after(LONG)).unwrap(), "the transfer did not end");
    transfer.outcome().expect("it has ended")
}

/// Blocks and slots are pulled and pushed between all kinds of memory; a pull of a whole slot by its key releases it.
#[test]
fn bytes_arrive_and_keys_are_released() {
    each(|one_sided, pair, local, remote| {
        let keys = [None, Some(request(2)), None];
        let source = remote.held(&pair.remote, (4, 3, 96), Batch, &keys);
        let into = local.held(&pair.local, (4, 3, 96), Batch, &[]);
        let (bytes, mut expected) = (source.fill(1), into.fill(2));
        let name = if one_sided { row(&source, 1) } else { Name::Key(request(2)) };
        let pulled =
            pair.local.pull(of(2, name), &into.end(), Rows::slot(0, -1), Layers::ALL).start().unwrap();
        assert_eq!(outcome(&pulled).unwrap(), 4 * 96);
        (0..4).for_each(|tensor| expected[tensor][..96].copy_from_slice(&bytes[tensor][96..192]));
        assert!(into.read() == expected);
        assert_eq!(pulled.progress().done, 4 * 96);
        let kept = one_sided || remote.registered;
        assert_eq!(pair.remote.find_key(request(2)).is_ok(), kept);

        let rows = Rows::slot(0, -1);
        let pushed = pair.local.push(&into.end(), of(2, row(&source, 2)), rows, Layers::ALL).start().unwrap();
        assert_eq!(outcome(&pushed).unwrap(), 4 * 96);
        let mut sent = bytes.clone();
        (0..4).for_each(|tensor| sent[tensor][192..].copy_from_slice(&bytes[tensor][96..192]));
        assert!(source.read() == sent);
        assert!(pair.local.poll(9).unwrap().is_empty(), "both outcomes were taken");
        pair.remote.remove_key(request(2)).unwrap();
        source.free(&pair.remote);
        into.free(&pair.local);
    });
}

/// A short pull from a mapped pool needs no answer of the peer once the cache is known, so it has ended when it is returned. It
/// waits in turn for local rows that another call uses, and it never brings bytes of a cache that was freed.
#[test]
fn a_short_pull_has_ended_when_it_is_returned() {
    let Pair { local, remote } = Pair::with(Way::Shm, |config| config.remote_accessible = true);
    let source = Held::pool(&remote, &device(2, 8, 4096), Blocks);
    let into = Held::pool(&local, &device(2, 8, 4096), Blocks);
    let (bytes, mut expected) = (source.fill(1), into.fill(2));
    let pull = |from: i64, to: i64| {
        let rows = Rows::Blocks { remote: vec![from], local: vec![to] };
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

    source.free(&remote);
    let other = Held::pool(&remote, &device(2, 8, 4096), Blocks);
    other.fill(9);
    let gone = outcome(&pull(6, 6)).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::CacheNotFound, "{gone}");
}

#[test]
fn many_at_once_end_once_each() {
    for pair in pairs() {
        let source = Held::new(&pair.remote, false, &device(2, 64, 4096), Blocks, &[Some(KEY)]);
        let into = Held::pool(&pair.local, &device(2, 64, 4096), Blocks);
        let bytes = source.fill(1);
        into.fill(2);
        let start = |block: i64| {
            let rows = Rows::Blocks { remote: vec![block], local: vec![block] };
            pair.local.pull(of(2, Name::Key(KEY)), &into.end(), rows, Layers::ALL).start().unwrap().number()
        };
        // Every block several times, so that calls meet.
        let mut started: Vec<u64> = (0..512).map(|index| start(index % 64)).collect();
        let mut ended = Vec::new();
        eventually("all transfers end", || {
            for event in pair.local.poll(100).unwrap() {
                let Event::Completed(transfer) = event else { panic!("another event") };
                assert_eq!(transfer.outcome().unwrap().unwrap(), 2 * 4096);
                ended.push(transfer.number());
            }
            ended.len() == 512
        });
        ended.sort_unstable();
        started.sort_unstable();
        assert_eq!(ended, started);
        assert!(into.read() == bytes);
        assert_eq!(pair.local.events().open_transfers(), 0);
    }
}

/// What the arguments decide is an error of the call; what the peer decides is an outcome.
#[test]
fn refusals_come_at_once_and_failures_as_outcomes() {
    for pair in pairs() {
        let into = Held::pool(&pair.local, &device(1, 4, 64), Blocks);
        let pull = |cluster, local: i64| {
            let rows = Rows::Blocks { remote: vec![0], local: vec![local] };
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
                let rows = Rows::Blocks { remote: vec![0], local: vec![3] };
                local
                    .pull(of(2, Name::Key(KEY)), &into.end(), rows, Layers::ALL)
                    .within(limit)
                    .start()
                    .unwrap()
            };
            let late = pull(Some(Duration::from_millis(50)));
            if way == Way::Tcp {
                let error = outcome(&late).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
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
        let gate = remote;
        let source = Held::new(&gate, false, &device(1, 4, 64), Blocks, &[Some(KEY)]);
        let into = Held::pool(&local, &device(1, 4, 64), Blocks);
        source.fill(1);
        let start = |_| {
            let rows = Rows::Blocks { remote: vec![1], local: vec![1] };
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
                let rows = Rows::Blocks { remote: vec![0], local: vec![1] };
                let pull = engine.pull(of(peer, Name::Key(KEY)), &cache.end(), rows, Layers::ALL).start();
                let rows = Rows::Blocks { local: vec![1], remote: vec![0] };
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
