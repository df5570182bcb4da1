//! Asynchronous copies and swaps within one engine: order, limits, cancellation, and the queue of outcomes.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use llm_datadist_core::bindings::{Cache, Config, DataDist, SubRow};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{CacheKind, Deadline, Error, ErrorKind, Event, Placement, Transfer, Verify};
use rustix::event::{PollFd, PollFlags, poll};

use crate::fixtures::{
    Gated, LONG, Own, config, contents, desc, end, engine_on, fill, outcome, patterned, pin_writes,
};
use crate::moved::after_the_move;

const ROW: usize = 4096;

/// A device and a host cache, with the same bytes.
fn caches(engine: &DataDist) -> [Arc<Cache>; 2] {
    [Placement::Device, Placement::Host].map(|placement| {
        let cache = engine.allocate(&desc(placement, 2, 16, ROW), CacheKind::Blocks, &[]).unwrap();
        fill(&cache, &patterned(3, 2, 16 * ROW));
        cache
    })
}

/// The transfers that have ended, from the queue of events.
fn ended(engine: &DataDist, most: usize) -> Vec<Arc<Transfer>> {
    let transfer = |event| match event {
        Event::Completed(transfer) => transfer,
        other => panic!("{other:?}"),
    };
    engine.poll(most).unwrap().into_iter().map(transfer).collect()
}

/// An engine whose device copies wait while the gate is shut, and a blocks cache of each placement.
struct Bench {
    gate: Arc<Gated>,
    engine: DataDist,
    device: Arc<Cache>,
    host: Arc<Cache>,
}

impl Bench {
    fn new(most: usize) -> Bench {
        let gate = Gated::new(HostReach::Direct);
        let engine = engine_on(Config { max_transfers: most, ..config(4 << 20) }, gate.clone());
        let [device, host] = caches(&engine);
        Bench { gate, engine, device, host }
    }

    fn copy(&self, from: i64, to: i64) -> Arc<Transfer> {
        self.try_copy(from, to, None).unwrap()
    }

    fn try_copy(&self, from: i64, to: i64, limit: Option<Duration>) -> Result<Arc<Transfer>, Error> {
        self.engine.copy_blocks(&end(&self.device), &[(from, to)]).within(limit).start()
    }

    fn polled(&self) -> Vec<u64> {
        self.polled_at_most(usize::MAX)
    }

    fn polled_at_most(&self, most: usize) -> Vec<u64> {
        ended(&self.engine, most).iter().map(|transfer| transfer.number()).collect()
    }
}

/// Synchronous and asynchronous calls that meet run in the order of their start, however long the first one takes.
#[test]
fn calls_that_meet_take_turns() {
    let bench = Bench::new(100);
    let Bench { gate, engine, device, host } = &bench;
    gate.shut();
    let mut transfers = vec![engine.swap_blocks(&end(host), &end(device), &[(9, 0)]).start().unwrap()];
    gate.wait_for(1);
    transfers.extend((0..6).map(|row| bench.copy(row, row + 1)));
    let free = bench.copy(10, 11);
    assert!(transfers.iter().all(|transfer| !transfer.done()));
    std::thread::scope(|scope| {
        let last = scope.spawn(|| engine.swap_blocks(&end(device), &end(host), &[(6, 15)]).run());
        gate.open();
        last.join().unwrap().unwrap();
    });
    assert_eq!(outcome(&free).unwrap(), 2 * ROW as u64);
    for tensor in contents(host) {
        assert!(tensor[15 * ROW..] == tensor[9 * ROW..10 * ROW]);
    }
    let started: Vec<u64> = transfers.iter().map(|transfer| transfer.number()).collect();
    // A copy releases its rows before it reports its end.
    assert!(engine.drain(LONG).unwrap());
    let polled = bench.polled();
    assert_eq!(polled.iter().filter(|number| started.contains(number)).copied().collect::<Vec<_>>(), started);
}

/// A short copy between host memories needs no worker, so it has ended when it is returned. It waits in turn for rows that
/// another call uses.
#[test]
fn a_short_copy_has_ended_when_it_is_returned() {
    let engine = DataDist::open(Config { max_transfers: 2, ..config(4 << 20) }).unwrap();
    let [device, host] = caches(&engine);
    let mut expected = contents(&host);
    let copy =
        |from, to| engine.copy(&end(&device), &end(&host), &[(from, to)], SubRow::default(), None).start();

    let first = copy(9, 0).unwrap();
    assert!(first.done());
    expected.iter_mut().for_each(|tensor| tensor.copy_within(9 * ROW..10 * ROW, 0));
    assert!(contents(&device) == expected);
    let same = engine.copy(&end(&device), &end(&device), &[(0, 5)], SubRow::default(), None).start().unwrap();
    assert!(same.done());
    expected.iter_mut().for_each(|tensor| tensor.copy_within(0..ROW, 5 * ROW));
    // Both outcomes wait to be taken, so there is no room, and nothing moves.
    assert_eq!(copy(1, 2).unwrap_err().kind(), ErrorKind::Busy);
    assert!(contents(&device) == expected);
    assert_eq!(first.outcome().unwrap().unwrap(), 2 * ROW as u64);
    let events = engine.poll(9).unwrap();
    assert!(matches!(&events[..], [Event::Completed(ended)] if Arc::ptr_eq(ended, &same)), "{events:?}");

    let held = pin_writes(&host, vec![4], Deadline::after(LONG)).unwrap();
    let waiting = copy(4, 6).unwrap();
    assert!(!waiting.done());
    let behind = copy(2, 6).unwrap();
    assert!(!behind.done(), "it writes the same row later");
    drop(held);
    assert_eq!(outcome(&waiting).unwrap(), 2 * ROW as u64);
    assert_eq!(outcome(&behind).unwrap(), 2 * ROW as u64);
    expected.iter_mut().for_each(|tensor| tensor.copy_within(2 * ROW..3 * ROW, 6 * ROW));
    assert!(contents(&device) == expected);
    let calls = engine.stats().ops.iter().map(|(_, op)| op.calls).sum::<u64>();
    assert_eq!(calls, 2 + 4, "two allocations and four copies");
}

/// A short copy that another thread runs is waited for, and its event comes before that of a copy that waited for its rows.
#[test]
fn a_short_copy_in_progress_is_a_running_transfer() {
    let engine = DataDist::open(Config { verify: Verify::Full, ..config(4 << 20) }).unwrap();
    let [device, host] = caches(&engine);
    let copy = |from, to| {
        engine.copy(&end(&device), &end(&host), &[(from, to)], SubRow::default(), None).start().unwrap()
    };
    let ((begins, begun), (go, gate)) = (channel(), channel());
    after_the_move(&device, move |_| {
        begins.send(()).unwrap();
        gate.recv().unwrap();
    });
    std::thread::scope(|scope| {
        let short = scope.spawn(|| copy(9, 0));
        begun.recv().unwrap();
        assert!(!engine.drain(Duration::from_millis(20)).unwrap(), "it has not ended");
        let behind = copy(1, 0);
        assert!(!behind.done(), "it writes the same row later");
        go.send(()).unwrap();
        let short = short.join().unwrap();
        assert!(engine.drain(LONG).unwrap());
        let ended = ended(&engine, 9);
        assert_eq!(
            ended.iter().map(|ended| ended.number()).collect::<Vec<_>>(),
            [short.number(), behind.number()]
        );
        assert!(ended.iter().all(|ended| ended.outcome().unwrap().is_ok()));
    });
    assert!(contents(&device)[0][..ROW] == contents(&host)[0][ROW..2 * ROW]);
}

#[test]
fn a_call_that_waits_is_cancelled_or_late_at_once() {
    let bench = Bench::new(100);
    bench.gate.shut();
    let first = bench.copy(0, 1);
    bench.gate.wait_for(1);
    let [cancelled, behind] = [bench.copy(1, 2), bench.copy(2, 3)];
    let late = bench.try_copy(1, 4, Some(Duration::from_millis(20))).unwrap();
    assert!(cancelled.cancel());
    let ended = cancelled.outcome().expect("no worker had begun it").unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::Cancelled);
    let error = outcome(&late).unwrap_err();
    assert_eq!((error.kind(), error.fact("limit_ms")), (ErrorKind::Timeout, Some("20")), "{error}");
    assert!(error.to_string().starts_with("timeout passed"), "{error}");
    // The call behind waits for nobody any more: it copies.
    bench.gate.wait_for(2);
    assert!(!first.done());
    assert!(first.cancel(), "a copy that has begun");
    bench.gate.open();
    assert_eq!(outcome(&behind).unwrap(), 2 * ROW as u64);
    assert_eq!(outcome(&first).unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!((first.cancel(), behind.cancel()), (false, false));
    bench.engine.copy_blocks(&end(&bench.device), &[(1, 2)]).run().expect("no row is held");
    assert!(bench.engine.drain(LONG).unwrap());
}

/// A full queue refuses calls and changes nothing. Polling and taking an outcome make room, each once.
#[test]
fn the_queue_is_bounded() {
    let bench = Bench::new(3);
    let transfers: Vec<_> = (0..3).map(|row| bench.copy(row, row + 8)).collect();
    assert!(bench.engine.drain(LONG).unwrap());
    let full = bench.try_copy(0, 1, None).unwrap_err();
    assert_eq!((full.kind(), full.fact("limit")), (ErrorKind::Busy, Some("3")));
    let polled = bench.polled_at_most(1);
    assert_eq!(polled.len(), 1);
    bench.copy(0, 1);
    assert_eq!(bench.try_copy(0, 1, None).unwrap_err().kind(), ErrorKind::Busy);
    // An outcome whose event was not polled is taken twice and makes room once. The copies may end in any order.
    let other = transfers.iter().find(|transfer| !polled.contains(&transfer.number())).unwrap();
    assert!(other.outcome().is_some() && other.outcome().is_some());
    assert!(bench.engine.drain(LONG).unwrap());
    assert_eq!(bench.polled().len(), 2);
    assert_eq!((bench.engine.events().open_transfers(), bench.polled().len()), (0, 0));
    assert_eq!(bench.engine.poll(0).unwrap().len(), 0);
}

/// The descriptor is readable exactly while there is something to poll, whenever it is asked for.
#[test]
fn the_descriptor_follows_the_queue() {
    for before in [false, true] {
        let bench = Bench::new(100);
        let readable = || {
            let descriptor = bench.engine.events().descriptor().unwrap();
            let mut polled = [PollFd::new(&*descriptor, PollFlags::IN)];
            poll(&mut polled, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        };
        if before {
            assert!(!readable());
        }
        let transfers = [bench.copy(0, 1), bench.copy(2, 3), bench.copy(4, 5)];
        assert!(bench.engine.drain(LONG).unwrap());
        assert!(readable());
        transfers[1].outcome();
        assert!(readable());
        assert_eq!(bench.engine.poll(1).unwrap().len(), 1);
        assert!(readable());
        assert_eq!(bench.engine.poll(9).unwrap().len(), 1);
        assert!(!readable());
        let taken = bench.copy(0, 1);
        outcome(&taken).unwrap();
        assert!(!readable(), "the outcome was taken, so there is nothing to poll");
    }
}

/// A work that panics is a failure of its transfer, and releases its rows.
#[test]
fn a_panic_is_a_failure() {
    let bench = Bench::new(100);
    *bench.gate.panics.lock().unwrap() = Some("llm-worker".into());
    bench.gate.shut();
    let panicking = bench.copy(0, 1);
    let other = bench.copy(4, 5);
    bench.gate.wait_for(1);
    bench.gate.open();
    let ended = [outcome(&panicking), outcome(&other)].map(|ended| ended.map_err(|error| error.kind()));
    assert_eq!(ended.iter().filter(|ended| **ended == Err(ErrorKind::System)).count(), 1, "{ended:?}");
    bench.engine.copy_blocks(&end(&bench.device), &[(0, 1), (4, 5)]).run().expect("no row is held");
}

#[test]
fn a_closed_engine_has_no_events() {
    let bench = Bench::new(100);
    bench.gate.shut();
    let [running, waiting] = [bench.copy(0, 1), bench.copy(1, 2)];
    bench.gate.wait_for(1);
    let queue = bench.engine.events().clone();
    queue.descriptor().unwrap();
    let Bench { gate, engine, .. } = bench;
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| drop(engine));
        assert_eq!(outcome(&waiting).unwrap_err().kind(), ErrorKind::Closed);
        gate.open();
        closing.join().unwrap();
    });
    assert_eq!(running.outcome().expect("the engine has drained").unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(queue.poll(9).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(queue.descriptor().unwrap_err().kind(), ErrorKind::Closed);
}

/// A released cache is gone at once, and the transfer ends when nothing touches its memory.
#[test]
fn a_cache_is_freed_when_its_calls_have_ended() {
    let Bench { gate, engine, device, .. } = &Bench::new(100);
    let shape = desc(Placement::Host, 2, 16, ROW);
    let own = Own::new(&shape, CacheKind::Blocks, |adopted| engine.register(adopted, &[], None).unwrap());
    let id = own.cache.id();
    own.write(&patterned(5, 2, 16 * ROW));
    gate.shut();
    let copy = engine.swap_blocks(&own.end(), &end(device), &[(3, 3)]).start().unwrap();
    gate.wait_for(1);
    let behind = engine.swap_blocks(&own.end(), &end(device), &[(3, 3)]).start().unwrap();
    let late = engine.start_free(id, Some(Duration::from_millis(1))).unwrap();
    assert_eq!(engine.find(id).unwrap_err().kind(), ErrorKind::CacheNotFound);
    assert_eq!(outcome(&late).unwrap_err().kind(), ErrorKind::Timeout);
    let freed = engine.start_free(id, None).unwrap();
    assert!(!freed.done() && !copy.done());
    gate.open();
    assert_eq!(outcome(&freed).unwrap(), 0);
    assert!(copy.done() && behind.done(), "what used the memory has ended");
    outcome(&copy).unwrap();
    // It had not begun when the cache was released.
    assert_eq!(outcome(&behind).unwrap_err().kind(), ErrorKind::CacheNotFound);
    own.outside_untouched();
    for id in [id, device.id()] {
        let freed = engine.start_free(id, None).unwrap();
        assert!(freed.done() && !freed.has_event(), "gone, or of the pool");
        assert_eq!(engine.find(id).unwrap_err().kind(), ErrorKind::CacheNotFound);
    }
}
