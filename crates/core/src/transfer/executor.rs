//! The executor: a pool of worker threads that run the jobs of transfers. All engines of a process share the workers and the clock.
//!
//! One of the idle workers polls for a short time before it sleeps, so a caller who starts a call meanwhile wakes no thread.
//! A caller who hands over many jobs wakes one worker, which wakes the next.
//!
//! A transfer whose next layer is still being computed takes no worker, so there are as many threads as layers
//! in transit, not as transfers (`tasks_that_wait_take_no_threads`). One destination cluster cannot
//! take all workers either: jobs for a peer that stalls delay only jobs for the same peer
//! (`every_cluster_gets_a_worker_and_at_most_32`).
//!
//! An engine that closes refuses its jobs that have not begun and waits for those that run. It waits for no job of another
//! engine (`an_engine_that_closes_leaves_the_jobs_of_others`).

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::clock::{Clock, ClockThread, no_thread};
use crate::error::Error;
use crate::model::ClusterId;
#[cfg(any(test, feature = "testing"))]
use crate::sync::SPIN_BEFORE_PARK;
use crate::sync::{AtomicBool, Ordering};
use crate::threads::{CLOSE_WAIT, EngineNumber, JobQueue, PerProcess, PollLimits, ThreadPool};

/// The threads that all engines of this process share.
static SHARED: PerProcess<TransferThreads> = PerProcess::new();
/// Maximum number of workers. Further jobs wait, except the first job of a class of an engine.
const MAX_WORKERS: usize = 512;
/// Maximum number of workers at work for one class: half of the streams of a link.
const MAX_WORKERS_OF_CLUSTER: usize = 32;
/// Maximum number of workers that copy for one client: two keep the memory of most hosts busy.
const MAX_READERS_OF_CLIENT: usize = 2;

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
    /// Calls that wait for others to end, and so use no worker of these. They are spread over 16 classes, as links are.
    Waits(u8),
    /// The ends of links, which end calls. They wait for nothing.
    LinkEnds,
    /// Calls to several clusters. They may wait for each of them, so they use the workers of none of these.
    SeveralClusters,
    /// The calls of a client without an engine.
    Client(ClientCallKind),
}

/// What calls of one client wait for: calls of one kind share workers, and never wait for those of the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientCallKind {
    /// Calls that wait for nobody. A few run beside each other.
    Reads,
    /// Calls that wait for the other end, and run one after the other.
    Writes,
}

impl JobClass {
    /// Maximum number of workers at work for the class.
    fn max_workers(self) -> usize {
        match self {
            JobClass::Client(ClientCallKind::Reads) => MAX_READERS_OF_CLIENT,
            JobClass::Client(ClientCallKind::Writes) => 1,
            _ => MAX_WORKERS_OF_CLUSTER,
        }
    }

    /// Whether the class gets a worker even if there are [`MAX_WORKERS`]. A program may have any number of clients, so theirs do not.
    fn always_has_worker(self) -> bool {
        !matches!(self, JobClass::Client(_))
    }
}

/// Work for a worker thread. It is run or refused, exactly once. The executor keeps no other reference then.
pub(crate) trait Job: Send + Sync {
    /// Does the work.
    fn run(self: Arc<Self>);

    /// Called instead of [`run`](Self::run) if no worker will ever do the work.
    fn refused(self: Arc<Self>, why: Error);
}

/// Runs the jobs of one engine on threads that other engines may share. Drop refuses the jobs that have not begun, drops the
/// alarms, and waits for the jobs that run.
pub struct Executor {
    handle: ExecutorHandle,
    /// Ends with the last engine.
    _threads: Arc<TransferThreads>,
    polls: PollLimits,
}

/// Hands the jobs of one engine to the workers. It may outlive the engine, and keeps no worker alive.
#[derive(Clone)]
pub struct ExecutorHandle(Arc<JobsOfEngine>);

/// What the handles of one engine share.
struct JobsOfEngine {
    engine: EngineNumber,
    workers: Arc<ThreadPool<QueuedJobs>>,
    clock: Clock,
    /// Changes under the lock of the workers.
    closed: AtomicBool,
}

/// The workers and the clock. Drop ends the threads.
struct TransferThreads {
    workers: Arc<ThreadPool<QueuedJobs>>,
    clock: Arc<ClockThread>,
}

/// The jobs that no worker has taken.
#[derive(Default)]
struct QueuedJobs {
    /// Jobs that may run now, each with its class.
    jobs: VecDeque<(ClassOfEngine, Arc<dyn Job>)>,
    classes: HashMap<ClassOfEngine, JobsOfClass>,
    /// The last key of a job that waits.
    last_key: Option<JobKey>,
}

/// Names a job that waits for others of its class. A later one has a greater key.
pub(crate) type JobKey = NonZeroU64;

/// A class of the jobs of one engine. Peers of two engines never share a class.
type ClassOfEngine = (EngineNumber, JobClass);

/// A destination of jobs.
#[derive(Default)]
struct JobsOfClass {
    /// Jobs that are running or about to run.
    taken: usize,
    /// Jobs that wait until one of the others ends, in order of arrival.
    waiting: BTreeMap<JobKey, Arc<dyn Job>>,
}

impl QueuedJobs {
    /// Notes that a job for `class` has ended, and queues the job that has waited longest for this class.
    fn over(&mut self, class: ClassOfEngine) {
        let Some(at) = self.classes.get_mut(&class) else { return };
        match at.waiting.pop_first() {
            Some((_, job)) => self.jobs.push_back((class, job)),
            None => at.taken -= 1,
        }
        if at.taken == 0 {
            self.classes.remove(&class);
        }
    }

    /// Takes the jobs that do not run, of the engines for which `is_of` holds.
    fn take_of(&mut self, is_of: impl Fn(EngineNumber) -> bool) -> Vec<(EngineNumber, Arc<dyn Job>)> {
        let (ready, others): (VecDeque<_>, _) = self.jobs.drain(..).partition(|((of, _), _)| is_of(*of));
        self.jobs = others;
        let mut taken = Vec::new();
        for ((of, _), at) in self.classes.iter_mut().filter(|((of, _), _)| is_of(*of)) {
            taken.extend(std::mem::take(&mut at.waiting).into_values().map(|job| (*of, job)));
        }
        for (class, job) in ready {
            self.over(class);
            taken.push((class.0, job));
        }
        taken
    }

    /// Returns how many jobs of an engine run or are about to run.
    fn taken_of(&self, engine: EngineNumber) -> usize {
        self.classes.iter().filter(|((of, _), _)| *of == engine).map(|(_, at)| at.taken).sum()
    }
}

impl JobQueue for QueuedJobs {
    type Job = (EngineNumber, Arc<dyn Job>);
    type Key = ClassOfEngine;

    fn ready(&self) -> usize {
        self.jobs.len()
    }

    /// Takes another job for the class of the job that has ended if no other worker works for it. So a class keeps its worker
    /// as long as it has work (`every_cluster_gets_a_worker_and_at_most_32`).
    fn next(&mut self, ended: Option<ClassOfEngine>) -> Option<(ClassOfEngine, Self::Job)> {
        if let Some(class) = ended {
            self.over(class);
        }
        let unserved = |class: &ClassOfEngine| {
            let queued = self.jobs.iter().filter(|(to, _)| to == class).count();
            self.classes.get(class).is_some_and(|at| at.taken == queued)
        };
        let own = ended.filter(unserved).and_then(|class| self.jobs.iter().position(|(to, _)| *to == class));
        let (class, job) = self.jobs.remove(own.unwrap_or(0))?;
        Some((class, (class.0, job)))
    }

    fn take_all(&mut self) -> Vec<Self::Job> {
        self.take_of(|_| true)
    }

    /// Runs a job. A job that panics reports it when it is dropped.
    fn run((engine, job): Self::Job) {
        let _engine = engine.on_this_thread();
        job.run();
    }
}

impl TransferThreads {
    fn new() -> Self {
        // Each engine sets how long the worker polls.
        let polls = PollLimits { threads: 1, time: Duration::ZERO };
        let workers = Arc::new(ThreadPool::new("llm-worker", MAX_WORKERS, polls));
        let clock = ClockThread::new(workers.threads().clone());
        TransferThreads { workers, clock }
    }
}

impl Drop for TransferThreads {
    fn drop(&mut self) {
        // Every engine has left, so there is no job.
        drop(self.workers.close());
        self.clock.close();
        self.workers.threads().wait(0);
    }
}

impl Executor {
    /// Creates an executor on the threads that all engines of this process share. An idle worker polls for `poll`, or longer
    /// if another engine has it poll longer, before it sleeps.
    pub(crate) fn of_process(engine: EngineNumber, poll: Duration) -> Self {
        Executor::with_threads(SHARED.get(TransferThreads::new), engine, poll)
    }

    fn with_threads(threads: Arc<TransferThreads>, engine: EngineNumber, poll: Duration) -> Self {
        let polls = PollLimits { threads: 1, time: poll };
        threads.workers.enter(MAX_WORKERS, polls);
        let handle = ExecutorHandle(Arc::new(JobsOfEngine {
            engine,
            workers: threads.workers.clone(),
            clock: Clock::new(&threads.clock, engine),
            closed: AtomicBool::new(false),
        }));
        Executor { handle, _threads: threads, polls }
    }

    /// Returns the handle that hands jobs to the workers.
    pub fn handle(&self) -> &ExecutorHandle {
        &self.handle
    }
}

impl ExecutorHandle {
    /// Queues `job` for the next free worker, under `class`. Never waits for a worker. If no thread can be
    /// started, the existing workers run the job; without any worker, it is refused
    /// (`a_worker_that_cannot_be_started`). Returns the key of the job if it waits for others of its class.
    pub(crate) fn submit(&self, class: JobClass, job: Arc<dyn Job>) -> Option<JobKey> {
        let class = (self.0.engine, class);
        let mut state = self.0.workers.lock();
        if self.0.closed.load(Ordering::Relaxed) {
            drop(state);
            job.refused(Error::closed());
            return None;
        }
        let queue = &mut state.queue;
        let at = queue.classes.entry(class).or_default();
        if at.taken == class.1.max_workers() {
            let key = queue.last_key.map_or(JobKey::MIN, |last| last.saturating_add(1));
            queue.last_key = Some(key);
            at.waiting.insert(key, job);
            return Some(key);
        }
        at.taken += 1;
        // A class without a worker gets one, however many others stall
        // (`every_cluster_gets_a_worker_and_at_most_32`).
        let first = at.taken == 1 && class.1.always_has_worker();
        if first {
            queue.jobs.push_front((class, job));
        } else {
            queue.jobs.push_back((class, job));
        }
        if let Err((error, jobs)) = self.0.workers.dispatch(state, 1, first) {
            for (_, job) in jobs {
                job.refused(no_thread(&error));
            }
        }
        None
    }

    /// Returns a job that still waits for others of its class, and forgets it.
    pub(crate) fn withdraw(&self, class: JobClass, key: JobKey) -> Option<Arc<dyn Job>> {
        self.0.workers.lock().queue.classes.get_mut(&(self.0.engine, class))?.waiting.remove(&key)
    }

    /// Returns the clock.
    pub(crate) fn clock(&self) -> &Clock {
        &self.0.clock
    }

    /// Waits until no job of the engine runs, at most [`CLOSE_WAIT`]. A job that closes its own engine does not wait for
    /// itself.
    fn wait_jobs(&self) {
        let JobsOfEngine { engine, workers, .. } = &*self.0;
        let runs_here = EngineNumber::current() == Some(*engine) && workers.threads().has_current();
        let until = Instant::now() + CLOSE_WAIT;
        let mut state = workers.lock();
        while state.queue.taken_of(*engine) > usize::from(runs_here) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = workers.wait_job(state, left);
        }
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

/// An executor with threads of its own.
#[cfg(any(test, feature = "testing"))]
impl Default for Executor {
    fn default() -> Self {
        Executor::with_threads(Arc::new(TransferThreads::new()), EngineNumber::next(), SPIN_BEFORE_PARK)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let JobsOfEngine { engine, workers, clock, closed } = &*self.handle.0;
        let mut state = workers.lock();
        closed.store(true, Ordering::Relaxed);
        let jobs = state.queue.take_of(|of| of == *engine);
        drop(state);
        // Without the lock, because the jobs report their end.
        for (_, job) in jobs {
            job.refused(Error::closed());
        }
        clock.close();
        self.handle.wait_jobs();
        workers.leave(MAX_WORKERS, self.polls);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
