//! A pool of threads that start when there are jobs and end when there have been none for a while.
//!
//! A thread ends when it has had no job for 30 s, whatever the other threads do. The thread that fell asleep last takes the
//! next job, so that threads which are not needed end (`work_of_one_thread_keeps_no_other_thread`).
//!
//! A caller starts at most one thread. Each thread that takes a job starts or wakes the next one if jobs are left, so that the
//! caller goes on at once (`a_caller_starts_one_thread_which_starts_the_next`).
//!
//! Idle threads poll for a short time before they sleep. A caller who adds a job meanwhile wakes no thread
//! (`the_polling_thread_takes_the_next_job_and_no_thread_is_woken`). Waking one takes longer than the rest of a short call.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine_number::EngineNumber;
use super::running::Threads;
use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering, guarded, poll};

/// How long a thread is kept after its last job.
const IDLE_EXIT: Duration = Duration::from_secs(30);

/// The jobs of a pool, which the pool keeps under its lock. The queue decides which job is next.
pub(crate) trait JobQueue: Default + Send + 'static {
    type Job: Send;
    /// What the queue knows of a running job.
    type Key;

    /// Number of jobs that may run now.
    fn ready(&self) -> usize;

    /// Takes the next job for a thread. `ended` is the job that this thread has just run.
    fn next(&mut self, ended: Option<Self::Key>) -> Option<(Self::Key, Self::Job)>;

    /// Takes all jobs that do not run.
    fn take_all(&mut self) -> Vec<Self::Job>;

    /// Runs a job, without the lock.
    fn run(job: Self::Job);
}

/// Jobs of a pool that are closures, in the order in which they were added.
pub(crate) type Closures = VecDeque<Box<dyn FnOnce() + Send>>;

impl JobQueue for Closures {
    type Job = Box<dyn FnOnce() + Send>;
    type Key = ();

    fn ready(&self) -> usize {
        self.len()
    }

    fn next(&mut self, _: Option<()>) -> Option<((), Self::Job)> {
        self.pop_front().map(|task| ((), task))
    }

    fn take_all(&mut self) -> Vec<Self::Job> {
        self.drain(..).collect()
    }

    fn run(task: Self::Job) {
        task();
    }
}

/// How the idle threads of a pool poll for jobs before they sleep.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) struct PollLimits {
    /// Maximum number of threads that poll at the same time.
    pub(crate) threads: usize,
    /// How long a thread polls.
    pub(crate) time: Duration,
}

/// A pool of threads. It may be dropped while its threads run; [`close`](Self::close) ends them.
pub(crate) struct ThreadPool<Q: JobQueue>(Arc<Shared<Q>>);

struct Shared<Q> {
    /// Name of each thread.
    name: &'static str,
    /// Whether idle threads poll. On a single core, a thread that polls only delays those for which it waits.
    may_poll: bool,
    /// How long a thread is kept after its last job.
    idle_exit: Duration,
    state: Mutex<State<Q>>,
    /// What polling threads look at: whether there is a job, or the pool closes. Changes under the lock.
    has_jobs: AtomicBool,
    /// Notified when a job has ended.
    job_ended: Condvar,
    threads: Arc<Threads>,
}

/// The jobs and the threads of a pool.
#[derive(Default)]
pub(crate) struct State<Q> {
    pub(crate) queue: Q,
    /// Maximum number of threads, unless a caller exceeds it.
    most: usize,
    polls: PollLimits,
    /// The limits of each of the engines that share the pool. The largest of them count.
    engines: Vec<(usize, PollLimits)>,
    /// Number of threads, including those that are starting.
    threads: usize,
    /// Number of threads that poll. They take jobs without being woken.
    polling: usize,
    /// Number of threads that were started and do not run yet.
    starting: usize,
    /// Number of threads that were woken and do not run yet.
    waking: usize,
    /// The threads that sleep, in the order in which they fell asleep.
    asleep: Vec<Arc<Condvar>>,
    closed: bool,
}

impl<Q> State<Q> {
    /// Sets the limits to the largest of those of the engines. Without an engine, they stay as they are.
    fn update_limits(&mut self) {
        let Some(&first) = self.engines.first() else { return };
        let largest = |(most, polls): (usize, PollLimits), other: &(usize, PollLimits)| {
            let threads = polls.threads.max(other.1.threads);
            (most.max(other.0), PollLimits { threads, time: polls.time.max(other.1.time) })
        };
        (self.most, self.polls) = self.engines.iter().fold(first, largest);
    }
}

impl<Q: JobQueue> ThreadPool<Q> {
    /// Creates a pool without any thread, which starts at most `most`.
    pub(crate) fn new(name: &'static str, most: usize, polls: PollLimits) -> Self {
        let may_poll = rustix::thread::sched_getaffinity(None).map_or(true, |cores| cores.count() != 1);
        ThreadPool::with_idle_exit(name, most, polls, (IDLE_EXIT, may_poll))
    }

    /// Creates a pool whose threads end when they have had no job for `idle_exit`.
    fn with_idle_exit(
        name: &'static str,
        most: usize,
        polls: PollLimits,
        (idle_exit, may_poll): (Duration, bool),
    ) -> Self {
        ThreadPool(Arc::new(Shared {
            name,
            may_poll,
            idle_exit,
            state: Mutex::new(State { most, polls, ..State::default() }),
            has_jobs: AtomicBool::new(false),
            job_ended: Condvar::new(),
            threads: Threads::new(),
        }))
    }

    /// Adds an engine to those that share the pool. Until the engine [leaves](Self::leave), the pool has at least its limits.
    pub(crate) fn enter(&self, most: usize, polls: PollLimits) {
        let mut state = self.lock();
        state.engines.push((most, polls));
        state.update_limits();
    }

    /// Removes an engine that has [entered](Self::enter) with these limits. Its jobs must have ended.
    pub(crate) fn leave(&self, most: usize, polls: PollLimits) {
        let mut state = self.lock();
        if let Some(at) = state.engines.iter().position(|&engine| engine == (most, polls)) {
            state.engines.swap_remove(at);
        }
        state.update_limits();
    }

    /// Locks the jobs. Jobs that are added must be [dispatched](Self::dispatch) under the same lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State<Q>> {
        self.0.state.lock()
    }

    /// Returns the threads of the pool, to which their owner may add others.
    pub(crate) fn threads(&self) -> &Arc<Threads> {
        &self.0.threads
    }

    /// Has threads run the jobs that the caller has just added under this lock. Starts at most one thread, if there are fewer
    /// than there may be or the caller `exceeds` that number. Wakes at most `most` threads. Each of these threads starts or
    /// wakes the next one if there are more jobs.
    ///
    /// If no thread can be started, the existing ones run the jobs. If there are none either, returns the error and all jobs.
    pub(crate) fn dispatch(
        &self,
        mut state: MutexGuard<'_, State<Q>>,
        most: usize,
        exceeds: bool,
    ) -> Result<(), (io::Error, Vec<Q::Job>)> {
        if let Err(error) = self.0.start(&mut state, exceeds)
            && state.threads == 0
        {
            return Err((error, state.queue.take_all()));
        }
        let woken = self.0.wake(&mut state, most);
        drop(state);
        notify(&woken);
        Ok(())
    }

    /// Waits until a job ends, at most `limit`.
    pub(crate) fn wait_job<'a>(
        &'a self,
        state: MutexGuard<'a, State<Q>>,
        limit: Duration,
    ) -> MutexGuard<'a, State<Q>> {
        self.0.job_ended.wait_timeout(state, limit).0
    }

    /// Ends the threads, those that run jobs after these jobs. Returns the jobs that no thread will run.
    pub(crate) fn close(&self) -> Vec<Q::Job> {
        let mut state = self.0.state.lock();
        state.closed = true;
        self.0.has_jobs.store(true, Ordering::Relaxed);
        let (jobs, asleep) = (state.queue.take_all(), std::mem::take(&mut state.asleep));
        state.waking += asleep.len();
        drop(state);
        notify(&asleep);
        jobs
    }
}

impl<Q: JobQueue> Shared<Q> {
    /// Body of a thread: runs jobs until there has been none for a while.
    fn work(self: &Arc<Self>) {
        let (sleeper, mut ended, mut until) = (Arc::default(), None, Instant::now() + self.idle_exit);
        let mut state = self.state.lock();
        state.starting -= 1;
        loop {
            let next = state.queue.next(ended.take());
            self.job_ended.notify_all();
            if let Some((key, job)) = next {
                // If no thread can be started, the existing ones run the other jobs.
                let _ = self.start(&mut state, false);
                let woken = self.wake(&mut state, 1);
                drop(state);
                notify(&woken);
                guarded("running a job", || Q::run(job));
                // Loom's threads share the thread-locals of the standard library.
                debug_assert!(
                    cfg!(loom) || EngineNumber::current().is_none(),
                    "a job left its engine behind"
                );
                until = Instant::now() + self.idle_exit;
                state = self.state.lock();
                ended = Some(key);
            } else if state.closed {
                break;
            } else {
                let (rested, woken) = self.rest(state, &sleeper, until);
                state = rested;
                if !woken && state.queue.ready() == 0 {
                    break;
                }
            }
        }
        // Under the same lock under which it found no job.
        state.threads -= 1;
    }

    /// Waits until there are jobs for this thread or the pool closes, and returns `false` if neither happened before `until`.
    /// Polls at first, unless enough other threads do.
    fn rest<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<Q>>,
        sleeper: &Arc<Condvar>,
        until: Instant,
    ) -> (MutexGuard<'a, State<Q>>, bool) {
        let polls = state.polls;
        if self.may_poll && !polls.time.is_zero() && state.polling < polls.threads {
            state.polling += 1;
            self.has_jobs.store(false, Ordering::Relaxed);
            drop(state);
            poll(polls.time, || self.has_jobs.load(Ordering::Relaxed));
            state = self.state.lock();
            state.polling -= 1;
            if state.queue.ready() > 0 || state.closed {
                return (state, true);
            }
        }
        state.asleep.push(sleeper.clone());
        loop {
            let Some(at) = state.asleep.iter().position(|other| Arc::ptr_eq(other, sleeper)) else {
                state.waking -= 1;
                return (state, true);
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.asleep.remove(at);
                return (state, false);
            }
            state = sleeper.wait_timeout(state, left).0;
        }
    }

    /// Starts a thread if there are more jobs than idle threads, and fewer threads than there may be, or the caller `exceeds`
    /// that number.
    fn start(self: &Arc<Self>, state: &mut State<Q>, exceeds: bool) -> io::Result<()> {
        let idle = state.polling + state.starting + state.waking + state.asleep.len();
        if idle >= state.queue.ready() || (state.threads >= state.most && !exceeds) {
            return Ok(());
        }
        let shared = self.clone();
        // Under the lock, so that a thread that is counted does exist.
        self.threads.spawn(self.name, move || shared.work())?;
        (state.threads, state.starting) = (state.threads + 1, state.starting + 1);
        Ok(())
    }

    /// Tells idle threads that there are jobs. Returns those that the caller must notify after it has released the lock. At most
    /// `most` threads that are awake are on their way to the jobs then. A thread that starts takes longer than one that wakes,
    /// so it does not count (`a_thread_that_starts_leaves_no_other_asleep`).
    fn wake(&self, state: &mut State<Q>, most: usize) -> Vec<Arc<Condvar>> {
        let (ready, mut woken) = (state.queue.ready(), Vec::new());
        if ready > 0 {
            self.has_jobs.store(true, Ordering::Relaxed);
        }
        while state.polling + state.waking < ready.min(most)
            && let Some(thread) = state.asleep.pop()
        {
            state.waking += 1;
            woken.push(thread);
        }
        woken
    }
}

/// Notifies threads that were woken.
fn notify(threads: &[Arc<Condvar>]) {
    for thread in threads {
        thread.notify_one();
    }
}

impl<Q: JobQueue> std::fmt::Debug for ThreadPool<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.0.state.lock();
        f.debug_struct("ThreadPool")
            .field("name", &self.0.name)
            .field("threads", &state.threads)
            .field("ready", &state.queue.ready())
            .finish()
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
