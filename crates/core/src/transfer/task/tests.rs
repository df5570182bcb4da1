//! A task and its lanes alone: what becomes of each destination, in every order in which layers, carriers and those who
//! end the task may come.
//!
//! Part of the library's own tests (carriers are private): `cargo test -p llm-datadist-core --lib task`. Not for: bytes
//! (`links/layerwise`), or links that break (`links/layerwise_faults`).
#![allow(clippy::needless_for_each, clippy::cast_possible_truncation, reason = "small numbers, one line")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;

use super::*;
use crate::transfer::Executor;

const LONG: Duration = Duration::from_secs(20);

/// What a carrier does next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    Bring,
    Fail,
    Panic,
}

/// Does as told, at a gate, and notes what it did.
struct Told {
    find: Does,
    layers: Mutex<VecDeque<Does>>,
    brought: Mutex<Vec<u32>>,
    gate: Mutex<(bool, u32)>,
    changed: Condvar,
    finds: AtomicU32,
    /// Set once it was let go.
    gone: Arc<AtomicBool>,
}

impl Told {
    fn new(find: Does, layers: &[Does]) -> Arc<Told> {
        Arc::new(Told {
            find,
            layers: Mutex::new(layers.iter().copied().collect()),
            brought: Mutex::default(),
            gate: Mutex::new((true, 0)),
            changed: Condvar::new(),
            finds: AtomicU32::new(0),
            gone: Arc::default(),
        })
    }

    fn good() -> Arc<Told> {
        Told::new(Does::Bring, &[])
    }

    fn shut(&self) {
        *self.gate.lock().unwrap() = (false, 0);
    }

    fn open(&self) {
        self.gate.lock().unwrap().0 = true;
        self.changed.notify_all();
    }

    /// Waits until a layer stands at the gate.
    fn arrived(&self) {
        let gate = self.gate.lock().unwrap();
        let waited = self.changed.wait_timeout_while(gate, LONG, |gate| gate.1 == 0).unwrap();
        assert!(!waited.1.timed_out(), "no layer came");
    }

    fn brought(&self) -> Vec<u32> {
        self.brought.lock().unwrap().clone()
    }

    fn act(does: Does) -> Result<()> {
        match does {
            Does::Bring => Ok(()),
            Does::Fail => Err(Error::new(ErrorKind::NotLinked, "as told")),
            Does::Panic => {
                silence();
                panic!("as told")
            }
        }
    }
}

impl Carrier for Told {
    fn find(&self) -> Result<()> {
        assert_eq!(self.finds.fetch_add(1, Ordering::SeqCst), 0, "found twice");
        Told::act(self.find)
    }

    fn layer(&self, layer: u32) -> Result<u64> {
        assert_eq!(self.finds.load(Ordering::SeqCst), 1, "a layer before the destination was found");
        let mut gate = self.gate.lock().unwrap();
        gate.1 += 1;
        self.changed.notify_all();
        let (gate, late) = self.changed.wait_timeout_while(gate, LONG, |gate| !gate.0).unwrap();
        assert!(!late.timed_out());
        drop(gate);
        let does = self.layers.lock().unwrap().pop_front().unwrap_or(Does::Bring);
        Told::act(does)?;
        self.brought.lock().unwrap().push(layer);
        Ok(10)
    }
}

/// What the task holds of a carrier; lets go slowly.
struct Hold(Arc<Told>);

impl Carrier for Hold {
    fn find(&self) -> Result<()> {
        self.0.find()
    }

    fn layer(&self, layer: u32) -> Result<u64> {
        self.0.layer(layer)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        thread::sleep(Duration::from_millis(5));
        assert!(!self.0.gone.swap(true, Ordering::SeqCst));
    }
}

/// Panics of lanes are part of these tests and nothing to read.
fn silence() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if thread::current().name() != Some("llm-lane") && thread::current().name() != Some("llm-clock") {
                before(info);
            }
        }));
    });
}

fn range(first: u32, end: u32) -> LayerRange {
    LayerRange { first, end }
}

fn leg(first: u32, end: u32, told: &Arc<Told>) -> Leg {
    leg_to(2, first, end, told)
}

fn leg_to(cluster: u64, first: u32, end: u32, told: &Arc<Told>) -> Leg {
    Leg { cluster: ClusterId(cluster), layers: range(first, end), carrier: Arc::new(Hold(told.clone())) }
}

fn start(lanes: &Executor, to: &[(u32, u32, &Arc<Told>)], patience: Option<Duration>) -> Arc<Task> {
    let legs = to.iter().map(|&(first, end, told)| leg(first, end, told)).collect();
    Task::start(lanes.handle().clone(), legs, patience).unwrap()
}

fn ended(task: &Task) {
    assert!(task.wait(Deadline::after(LONG)).unwrap(), "{:?}", task.outcomes());
    assert!(task.done());
    // And whoever waits on the descriptor hears of it.
    let descriptor = task.descriptor().unwrap();
    let mut polled = [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut polled, Some(&zero)).unwrap(), 1);
}

/// In short: how each destination ended.
fn ends(task: &Task) -> Vec<String> {
    let short = |outcome: &Outcome| match outcome {
        Outcome::Failed(error) => format!("{:?}", error.kind()),
        other => format!("{other:?}"),
    };
    task.outcomes().iter().map(short).collect()
}

fn refusal() -> Error {
    Error::new(ErrorKind::System, "the layer does not come").with("layer", 7)
}

fn eventually(what: &str, there: impl Fn() -> bool) {
    let started = Instant::now();
    while !there() {
        assert!(started.elapsed() < LONG, "{what} did not come about");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn one_place_does_not_take_all_lanes() {
    let lanes = Executor::default();
    let stuck: Vec<_> = (0..600).map(|_| Told::good()).collect();
    stuck.iter().for_each(|told| told.shut());
    let legs = stuck.iter().map(|told| leg_to(2, 0, 1, told)).collect();
    let standing = Task::start(lanes.handle().clone(), legs, None).unwrap();
    standing.ready(0);
    let well = Told::good();
    let task = Task::start(lanes.handle().clone(), vec![leg_to(3, 0, 1, &well)], None).unwrap();
    task.ready(0);
    ended(&task);
    assert_eq!(ends(&task), ["Done"]);
    // One for each job that may be at work, however slowly they start.
    assert!(!standing.done() && lanes.handle().threads() <= 33, "{}", lanes.handle().threads());
    stuck.iter().for_each(|told| told.open());
    ended(&standing);
    assert!(ends(&standing).iter().all(|end| end == "Done"));
    // Nobody waits for its turn any more, so all of them may be at work at once again.
    let again = Told::good();
    let task = Task::start(lanes.handle().clone(), vec![leg_to(2, 0, 1, &again)], None).unwrap();
    task.ready(0);
    ended(&task);
}

/// A task whose `count` layers to `cluster` all stand still, and what opens them.
fn standing(lanes: &Executor, cluster: u64, count: usize) -> (Arc<Task>, Vec<Arc<Told>>) {
    let told: Vec<_> = (0..count).map(|_| Told::good()).collect();
    told.iter().for_each(|told| told.shut());
    let legs = told.iter().map(|told| leg_to(cluster, 0, 1, told)).collect();
    let task = Task::start(lanes.handle().clone(), legs, None).unwrap();
    eventually("all to be found", || told.iter().all(|told| told.finds.load(Ordering::SeqCst) == 1));
    task.ready(0);
    (task, told)
}

/// Sixteen places that stand still have every lane there is; a seventeenth and its own queue, which has one, do not keep
/// an eighteenth waiting, and that one keeps its lane until it has nothing more to do.
fn lanes_all_taken(lanes: &Executor) -> Vec<(Arc<Task>, Vec<Arc<Told>>)> {
    let mut all: Vec<_> = (100..116).map(|place| standing(lanes, place, 32)).collect();
    all.iter().flat_map(|(_, told)| told).for_each(|told| told.arrived());
    assert_eq!(lanes.handle().threads(), 512);
    let (task, told) = standing(lanes, 116, 32);
    eventually("its lane", || told.iter().any(|told| told.gate.lock().unwrap().1 > 0));
    all.push((task, told));
    all
}

/// Lets all that stand still go on, and looks that they do.
fn go_on(all: &[(Arc<Task>, Vec<Arc<Told>>)]) {
    all.iter().flat_map(|(_, told)| told).for_each(|told| told.open());
    for (task, _) in all {
        ended(task);
        assert!(ends(task).iter().all(|end| end == "Done"));
    }
}

#[test]
fn a_place_without_a_lane_gets_one() {
    let lanes = Executor::default();
    let all = lanes_all_taken(&lanes);
    let good = Told::good();
    let task = Task::start(lanes.handle().clone(), vec![leg_to(200, 0, 2, &good)], None).unwrap();
    task.ready(1);
    ended(&task);
    assert_eq!((ends(&task), good.brought()), (vec!["Done".to_owned()], vec![0, 1]));
    // Not more than that: the rest of the seventeenth still waits for a lane.
    assert!(lanes.handle().threads() <= 514, "{}", lanes.handle().threads());
    assert!(all.iter().all(|(task, _)| !task.done()));
    go_on(&all);
}

#[test]
fn a_place_keeps_its_lane() {
    let lanes = Executor::default();
    let all = lanes_all_taken(&lanes);
    let several: Vec<_> = (0..5).map(|_| Told::good()).collect();
    several[0].shut();
    let legs = several.iter().map(|told| leg_to(200, 0, 1, told)).collect();
    let task = Task::start(lanes.handle().clone(), legs, None).unwrap();
    task.ready(0);
    // The lane stands still here, and then has the other four to do, behind all of the seventeenth.
    several[0].arrived();
    several[0].open();
    ended(&task);
    assert_eq!(ends(&task), ["Done"; 5]);
    go_on(&all);
}

/// What waits for a place that stands still and has nothing to bring ends where it waits; what has something to bring is
/// still brought.
#[test]
fn what_is_queued_behind_a_silent_place_ends_at_once() {
    for way in ["cancel", "close", "refuse"] {
        let lanes = Executor::default();
        let (silent, told) = standing(&lanes, 2, 32);
        told.iter().for_each(|told| told.arrived());
        let queued: Vec<_> = (0..4).map(|_| Told::good()).collect();
        let legs = [(0, 3), (0, 2), (1, 4), (5, 6)];
        let legs = queued.iter().zip(legs).map(|(told, (first, end))| leg_to(2, first, end, told)).collect();
        let task = Task::start(lanes.handle().clone(), legs, None).unwrap();
        task.ready(1);
        let gone = || queued.iter().map(|told| told.gone.load(Ordering::SeqCst)).collect::<Vec<_>>();
        assert_eq!(gone(), [false; 4]);
        match way {
            "cancel" => assert!(task.cancel()),
            "close" => assert!(task.close()),
            _ => task.refuse(2, &refusal()),
        }
        if way == "refuse" {
            // The second has both its layers, the fourth none.
            assert_eq!(ends(&task), ["System", "UnderWay", "System", "Unreached"]);
            assert_eq!((task.done(), gone()), (false, vec![true, false, true, true]));
        } else {
            let kind = if way == "cancel" { "Cancelled" } else { "Closed" };
            assert_eq!((task.done(), gone(), ends(&task)), (true, vec![true; 4], vec![kind.to_owned(); 4]));
        }
        assert!(!silent.done());
        go_on(&[(silent, told)]);
        ended(&task);
        let brought: Vec<_> = queued.iter().map(|told| told.brought()).collect();
        let second = if way == "refuse" { vec![0, 1] } else { vec![] };
        assert_eq!(brought, [vec![], second, vec![], vec![]], "{way}");
        assert_eq!(ends(&task)[1] == "Done", way == "refuse");
        // Nor was a destination looked for in vain.
        let finds: Vec<_> = queued.iter().map(|told| told.finds.load(Ordering::SeqCst)).collect();
        assert_eq!(finds, [0, u32::from(way == "refuse"), 0, 0]);
    }
}

#[test]
fn reasons_say_what_is_waited_for() {
    let lanes = Executor::default();
    let (done, moving, failed, later) = (Told::good(), Told::good(), Told::good(), Told::good());
    let to = [(0, 1, &done), (0, 3, &moving), (2, 4, &failed), (5, 6, &later)];
    let task = start(&lanes, &to, None);
    let text = |at: usize| task.reasons()[at].as_ref().map(ToString::to_string);
    let facts = |at: usize| {
        let reason = task.reasons()[at].clone().unwrap();
        let fact = |name| reason.fact(name).map(str::to_owned);
        assert_eq!(fact("cluster").as_deref(), Some("2"));
        (reason.kind(), fact("layer").unwrap(), fact("layers_done").unwrap(), fact("waited_ms").is_some())
    };
    let not_asked = |layer: &str| (ErrorKind::Timeout, layer.to_owned(), "0".to_owned(), false);
    assert_eq!((0..4).map(facts).collect::<Vec<_>>(), ["0", "0", "2", "5"].map(not_asked));
    assert!((0..4).all(|at| text(at).unwrap().contains("nobody has asked")));
    // Waited for by those that need it; the others say that theirs is not asked for.
    assert!(task.wanted(0));
    assert!(text(0).unwrap().contains("being waited for") && text(1).unwrap().contains("being waited for"));
    assert_eq!(facts(1), (ErrorKind::Timeout, "0".to_owned(), "0".to_owned(), true));
    assert!((2..4).all(|at| text(at).unwrap().contains("nobody has asked") && !facts(at).3));
    thread::sleep(Duration::from_millis(30));
    let waited = task.reasons()[0].as_ref().and_then(|reason| reason.fact("waited_ms")?.parse::<u64>().ok());
    assert!(waited.unwrap() >= 30, "{waited:?}");
    moving.shut();
    task.ready(0);
    moving.arrived();
    eventually("the first", || ends(&task)[0] == "Done");
    assert_eq!(text(0), None);
    assert!(text(1).unwrap().contains("on its way"));
    assert_eq!(facts(1), (ErrorKind::Timeout, "0".to_owned(), "0".to_owned(), false));
    moving.open();
    eventually("layer 0", || task.progress()[1].layers == 1);
    assert_eq!(facts(1), (ErrorKind::Timeout, "1".to_owned(), "1".to_owned(), false));
    assert!(task.wanted(2));
    assert!(text(1).unwrap().contains("being waited for") && text(2).unwrap().contains("being waited for"));
    task.ready(2);
    eventually("layer 2", || ends(&task)[1] == "Done" && task.progress()[2].layers == 1);
    task.refuse(3, &refusal());
    ended(&task);
    assert_eq!(ends(&task), ["Done", "Done", "System", "Unreached"]);
    assert_eq!([text(0), text(1), text(3)], [None, None, None]);
    assert!(text(2).unwrap().contains("the layer does not come"));
}

#[test]
fn a_task_without_destinations_has_ended() {
    let lanes = Executor::default();
    let task = start(&lanes, &[], Some(LONG));
    ended(&task);
    assert!(task.layers().is_empty() && task.outcomes().is_empty() && !task.wanted(0) && !task.cancel());
    // And one whose destinations need nothing is done once they are found.
    let (good, bad) = (Told::good(), Told::new(Does::Fail, &[]));
    let task = start(&lanes, &[(3, 3, &good), (3, 3, &bad), (5, 4, &Told::good())], None);
    ended(&task);
    assert_eq!(ends(&task), ["Done", "NotLinked", "Done"]);
    assert!(task.layers().is_empty());
    task.ready(9);
    task.refuse(3, &refusal());
    assert_eq!(ends(&task), ["Done", "NotLinked", "Done"]);
}

/// A carrier that panics ends its own destination, and takes no lane with it.
#[test]
fn a_carrier_that_panics_is_a_failure() {
    let lanes = Executor::default();
    for round in 0..20 {
        let finds = Told::new(Does::Panic, &[]);
        let brings = Told::new(Does::Bring, &[Does::Bring, Does::Panic]);
        let good = Told::good();
        let task = start(&lanes, &[(0, 4, &finds), (0, 4, &brings), (0, 4, &good)], None);
        for layer in task.layers() {
            task.ready(layer);
        }
        ended(&task);
        assert_eq!(ends(&task), ["System", "System", "Done"], "round {round}");
        let Outcome::Failed(error) = &task.outcomes()[1] else { panic!() };
        assert!(error.to_string().contains("ended without a result"), "{error}");
        assert_eq!((finds.brought(), brings.brought(), good.brought()), (vec![], vec![0], vec![0, 1, 2, 3]));
        let layers: Vec<_> = task.progress().iter().map(|carried| carried.layers).collect();
        assert_eq!(layers, [0, 1, 4]);
    }
    assert!(lanes.handle().threads() <= 6, "{lanes:?}");
}

#[test]
fn layers_may_be_ready_out_of_order_twice_and_beyond_the_end() {
    let lanes = Executor::default();
    let (a, b, c) = (Told::good(), Told::good(), Told::good());
    let task = start(&lanes, &[(0, 3, &a), (2, 6, &b), (5, 9, &c)], None);
    assert_eq!(task.layers(), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(task.wanted(8) && !task.wanted(9) && !task.wanted(u32::MAX));
    task.ready(3);
    eventually("layers 0 to 3", || task.progress()[0].layers == 3 && task.progress()[1].layers == 2);
    for layer in [0, 3, 1, 3] {
        task.ready(layer);
    }
    assert!(!task.wait(Deadline::after(Duration::from_millis(20))).unwrap());
    assert_eq!(ends(&task), ["Done", "UnderWay", "UnderWay"]);
    assert!(!task.wanted(1), "the one that needed it has it");
    task.ready(u32::MAX);
    ended(&task);
    assert_eq!((a.brought(), b.brought(), c.brought()), (vec![0, 1, 2], vec![2, 3, 4, 5], vec![5, 6, 7, 8]));
    let carried = |layers| Carried { layers, of_layers: layers, bytes: u64::from(layers) * 10 };
    assert_eq!(task.progress(), [carried(3), carried(4), carried(4)]);
    assert!(!task.cancel());
    assert_eq!(ends(&task), ["Done", "Done", "Done"]);
}

/// Neither a destination that fails nor one that hangs keeps the others waiting.
#[test]
fn destinations_are_independent() {
    let lanes = Executor::default();
    let (slow, dead, gone, good) = (
        Told::good(),
        Told::new(Does::Bring, &[Does::Bring, Does::Fail]),
        Told::new(Does::Fail, &[]),
        Told::good(),
    );
    slow.shut();
    let task = start(&lanes, &[(0, 5, &slow), (0, 5, &dead), (0, 5, &gone), (0, 5, &good)], None);
    for layer in task.layers() {
        assert!(task.wanted(layer));
        task.ready(layer);
        eventually("the good one", || task.progress()[3].layers == layer + 1);
    }
    slow.arrived();
    eventually("the failure of the dead one", || ends(&task)[1] == "NotLinked");
    assert_eq!(ends(&task), ["UnderWay", "NotLinked", "NotLinked", "Done"]);
    assert!(!task.done());
    slow.open();
    ended(&task);
    assert_eq!(ends(&task), ["Done", "NotLinked", "NotLinked", "Done"]);
    assert_eq!(dead.brought(), [0]);
}

#[test]
fn a_layer_that_is_refused_ends_those_that_need_it() {
    let lanes = Executor::default();
    let (a, b, c, busy) = (Told::good(), Told::good(), Told::good(), Told::good());
    busy.shut();
    let task = start(&lanes, &[(0, 3, &a), (1, 5, &b), (4, 6, &c), (2, 3, &busy)], None);
    task.ready(2);
    busy.arrived();
    eventually("layer 2", || task.progress()[1].layers == 2);
    task.refuse(3, &refusal());
    task.refuse(0, &Error::new(ErrorKind::Cancelled, "too late"));
    assert_eq!(ends(&task)[1..], ["System", "Unreached", "UnderWay"]);
    let Outcome::Failed(error) = &task.outcomes()[1] else { panic!() };
    assert_eq!(error.fact("layer"), Some("7"));
    assert!(!task.done() && !task.wanted(4));
    task.ready(8);
    // Whoever was never reached stays so, whatever comes after.
    assert!(task.cancel());
    busy.open();
    ended(&task);
    assert!(!task.cancel() && !task.close());
    assert_eq!(ends(&task), ["Done", "System", "Unreached", "Cancelled"]);
    assert_eq!((b.brought(), c.brought()), (vec![1, 2], vec![]));
}

/// Layers before the one that is refused, which nobody said are ready, do not come either: a destination that has some of
/// its layers was reached.
#[test]
fn a_refusal_leaves_nobody_between() {
    let lanes = Executor::default();
    let (a, b, c) = (Told::good(), Told::good(), Told::good());
    let task = start(&lanes, &[(0, 3, &a), (4, 5, &b), (6, 7, &c)], None);
    task.ready(0);
    eventually("layer 0", || task.progress()[0].layers == 1);
    task.refuse(5, &refusal());
    ended(&task);
    assert_eq!(ends(&task), ["System", "System", "Unreached"]);
}

/// While a layer is on the way the task is not done, whoever ends it; afterwards nothing moves.
#[test]
fn it_is_done_only_when_nothing_moves() {
    for way in ["cancel", "close", "refuse", "fail"] {
        let lanes = Executor::default();
        let told = Told::new(Does::Bring, if way == "fail" { &[Does::Fail] } else { &[] });
        told.shut();
        let task = start(&lanes, &[(0, 3, &told)], None);
        task.ready(1);
        told.arrived();
        let kind = match way {
            "cancel" => {
                assert!(task.cancel() && !task.cancel());
                "Cancelled"
            }
            "close" => {
                assert!(task.close() && !task.close() && !task.cancel());
                "Closed"
            }
            "refuse" => {
                task.refuse(2, &refusal());
                "System"
            }
            _ => "NotLinked",
        };
        if way != "fail" {
            assert_eq!(ends(&task), [kind], "{way}");
        }
        assert!(!task.wait(Deadline::after(Duration::from_millis(20))).unwrap(), "{way}");
        assert!(!told.gone.load(Ordering::SeqCst));
        task.ready(2);
        told.open();
        ended(&task);
        // What the carrier held is gone by then.
        assert!(told.gone.load(Ordering::SeqCst), "{way}");
        let brought = told.brought();
        assert_eq!(brought.len(), usize::from(way != "fail"), "{way}: {brought:?}");
        assert_eq!(ends(&task), [kind], "{way}");
        assert_eq!(task.progress()[0].layers as usize, brought.len());
    }
}

#[test]
fn patience_is_for_each_layer() {
    let lanes = Executor::default();
    let told = Told::good();
    // In time each, together much longer.
    let patience = Duration::from_millis(1500);
    let task = start(&lanes, &[(0, 8, &told)], Some(patience));
    for layer in task.layers() {
        assert!(task.wanted(layer));
        thread::sleep(patience / 5);
        task.ready(layer);
    }
    ended(&task);
    assert_eq!(ends(&task), ["Done"]);
    assert_eq!(told.brought(), (0..8).collect::<Vec<_>>());
}

#[test]
fn a_layer_that_never_comes_ends_those_that_need_it() {
    let lanes = Executor::default();
    let (a, b, c) = (Told::good(), Told::good(), Told::good());
    let task = start(&lanes, &[(0, 1, &a), (0, 4, &b), (3, 4, &c)], Some(Duration::from_millis(30)));
    // Nobody waits yet, so no time passes.
    thread::sleep(Duration::from_millis(60));
    assert!(task.wanted(0));
    task.ready(0);
    thread::sleep(Duration::from_millis(60));
    assert_eq!(ends(&task)[1..], ["UnderWay", "UnderWay"]);
    assert!(task.wanted(1));
    ended(&task);
    assert_eq!(ends(&task), ["Done", "Timeout", "Unreached"]);
    let Outcome::Failed(error) = &task.outcomes()[1] else { panic!() };
    assert_eq!(error.fact("limit_ms"), Some("30"), "{error}");
    assert!(
        error.to_string().contains("timeout_in_millis") && error.to_string().contains("layer 1"),
        "{error}"
    );
    assert!(!task.wanted(2));
    task.ready(2);
    assert_eq!(b.brought(), [0]);
}

/// Asking for a layer that is ready already is no waiting.
#[test]
fn a_layer_that_is_ready_is_not_waited_for() {
    let lanes = Executor::default();
    let told = Told::good();
    told.shut();
    let task = start(&lanes, &[(0, 2, &told)], Some(Duration::from_millis(20)));
    task.ready(1);
    assert!(task.wanted(0) && task.wanted(1));
    thread::sleep(Duration::from_millis(80));
    told.open();
    ended(&task);
    assert_eq!(ends(&task), ["Done"]);
}

/// More tasks than there may be lanes wait, with patience, and all of them get on.
#[test]
fn tasks_that_wait_take_no_threads() {
    let lanes = Executor::default();
    let told: Vec<_> = (0..700).map(|_| Told::good()).collect();
    let mut tasks = vec![];
    for told in &told {
        let task = start(&lanes, &[(0, 2, told)], Some(LONG * 10));
        assert!(task.wanted(0));
        eventually("it to be found", || told.finds.load(Ordering::SeqCst) == 1);
        tasks.push(task);
    }
    assert!(lanes.handle().threads() < 100, "{lanes:?}");
    for layer in 0..2 {
        for task in &tasks {
            assert!(task.wanted(layer));
            task.ready(layer);
        }
    }
    for task in &tasks {
        ended(task);
        assert_eq!(ends(task), ["Done"]);
    }
    eventually("the end of the alarms", || lanes.handle().alarms() == 0);
}

#[test]
fn alarms_run_on_the_clock_thread() {
    struct Report(std::sync::mpsc::Sender<Option<String>>);
    impl Job for Report {
        fn run(self: Box<Self>) {
            self.0.send(thread::current().name().map(str::to_owned)).unwrap();
        }
        fn refused(self: Box<Self>, _: Error) {}
    }
    let lanes = Executor::default();
    let (sender, receiver) = std::sync::mpsc::channel();
    lanes.handle().at(Instant::now(), Box::new(Report(sender))).unwrap();
    assert_eq!(receiver.recv_timeout(LONG).unwrap().as_deref(), Some("llm-clock"));
}

/// A task that nobody holds any more lets go of what it held, however much patience it had.
#[test]
fn a_task_that_is_dropped_holds_nothing() {
    let lanes = Executor::default();
    let told = Told::good();
    let task = start(&lanes, &[(0, 2, &told)], Some(LONG * 10));
    assert!(task.wanted(0));
    drop(task);
    eventually("the end of the carrier", || told.gone.load(Ordering::SeqCst));
    eventually("the end of the alarm", || lanes.handle().alarms() == 0);
    // What is on the way is still brought.
    let told = Told::good();
    told.shut();
    let task = start(&lanes, &[(0, 3, &told)], None);
    task.ready(1);
    told.arrived();
    drop(task);
    told.open();
    eventually("the end of the carrier", || told.gone.load(Ordering::SeqCst));
    assert_eq!(told.brought(), [0, 1]);
}

/// Where the system gives no thread the destinations fail and say why; with lanes there, those do the work.
#[test]
fn a_lane_that_cannot_be_started() {
    let lanes = Executor::default();
    lanes.handle().0.no_threads.store(true, Ordering::SeqCst);
    let (a, b) = (Told::good(), Told::good());
    let task = start(&lanes, &[(0, 2, &a), (0, 2, &b)], Some(LONG));
    ended(&task);
    assert_eq!(ends(&task), ["System", "System"]);
    let Outcome::Failed(error) = &task.outcomes()[0] else { panic!() };
    assert_eq!(error.fact("errno"), Some("11"), "{error}");
    assert!(a.gone.load(Ordering::SeqCst) && !task.wanted(0) && !task.cancel());

    lanes.handle().0.no_threads.store(false, Ordering::SeqCst);
    let held = Told::good();
    held.shut();
    let busy = start(&lanes, &[(0, 1, &held)], None);
    busy.ready(0);
    held.arrived();
    lanes.handle().0.no_threads.store(true, Ordering::SeqCst);
    let (a, b) = (Told::good(), Told::good());
    let task = start(&lanes, &[(0, 2, &a), (0, 2, &b)], None);
    task.ready(1);
    assert!(!task.wait(Deadline::after(Duration::from_millis(20))).unwrap());
    held.open();
    ended(&task);
    ended(&busy);
    assert_eq!(ends(&task), ["Done", "Done"]);
    // Nobody would notice that a layer does not come.
    let told = Told::good();
    let task = start(&lanes, &[(0, 2, &told)], Some(LONG));
    assert!(task.wanted(0));
    ended(&task);
    assert_eq!(ends(&task), ["System"]);
}

/// Dropped with layers on the way and in the queue, with handles still held: at its end no lane runs, every destination
/// has ended, and no later task starts one.
#[test]
fn lanes_that_close_have_ended() {
    let lanes = Executor::default();
    let told: Vec<_> = (0..4).map(|_| Told::good()).collect();
    told.iter().for_each(|told| told.shut());
    let to: Vec<_> = told.iter().map(|told| (0, 3, told)).collect();
    let task = start(&lanes, &to, Some(LONG));
    task.ready(0);
    told.iter().for_each(|told| told.arrived());
    let handle = lanes.handle().clone();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            assert!(task.close());
            told.iter().for_each(|told| told.open());
        });
        drop(lanes);
        assert_eq!(handle.threads(), 0);
        assert!(told.iter().all(|told| told.gone.load(Ordering::SeqCst)), "a lane runs after the end");
    });
    assert!(task.done());
    assert_eq!(ends(&task), ["Closed"; 4]);
    let late = Told::good();
    let legs = vec![leg(0, 1, &late)];
    let task = Task::start(handle.clone(), legs, Some(LONG)).unwrap();
    ended(&task);
    assert_eq!(ends(&task), ["Closed"]);
    assert!(late.gone.load(Ordering::SeqCst) && handle.threads() == 0);
}

/// Whoever is first sets the outcome; it stays, progress only grows, and after the end nothing changes: with ready, refuse,
/// cancel and close from several threads, over carriers that bring, fail and panic.
#[test]
fn every_order_of_everything() {
    let rounds = if std::env::var("PROPTEST_CASES").is_ok() { 5000 } else { 300 };
    let lanes = Executor::default();
    (0..rounds).for_each(|seed| everything(&lanes, seed));
}

/// A number below `most`, as `seed` has it.
fn draw(seed: &mut u64, most: u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % most
}

fn everything(lanes: &Executor, round: u64) {
    let mut seed = round.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let does = |draw: u64| {
        [Does::Bring, Does::Bring, Does::Bring, Does::Bring, Does::Fail, Does::Panic][draw as usize]
    };
    let told: Vec<_> = (0..3)
        .map(|_| {
            let layers: Vec<_> = (0..6).map(|_| does(draw(&mut seed, 6))).collect();
            let (first, more) = (draw(&mut seed, 6) as u32, draw(&mut seed, 4) as u32);
            (first, first + more, Told::new(does(draw(&mut seed, 6)), &layers))
        })
        .collect();
    let to: Vec<_> = told.iter().map(|(first, end, told)| (*first, *end, told)).collect();
    let patience = (draw(&mut seed, 2) == 0).then(|| Duration::from_micros(draw(&mut seed, 3000)));
    let task = start(lanes, &to, patience);
    let (end, pause) = (draw(&mut seed, 4), Duration::from_micros(draw(&mut seed, 400)));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for layer in 0..9 {
                if task.wanted(layer) {
                    task.ready(layer);
                }
            }
        });
        scope.spawn(|| {
            thread::sleep(pause);
            match end {
                0 => _ = task.cancel(),
                1 => _ = task.close(),
                2 => task.refuse(3, &refusal()),
                _ => {}
            }
        });
        scope.spawn(|| {
            let mut last = (ends(&task), task.progress());
            while !over.load(Ordering::SeqCst) {
                let done = task.done();
                let now = (ends(&task), task.progress());
                for (was, is) in last.0.iter().zip(&now.0) {
                    assert!(was == is || was == "UnderWay", "round {round}: {was} became {is}");
                    assert!(!done || is != "UnderWay", "round {round}: done, and under way");
                }
                let grew = |(was, is): (&Carried, &Carried)| is.layers >= was.layers && is.bytes >= was.bytes;
                assert!(
                    last.1.iter().zip(&now.1).all(grew),
                    "round {round}: {:?} became {:?}",
                    last.1,
                    now.1
                );
                last = now;
                thread::yield_now();
            }
        });
        let ended = task.wait(Deadline::after(LONG));
        over.store(true, Ordering::SeqCst);
        assert!(ended.unwrap(), "round {round}: {:?}", task.outcomes());
    });
    let last = (ends(&task), task.progress());
    task.ready(9);
    task.refuse(0, &refusal());
    assert!(!task.cancel() && !task.close(), "round {round}");
    assert_eq!((ends(&task), task.progress()), last);
    for (((first, end, told), how), carried) in told.iter().zip(&last.0).zip(&last.1) {
        assert!(told.gone.load(Ordering::SeqCst), "round {round}");
        let all: Vec<_> = (*first..*end).collect();
        assert_eq!(told.brought(), all[..carried.layers as usize], "round {round}");
        assert_eq!(how == "Done", carried.layers as usize == all.len() && how == "Done", "round {round}");
        assert_eq!(carried.bytes, u64::from(carried.layers) * 10);
    }
}
