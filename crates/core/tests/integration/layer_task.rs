//! Pushes whose layers the caller reports: the one outcome and event of all destinations, compared with a naive model, and in every
//! order of several threads. `task.rs` covers what they share with the tasks of `transfer_cache_async`, and
//! `tests/native/test_transfers.py` the bytes.
#![allow(clippy::needless_for_each, clippy::cast_possible_truncation, reason = "small numbers, one line")]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use llm_datadist_core::testing::transfer::{AsyncCalls, Executor, LayerTask};
use llm_datadist_core::testing::{begin_layer_task, end_link};
use llm_datadist_core::{
    ClusterId, Deadline, Error, ErrorKind, Event, EventQueue, LinkEnd, PeerInfo, Result, Transfer,
};

use crate::fixtures::{LONG, eventually};
use crate::layer_sinks::{BYTES, FAIL, Script, delivery};

const LAYERS: u32 = 8;

type To = (u32, u32, Arc<Script>);

/// An engine's workers and events, without links.
struct Bed {
    executor: Executor,
    calls: AsyncCalls,
    /// The limit of a layer.
    limit: Duration,
}

impl Bed {
    fn new() -> Bed {
        Bed::with(LONG * 100)
    }

    fn with(limit: Duration) -> Bed {
        let executor = Executor::default();
        let calls = AsyncCalls::new(Arc::new(EventQueue::new(64)), executor.handle(), Weak::new());
        Bed { executor, calls, limit }
    }

    fn try_begin(&self, to: &[To]) -> Result<LayerTask> {
        let delivery = |(first, end, script): &To| delivery(2, (*first, *end), script);
        begin_layer_task(&self.calls, LAYERS, to.iter().map(delivery).collect(), self.limit)
    }

    fn begin(&self, to: &[To]) -> LayerTask {
        self.try_begin(to).unwrap()
    }

    /// Returns the events so far: the number of a transfer, or the cluster of a link that ended.
    fn events(&self) -> Vec<(&'static str, u64)> {
        let event = |event| match event {
            Event::Completed(transfer) => ("call", transfer.number()),
            Event::LinkDown(end) => ("link", end.peer.cluster.0),
            other => panic!("{other:?}"),
        };
        self.calls.queue().poll(1000).unwrap().into_iter().map(event).collect()
    }
}

fn failure(transfer: &Transfer) -> Error {
    assert!(transfer.wait(Deadline::after(LONG)).unwrap(), "{transfer:?}");
    transfer.peek().unwrap().unwrap_err()
}

/// Bytes of a push whose layers have all arrived.
fn bytes_of(to: &[To]) -> u64 {
    to.iter().map(|(first, end, _)| u64::from(end - first) * BYTES).sum()
}

/// Checks why a transfer failed, and at which layer.
fn check(transfer: &Transfer, kind: ErrorKind, layer: u32, text: &str) {
    let error = failure(transfer);
    assert!(error.kind() == kind && error.to_string().contains(text), "{error}");
    let facts = ["cluster", "layer", "peer"].map(|name| error.fact(name).unwrap_or("none"));
    assert_eq!(facts, ["2", &layer.to_string(), "somewhere"], "{error}");
}

fn succeeded(transfer: &Transfer) {
    assert!(transfer.wait(Deadline::after(LONG)).unwrap());
    transfer.peek().unwrap().unwrap();
}

/// One step of a program.
#[derive(Clone, Debug)]
enum Step {
    Ready(u32),
    Cancel,
}

/// What is known of a push: how it ended, and until then the layers that arrived at each destination, in order.
struct Model {
    arrived: Vec<Vec<u32>>,
    end: Option<std::result::Result<(), ErrorKind>>,
}

impl Model {
    fn new(to: &[To]) -> Model {
        let find_fails = to.iter().any(|(.., script)| script.find.is_some());
        Model { arrived: vec![vec![]; to.len()], end: find_fails.then_some(Err(ErrorKind::NotLinked)) }
    }

    fn ready(&mut self, layer: u32, to: &[To]) {
        if self.end.is_some() {
            return;
        }
        let mut whole = true;
        for (arrived, (first, end, script)) in self.arrived.iter_mut().zip(to) {
            if (*first..*end).contains(&layer) {
                if script.fails_at == Some(layer) {
                    self.end = Some(Err(ErrorKind::NotLinked));
                }
                arrived.push(layer);
            }
            whole &= arrived.len() == (end - first) as usize;
        }
        if whole {
            self.end.get_or_insert(Ok(()));
        }
    }

    /// Waits until the push is as far. Once it has failed, a destination may lack what others have.
    fn met_by(&self, transfer: &Transfer, to: &[To]) {
        eventually("the model", || {
            let end = transfer.peek().map(|outcome| outcome.map(drop).map_err(|error| error.kind()));
            let mut layers = self.arrived.iter().zip(to);
            let failed = matches!(self.end, Some(Err(_)));
            // A layer counts as arrived a moment after its push. After the end, all is counted.
            let count = self.arrived.iter().map(|arrived| arrived.len() as u64 * BYTES).sum::<u64>();
            let counted = self.end.is_some() || transfer.progress().done == count;
            end == self.end && (failed || counted && layers.all(|(arrived, to)| to.2.pushed() == *arrived))
        });
        for (arrived, (.., script)) in self.arrived.iter().zip(to) {
            assert!(arrived.starts_with(&script.pushed()), "{:?} of {arrived:?}", script.pushed());
            assert!(self.end.is_none() || script.dropped(), "an end before the memory was released");
        }
        match transfer.peek() {
            Some(Ok(bytes)) => assert_eq!((bytes, transfer.progress().total), (bytes_of(to), bytes_of(to))),
            // An error names its destination if there are several.
            Some(Err(error)) => assert_eq!(error.fact("part").is_some(), to.len() > 1, "{error}"),
            None => (),
        }
    }
}

/// A destination: its first layer, the end of its layers, whether `find` fails, the layer at which a push fails, and the layers
/// after the first one in a request.
type DestinationCase = (u32, u32, bool, Option<u32>, u32);

fn destinations() -> impl Strategy<Value = Vec<DestinationCase>> {
    let range = (0..LAYERS).prop_flat_map(|first| (Just(first), first + 1..=LAYERS));
    let find_fails = prop::bool::weighted(0.1);
    let fails_at = prop_oneof![3 => Just(None), 1 => (0..LAYERS).prop_map(Some)];
    let one = (range, find_fails, fails_at, 0..LAYERS)
        .prop_map(|((first, end), find, at, more)| (first, end, find, at, more));
    prop::collection::vec(one, 1..6)
}

fn scripted(given: &[DestinationCase]) -> Vec<To> {
    let one = |&(first, end, find_fails, fails_at, more): &DestinationCase| {
        let find = find_fails.then_some(FAIL);
        (first, end, Arc::new(Script { find, fails_at, more, ..Script::default() }))
    };
    given.iter().map(one).collect()
}

/// Layers become ready in any order, the push is cancelled, and at last the task is dropped. After each step, the push is as a naive
/// model says.
#[test]
fn a_push_follows_the_model() {
    let step = prop_oneof![12 => (0..LAYERS + 1).prop_map(Step::Ready), 1 => Just(Step::Cancel)];
    let shuffled = Just((0..LAYERS).collect::<Vec<_>>()).prop_shuffle();
    TestRunner::default()
        .run(&(destinations(), prop::collection::vec(step, 0..12), shuffled), |(given, mut steps, rest)| {
            let bed = Bed::new();
            steps.extend(rest.into_iter().take(steps.len() * 2 / 3).map(Step::Ready));
            let to = scripted(&given);
            let mut model = Model::new(&to);
            let task = bed.begin(&to);
            let transfer = task.transfer().clone();
            model.met_by(&transfer, &to);
            let mut reported = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Ready(layer) => {
                        let accepted = layer < LAYERS && reported.insert(layer);
                        assert_eq!(task.ready(layer).is_ok(), accepted);
                        if accepted {
                            model.ready(layer, &to);
                        }
                    }
                    Step::Cancel => {
                        assert_eq!(transfer.cancel(), model.end.is_none());
                        model.end.get_or_insert(Err(ErrorKind::Cancelled));
                    }
                }
                model.met_by(&transfer, &to);
            }
            drop(task);
            model.end.get_or_insert(Err(ErrorKind::Cancelled));
            model.met_by(&transfer, &to);
            assert_eq!(bed.events(), [("call", transfer.number())], "one event");
            assert_eq!(bed.calls.queue().open_transfers(), 0);
            assert!(bed.calls.drain(Deadline::after(LONG)).unwrap());
            eventually("the end of the alarms", || bed.executor.handle().alarms() == 0);
            Ok(())
        })
        .unwrap();
}

/// Layers are reported by two threads, while others cancel the push and drop the task. It ends once, and with success only if all
/// layers are in place.
#[test]
fn every_order_of_several_threads() {
    TestRunner::default()
        .run(&(destinations(), prop::bool::ANY, 0..300u64), |(given, cancels, pause)| {
            let bed = Bed::new();
            let to = scripted(&given);
            let task = bed.begin(&to);
            let transfer = task.transfer().clone();
            thread::scope(|scope| {
                scope.spawn(|| (0..LAYERS).for_each(|layer| _ = task.ready(layer)));
                scope.spawn(|| (0..LAYERS).rev().for_each(|layer| _ = task.ready(layer)));
                thread::sleep(Duration::from_micros(pause));
                scope.spawn(|| cancels.then(|| transfer.cancel()));
            });
            drop(task);
            assert!(transfer.wait(Deadline::after(LONG)).unwrap());
            assert!(to.iter().all(|(.., script)| script.dropped()));
            match transfer.peek().unwrap() {
                Ok(bytes) => {
                    for (first, end, script) in &to {
                        let mut pushed = script.pushed();
                        pushed.sort_unstable();
                        assert_eq!(pushed, (*first..*end).collect::<Vec<_>>());
                    }
                    assert_eq!(bytes, bytes_of(&to));
                }
                Err(error) if error.kind() == ErrorKind::NotLinked => {
                    assert!(to.iter().any(|(.., script)| script.find.is_some() || script.fails_at.is_some()));
                }
                Err(error) => assert!(cancels && error.kind() == ErrorKind::Cancelled, "{error}"),
            }
            assert_eq!(bed.events(), [("call", transfer.number())]);
            assert_eq!(bed.calls.queue().open_transfers(), 0);
            Ok(())
        })
        .unwrap();
}

/// Layers become ready while a destination is being found. Its first request pushes one layer, the next ones as many as follow.
#[test]
fn layers_that_wait_share_requests() {
    let bed = Bed::new();
    let script = Arc::new(Script { shut_at_find: true, shut: Mutex::new(true), ..Script::default() });
    let task = bed.begin(&[(1, LAYERS, script.clone())]);
    // No destination needs layer 0, and layer 4 comes late.
    [0, 1, 2, 3, 5, 6, 7, 4].into_iter().for_each(|layer| task.ready(layer).unwrap());
    script.open();
    succeeded(task.transfer());
    assert_eq!(script.pushed(), [1, 2, 3, 5, 6, 7, 4]);
    assert_eq!(task.transfer().peek().unwrap().unwrap(), 7 * BYTES);
    assert_eq!(*script.requests.lock().unwrap(), [(1, 2), (2, 4), (5, 8), (4, 5)]);
}

/// However many destinations it has, a push takes one place in the queue.
#[test]
fn a_push_takes_room_for_one_transfer() {
    let bed = Bed::new();
    let good = || (0..5).map(|_| (0, 1, Script::good())).collect::<Vec<To>>();
    let tasks: Vec<_> = (0..64).map(|_| bed.begin(&good())).collect();
    let refused = good();
    let error = bed.try_begin(&refused).unwrap_err();
    let facts = ["open_transfers", "limit"].map(|name| error.fact(name).unwrap());
    assert_eq!((error.kind(), facts), (ErrorKind::Busy, ["64", "64"]));
    assert!(refused.iter().all(|(.., script)| script.finds() == 0), "a destination was begun");
    tasks.iter().for_each(|task| task.ready(0).unwrap());
    tasks.iter().for_each(|task| succeeded(task.transfer()));
    assert_eq!(bed.events().len(), 64);
    bed.calls.close();
    assert_eq!(bed.try_begin(&good()).unwrap_err().kind(), ErrorKind::Closed);
}

/// The limit of a layer counts from its report. The workers of the cluster stall, so nothing else ends the wait.
#[test]
fn a_layer_that_waits_for_a_thread_is_late() {
    let mut bed = Bed::with(LONG);
    let stalled: Vec<To> = (0..32).map(|_| (0, 1, Script::stalled())).collect();
    let stall = bed.begin(&stalled);
    eventually("all to be found", || stalled.iter().all(|(.., script)| script.finds() == 1));
    stall.ready(0).unwrap();
    eventually("all workers", || stalled.iter().all(|(.., script)| script.is_at_gate()));
    bed.limit = Duration::from_secs(2);
    let late = Script::good();
    let task = bed.begin(&[(0, 2, late.clone())]);
    thread::sleep(Duration::from_millis(2200));
    assert!(!task.transfer().done(), "no layer was reported");
    task.ready(0).unwrap();
    check(task.transfer(), ErrorKind::Timeout, 0, "sync_kv_timeout passed while layer 0 was waiting");
    assert_eq!(failure(task.transfer()).fact("limit_ms"), Some("2000"));
    assert!(late.dropped() && late.pushed().is_empty());
    assert!(!stall.transfer().done());
    stalled.iter().for_each(|(.., script)| script.open());
    succeeded(stall.transfer());
    eventually("the end of the alarms", || bed.executor.handle().alarms() == 0);
}

/// A push that begins in time and takes too long has the deadline of its layer.
#[test]
fn a_layer_has_the_deadline_of_its_report() {
    let bed = Bed::with(Duration::from_secs(2));
    let slow = Script::stalled();
    let task = bed.begin(&[(0, 2, slow.clone())]);
    task.ready(1).unwrap();
    slow.arrived();
    thread::sleep(Duration::from_millis(2100));
    assert!(!task.transfer().done(), "a layer in transit still touches memory");
    slow.open();
    check(task.transfer(), ErrorKind::Timeout, 1, "sync_kv_timeout passed while pushing");
}

/// Whatever ends a push, a layer in transit ends first, and the one event comes after it. The other destinations end at once.
#[test]
fn a_push_ends_only_when_nothing_moves() {
    for kind in [ErrorKind::Cancelled, ErrorKind::Closed, ErrorKind::NotLinked] {
        for dropped in [false, true] {
            let bed = Bed::new();
            let other = Arc::new(Script { fails_at: Some(2), ..Script::default() });
            let slow = Script::stalled();
            let task = bed.begin(&[(0, 2, slow.clone()), (2, 4, other.clone())]);
            let transfer = task.transfer().clone();
            task.ready(0).unwrap();
            slow.arrived();
            match kind {
                // The drop does it.
                ErrorKind::Cancelled if dropped => {}
                ErrorKind::Cancelled => assert!(transfer.cancel()),
                ErrorKind::Closed => bed.calls.close(),
                _ => task.ready(2).unwrap(),
            }
            let ended = || eventually("the end of the other destination", || other.dropped());
            if kind == ErrorKind::NotLinked {
                ended();
            }
            let kept = (!dropped).then_some(task);
            ended();
            thread::sleep(Duration::from_millis(30));
            assert!(!transfer.done() && !slow.dropped(), "{kind:?}");
            assert!(kind == ErrorKind::Closed || bed.events().is_empty(), "{kind:?}");
            slow.open();
            let error = failure(&transfer);
            assert_eq!(error.kind(), kind);
            assert!(slow.dropped());
            assert!(bed.calls.drain(Deadline::after(LONG)).unwrap());
            if kind != ErrorKind::Closed {
                assert_eq!(error.fact("part"), Some("1"), "the other one ended first: {error}");
                assert_eq!(bed.events(), [("call", transfer.number())]);
            }
            drop(kept);
        }
    }
}

/// Nobody can report layers of a dropped task. A push whose layers are all ready continues.
#[test]
fn a_dropped_task_ends_what_waits_for_layers() {
    let bed = Bed::new();
    let (whole, part) = (Script::stalled(), Script::good());
    let [all, some] = [bed.begin(&[(0, 2, whole.clone())]), bed.begin(&[(0, 3, part.clone())])];
    let [continues, ends] = [&all, &some].map(|task| task.transfer().clone());
    for task in [&all, &some] {
        [1, 0].iter().for_each(|&layer| task.ready(layer).unwrap());
    }
    eventually("two layers", || part.pushed() == [1, 0]);
    drop((all, some));
    check(&ends, ErrorKind::Cancelled, 2, "the task was dropped before layer 2 was ready");
    assert!(!continues.done());
    whole.open();
    succeeded(&continues);
    assert_eq!(whole.pushed(), [1, 0]);
}

/// Without a thread, the push fails; nothing is left behind.
#[test]
fn a_task_without_threads_fails() {
    let bed = Bed::with(LONG);
    bed.executor.handle().refuse_threads(true);
    let script = Script::good();
    let task = bed.begin(&[(0, 1, script.clone())]);
    assert_eq!(failure(task.transfer()).kind(), ErrorKind::System);
    assert!(script.dropped() && script.finds() == 0);
    task.ready(0).unwrap();
    assert!(bed.calls.drain(Deadline::after(Duration::ZERO)).unwrap());
}

fn link_end(cluster: u64) -> LinkEnd {
    let peer = PeerInfo {
        cluster: ClusterId(cluster),
        incarnation: 1,
        name: Arc::default(),
        address: String::new(),
        transport: "tcp",
        metadata: Arc::default(),
    };
    LinkEnd { peer, reason: "dead".into(), unacknowledged: 0 }
}

/// A program that learns of the end of a peer has learnt of the ends of all its calls to that peer.
#[test]
fn the_end_of_a_link_comes_after_the_ends_of_its_calls() {
    let bed = Bed::new();
    assert!(bed.events().is_empty());
    loop {
        let started = Instant::now();
        let task = bed.begin(&[(0, 1, Script::good())]);
        end_link(bed.calls.queue(), link_end(7));
        end_link(bed.calls.queue(), link_end(2));
        // A push fails with its link.
        let transfer = task.transfer().clone();
        assert_eq!(failure(&transfer).kind(), ErrorKind::NotLinked);
        let mut seen = Vec::new();
        eventually("the end of the link", || {
            seen.extend(bed.events());
            seen.contains(&("link", 2))
        });
        if started.elapsed() >= Duration::from_secs(1) {
            // On a busy machine the end may have waited long enough.
            continue;
        }
        assert!(seen.contains(&("link", 7)), "a peer without calls");
        seen.retain(|event| *event != ("link", 7));
        assert_eq!(seen, [("call", transfer.number()), ("link", 2)]);
        return;
    }
}

/// A call that does not end, for example because the kernel keeps a read, delays the end of its link for a while only.
#[test]
fn the_end_of_a_link_waits_for_no_call_that_stalls() {
    let bed = Bed::new();
    assert!(bed.events().is_empty());
    let slow = Script::stalled();
    let task = bed.begin(&[(0, 1, slow.clone())]);
    task.ready(0).unwrap();
    slow.arrived();
    end_link(bed.calls.queue(), link_end(2));
    let mut reported = Vec::new();
    eventually("the end of the link", || {
        reported.extend(bed.events());
        !reported.is_empty()
    });
    assert_eq!(reported, [("link", 2)]);
    assert!(!task.transfer().done());
    slow.open();
}
