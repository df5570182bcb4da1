//! A pool of threads that start when there are jobs and end when there have been none for a while.
//!
//! A thread ends when it has had no job for 30 s, whatever the other threads do. The thread that fell asleep last takes the
//! next job, so that threads which are not needed end (`work_of_one_thread_keeps_no_other_thread`).
//!
//! Idle threads poll for a short time before they sleep. A caller who adds a job meanwhile wakes no thread
//! (`the_polling_thread_takes_the_next_job_and_no_thread_is_woken`). Waking one takes longer than the rest of a short call.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::running::{Threads, guarded};
use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering, poll};

/// How long a thread is kept after its last job.
const KEEP: Duration = Duration::from_secs(30);

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
pub(crate) type Tasks = VecDeque<Box<dyn FnOnce() + Send>>;

impl JobQueue for Tasks {
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
#[derive(Clone, Copy)]
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
    polls: PollLimits,
    /// How long a thread is kept after its last job.
    keep: Duration,
    state: Mutex<State<Q>>,
    /// What polling threads look at: whether there is a job, or the pool closes. Changes under the lock.
    called: AtomicBool,
    /// Notified when a job has ended.
    job_ended: Condvar,
    threads: Arc<Threads>,
}

/// The jobs and the threads of a pool.
#[derive(Default)]
pub(crate) struct State<Q> {
    pub(crate) queue: Q,
    /// Number of threads, including those that are starting.
    threads: usize,
    /// Number of threads that poll. They take jobs without being woken.
    polling: usize,
    /// Number of threads that were started or woken and do not run yet.
    coming: usize,
    /// The threads that sleep, in the order in which they fell asleep.
    asleep: Vec<Arc<Condvar>>,
    closed: bool,
}

impl<Q> State<Q> {
    /// Whether the pool has been closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }
}

impl<Q: JobQueue> ThreadPool<Q> {
    /// Creates a pool without any thread.
    pub(crate) fn new(name: &'static str, mut polls: PollLimits) -> Self {
        // On a single core, a thread that polls only delays those for which it waits.
        if rustix::thread::sched_getaffinity(None).is_ok_and(|cores| cores.count() == 1) {
            polls.time = Duration::ZERO;
        }
        ThreadPool::keeping(name, polls, KEEP)
    }

    /// Creates a pool whose threads end when they have had no job for `keep`.
    fn keeping(name: &'static str, polls: PollLimits, keep: Duration) -> Self {
        ThreadPool(Arc::new(Shared {
            name,
            polls,
            keep,
            state: Mutex::default(),
            called: AtomicBool::new(false),
            job_ended: Condvar::new(),
            threads: Threads::new(),
        }))
    }

    /// Locks the jobs. Jobs that are added must be [dispatched](Self::dispatch) under the same lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State<Q>> {
        self.0.state.lock()
    }

    /// Returns the threads of the pool, to which their owner may add others.
    pub(crate) fn threads(&self) -> &Arc<Threads> {
        &self.0.threads
    }

    /// Has threads run the `added` jobs that the caller has just added under this lock. Starts threads while there are fewer
    /// than `most`. At most `added` threads are woken here, and each of them wakes the next one if there are more jobs.
    ///
    /// If no thread can be started, the existing ones run the jobs. If there are none either, returns the error and all jobs.
    pub(crate) fn dispatch(
        &self,
        mut state: MutexGuard<'_, State<Q>>,
        added: usize,
        most: usize,
    ) -> Result<(), (io::Error, Vec<Q::Job>)> {
        for _ in 0..added {
            let idle = state.polling + state.coming + state.asleep.len();
            if idle >= state.queue.ready() || state.threads >= most {
                break;
            }
            let shared = self.0.clone();
            // Under the lock, so that a thread that is counted does exist.
            match self.0.threads.spawn(self.0.name, move || shared.work()) {
                Ok(()) => (state.threads, state.coming) = (state.threads + 1, state.coming + 1),
                Err(error) if state.threads == 0 => return Err((error, state.queue.take_all())),
                Err(_) => break,
            }
        }
        let called = self.0.call(&mut state, added);
        drop(state);
        wake(&called);
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
        self.0.called.store(true, Ordering::Relaxed);
        let (jobs, asleep) = (state.queue.take_all(), std::mem::take(&mut state.asleep));
        state.coming += asleep.len();
        drop(state);
        wake(&asleep);
        jobs
    }
}

impl<Q: JobQueue> Shared<Q> {
    /// Body of a thread: runs jobs until there has been none for a while.
    fn work(&self) {
        let (sleeper, mut ended, mut until) = (Arc::default(), None, Instant::now() + self.keep);
        let mut state = self.state.lock();
        state.coming -= 1;
        loop {
            let next = state.queue.next(ended.take());
            self.job_ended.notify_all();
            if let Some((key, job)) = next {
                let called = self.call(&mut state, 1);
                drop(state);
                wake(&called);
                guarded("running a job", || Q::run(job));
                until = Instant::now() + self.keep;
                state = self.state.lock();
                ended = Some(key);
            } else if state.closed {
                break;
            } else {
                let (rested, called) = self.rest(state, &sleeper, until);
                state = rested;
                if !called && state.queue.ready() == 0 {
                    break;
                }
            }
        }
        // Under the same lock under which it found no job.
        state.threads -= 1;
    }

    /// Waits until this thread is called or the pool closes, and returns `false` if neither happened before `until`. Polls at
    /// first, unless enough other threads do.
    fn rest<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<Q>>,
        sleeper: &Arc<Condvar>,
        until: Instant,
    ) -> (MutexGuard<'a, State<Q>>, bool) {
        if !self.polls.time.is_zero() && state.polling < self.polls.threads {
            state.polling += 1;
            self.called.store(false, Ordering::Relaxed);
            drop(state);
            poll(self.polls.time, || self.called.load(Ordering::Relaxed));
            state = self.state.lock();
            state.polling -= 1;
            if state.queue.ready() > 0 || state.closed {
                return (state, true);
            }
        }
        state.asleep.push(sleeper.clone());
        loop {
            let Some(at) = state.asleep.iter().position(|other| Arc::ptr_eq(other, sleeper)) else {
                state.coming -= 1;
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

    /// Tells idle threads that there are jobs. Returns those that the caller must wake after it has released the lock. At most
    /// `most` threads are on their way to the jobs then.
    fn call(&self, state: &mut State<Q>, most: usize) -> Vec<Arc<Condvar>> {
        let (ready, mut woken) = (state.queue.ready(), Vec::new());
        if ready > 0 {
            self.called.store(true, Ordering::Relaxed);
        }
        while state.polling + state.coming < ready.min(most)
            && let Some(thread) = state.asleep.pop()
        {
            state.coming += 1;
            woken.push(thread);
        }
        woken
    }
}

/// Wakes threads that were called.
fn wake(threads: &[Arc<Condvar>]) {
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

#[cfg(all(test, not(loom)))]
mod tests;
