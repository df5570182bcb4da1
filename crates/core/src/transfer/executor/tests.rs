//! Jobs of the executor: which of them run, and who holds them. Not for: the threads (`threads/pool/tests.rs`).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::{Executor, Job, JobClass, MAX_WORKERS_OF_CLUSTER, MIN_WITHDRAWN};
use crate::error::Error;
use crate::model::ClusterId;
use crate::sync::Mutex;

const CLASS: JobClass = JobClass::Calls(ClusterId(1));

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
    let (executor, class) = (Executor::default(), JobClass::SeveralClusters);
    let ((ran, numbers), (open, gate)) = (channel(), channel());
    let gate = Arc::new(Mutex::new(gate));
    let mut expected = Vec::new();
    for number in 0..2000 {
        let job = Arc::new(Stalls { number, ran: ran.clone(), gate: gate.clone() });
        let key = executor.handle.submit(class, job);
        assert_eq!(key.is_some(), number >= MAX_WORKERS_OF_CLUSTER);
        match key.filter(|_| number % 10 > 0) {
            Some(key) => {
                assert!(executor.handle.withdraw(class, key).is_some());
                assert!(executor.handle.withdraw(class, key).is_none());
            }
            None => expected.push(number),
        }
        let state = executor.handle.0.workers.lock();
        let at = &state.queue.classes[&class];
        assert!(at.waiting == state.queue.waiting.len() && at.queue.len() <= 2 * at.waiting + MIN_WITHDRAWN);
    }
    drop(open);
    let mut all: Vec<_> = expected.iter().map(|_| numbers.recv().unwrap()).collect();
    all.sort_unstable();
    assert_eq!(all, expected);
    drop((executor, ran));
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
