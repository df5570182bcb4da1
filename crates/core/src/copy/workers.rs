//! The copy workers: the calling thread, and the threads of a pool.
//!
//! A job is cut into units of equal bytes. Every worker takes the next unit until none is left, so tensors
//! and blocks of any size keep all workers busy. A call never waits for a worker that has not started: the
//! calling thread works too, closes the job when no unit is left, and then waits only for the workers inside.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Limit;
use super::unit_job::{UnitJob, Work};
use crate::error::{Error, Result};
use crate::sync::SPIN_BEFORE_PARK;
use crate::threads::{Closures, PollLimits, ThreadPool};

/// Threads that share jobs with their callers. Drop waits for the threads to end, for at most ten seconds.
#[derive(Debug)]
pub struct Workers {
    pool: ThreadPool<Closures>,
    count: usize,
    /// Whether the engine has warned that a caller copies alone. The copy workers and the streams of an engine share it.
    warned: Arc<AtomicBool>,
}

impl Workers {
    /// Creates `count` workers, of which one is the calling thread. The others are named `role`.
    pub(super) fn new(role: &'static str, count: usize, warned: Arc<AtomicBool>) -> Self {
        let polls = PollLimits { threads: usize::MAX, time: SPIN_BEFORE_PARK };
        // At least one thread, for spawned tasks: the staging ring drains on a set of workers of its own.
        let most = count.saturating_sub(1).max(1);
        Workers { pool: ThreadPool::new(role, most, polls), count, warned }
    }

    /// Maximum number of threads that work on one job, including the calling thread.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Queues `task` for a worker thread and returns at once. Returns `Err`, and drops the task, if there is no thread and none
    /// can be started.
    pub(super) fn spawn(&self, task: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let task: Box<dyn FnOnce() + Send> = Box::new(task);
        self.add([task].into())
    }

    fn add(&self, mut tasks: Closures) -> io::Result<()> {
        let mut state = self.pool.lock();
        state.queue.append(&mut tasks);
        let ready = state.queue.len();
        self.pool.dispatch(state, ready, false).map_err(|(error, _)| error)
    }

    /// Sets whether the workers behave as if no thread could be started.
    #[cfg(feature = "testing")]
    pub(super) fn refuse_threads(&self, refuse: bool) {
        self.pool.threads().refuse(refuse);
    }

    /// Has at most `helpers` worker threads run units `0..units` of `work`, and returns at once. Without a thread, the caller
    /// does all of the work (`without_threads_for_copies_the_caller_moves_all_bytes`).
    pub(super) fn start(&self, work: Arc<dyn Work>, units: usize, helpers: usize) -> SharedJob {
        let job = Arc::new(UnitJob::new(work, units));
        let help = |_| {
            let job = job.clone();
            Box::new(move || job.help()) as Box<dyn FnOnce() + Send>
        };
        if helpers > 0
            && let Err(error) = self.add((0..helpers).map(help).collect())
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                target: "llm_datadist::transfers",
                "a calling thread copies alone: {}. This warning is given once",
                Error::no_thread("a thread that copies", error)
            );
        }
        SharedJob(job)
    }

    /// Runs units `0..units` of `work`, and returns when no thread touches `work` any more. After a failure,
    /// or once a [`Limit::Whole`] has passed, no further unit starts. Returns the first failure.
    pub fn run(&self, work: Arc<impl Work>, units: usize, limit: impl Into<Limit>) -> Result<()> {
        let limit = limit.into();
        let work = move |index| {
            // The first unit runs even if the deadline is very short, so that a small transfer never times
            // out spuriously.
            if index > 0 {
                limit.check("copying")?;
            }
            work(index)
        };
        self.start(Arc::new(work), units, self.count.min(units).saturating_sub(1)).finish()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        drop(self.pool.close());
        self.pool.threads().wait(0);
    }
}

/// A job that its caller shares with worker threads. Drop waits until no thread is inside.
pub(super) struct SharedJob(Arc<UnitJob>);

impl SharedJob {
    /// Runs the units that are left, waits for those that run on other threads, and returns the first failure.
    pub(super) fn finish(self) -> Result<()> {
        self.0.help();
        self.0.close()
    }
}

impl Drop for SharedJob {
    fn drop(&mut self) {
        // A job that has finished has no failure left.
        let _ = self.0.close();
    }
}
