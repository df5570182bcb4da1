//! The executor: a pool of worker threads that run the jobs of transfers.
//!
//! One of the idle workers polls for a short time before it sleeps, so a caller who starts a call meanwhile wakes no thread.
//! A caller who hands over many jobs wakes one worker, which wakes the next.
//!
//! A transfer whose next layer is still being computed takes no worker, so there are as many threads as layers
//! in transit, not as transfers (`tasks_that_wait_take_no_threads`). One destination cluster cannot
//! take all workers either: jobs for a peer that stalls delay only jobs for the same peer
//! (`every_cluster_gets_a_worker_and_at_most_32`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use super::clock::{Clock, no_thread};
use super::slot_map::{SlotKey, SlotMap};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::ClusterId;
use crate::sync::SPIN_BEFORE_PARK;
use crate::threads::{JobQueue, PollLimits, ThreadPool};

/// Maximum number of workers of one engine. Further jobs wait, except the first one of a class.
const MAX_WORKERS: usize = 512;
/// Maximum number of workers at work for one class: half of the streams of a link.
const MAX_WORKERS_OF_CLUSTER: usize = 32;
/// Number of withdrawn jobs of a class that are never worth removing from its queue.
const MIN_WITHDRAWN: usize = 64;
/// Name of these lists in out-of-memory errors.
const JOBS: &str = "the jobs of an engine";

/// What jobs wait for: jobs of one class share workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum JobClass {
    /// Calls to one cluster; the engine's own for copies.
    Calls(ClusterId),
    /// The notifications for one cluster. Calls may wait for them.
    Notifications(ClusterId),
    /// Links on demand. Peers that cannot be reached take no workers of calls, and delay few of the other links: addresses
    /// are spread over 16 classes.
    Links(u8),
    /// Calls to several clusters. They may wait for each of them, so they use the workers of none of these.
    SeveralClusters,
}

/// Work for a worker thread. It is run or refused, exactly once. The executor keeps no other reference then.
pub(crate) trait Job: Send + Sync {
    /// Does the work.
    fn run(self: Arc<Self>);

    /// Called instead of [`run`](Self::run) if no worker will ever do the work.
    fn refused(self: Arc<Self>, why: Error);
}

/// The workers and the clock of one engine. Drop refuses the jobs that have not begun, drops the alarms, and waits for the
/// threads to end.
#[derive(Debug)]
pub struct Executor {
    handle: ExecutorHandle,
}

/// Hands jobs to the workers. It may outlive the engine, and keeps no worker alive.
#[derive(Clone)]
pub struct ExecutorHandle(Arc<Shared>);

struct Shared {
    workers: ThreadPool<QueuedJobs>,
    clock: Clock,
}

/// The jobs of an engine that no worker has taken.
#[derive(Default)]
struct QueuedJobs {
    /// Jobs that may run now, each with its class.
    jobs: VecDeque<(JobClass, Arc<dyn Job>)>,
    classes: HashMap<JobClass, JobsOfClass>,
    /// Jobs that wait until one of the others of their class ends.
    waiting: SlotMap<Arc<dyn Job>>,
}

/// A destination of jobs.
#[derive(Default)]
struct JobsOfClass {
    /// Jobs that are running or about to run.
    taken: usize,
    /// Where the jobs are that wait until one of the others ends, in order of arrival; also jobs that were withdrawn.
    queue: VecDeque<SlotKey>,
    /// Number of the jobs that wait.
    waiting: usize,
}

impl QueuedJobs {
    /// Notes that a job for `class` has ended, and queues the job that has waited longest for this class.
    fn over(&mut self, class: JobClass) {
        let Some(at) = self.classes.get_mut(&class) else { return };
        let mut jobs = std::iter::from_fn(|| at.queue.pop_front());
        match jobs.find_map(|key| self.waiting.remove(key)) {
            Some(job) => {
                at.waiting -= 1;
                self.jobs.push_back((class, job));
            }
            None => at.taken -= 1,
        }
        if at.taken == 0 {
            self.classes.remove(&class);
        }
    }

    /// Makes an entry for a job that waits until another one for `class` ends.
    fn reserve_waiting(&mut self, class: JobClass) -> Result<SlotKey> {
        let at = self.classes.entry(class).or_default();
        let room = at.queue.try_reserve(1);
        room.map_err(|_| fallible::out_of_memory(JOBS, at.queue.len() * size_of::<SlotKey>()))?;
        let key = self.waiting.reserve(JOBS)?;
        at.queue.push_back(key);
        at.waiting += 1;
        Ok(key)
    }

    /// Takes a job that waits for others of its class.
    fn withdraw(&mut self, class: JobClass, key: SlotKey) -> Option<Arc<dyn Job>> {
        let job = self.waiting.remove(key)?;
        let QueuedJobs { waiting, classes, .. } = self;
        if let Some(at) = classes.get_mut(&class) {
            at.waiting -= 1;
            // Half of the entries or more are removed, so that the time for each job is constant.
            if at.queue.len() > 2 * at.waiting + MIN_WITHDRAWN {
                at.queue.retain(|key| waiting.contains(*key));
            }
        }
        Some(job)
    }
}

impl JobQueue for QueuedJobs {
    type Job = Arc<dyn Job>;
    type Key = JobClass;

    fn ready(&self) -> usize {
        self.jobs.len()
    }

    /// Takes another job for the class of the job that has ended if no other worker works for it. So a class keeps its worker
    /// as long as it has work (`every_cluster_gets_a_worker_and_at_most_32`).
    fn next(&mut self, ended: Option<JobClass>) -> Option<(JobClass, Arc<dyn Job>)> {
        if let Some(class) = ended {
            self.over(class);
        }
        let unserved = |class: &JobClass| {
            let queued = self.jobs.iter().filter(|(to, _)| to == class).count();
            self.classes.get(class).is_some_and(|at| at.taken == queued)
        };
        let own = ended.filter(unserved).and_then(|class| self.jobs.iter().position(|(to, _)| *to == class));
        self.jobs.remove(own.unwrap_or(0))
    }

    fn take_all(&mut self) -> Vec<Arc<dyn Job>> {
        let ready: Vec<_> = self.jobs.drain(..).collect();
        let mut waiting = Vec::new();
        for at in self.classes.values_mut() {
            at.waiting = 0;
            waiting.extend(at.queue.drain(..).filter_map(|key| self.waiting.remove(key)));
        }
        for (class, _) in &ready {
            self.over(*class);
        }
        ready.into_iter().map(|(_, job)| job).chain(waiting).collect()
    }

    /// Runs a job. A job that panics reports it when it is dropped.
    fn run(job: Arc<dyn Job>) {
        job.run();
    }
}

impl Executor {
    /// Creates an executor without any worker. An idle worker polls for `poll` before it sleeps.
    pub fn new(poll: Duration) -> Self {
        let workers = ThreadPool::new("llm-lane", MAX_WORKERS, PollLimits { threads: 1, time: poll });
        let clock = Clock::new(workers.threads().clone());
        Executor { handle: ExecutorHandle(Arc::new(Shared { workers, clock })) }
    }

    /// Returns the handle that hands jobs to the workers.
    pub fn handle(&self) -> &ExecutorHandle {
        &self.handle
    }
}

impl ExecutorHandle {
    /// Has the next free worker run `job`, which is for `class`. Never waits for a worker. If no thread can be
    /// started, the existing workers run the job; without any worker, it is refused
    /// (`a_worker_that_cannot_be_started`). Returns the key of the job if it waits for others of its class.
    pub(crate) fn submit(&self, class: JobClass, job: Arc<dyn Job>) -> Option<SlotKey> {
        let mut state = self.0.workers.lock();
        if state.is_closed() {
            drop(state);
            job.refused(Error::closed());
            return None;
        }
        let queue = &mut state.queue;
        let at = queue.classes.entry(class).or_default();
        if at.taken == MAX_WORKERS_OF_CLUSTER {
            return match queue.reserve_waiting(class) {
                Ok(key) => {
                    queue.waiting.fill(key, job);
                    Some(key)
                }
                Err(error) => {
                    drop(state);
                    job.refused(error);
                    None
                }
            };
        }
        at.taken += 1;
        // A class without a worker gets one, however many others stall
        // (`every_cluster_gets_a_worker_and_at_most_32`).
        let first = at.taken == 1;
        if first {
            queue.jobs.push_front((class, job));
        } else {
            queue.jobs.push_back((class, job));
        }
        if let Err((error, jobs)) = self.0.workers.dispatch(state, 1, first) {
            for job in jobs {
                job.refused(no_thread(&error));
            }
        }
        None
    }

    /// Returns a job that still waits for others of its class, and forgets it.
    pub(crate) fn withdraw(&self, class: JobClass, key: SlotKey) -> Option<Arc<dyn Job>> {
        self.0.workers.lock().queue.withdraw(class, key)
    }

    /// Returns the clock.
    pub(crate) fn clock(&self) -> &Clock {
        &self.0.clock
    }

    /// Sets whether the executor behaves as if no thread could be started.
    #[cfg(feature = "testing")]
    pub fn refuse_threads(&self, refuse: bool) {
        self.0.workers.threads().refuse(refuse);
    }

    /// Number of threads.
    #[cfg(feature = "testing")]
    pub fn threads(&self) -> usize {
        self.0.workers.threads().count()
    }

    /// Number of alarms that are set.
    #[cfg(feature = "testing")]
    pub fn alarms(&self) -> usize {
        self.0.clock.alarms()
    }
}

impl Default for Executor {
    fn default() -> Self {
        Executor::new(SPIN_BEFORE_PARK)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let Shared { workers, clock } = &*self.handle.0;
        // Without the lock, because the jobs report their end.
        workers.close().into_iter().for_each(|job| job.refused(Error::closed()));
        clock.close();
        workers.threads().wait(0);
    }
}

impl std::fmt::Debug for ExecutorHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ExecutorHandle").field(&self.0.workers).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
