//! Jobs of the executor: which of them run, and who holds them. Not for: the threads (`threads/pool/tests.rs`).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::{Executor, Job, JobClass, MAX_WORKERS_OF_CLUSTER, TransferThreads};
use crate::error::{Error, ErrorKind};
use crate::model::ClusterId;
use crate::sync::{Mutex, SPIN_BEFORE_PARK};
use crate::threads::EngineNumber;

const CLASS: JobClass = JobClass::Calls(ClusterId(1));

/// A job that sends its number when it starts, and at its end its engine, and `true` if it ran or `false` if it was refused
/// because the engine closed. It blocks in between until the other end of `gate` is dropped.
struct Reports {
    number: usize,
    ended: Sender<(Option<EngineNumber>, bool)>,
    started: Sender<usize>,
    gate: Arc<Mutex<Receiver<()>>>,
}

impl Job for Reports {
    fn run(self: Arc<Self>) {
        let _ = self.started.send(self.number);
        let _ = self.gate.lock().recv();
        let _ = self.ended.send((EngineNumber::current(), true));
    }

    fn refused(self: Arc<Self>, why: Error) {
        assert_eq!(why.kind(), ErrorKind::Closed);
        let _ = self.ended.send((None, false));
    }
}

/// Jobs that are withdrawn while they wait do not run, and leave no memory behind; the others run, each once.
#[test]
fn withdrawn_jobs_do_not_run() {
    let (executor, class) = (Executor::default(), JobClass::SeveralClusters);
    let ((started, numbers), (ended, _ends), (open, gate)) = (channel(), channel(), channel());
    let gate = Arc::new(Mutex::new(gate));
    let mut expected = Vec::new();
    for number in 0..2000 {
        let job = Reports { number, ended: ended.clone(), started: started.clone(), gate: gate.clone() };
        let key = executor.handle.submit(class, Arc::new(job));
        assert_eq!(key.is_some(), number >= MAX_WORKERS_OF_CLUSTER);
        match key.filter(|_| number % 10 > 0) {
            Some(key) => {
                assert!(executor.handle.withdraw(class, key).is_some());
                assert!(executor.handle.withdraw(class, key).is_none());
            }
            None => expected.push(number),
        }
        let state = executor.handle.0.workers.lock();
        let at = &state.queue.classes[&(executor.handle.0.engine, class)];
        assert_eq!(at.taken + at.waiting.len(), expected.len());
    }
    drop(open);
    let mut all: Vec<_> = expected.iter().map(|_| numbers.recv().unwrap()).collect();
    all.sort_unstable();
    assert_eq!(all, expected);
    drop((executor, started));
    assert!(numbers.recv().is_err(), "a withdrawn job ran");
}

/// A job that sends whether the worker has the only reference to it.
struct SoleOwner(Sender<bool>);

impl Job for SoleOwner {
    fn run(self: Arc<Self>) {
        let ran = self.0.clone();
        ran.send(Arc::into_inner(self).is_some()).unwrap();
    }

    fn refused(self: Arc<Self>, _: Error) {
        self.run();
    }
}

/// Holds even if a worker takes the job at the moment it is queued.
#[test]
fn a_worker_has_the_only_reference_to_its_job() {
    let executor = Executor::default();
    let (sender, ran) = channel();
    thread::scope(|scope| {
        for _ in 0..4 {
            let (executor, sender) = (executor.handle(), sender.clone());
            scope.spawn(move || {
                for _ in 0..20_000 {
                    let _ = executor.submit(CLASS, Arc::new(SoleOwner(sender.clone())));
                }
            });
        }
    });
    drop((executor, sender));
    let alone: Vec<bool> = ran.iter().collect();
    assert_eq!((alone.len(), alone.iter().all(|&alone| alone)), (80_000, true));
}

/// Two engines on the same threads.
fn two_engines() -> [Executor; 2] {
    let threads = Arc::new(TransferThreads::new());
    [(); 2].map(|()| Executor::with_threads(threads.clone(), EngineNumber::next(), SPIN_BEFORE_PARK))
}

/// Both engines have more jobs for one cluster than may run. Closing the first engine refuses those that wait and ends with
/// those that run, while all jobs of the second one still run or wait.
#[test]
fn an_engine_that_closes_leaves_the_jobs_of_others() {
    const JOBS: usize = MAX_WORKERS_OF_CLUSTER + 10;
    let [first, second] = two_engines();
    let numbers = [first.handle.0.engine, second.handle.0.engine];
    let engines = [first, second].map(|executor| {
        let ((open, gate), (ended, ends), (started, starts)) = (channel::<()>(), channel(), channel());
        let gate = Arc::new(Mutex::new(gate));
        for number in 0..JOBS {
            let job = Reports { number, ended: ended.clone(), started: started.clone(), gate: gate.clone() };
            executor.handle.submit(CLASS, Arc::new(job));
        }
        // Jobs of the same class of two engines do not share the limit.
        assert_eq!(starts.iter().take(MAX_WORKERS_OF_CLUSTER).count(), MAX_WORKERS_OF_CLUSTER);
        (executor, open, ended, ends)
    });
    let [(first, open, _, ends), (second, second_open, second_ended, second_ends)] = engines;
    let late = first.handle().clone();
    thread::scope(|scope| {
        let closes = scope.spawn(|| drop(first));
        for _ in MAX_WORKERS_OF_CLUSTER..JOBS {
            assert_eq!(ends.recv().unwrap(), (None, false));
        }
        assert!(!closes.is_finished(), "its jobs still run");
        drop(open);
        closes.join().unwrap();
    });
    let ran: Vec<_> = ends.try_iter().collect();
    assert_eq!(ran, [(Some(numbers[0]), true); MAX_WORKERS_OF_CLUSTER]);
    let (started, _) = channel();
    let (ended, refused) = channel();
    let gate = Arc::new(Mutex::new(channel().1));
    late.submit(CLASS, Arc::new(Reports { number: JOBS, ended, started, gate }));
    assert_eq!(refused.recv().unwrap(), (None, false));

    assert_eq!(second.handle.0.workers.lock().queue.taken_of(numbers[1]), MAX_WORKERS_OF_CLUSTER);
    assert!(second_ends.try_recv().is_err());
    drop((second_open, second_ended));
    assert_eq!(
        (0..JOBS).map(|_| second_ends.recv().unwrap()).collect::<Vec<_>>(),
        [(Some(numbers[1]), true); JOBS]
    );
    let handle = second.handle().clone();
    drop(second);
    assert_eq!(handle.0.workers.threads().count(), 0);
}

#[test]
fn an_idle_worker_runs_the_jobs_of_every_engine() {
    let engines = two_engines();
    for _ in 0..50 {
        for Executor { handle, .. } in &engines {
            let (sender, ran) = channel();
            handle.submit(CLASS, Arc::new(SoleOwner(sender)));
            assert!(ran.recv().unwrap());
            // Then the worker is idle.
            while handle.0.workers.lock().queue.taken_of(handle.0.engine) > 0 {
                thread::yield_now();
            }
            assert_eq!(handle.0.workers.threads().count(), 1);
        }
    }
}
