//! The copy workers: the calling thread, and the threads of a pool that all engines of a process share.
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
use crate::threads::{Closures, EngineNumber, PollLimits, ThreadPool};

/// How the idle threads poll.
const POLLS: PollLimits = PollLimits { threads: usize::MAX, time: SPIN_BEFORE_PARK };

/// Threads of one role. Drop waits for them to end, for at most ten seconds.
#[derive(Debug)]
pub(super) struct WorkerThreads(ThreadPool<Closures>);

impl WorkerThreads {
    /// Creates the set without any thread.
    pub(super) fn new(role: &'static str) -> Self {
        // The workers of each engine set how many there may be.
        WorkerThreads(ThreadPool::new(role, 1, POLLS))
    }
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        drop(self.0.close());
        self.0.threads().wait(0);
    }
}

/// Threads that share jobs of one engine with their callers. Other engines may use the same threads. When the workers are dropped,
/// each job has ended, because its caller waits for it.
#[derive(Debug)]
pub struct Workers {
    threads: Arc<WorkerThreads>,
    engine: EngineNumber,
    count: usize,
    /// Test only: behave as if there were no thread and none could be started.
    #[cfg(feature = "testing")]
    refused: AtomicBool,
    /// Whether the engine has warned that a caller copies alone. The copy workers and the streams of an engine share it.
    warned: Arc<AtomicBool>,
}

impl Workers {
    /// Creates `count` workers of an engine, of which one is the calling thread. The others are among `threads`.
    pub(super) fn new(
        threads: &Arc<WorkerThreads>,
        engine: EngineNumber,
        count: usize,
        warned: Arc<AtomicBool>,
    ) -> Self {
        threads.0.enter(most_helpers(count), POLLS);
        Workers {
            threads: threads.clone(),
            engine,
            count,
            #[cfg(feature = "testing")]
            refused: AtomicBool::new(false),
            warned,
        }
    }

    /// Maximum number of threads that work on one job, including the calling thread.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Queues tasks for the threads. Returns `Err`, and drops the tasks, if there is no thread and none can be started.
    fn add(&self, mut tasks: Closures) -> io::Result<()> {
        #[cfg(feature = "testing")]
        if self.refused.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let pool = &self.threads.0;
        let mut state = pool.lock();
        state.queue.append(&mut tasks);
        let ready = state.queue.len();
        pool.dispatch(state, ready, false).map_err(|(error, _)| error)
    }

    /// Sets whether the workers behave as if there were no thread and none could be started.
    #[cfg(feature = "testing")]
    pub(super) fn refuse_threads(&self, refuse: bool) {
        self.refused.store(refuse, Ordering::SeqCst);
    }

    /// Has at most `helpers` worker threads run units `0..units` of `work`, and returns at once. Without a thread, the caller
    /// does all of the work (`without_threads_for_copies_the_caller_moves_all_bytes`).
    pub(super) fn start(&self, work: Arc<dyn Work>, units: usize, helpers: usize) -> SharedJob {
        let job = Arc::new(UnitJob::new(work, units));
        let help = |_| -> Box<dyn FnOnce() + Send> {
            let (engine, job) = (self.engine, job.clone());
            Box::new(move || {
                let _engine = engine.on_this_thread();
                job.help();
            })
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
        self.threads.0.leave(most_helpers(self.count), POLLS);
    }
}

/// Maximum number of threads beside the calling one. At least one, for jobs that a caller starts and does not run at once.
fn most_helpers(count: usize) -> usize {
    count.saturating_sub(1).max(1)
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

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Barrier;

    use hashbrown::HashSet;

    use super::*;
    use crate::model::Deadline;
    use crate::sync::{Mutex, current};

    /// Runs a job of `units` units that wait for one another, and returns its threads.
    fn meet(workers: &Workers, units: usize) -> HashSet<crate::sync::ThreadId> {
        let (barrier, ids) = (Barrier::new(units), Arc::new(Mutex::new(HashSet::new())));
        let noted = ids.clone();
        let work = move |_| {
            noted.lock().insert(current().id());
            barrier.wait();
            Ok(())
        };
        workers.run(Arc::new(work), units, Deadline::after(std::time::Duration::from_secs(3600))).unwrap();
        std::mem::take(&mut *ids.lock())
    }

    /// The engines have 4, 2 and 1 workers. Each has at most its own helpers, and all have the same three threads.
    #[test]
    fn engines_share_the_threads_and_keep_their_limits() {
        let threads = Arc::new(WorkerThreads::new("test"));
        let workers =
            [4, 2, 1].map(|count| Workers::new(&threads, EngineNumber::next(), count, Arc::default()));
        let count = || threads.0.threads().count();
        assert_eq!((meet(&workers[0], 4).len(), count()), (4, 3));
        assert_eq!((meet(&workers[1], 2).len(), count()), (2, 3));
        assert_eq!((meet(&workers[2], 1).len(), count()), (1, 3));
        assert_eq!((meet(&workers[0], 4).len(), count()), (4, 3));
        let [first, second, _third] = workers;
        drop(first);
        assert_eq!((meet(&second, 2).len(), count()), (2, 3));
    }

    #[test]
    fn the_threads_end_with_the_last_engine() {
        let threads = Arc::new(WorkerThreads::new("test"));
        let workers = [4, 4].map(|count| Workers::new(&threads, EngineNumber::next(), count, Arc::default()));
        let running = threads.0.threads().clone();
        drop(threads);
        let [first, second] = workers;
        meet(&first, 4);
        drop(first);
        assert_eq!(running.count(), 3);
        meet(&second, 4);
        drop(second);
        assert_eq!(running.count(), 0);
    }
}
