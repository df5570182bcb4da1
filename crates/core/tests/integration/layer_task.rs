//! Tasks whose layers the caller reports: the outcome and the one event of each destination, compared with a naive model,
//! and in every order of several threads. `task.rs` covers what they share with the tasks of `transfer_cache_async`, and
//! `tests/native/test_transfers.py` the bytes.
#![allow(clippy::needless_for_each, clippy::cast_possible_truncation, reason = "small numbers, one line")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use llm_datadist_core::testing::transfer::{
    AsyncCalls, Delivery, Executor, LayerSink, LayerTask, TaskKind, TaskLimits,
};
use llm_datadist_core::testing::{begin_joint_layer_task, begin_layer_task, end_link};
use llm_datadist_core::{
    ClusterId, Deadline, Error, ErrorKind, Event, EventQueue, LayerRange, LinkEnd, PeerInfo, Result, Transfer,
};

use crate::fixtures::eventually;

const LAYERS: u32 = 8;
const LONG: Duration = Duration::from_secs(60);
const BYTES: u64 = 10;

/// A sink that may stall at a gate, and the record of what it did.
#[derive(Default)]
struct Script {
    find_fails: bool,
    fails_at: Option<u32>,
    /// Maximum number of layers that a request pushes after its first layer.
    more: u32,
    shut: Mutex<bool>,
    opened: Condvar,
    at_gate: AtomicBool,
    found: AtomicBool,
    pushed: Mutex<Vec<u32>>,
    /// The layers of each request: the first one, and the one after the last.
    requests: Mutex<Vec<(u32, u32)>>,
    /// Whether the gate is in `find`, not in the pushes, and requests have as many layers as they may.
    shut_at_find: bool,
    dropped: AtomicBool,
}

impl Script {
    fn good() -> Arc<Script> {
        Arc::default()
    }

    fn stalled() -> Arc<Script> {
        Arc::new(Script { shut: Mutex::new(true), ..Script::default() })
    }

    fn open(&self) {
        *self.shut.lock().unwrap() = false;
        self.opened.notify_all();
    }

    fn wait_for_gate(&self) {
        let shut = self.shut.lock().unwrap();
        let waited = self.opened.wait_timeout_while(shut, LONG, |shut| *shut).unwrap();
        assert!(!waited.1.timed_out());
    }

    fn pushed(&self) -> Vec<u32> {
        self.pushed.lock().unwrap().clone()
    }

    fn is(flag: &AtomicBool) -> bool {
        flag.load(Ordering::SeqCst)
    }
}

struct Scripted(Arc<Script>, u32);

impl LayerSink for Scripted {
    fn find(&self, _: TaskKind, _: Deadline) -> Result<u64> {
        assert!(!self.0.found.swap(true, Ordering::SeqCst), "found twice");
        if self.0.shut_at_find {
            self.0.wait_for_gate();
        }
        if self.0.find_fails { Err(broken()) } else { Ok(u64::from(self.1) * BYTES) }
    }

    /// Also stops before the layer at which it fails.
    fn push(&self, ready: LayerRange, max_bytes: u64, deadline: Deadline) -> Result<(u32, u64)> {
        let fails_next = |&layer: &u32| self.0.fails_at != Some(layer + 1);
        let count = if self.0.shut_at_find {
            (max_bytes / BYTES).clamp(1, u64::from(ready.end - ready.first)) as u32
        } else {
            let more = (ready.first..ready.end - 1).take(self.0.more as usize).take_while(fails_next);
            1 + more.count() as u32
        };
        let layers = LayerRange { end: ready.first + count, ..ready };
        assert!(Script::is(&self.0.found) && !Script::is(&self.0.dropped));
        self.0.at_gate.store(true, Ordering::SeqCst);
        self.0.wait_for_gate();
        self.0.requests.lock().unwrap().push((layers.first, layers.end));
        deadline.check("pushing")?;
        if self.0.fails_at == Some(layers.first) {
            return Err(broken());
        }
        self.0.pushed.lock().unwrap().extend(layers.first..layers.end);
        Ok((count, u64::from(count) * BYTES))
    }

    fn named(&self, error: Error) -> Error {
        error.with("peer", "somewhere")
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        // Slow, so that an event that comes too early is noticed.
        thread::sleep(Duration::from_millis(1));
        assert!(!self.0.dropped.swap(true, Ordering::SeqCst));
    }
}

fn broken() -> Error {
    Error::new(ErrorKind::NotLinked, "scripted")
}

type To = (u32, u32, Arc<Script>);

/// An engine's workers and events, without links.
struct Bed {
    executor: Executor,
    calls: AsyncCalls,
    limits: TaskLimits,
}

impl Bed {
    fn new() -> Bed {
        Bed::with(LONG * 100, None)
    }

    fn with(layer: Duration, wait: Option<Duration>) -> Bed {
        let executor = Executor::default();
        let calls = AsyncCalls::new(Arc::new(EventQueue::new(64)), executor.handle(), Weak::new());
        Bed { executor, calls, limits: TaskLimits { kind: TaskKind::LayerTask, layer, wait } }
    }

    fn try_begin(&self, cluster: u64, to: &[To]) -> Result<LayerTask> {
        begin_layer_task(&self.calls, LAYERS, Self::deliveries(cluster, to), self.limits)
    }

    /// Begins a task with one transfer for all destinations.
    fn begin_joint(&self, to: &[To]) -> LayerTask {
        begin_joint_layer_task(&self.calls, LAYERS, Self::deliveries(2, to), self.limits).unwrap()
    }

    fn deliveries(cluster: u64, to: &[To]) -> Vec<Delivery> {
        let delivery = |(first, end, script): &To| {
            let sink: Arc<dyn LayerSink> = Arc::new(Scripted(script.clone(), end - first));
            let layers = LayerRange { first: *first, end: *end };
            Delivery { cluster: ClusterId(cluster), layers, sink: Ok(sink) }
        };
        to.iter().map(delivery).collect()
    }

    fn begin(&self, to: &[To]) -> LayerTask {
        self.try_begin(2, to).unwrap()
    }

    /// Returns the transfers of all events so far.
    fn events(&self) -> Vec<u64> {
        let number = |event| match event {
            Event::Completed(transfer) => transfer.number(),
            other => panic!("{other:?}"),
        };
        self.calls.queue().poll(1000).unwrap().into_iter().map(number).collect()
    }
}

fn failure(transfer: &Transfer) -> Error {
    assert!(transfer.wait(Deadline::after(LONG)).unwrap(), "{transfer:?}");
    transfer.peek().unwrap().unwrap_err()
}

/// Checks why a transfer failed, and at which layer.
fn check(transfer: &Transfer, kind: ErrorKind, layer: u32, text: &str) {
    let error = failure(transfer);
    assert!(error.kind() == kind && error.to_string().contains(text), "{error}");
    let facts = ["cluster", "layer", "peer"].map(|name| error.fact(name).unwrap_or("none"));
    assert_eq!(facts, ["2", &layer.to_string(), "somewhere"], "{error}");
    assert_eq!(transfer.cancelled(), kind == ErrorKind::Cancelled);
}

fn succeeded(transfer: &Transfer) {
    assert!(transfer.wait(Deadline::after(LONG)).unwrap());
    transfer.peek().unwrap().unwrap();
}

/// One step of a program.
#[derive(Clone, Debug)]
enum Step {
    Ready(u32),
    Fail(u32),
    Cancel(usize),
}

/// What is known of a destination: how it ended, and the layers that arrived, in order.
#[derive(Clone, Debug)]
struct Model {
    needs: BTreeSet<u32>,
    arrived: Vec<u32>,
    end: Option<std::result::Result<(), ErrorKind>>,
}

impl Model {
    fn new((first, end, script): &To) -> Model {
        let end_now = script.find_fails.then_some(Err(ErrorKind::NotLinked));
        Model { needs: (*first..*end).collect(), arrived: vec![], end: end_now }
    }

    fn ready(&mut self, layer: u32, script: &Script) {
        if self.end.is_some() || !self.needs.contains(&layer) {
            return;
        }
        if script.fails_at == Some(layer) {
            self.end = Some(Err(ErrorKind::NotLinked));
            return;
        }
        self.arrived.push(layer);
        if self.arrived.len() == self.needs.len() {
            self.end = Some(Ok(()));
        }
    }

    fn ends_if(&mut self, condition: bool, kind: ErrorKind) -> bool {
        let ends = self.end.is_none() && condition;
        if ends {
            self.end = Some(Err(kind));
        }
        ends
    }

    /// Waits until a transfer is as far.
    fn met_by(&self, transfer: &Transfer, script: &Script) {
        eventually("the model", || {
            let end = transfer.peek().map(|outcome| outcome.map(drop).map_err(|error| error.kind()));
            // A layer counts as arrived a moment after its push. After the end, all is counted.
            let counted = transfer.progress().done == self.arrived.len() as u64 * BYTES;
            end == self.end && script.pushed() == self.arrived && (counted || self.end.is_some())
        });
        assert!(self.end.is_none() || Script::is(&script.dropped), "an end before the memory was released");
        assert_eq!(transfer.progress().done, self.arrived.len() as u64 * BYTES);
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
        (first, end, Arc::new(Script { find_fails, fails_at, more, ..Script::default() }))
    };
    given.iter().map(one).collect()
}

/// Layers become ready and fail in any order, destinations are cancelled, and at last the task is dropped. After each step,
/// every destination is as a naive model says.
#[test]
fn every_destination_follows_the_model() {
    let layer = 0..LAYERS + 1;
    let step = prop_oneof![
        8 => layer.clone().prop_map(Step::Ready),
        1 => layer.prop_map(Step::Fail),
        1 => (0..6usize).prop_map(Step::Cancel),
    ];
    let shuffled = Just((0..LAYERS).collect::<Vec<_>>()).prop_shuffle();
    TestRunner::default()
        .run(&(destinations(), prop::collection::vec(step, 0..12), shuffled), |(given, mut steps, rest)| {
            let bed = Bed::new();
            steps.extend(rest.into_iter().take(steps.len() * 2 / 3).map(Step::Ready));
            let to = scripted(&given);
            let mut models: Vec<_> = to.iter().map(Model::new).collect();
            let task = bed.begin(&to);
            let transfers = task.transfers().to_vec();
            let met = |models: &[Model]| {
                let all = models.iter().zip(&transfers).zip(&to);
                all.for_each(|((model, transfer), (_, _, script))| model.met_by(transfer, script));
            };
            met(&models);
            let mut reported = BTreeSet::new();
            for step in steps {
                let layer = match step {
                    Step::Ready(layer) | Step::Fail(layer) => layer,
                    Step::Cancel(at) => {
                        let at = at % to.len();
                        let open = models[at].ends_if(true, ErrorKind::Cancelled);
                        assert_eq!(transfers[at].cancel(), open);
                        // Until it has ended, another cancellation is accepted as well.
                        met(&models);
                        continue;
                    }
                };
                let is_ready = matches!(step, Step::Ready(_));
                let result = if is_ready { task.ready(layer) } else { task.fail(layer, "no such token") };
                let accepted = layer < LAYERS && reported.insert(layer);
                assert_eq!(result.map_err(|error| error.kind()).is_ok(), accepted);
                for (model, (_, _, script)) in models.iter_mut().zip(&to).filter(|_| accepted) {
                    if is_ready {
                        model.ready(layer, script);
                    } else {
                        model.ends_if(model.needs.contains(&layer), ErrorKind::InvalidArgument);
                    }
                }
                met(&models);
            }
            drop(task);
            models.iter_mut().for_each(|model| _ = model.ends_if(true, ErrorKind::Cancelled));
            met(&models);
            let (mut events, mut all) =
                (bed.events(), transfers.iter().map(|one| one.number()).collect::<Vec<_>>());
            events.sort_unstable();
            all.sort_unstable();
            assert_eq!(events, all, "one event each");
            assert_eq!(bed.calls.queue().open_transfers(), 0);
            assert!(bed.calls.drain(Deadline::after(LONG)).unwrap());
            eventually("the end of the alarms", || bed.executor.handle().alarms() == 0);
            Ok(())
        })
        .unwrap();
}

/// Layers are reported by two threads, while others fail layers, cancel transfers and drop the task. Each destination ends
/// once, and with success only if all its layers are in place.
#[test]
fn every_order_of_several_threads() {
    let chance = (destinations(), prop::option::of(0..LAYERS), 0..6usize, 0..300u64);
    TestRunner::default()
        .run(&chance, |(given, fails, cancels, pause)| {
            let bed = Bed::new();
            let to = scripted(&given);
            let task = bed.begin(&to);
            let transfers = task.transfers().to_vec();
            let failed = thread::scope(|scope| {
                scope.spawn(|| (0..LAYERS).for_each(|layer| _ = task.ready(layer)));
                scope.spawn(|| (0..LAYERS).rev().for_each(|layer| _ = task.ready(layer)));
                scope.spawn(|| _ = transfers.get(cancels).map(|transfer| transfer.cancel()));
                thread::sleep(Duration::from_micros(pause));
                fails.filter(|&layer| task.fail(layer, "scripted").is_ok())
            });
            drop(task);
            for ((first, end, script), transfer) in to.iter().zip(&transfers) {
                assert!(transfer.wait(Deadline::after(LONG)).unwrap());
                assert!(Script::is(&script.dropped));
                let mut pushed = script.pushed();
                pushed.sort_unstable();
                match transfer.peek().unwrap() {
                    Ok(bytes) => {
                        assert_eq!(pushed, (*first..*end).collect::<Vec<_>>());
                        assert_eq!(bytes, u64::from(end - first) * BYTES);
                    }
                    Err(error) => match error.kind() {
                        ErrorKind::NotLinked => assert!(script.find_fails || script.fails_at.is_some()),
                        ErrorKind::InvalidArgument => assert!(failed.is_some()),
                        kind => assert_eq!(kind, ErrorKind::Cancelled, "{error}"),
                    },
                }
            }
            let mut events = bed.events();
            events.sort_unstable();
            events.dedup();
            assert_eq!((events.len(), bed.calls.queue().open_transfers()), (to.len(), 0));
            Ok(())
        })
        .unwrap();
}

/// Layers become ready while a destination is being found. Its first request pushes one layer. If that takes so little time that
/// more layers fit the time of a request, the next request has several; on a busy machine, that may take more than one attempt.
#[test]
fn layers_that_wait_share_requests() {
    for _ in 0..1000 {
        let bed = Bed::new();
        let script = Arc::new(Script { shut_at_find: true, shut: Mutex::new(true), ..Script::default() });
        let task = bed.begin(&[(1, LAYERS, script.clone())]);
        // Layer 0 is for nobody, and layer 4 comes late.
        [0, 1, 2, 3, 5, 6, 7, 4].into_iter().for_each(|layer| task.ready(layer).unwrap());
        script.open();
        succeeded(&task.transfers()[0]);
        assert_eq!(script.pushed(), [1, 2, 3, 5, 6, 7, 4]);
        assert_eq!(task.transfers()[0].peek().unwrap().unwrap(), 7 * BYTES);
        let requests = script.requests.lock().unwrap().clone();
        assert_eq!(requests[0], (1, 2), "the first request pushes one layer");
        if requests == [(1, 2), (2, 4), (5, 8), (4, 5)] {
            return;
        }
    }
    panic!("layers never shared a request");
}

#[test]
fn errors_of_layers_name_the_layer_and_the_range() {
    let bed = Bed::new();
    let task = bed.begin(&[(2, 4, Script::good())]);
    assert_eq!((task.layers(), task.transfers().len()), (8, 1));
    task.ready(7).unwrap();
    task.fail(6, "nobody needs it").unwrap();
    let refused = |result: Result<()>, text: &str| {
        let error = result.unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains(text), "{error}");
        assert!(error.to_string().contains("0 to 7"), "{error}");
    };
    refused(task.ready(8), "layer=8 is out of range");
    refused(task.fail(u32::MAX, "x"), "layer=4294967295 is out of range");
    refused(task.ready(7), "layer=7 was reported before, as ready");
    refused(task.fail(7, "x"), "as ready");
    refused(task.ready(6), "layer=6 was reported before, as failed");
    refused(task.fail(6, "x"), "as failed");
    assert!(!task.transfers()[0].done());
    task.fail(3, &"why".repeat(1000)).unwrap();
    check(&task.transfers()[0], ErrorKind::InvalidArgument, 3, "layer 3 will not be ready: whywhy");
    assert!(failure(&task.transfers()[0]).to_string().len() < 1000);
    // Afterwards layers may still be reported.
    task.ready(2).unwrap();
    refused(task.ready(3), "as failed");
}

#[test]
fn all_destinations_get_room_or_none_does() {
    let bed = Bed::new();
    let good = |count: u32| (0..count).map(|_| (0, 1, Script::good())).collect::<Vec<To>>();
    let task = bed.begin(&good(60));
    let refused = good(5);
    let error = bed.try_begin(2, &refused).unwrap_err();
    let facts = ["open_transfers", "asked", "limit"].map(|name| error.fact(name).unwrap());
    assert_eq!((error.kind(), facts), (ErrorKind::Busy, ["60", "5", "64"]));
    assert!(refused.iter().all(|(.., script)| !Script::is(&script.found)), "a destination was begun");
    assert_eq!(bed.calls.queue().open_transfers(), 60);
    let more = bed.begin(&good(4));
    [&task, &more].iter().for_each(|task| task.ready(0).unwrap());
    [&task, &more].iter().flat_map(|task| task.transfers()).for_each(|transfer| succeeded(transfer));
    assert_eq!(bed.events().len(), 64);
    bed.calls.close();
    assert_eq!(bed.try_begin(2, &good(1)).unwrap_err().kind(), ErrorKind::Closed);
}

/// The limit of a layer counts from its report. The workers of the cluster stall, so nothing else ends the wait.
#[test]
fn a_layer_that_waits_for_a_thread_is_late() {
    let mut bed = Bed::with(LONG, None);
    let stalled: Vec<To> = (0..32).map(|_| (0, 1, Script::stalled())).collect();
    let stall = bed.begin(&stalled);
    eventually("all to be found", || stalled.iter().all(|(.., script)| Script::is(&script.found)));
    stall.ready(0).unwrap();
    eventually("all workers", || stalled.iter().all(|(.., script)| Script::is(&script.at_gate)));
    bed.limits.layer = Duration::from_secs(2);
    let (late, other) = (Script::good(), Script::good());
    let task = bed.begin(&[(0, 2, late.clone()), (1, 3, other.clone())]);
    thread::sleep(Duration::from_millis(2200));
    assert!(task.transfers().iter().all(|transfer| !transfer.done()), "no layer was reported");
    task.ready(0).unwrap();
    check(&task.transfers()[0], ErrorKind::Timeout, 0, "sync_kv_timeout passed while layer 0 was waiting");
    assert_eq!(failure(&task.transfers()[0]).fact("limit_ms"), Some("2000"));
    assert!(Script::is(&late.dropped) && late.pushed().is_empty());
    assert!(!task.transfers()[1].done() && !stall.transfers()[0].done());
    stalled.iter().for_each(|(.., script)| script.open());
    stall.transfers().iter().for_each(|transfer| succeeded(transfer));
    eventually("the other destination", || Script::is(&other.found));
    [1, 2].iter().for_each(|&layer| task.ready(layer).unwrap());
    succeeded(&task.transfers()[1]);
    eventually("the end of the alarms", || bed.executor.handle().alarms() == 0);
}

/// A push that begins in time and takes too long has the deadline of its layer.
#[test]
fn a_layer_has_the_deadline_of_its_report() {
    let bed = Bed::with(Duration::from_secs(2), None);
    let slow = Script::stalled();
    let task = bed.begin(&[(0, 2, slow.clone())]);
    task.ready(1).unwrap();
    eventually("the push", || Script::is(&slow.at_gate));
    thread::sleep(Duration::from_millis(2100));
    assert!(!task.transfers()[0].done(), "a layer in transit still touches memory");
    slow.open();
    check(&task.transfers()[0], ErrorKind::Timeout, 1, "sync_kv_timeout passed while pushing");
}

/// The limit for waits counts from the last layer that the destination needs.
#[test]
fn a_destination_that_waits_too_long_is_late() {
    let limit = Duration::from_secs(4);
    let bed = Bed::with(LONG, Some(limit));
    let scripts = [(); 3].map(|()| Script::good());
    let [a, b, c] = scripts.clone();
    let task = bed.begin(&[(0, 5, a), (6, 8, b), (0, 1, c)]);
    let [served, starved, quick] = [0, 1, 2].map(|at| task.transfers()[at].clone());
    for layer in 0..4 {
        task.ready(layer).unwrap();
        thread::sleep(limit / 8);
    }
    check(&starved, ErrorKind::Timeout, 6, "layer_timeout_ms passed while waiting for layer 6");
    assert_eq!(failure(&starved).fact("limit_ms"), Some("4000"));
    succeeded(&quick);
    check(&served, ErrorKind::Timeout, 4, "layer_timeout_ms passed while waiting for layer 4");
    assert_eq!(scripts[0].pushed(), [0, 1, 2, 3]);
    let least = limit + 3 * limit / 8;
    assert!(u128::from(served.nanos()) >= least.as_nanos(), "the limit counts from its last layer");
    eventually("the end of the alarms", || bed.executor.handle().alarms() == 0);
}

/// Whatever ends a destination, a layer in transit ends first, and the event comes after it.
#[test]
fn a_destination_ends_only_when_nothing_moves() {
    for kind in [ErrorKind::Cancelled, ErrorKind::Closed, ErrorKind::InvalidArgument] {
        for dropped in [false, true] {
            let bed = Bed::new();
            let (slow, next) = (Script::stalled(), Script::good());
            let task = bed.begin(&[(0, 3, slow.clone()), (0, 1, next.clone())]);
            let transfers = task.transfers().to_vec();
            task.ready(0).unwrap();
            succeeded(&transfers[1]);
            eventually("the push", || Script::is(&slow.at_gate));
            match kind {
                // The drop does it.
                ErrorKind::Cancelled if dropped => {}
                ErrorKind::Cancelled => assert!(transfers[0].cancel()),
                ErrorKind::Closed => bed.calls.close(),
                _ => task.fail(2, "a reason").unwrap(),
            }
            let kept = (!dropped).then_some(task);
            thread::sleep(Duration::from_millis(30));
            assert!(!transfers[0].done() && !Script::is(&slow.dropped), "{kind:?}");
            slow.open();
            assert_eq!(failure(&transfers[0]).kind(), kind);
            assert!(Script::is(&slow.dropped) && slow.pushed() == [0]);
            assert!(bed.calls.drain(Deadline::after(LONG)).unwrap());
            drop(kept);
        }
    }
}

/// Nobody can report layers of a dropped task. Destinations whose layers are all ready continue.
#[test]
fn a_dropped_task_ends_what_waits_for_layers() {
    let bed = Bed::new();
    let (whole, part, none) = (Script::stalled(), Script::good(), Script::good());
    let task = bed.begin(&[(0, 2, whole.clone()), (0, 3, part.clone()), (5, 6, none.clone())]);
    let transfers = task.transfers().to_vec();
    [1, 0].iter().for_each(|&layer| task.ready(layer).unwrap());
    eventually("two layers", || part.pushed() == [1, 0] && Script::is(&none.found));
    drop(task);
    check(&transfers[1], ErrorKind::Cancelled, 2, "the task was dropped before layer 2 was ready");
    check(&transfers[2], ErrorKind::Cancelled, 5, "the task was dropped before layer 5 was ready");
    assert!(!transfers[0].done());
    whole.open();
    succeeded(&transfers[0]);
    assert_eq!(whole.pushed(), [1, 0]);
    assert_eq!(bed.calls.queue().open_transfers(), 3);
}

/// Without a thread, the destinations fail; nothing is left behind.
#[test]
fn a_task_without_threads_fails() {
    let bed = Bed::with(LONG, Some(LONG));
    bed.executor.handle().refuse_threads(true);
    let script = Script::good();
    let task = bed.begin(&[(0, 1, script.clone())]);
    assert_eq!(failure(&task.transfers()[0]).kind(), ErrorKind::System);
    assert!(Script::is(&script.dropped) && !Script::is(&script.found));
    task.ready(0).unwrap();
    assert!(bed.calls.drain(Deadline::after(Duration::ZERO)).unwrap());
}

/// One caller hands over many jobs; the workers wake one another.
#[test]
fn every_destination_of_a_cluster_is_served() {
    let bed = Bed::new();
    for _ in 0..20 {
        let to: Vec<To> = (0..40).map(|_| (0, 3, Script::good())).collect();
        let task = bed.begin(&to);
        (0..3).for_each(|layer| task.ready(layer).unwrap());
        task.transfers().iter().for_each(|transfer| succeeded(transfer));
        assert_eq!(task.transfers()[0].progress().total, 3 * BYTES);
        assert_eq!(bed.events().len(), 40);
    }
    assert!(bed.executor.handle().threads() <= 33);
}

/// One transfer, and one event, however many destinations there are. It ends after the last of them.
#[test]
fn a_joint_transfer_ends_with_the_last_destination() {
    let bed = Bed::new();
    let (quick, slow) = (Script::good(), Script::stalled());
    let task = bed.begin_joint(&[(0, 4, quick.clone()), (2, 8, slow.clone())]);
    let [transfer] = task.transfers() else { panic!("{:?}", task.transfers()) };
    (0..LAYERS).for_each(|layer| task.ready(layer).unwrap());
    eventually("the end of the first destination", || Script::is(&quick.dropped));
    assert!(!transfer.done() && bed.events().is_empty());
    slow.open();
    succeeded(transfer);
    assert!(Script::is(&slow.dropped));
    assert_eq!(transfer.peek().unwrap().unwrap(), 10 * BYTES);
    assert_eq!(transfer.progress().total, 10 * BYTES);
    assert!(bed.calls.drain(Deadline::after(LONG)).unwrap());
    assert_eq!(bed.events(), [transfer.number()]);
    assert_eq!(bed.calls.queue().open_transfers(), 0);
}

/// The failure of one destination is that of the transfer, and cancels the others; so do a cancellation and a lost handle.
#[test]
fn a_joint_transfer_fails_as_a_whole() {
    for (what, kind, part) in [
        ("fails", ErrorKind::NotLinked, Some("1")),
        ("cancel", ErrorKind::Cancelled, Some("0")),
        ("drop", ErrorKind::Cancelled, Some("0")),
        ("close", ErrorKind::Closed, None),
    ] {
        let bed = Bed::new();
        let fails_at = (what == "fails").then_some(5);
        let scripts = [Script::good(), Arc::new(Script { fails_at, ..Script::default() })];
        let task = bed.begin_joint(&[(0, 8, scripts[0].clone()), (4, 8, scripts[1].clone())]);
        let transfer = task.transfers()[0].clone();
        task.ready(4).unwrap();
        eventually("the first layers", || scripts.iter().all(|script| script.pushed() == [4]));
        match what {
            "fails" => task.ready(5).unwrap(),
            "cancel" => assert!(transfer.cancel()),
            "drop" => drop(task),
            _ => bed.calls.close(),
        }
        let error = failure(&transfer);
        assert_eq!(error.kind(), kind, "{what}: {error}");
        if part.is_some() {
            assert_eq!(error.fact("part"), part, "{what}: {error}");
            assert_eq!(bed.events(), [transfer.number()]);
        }
        eventually("the ends of all", || scripts.iter().all(|script| Script::is(&script.dropped)));
        assert!(bed.calls.drain(Deadline::after(LONG)).unwrap());
    }
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

/// Returns the events so far: the number of a transfer, or the cluster of a link that ended.
fn ends(bed: &Bed) -> Vec<(&'static str, u64)> {
    let end = |event| match event {
        Event::Completed(transfer) => ("call", transfer.number()),
        Event::LinkDown(end) => ("link", end.peer.cluster.0),
        other => panic!("{other:?}"),
    };
    bed.calls.queue().poll(1000).unwrap().into_iter().map(end).collect()
}

/// A program that learns of the end of a peer has learnt of the ends of all its calls to that peer.
#[test]
fn the_end_of_a_link_comes_after_the_ends_of_its_calls() {
    let bed = Bed::new();
    assert!(ends(&bed).is_empty());
    loop {
        let started = Instant::now();
        let [task, joint] =
            [bed.begin(&[(0, 1, Script::good())]), bed.begin_joint(&[(0, 1, Script::good())])];
        end_link(bed.calls.queue(), link_end(7));
        end_link(bed.calls.queue(), link_end(2));
        // A joint push fails with its link. The other task would find the peer again.
        let [transfer, failed] = [&task, &joint].map(|task| task.transfers()[0].clone());
        eventually("the end of the joint push", || failed.done());
        assert_eq!(failed.peek().unwrap().unwrap_err().kind(), ErrorKind::NotLinked);
        let mut seen = ends(&bed);
        task.ready(0).unwrap();
        succeeded(&transfer);
        eventually("the end of the link", || {
            seen.extend(ends(&bed));
            seen.contains(&("link", 2))
        });
        if started.elapsed() >= Duration::from_secs(1) {
            // On a busy machine the end may have waited long enough.
            continue;
        }
        let [first, second] = [failed, transfer].map(|transfer| ("call", transfer.number()));
        assert!(seen.contains(&("link", 7)), "a peer without calls");
        seen.retain(|event| *event != ("link", 7));
        assert_eq!(seen, [first, second, ("link", 2)]);
        return;
    }
}

/// A call that does not end, for example because the kernel keeps a read, delays the end of its link for a while only.
#[test]
fn the_end_of_a_link_waits_for_no_call_that_stalls() {
    let bed = Bed::new();
    assert!(ends(&bed).is_empty());
    let task = bed.begin(&[(0, 1, Script::good())]);
    end_link(bed.calls.queue(), link_end(2));
    let mut reported = Vec::new();
    eventually("the end of the link", || {
        reported.extend(ends(&bed));
        !reported.is_empty()
    });
    assert_eq!(reported, [("link", 2)]);
    assert!(!task.transfers()[0].done());
}
