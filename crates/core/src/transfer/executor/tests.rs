//! Lanes: which of them take a job, and when they are woken, poll and end.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::{Executor, ExecutorHandle, Job, LaneKey, MOST_OF_ONE, SPARE};
use crate::error::Error;
use crate::model::ClusterId;
use crate::sync::Mutex;

const HOUR: Duration = Duration::from_secs(3600);
const KEY: LaneKey = LaneKey::Calls(ClusterId(1));

/// A job that waits until as many lanes as the barrier counts run one, and then sends the id of its lane.
struct Meets(Arc<Barrier>, Sender<ThreadId>);

impl Job for Meets {
    fn run(self: Arc<Self>) {
        self.0.wait();
        self.1.send(thread::current().id()).unwrap();
    }

    fn refused(self: Arc<Self>, why: Error) {
        panic!("{why}");
    }
}

/// Has `count` lanes run one job each at the same time, and returns the lanes.
fn meet(lanes: &ExecutorHandle, count: usize) -> Vec<ThreadId> {
    let (sender, ran) = channel();
    let barrier = Arc::new(Barrier::new(count));
    for _ in 0..count {
        assert_eq!(lanes.carry(KEY, Arc::new(Meets(barrier.clone(), sender.clone()))), None);
    }
    (0..count).map(|_| ran.recv_timeout(HOUR).unwrap()).collect()
}

/// Waits until `count` lanes are idle and one of them polls.
fn await_poll(lanes: &ExecutorHandle, count: usize) {
    let polls = || {
        let state = lanes.0.state.lock();
        state.idle.polling && state.idle.count == count
    };
    while !polls() {
        thread::yield_now();
    }
}

#[test]
fn the_polling_lane_takes_the_next_job_and_no_lane_is_woken() {
    let executor = Executor::new(HOUR);
    let lanes = executor.handle();
    let [first] = meet(lanes, 1)[..] else { panic!() };
    for _ in 0..100 {
        await_poll(lanes, 1);
        assert_eq!(meet(lanes, 1), [first]);
        assert!(!lanes.0.state.lock().idle.waking);
    }
    assert_eq!(lanes.threads(), 1);
}

/// The polling lane takes one of the jobs, and each lane that takes one wakes the next.
#[test]
fn jobs_that_the_polling_lane_does_not_take_wake_sleeping_lanes() {
    let executor = Executor::new(HOUR);
    let lanes = executor.handle();
    meet(lanes, 4);
    for _ in 0..100 {
        await_poll(lanes, 4);
        meet(lanes, 4);
    }
    assert_eq!(lanes.threads(), 4);
}

#[test]
fn a_polling_lane_ends_with_its_engine() {
    let executor = Executor::new(HOUR);
    let lanes = executor.handle().clone();
    meet(&lanes, 2);
    await_poll(&lanes, 2);
    drop(executor);
    assert_eq!(lanes.threads(), 0);
}

#[test]
fn without_a_limit_no_lane_polls() {
    let executor = Executor::new(Duration::ZERO);
    for _ in 0..100 {
        meet(executor.handle(), 2);
        assert!(!executor.handle().0.state.lock().idle.polling);
    }
}

/// Waits until `count` lanes are asleep.
fn await_sleep(lanes: &ExecutorHandle, count: usize) {
    while lanes.0.state.lock().idle.asleep.len() < count {
        thread::yield_now();
    }
}

/// Calls `step` until one lane is left. Fails after a minute, many times longer than the lanes are kept.
fn until_one_lane_is_left(lanes: &ExecutorHandle, mut step: impl FnMut()) {
    let limit = Instant::now() + Duration::from_secs(60);
    while lanes.threads() > 1 {
        assert!(Instant::now() < limit, "{} lanes are left", lanes.threads());
        step();
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_lane_that_fell_asleep_last_takes_the_next_job() {
    let executor = Executor::keeping(Duration::ZERO, HOUR);
    let lanes = executor.handle();
    meet(lanes, 8);
    await_sleep(lanes, 8);
    let [last] = meet(lanes, 1)[..] else { panic!() };
    for _ in 0..100 {
        await_sleep(lanes, 8);
        assert_eq!(meet(lanes, 1), [last]);
    }
}

/// Jobs that one lane can do, more often than a lane is kept.
#[test]
fn work_of_one_lane_keeps_no_other_lane() {
    let executor = Executor::keeping(Duration::ZERO, Duration::from_millis(200));
    let lanes = executor.handle();
    meet(lanes, 16);
    until_one_lane_is_left(lanes, || drop(meet(lanes, 1)));
}

/// A lane whose sleep is interrupted without a job sleeps on, and its time goes on.
#[test]
fn wake_ups_without_a_job_keep_no_lane() {
    let executor = Executor::keeping(Duration::ZERO, Duration::from_millis(200));
    let lanes = executor.handle();
    meet(lanes, 16);
    until_one_lane_is_left(lanes, || {
        let state = lanes.0.state.lock();
        state.idle.asleep.interrupt();
        drop(state);
    });
}

/// A job that sends its number and blocks until the other end of `gate` is dropped.
struct Stalls {
    number: usize,
    ran: Sender<usize>,
    gate: Arc<Mutex<Receiver<()>>>,
}

impl Job for Stalls {
    fn run(self: Arc<Self>) {
        let _ = self.ran.send(self.number);
        let _ = self.gate.lock().recv();
    }

    fn refused(self: Arc<Self>, why: Error) {
        drop(why);
    }
}

/// Jobs that are withdrawn while they wait do not run, and leave no memory behind; the others run, each once.
#[test]
fn withdrawn_jobs_do_not_run() {
    let (executor, key) = (Executor::default(), LaneKey::SeveralClusters);
    let ((ran, numbers), (open, gate)) = (channel(), channel());
    let gate = Arc::new(Mutex::new(gate));
    let mut expected = Vec::new();
    for number in 0..2000 {
        let job = Arc::new(Stalls { number, ran: ran.clone(), gate: gate.clone() });
        let place = executor.handle.carry(key, job);
        assert_eq!(place.is_some(), number >= MOST_OF_ONE);
        match place.filter(|_| number % 10 > 0) {
            Some(place) => {
                assert!(executor.handle.withdraw(key, place).is_some());
                assert!(executor.handle.withdraw(key, place).is_none());
            }
            None => expected.push(number),
        }
        let state = executor.handle.0.state.lock();
        let at = &state.clusters[&key];
        assert!(at.waiting == state.waiting.len() && at.queue.len() <= 2 * at.waiting + SPARE);
    }
    drop(open);
    let mut all: Vec<_> = expected.iter().map(|_| numbers.recv().unwrap()).collect();
    all.sort_unstable();
    assert_eq!(all, expected);
    drop((executor, ran));
    assert!(numbers.recv().is_err(), "a withdrawn job ran");
}

/// A job that sends whether the lane has the only reference to it.
struct Alone(Sender<bool>);

impl Job for Alone {
    fn run(self: Arc<Self>) {
        let ran = self.0.clone();
        ran.send(Arc::into_inner(self).is_some()).unwrap();
    }

    fn refused(self: Arc<Self>, _: Error) {
        self.run();
    }
}

/// Holds even if a lane takes the job at the moment it is queued.
#[test]
fn a_lane_has_the_only_reference_to_its_job() {
    let executor = Executor::default();
    let (sender, ran) = channel();
    thread::scope(|scope| {
        for _ in 0..4 {
            let (lanes, sender) = (executor.handle(), sender.clone());
            scope.spawn(move || {
                for _ in 0..20_000 {
                    let _ = lanes.carry(KEY, Arc::new(Alone(sender.clone())));
                }
            });
        }
    });
    drop((executor, sender));
    let alone: Vec<bool> = ran.iter().collect();
    assert_eq!((alone.len(), alone.iter().all(|&alone| alone)), (80_000, true));
}
