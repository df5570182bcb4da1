//! A `CacheTask` and its workers alone: the outcome of each destination, in every order in which layers, sinks and the
//! callers that end the task may act. Bytes are covered by `links/layerwise.rs` and `links/layerwise_faults.rs`.
#![allow(clippy::needless_for_each, reason = "one line")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use std::{array, thread};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use llm_datadist_core::bindings::AwaitQueue;
use llm_datadist_core::testing::transfer::{
    AsyncCalls, CacheTask, Executor, ExecutorHandle, LayerProgress, Outcome,
};
use llm_datadist_core::testing::{refuse_layer, start_task};
use llm_datadist_core::{Deadline, Error, ErrorKind, EventQueue};

use crate::fixtures::{LONG, eventually};
use crate::layer_sinks::{BYTES, Does, FAIL, PANIC, PUSH, Script, delivery};

/// Number of layers of the source cache.
const LAYERS: u32 = 10;

/// The script of a sink whose `find` and first pushes do this.
fn scripted(find: Does, pushes: &[Does]) -> Arc<Script> {
    Arc::new(Script { find: Some(find), pushes: Mutex::new(pushes.to_vec().into()), ..Script::default() })
}

type To<'a> = (u32, u32, &'a Arc<Script>);

/// Returns the calls of an engine with these workers.
fn calls(executor: &ExecutorHandle) -> AsyncCalls {
    AsyncCalls::new(Arc::new(EventQueue::new(usize::MAX)), executor, Weak::new())
}

fn start(executor: &Executor, to: &[To<'_>], layer_timeout: Option<Duration>) -> CacheTask {
    start_in(&calls(executor.handle()), to, layer_timeout)
}

fn start_in(calls: &AsyncCalls, to: &[To<'_>], layer_timeout: Option<Duration>) -> CacheTask {
    let deliveries = to.iter().map(|(first, end, script)| delivery(2, (*first, *end), script)).collect();
    start_task(calls, LAYERS, deliveries, layer_timeout).unwrap()
}

/// Reports every layer up to `layer` that was not reported.
fn ready_to(task: &CacheTask, layer: u32) {
    (0..=layer).for_each(|layer| _ = task.ready(layer));
}

/// The outcome of each destination, in short.
fn ends_of(task: &CacheTask) -> Vec<String> {
    let short = |outcome: &Outcome| match outcome {
        Outcome::Failed(error) => format!("{:?}", error.kind()),
        other => format!("{other:?}"),
    };
    task.outcomes().iter().map(short).collect()
}

/// Waits for the end, and compares the outcomes.
fn ended_as(task: &CacheTask, expected: &[&str]) {
    assert!(task.wait(Deadline::after(LONG)).unwrap(), "{:?}", task.outcomes());
    assert_eq!(ends_of(task), expected);
}

fn failure(task: &CacheTask, at: usize) -> Error {
    match task.outcomes().swap_remove(at) {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

fn refusal() -> Error {
    Error::new(ErrorKind::System, "the layer does not come").with("layer", 7)
}

/// A task with `count` layers to push to `cluster`, all of which stall, or wait for those that do.
struct Stalled(CacheTask, Vec<Arc<Script>>);

impl Stalled {
    fn new(executor: &Executor, cluster: u64, count: usize) -> Stalled {
        let scripts: Vec<_> = (0..count).map(|_| Script::stalled()).collect();
        let deliveries = scripts.iter().map(|script| delivery(cluster, (0, 1), script)).collect();
        let task = start_task(&calls(executor.handle()), LAYERS, deliveries, None).unwrap();
        eventually("all to be found", || scripts.iter().all(|script| script.finds() == 1));
        task.ready(0).unwrap();
        Stalled(task, scripts)
    }

    /// Waits until `count` layers stall.
    fn arrived(&self, count: usize) {
        eventually("layers at work", || self.1.iter().filter(|script| script.is_at_gate()).count() >= count);
    }

    fn finish(&self) {
        assert!(!self.0.done());
        self.1.iter().for_each(|script| script.open());
        ended_as(&self.0, &vec!["Done"; self.1.len()]);
    }
}

/// Sixteen stalled clusters hold every worker. A seventeenth and an eighteenth get a worker anyway.
#[test]
fn every_cluster_gets_a_worker_and_at_most_32() {
    let executor = Executor::default();
    let mut all: Vec<_> = (100..116).map(|cluster| Stalled::new(&executor, cluster, 40)).collect();
    all.iter().for_each(|stalled| stalled.arrived(32));
    assert_eq!(executor.handle().threads(), 512);
    all.push(Stalled::new(&executor, 116, 40));
    all[16].arrived(1);

    let scripts = [Script::stalled(), Script::good(), Script::good(), Script::good()];
    let deliveries = scripts.iter().map(|script| delivery(200, (0, 2), script)).collect();
    let task = start_task(&calls(executor.handle()), LAYERS, deliveries, None).unwrap();
    ready_to(&task, 1);
    // The worker stalls here. Then it runs the others, which are queued behind all jobs of the seventeenth cluster.
    scripts[0].arrived();
    scripts[0].open();
    ended_as(&task, &["Done"; 4]);
    assert!(scripts.iter().all(|script| script.pushed() == [0, 1]));
    assert!(executor.handle().threads() <= 514, "{}", executor.handle().threads());
    all.iter().for_each(Stalled::finish);
    // Later layers for the same cluster find its workers free.
    let again = Stalled::new(&executor, 100, 32);
    again.arrived(32);
    again.finish();
}

/// Destinations that wait for a stalled cluster end at once if they have nothing to push.
#[test]
fn what_is_queued_behind_a_stalled_cluster_ends_at_once() {
    for kind in ["Cancelled", "Closed", "System"] {
        let executor = Executor::default();
        let stalled = Stalled::new(&executor, 2, 32);
        stalled.arrived(32);
        let [a, b, c, d] = array::from_fn(|_| Script::good());
        let calls = calls(executor.handle());
        let task = start_in(&calls, &[(0, 3, &a), (0, 2, &b), (1, 4, &c), (5, 6, &d)], None);
        ready_to(&task, 1);
        let all = [&a, &b, &c, &d];
        assert!(!all.iter().any(|script| script.dropped()));
        let (mut expected, mut pushed) = ([kind; 4], vec![]);
        match kind {
            "Cancelled" => assert!(task.cancel()),
            "Closed" => calls.close(),
            _ => {
                refuse_layer(&task, 2, &refusal());
                // The second has both its layers, the fourth none.
                assert_eq!(ends_of(&task), ["System", "UnderWay", "System", "Unreached"]);
                (expected[1], expected[3], pushed) = ("Done", "Unreached", vec![0, 1]);
            }
        }
        let lives = !pushed.is_empty();
        assert_eq!(task.done(), !lives);
        assert_eq!(all.map(|script| script.dropped()), [true, !lives, true, true]);
        stalled.finish();
        ended_as(&task, &expected);
        assert_eq!(all.map(|script| script.pushed()), [vec![], pushed, vec![], vec![]]);
        assert_eq!(all.map(|script| script.finds()), [0, u32::from(lives), 0, 0]);
    }
}

#[test]
fn reasons_name_what_is_waited_for() {
    const UNASKED: &str = "was not requested";
    const AWAITED: &str = "waiting for the layer";
    let executor = Executor::default();
    let [a, moving, c, d] = [Script::good(), Script::stalled(), Script::good(), Script::good()];
    let task = start(&executor, &[(0, 1, &a), (0, 3, &moving), (2, 4, &c), (5, 6, &d)], None);
    let check = |at: usize, text: &str, layer: &str, layers_done: &str| {
        let reason = task.reasons()[at].clone().unwrap();
        assert!(reason.kind() == ErrorKind::Timeout && reason.to_string().contains(text), "{reason}");
        let facts = ["cluster", "layer", "layers_done"].map(|name| reason.fact(name).unwrap());
        assert_eq!(facts, ["2", layer, layers_done]);
        assert_eq!(reason.fact("waited_ms").is_some(), text == AWAITED);
    };
    let layers = ["0", "0", "2", "5"];
    (0..4).for_each(|at| check(at, UNASKED, layers[at], "0"));
    assert!(task.wanted(0));
    (0..4).for_each(|at| check(at, if at < 2 { AWAITED } else { UNASKED }, layers[at], "0"));
    thread::sleep(Duration::from_millis(30));
    let reason = task.reasons()[0].clone().unwrap();
    assert!(reason.fact("waited_ms").unwrap().parse::<u64>().unwrap() >= 30, "{reason}");
    ready_to(&task, 0);
    moving.arrived();
    eventually("the first", || ends_of(&task)[0] == "Done");
    check(1, "being transferred", "0", "0");
    moving.open();
    eventually("layer 0", || task.progress()[1].layers == 1);
    check(1, UNASKED, "1", "1");
    assert!(task.wanted(2));
    check(1, AWAITED, "1", "1");
    check(2, AWAITED, "2", "0");
    ready_to(&task, 2);
    eventually("layer 2", || ends_of(&task)[1] == "Done" && task.progress()[2].layers == 1);
    refuse_layer(&task, 3, &refusal());
    ended_as(&task, &["Done", "Done", "System", "Unreached"]);
    let reasons = task.reasons().into_iter().flatten().map(|reason| reason.to_string());
    assert!(matches!(&reasons.collect::<Vec<_>>()[..], [one] if one.contains("the layer does not come")));
}

#[test]
fn a_task_without_layers_ends_once_all_are_found() {
    let executor = Executor::default();
    let task = start(&executor, &[], Some(LONG));
    ended_as(&task, &[]);
    assert!(task.layers().is_empty() && !task.wanted(0) && !task.cancel());
    let bad = scripted(FAIL, &[]);
    let task = start(&executor, &[(3, 3, &Script::good()), (3, 3, &bad), (5, 4, &Script::good())], None);
    ended_as(&task, &["Done", "NotLinked", "Done"]);
    ready_to(&task, 9);
    refuse_layer(&task, 3, &refusal());
    ended_as(&task, &["Done", "NotLinked", "Done"]);
}

/// A destination that fails, panics or stalls ends alone, and no worker is lost.
#[test]
fn destinations_are_independent() {
    let executor = Executor::default();
    for _ in 0..20 {
        let slow = Script::stalled();
        let scripts = [(FAIL, PUSH), (PUSH, FAIL), (PANIC, PUSH), (PUSH, PANIC), (PUSH, PUSH)]
            .map(|(find, second)| scripted(find, &[PUSH, second]));
        let mut to: Vec<_> = scripts.iter().map(|script| (0, 4, script)).collect();
        to.push((0, 4, &slow));
        let task = start(&executor, &to, None);
        for layer in task.layers() {
            task.ready(layer).unwrap();
            eventually("the good one", || task.progress()[4].layers == layer + 1);
        }
        slow.arrived();
        let failed = ["NotLinked", "NotLinked", "System", "System", "Done"];
        eventually("the failures", || ends_of(&task)[..5] == failed);
        assert!(!task.done() && ends_of(&task)[5] == "UnderWay");
        slow.open();
        ended_as(&task, &[&failed[..], &["Done"]].concat());
        assert!(failure(&task, 3).to_string().contains("ended without a result"));
        let pushed = scripts.map(|script| script.pushed());
        assert_eq!(pushed, [vec![], vec![0], vec![], vec![0], vec![0, 1, 2, 3]]);
    }
    assert!(executor.handle().threads() <= 12);
}

#[test]
fn layers_may_be_ready_in_any_order_but_once() {
    let executor = Executor::default();
    let [a, b, c] = array::from_fn(|_| Script::good());
    let task = start(&executor, &[(0, 3, &a), (2, 6, &b), (5, 9, &c)], None);
    assert_eq!(task.layers(), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(task.wanted(8) && !task.wanted(9) && !task.wanted(u32::MAX));
    for (layer, done) in [(3, [0, 1]), (1, [1, 1]), (2, [2, 2]), (0, [3, 2])] {
        task.ready(layer).unwrap();
        eventually("the layer", || [0, 1].map(|at| task.progress()[at].layers) == done);
    }
    for (wrong, why) in [0, 3, 1, 3, 10, u32::MAX]
        .map(|layer| (layer, if layer < 10 { "was reported before" } else { "is out of range" }))
    {
        let error = task.ready(wrong).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(text.contains(&format!("layer={wrong} {why}")) && text.contains("0 to 9"), "{text}");
    }
    assert!(!task.wait(Deadline::after(Duration::from_millis(20))).unwrap());
    assert_eq!(ends_of(&task), ["Done", "UnderWay", "UnderWay"]);
    assert!(!task.wanted(1), "the one that needed it has it");
    ready_to(&task, 9);
    ended_as(&task, &["Done"; 3]);
    assert_eq!((a.pushed(), b.pushed(), c.pushed()), (vec![1, 2, 0], vec![3, 2, 4, 5], vec![5, 6, 7, 8]));
    let progress = |layers| LayerProgress { layers, of_layers: layers, bytes: u64::from(layers) * BYTES };
    assert_eq!(task.progress(), [progress(3), progress(4), progress(4)]);
}

#[test]
fn a_refused_layer_ends_the_destinations_that_need_it() {
    let executor = Executor::default();
    let [a, b, c, busy] = [Script::good(), Script::good(), Script::good(), Script::stalled()];
    let task = start(&executor, &[(0, 3, &a), (1, 5, &b), (4, 6, &c), (2, 3, &busy)], None);
    ready_to(&task, 2);
    busy.arrived();
    eventually("layers 0 to 2", || ends_of(&task)[0] == "Done" && task.progress()[1].layers == 2);
    refuse_layer(&task, 3, &refusal());
    refuse_layer(&task, 0, &Error::new(ErrorKind::Cancelled, "too late"));
    eventually("the refusal", || ends_of(&task)[1..] == ["System", "Unreached", "UnderWay"]);
    assert_eq!(failure(&task, 1).fact("layer"), Some("7"));
    assert!(!task.done() && !task.wanted(4));
    ready_to(&task, 8);
    assert!(task.cancel());
    busy.open();
    ended_as(&task, &["Done", "System", "Unreached", "Cancelled"]);
    assert_eq!((b.pushed(), c.pushed()), (vec![1, 2], vec![]));

    // Earlier layers that are not ready are refused too, so a destination that begins in between fails.
    let [a, b, c] = array::from_fn(|_| Script::good());
    let task = start(&executor, &[(0, 3, &a), (4, 5, &b), (6, 7, &c)], None);
    ready_to(&task, 0);
    eventually("layer 0", || task.progress()[0].layers == 1);
    refuse_layer(&task, 5, &refusal());
    ended_as(&task, &["System", "System", "Unreached"]);
}

/// While a layer is in transit the task is not done, whatever ends it, and keeps its outcome; afterwards nothing moves.
#[test]
fn a_task_is_done_only_when_nothing_moves() {
    for kind in ["Cancelled", "Closed", "System", "NotLinked"] {
        let executor = Executor::default();
        let fails = kind == "NotLinked";
        let script = scripted(PUSH, if fails { &[FAIL] } else { &[] });
        *script.shut.lock().unwrap() = true;
        let calls = calls(executor.handle());
        let task = start_in(&calls, &[(0, 3, &script)], None);
        ready_to(&task, 1);
        script.arrived();
        match kind {
            "Cancelled" => assert!(task.cancel()),
            "Closed" => calls.close(),
            "System" => refuse_layer(&task, 2, &refusal()),
            _ => (),
        }
        let (end, reason) = if fails { ("UnderWay", "Timeout") } else { (kind, kind) };
        assert_eq!(ends_of(&task), [end]);
        assert_eq!(format!("{:?}", task.reasons()[0].as_ref().unwrap().kind()), reason);
        assert!(!task.wait(Deadline::after(Duration::from_millis(20))).unwrap(), "{kind}");
        assert!(!script.dropped());
        if !fails {
            // What ends the task later does not replace its outcome.
            assert!(!task.cancel());
            calls.close();
        }
        ready_to(&task, 2);
        script.open();
        ended_as(&task, &[kind]);
        assert!(script.dropped(), "{kind}");
        assert_eq!((script.pushed().len(), task.progress()[0].layers), if fails { (0, 0) } else { (1, 1) });
    }
}

/// An event loop that was closed while it awaited a task has dropped its queue. The task does not keep it.
#[test]
fn a_task_keeps_no_queue_of_an_event_loop() {
    let executor = Executor::default();
    let task = start(&executor, &[(0, 1, &Script::good())], None);
    let transfer = task.transfer();
    let [closed, open] = array::from_fn(|_| Arc::new(AwaitQueue::new().unwrap()));
    assert!([&closed, &open, &open].iter().all(|queue| transfer.wake(queue).unwrap()));
    assert!(Arc::into_inner(closed).is_some(), "its descriptor stays open");
    assert!(transfer.wake(&open).unwrap());
    ready_to(&task, 0);
    ended_as(&task, &["Done"]);
    let mut woken = Vec::new();
    eventually("the wake", || {
        woken.extend(open.take());
        !woken.is_empty()
    });
    assert_eq!(woken, [transfer.number()]);
    assert!(!transfer.wake(&open).unwrap());
}

#[test]
fn only_a_layer_that_is_not_ready_times_out() {
    let executor = Executor::default();
    let [a, b, c] = array::from_fn(|_| Script::good());
    let limit = Some(Duration::from_secs(1));
    let task = start(&executor, &[(0, 1, &a), (0, 4, &b), (3, 4, &c)], limit);
    // No layer is waited for.
    thread::sleep(Duration::from_millis(1100));
    assert!(task.wanted(0));
    ready_to(&task, 0);
    eventually("layer 0", || task.progress()[1].layers == 1);
    thread::sleep(Duration::from_millis(1100));
    assert_eq!(ends_of(&task)[1..], ["UnderWay", "UnderWay"]);
    assert!(task.wanted(1));
    ended_as(&task, &["Done", "Timeout", "Unreached"]);
    let error = failure(&task, 1);
    assert_eq!(error.fact("limit_ms"), Some("1000"), "{error}");
    assert!(["timeout_in_millis", "layer 1"].iter().all(|fact| error.to_string().contains(fact)), "{error}");
    assert!(!task.wanted(2));
    ready_to(&task, 2);
    assert_eq!(b.pushed(), [0]);

    // A layer in transit was ready.
    let slow = Script::stalled();
    let task = start(&executor, &[(0, 2, &slow)], limit);
    ready_to(&task, 1);
    assert!(task.wanted(0) && task.wanted(1));
    thread::sleep(Duration::from_millis(1100));
    slow.open();
    ended_as(&task, &["Done"]);

    // Each layer may take that long.
    let limit = Duration::from_secs(4);
    let task = start(&executor, &[(0, 8, &Script::good())], Some(limit));
    for layer in task.layers() {
        assert!(task.wanted(layer));
        thread::sleep(limit / 7);
        task.ready(layer).unwrap();
    }
    ended_as(&task, &["Done"]);
}

/// More tasks than workers may wait at the same time, and all of them make progress.
#[test]
fn tasks_that_wait_take_no_threads() {
    let executor = Executor::default();
    let wait = |_| {
        let script = Script::good();
        let task = start(&executor, &[(0, 2, &script)], Some(LONG * 10));
        eventually("it to be found", || script.finds() == 1);
        assert!(task.wanted(0));
        task
    };
    let tasks: Vec<_> = (0..700).map(wait).collect();
    assert!(executor.handle().threads() < 100);
    for layer in 0..2 {
        for task in &tasks {
            assert!(task.wanted(layer));
            task.ready(layer).unwrap();
        }
    }
    tasks.iter().for_each(|task| ended_as(task, &["Done"]));
    eventually("the end of the alarms", || executor.handle().alarms() == 0);
}

/// A task without an owner drops its sinks. Only the layer in transit is still pushed, and what has all its layers.
#[test]
fn a_dropped_task_holds_nothing() {
    let executor = Executor::default();
    let (idle, moving) = (Script::good(), Script::stalled());
    let task = start(&executor, &[(0, 2, &idle)], Some(LONG * 10));
    assert!(task.wanted(0));
    drop(task);
    eventually("the end of the sink", || idle.dropped());
    eventually("the end of the alarm", || executor.handle().alarms() == 0);
    let task = start(&executor, &[(0, 3, &moving)], None);
    ready_to(&task, 1);
    moving.arrived();
    let whole = Script::stalled();
    let other = start(&executor, &[(0, 2, &whole)], None);
    ready_to(&other, 1);
    drop((task, other));
    moving.open();
    whole.open();
    eventually("the end of the sinks", || moving.dropped() && whole.dropped());
    assert_eq!((moving.pushed(), whole.pushed()), (vec![0], vec![0, 1]));
}

/// Without any worker the destinations fail; otherwise the existing workers do the work.
#[test]
fn a_worker_that_cannot_be_started() {
    let executor = Executor::default();
    let no_threads = |none| executor.handle().refuse_threads(none);
    no_threads(true);
    let [a, b, c, d] = array::from_fn(|_| Script::good());
    let task = start(&executor, &[(0, 2, &a), (0, 2, &b)], Some(LONG));
    ended_as(&task, &["System", "System"]);
    assert_eq!(failure(&task, 0).fact("errno"), Some("11"));
    assert!(a.dropped() && !task.wanted(0) && !task.cancel());

    no_threads(false);
    let stalled = Stalled::new(&executor, 2, 1);
    stalled.arrived(1);
    no_threads(true);
    let task = start(&executor, &[(0, 2, &c), (0, 2, &d)], None);
    ready_to(&task, 1);
    assert!(!task.wait(Deadline::after(Duration::from_millis(20))).unwrap());
    stalled.finish();
    ended_as(&task, &["Done", "Done"]);
    // Without a clock, nothing would notice that a layer is late.
    let task = start(&executor, &[(0, 2, &Script::good())], Some(LONG));
    assert!(task.wanted(0));
    ended_as(&task, &["System"]);
}

/// The executor is dropped with layers in transit and in the queue: every destination has ended then, no worker runs,
/// and no later task starts one.
#[test]
fn an_executor_that_is_dropped_leaves_no_worker() {
    let executor = Executor::default();
    let scripts: [_; 4] = array::from_fn(|_| Script::stalled());
    let calls_of_engine = calls(executor.handle());
    let to = scripts.each_ref().map(|script| (0, 3, script));
    let task = start_in(&calls_of_engine, &to, Some(LONG));
    ready_to(&task, 0);
    scripts.iter().for_each(|script| script.arrived());
    let handle = executor.handle().clone();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            calls_of_engine.close();
            scripts.iter().for_each(|script| script.open());
        });
        drop(executor);
        assert_eq!(handle.threads(), 0);
        assert!(scripts.iter().all(|script| script.dropped()), "a worker runs after the end");
    });
    ended_as(&task, &["Closed"; 4]);
    let late = Script::good();
    let task = start_in(&calls(&handle), &[(0, 1, &late)], Some(LONG));
    ended_as(&task, &["Closed"]);
    assert!(late.dropped() && handle.threads() == 0);
}

/// The first cause sets the outcome, which stays; progress only grows; after the end nothing changes. Ready, refuse,
/// cancel and close come from several threads, over sinks that push, fail and panic.
#[test]
fn every_order_of_everything() {
    let does = || prop_oneof![4 => Just(PUSH), 1 => Just(FAIL), 1 => Just(PANIC)];
    let scripts = prop::array::uniform3((0..6u32, 0..4u32, does(), prop::collection::vec(does(), 6)));
    let times = (prop::option::of(0..3000u64), 0..400u64);
    let ends: [fn(&CacheTask, &AsyncCalls); 4] = [
        |task, _| _ = task.cancel(),
        |_, calls| calls.close(),
        |task, _| refuse_layer(task, 3, &refusal()),
        |_, _| (),
    ];
    let executor = Executor::default();
    TestRunner::default()
        .run(&(scripts, times, 0..ends.len()), |(scripts, (layer_timeout, pause), end)| {
            let scripts =
                scripts.map(|(first, count, find, layers)| (first, first + count, scripted(find, &layers)));
            let to = scripts.each_ref().map(|(first, end, script)| (*first, *end, script));
            let calls = calls(executor.handle());
            let task = start_in(&calls, &to, layer_timeout.map(Duration::from_micros));
            while_watched(&task, || {
                thread::sleep(Duration::from_micros(pause));
                ends[end](&task, &calls);
            });
            let last = (ends_of(&task), task.progress());
            ready_to(&task, 9);
            refuse_layer(&task, 0, &refusal());
            calls.close();
            assert!(!task.cancel());
            assert_eq!((ends_of(&task), task.progress()), last);
            for (((first, end, script), outcome), progress) in to.iter().zip(&last.0).zip(&last.1) {
                let pushed: Vec<_> = (*first..first + progress.layers).collect();
                assert!(script.dropped() && script.pushed() == pushed, "{:?}", script.pushed());
                assert!(outcome != "Done" || progress.layers == end - first);
                assert_eq!(progress.bytes, u64::from(progress.layers) * BYTES);
            }
            Ok(())
        })
        .unwrap();
}

/// Reports layers as ready while `act` runs, until the task ends, and watches its outcomes and its progress.
fn while_watched(task: &CacheTask, act: impl FnOnce() + Send) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            (0..9).filter(|&layer| task.wanted(layer)).for_each(|layer| task.ready(layer).unwrap());
        });
        scope.spawn(act);
        scope.spawn(|| {
            let mut last = (ends_of(task), task.progress());
            while !over.load(Ordering::SeqCst) {
                let done = task.done();
                let now = (ends_of(task), task.progress());
                for (was, is) in last.0.iter().zip(&now.0) {
                    assert!(was == is || was == "UnderWay", "{was} became {is}");
                    assert!(!done || is != "UnderWay", "done, and under way");
                }
                let grew = |(was, is): (&LayerProgress, &LayerProgress)| {
                    is.layers >= was.layers && is.bytes >= was.bytes
                };
                assert!(last.1.iter().zip(&now.1).all(grew), "{last:?} became {now:?}");
                last = now;
                thread::yield_now();
            }
        });
        let ended = task.wait(Deadline::after(LONG)).unwrap();
        over.store(true, Ordering::SeqCst);
        assert!(ended, "{:?}", task.outcomes());
    });
}
