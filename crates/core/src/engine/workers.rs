//! The workers that copy: the calling thread and rayon threads that live as long as the engine.
//!
//! A job is cut into units of equal bytes; every worker takes the next unit until none is left, so tensors and blocks
//! of any size keep all of them busy. Nobody ever waits for a worker that has not started: the caller works too, closes
//! the job when no unit is left, and waits only for those still inside. Not for: what a unit does (`wave`, `ring`).

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;

/// Work that can be cut into units which may run in any order and at the same time.
pub trait Work: Send + Sync + 'static {
    /// Does unit `index`.
    fn unit(&self, index: usize) -> Result<()>;
}

/// Persistent workers.
#[derive(Debug)]
pub struct Workers {
    pool: ThreadPool,
    count: usize,
}

impl Workers {
    /// `count` workers, the calling thread among them. More workers than cores take turns instead of sharing the work,
    /// which costs 5 to 30 % (docs/performance.md), so the default stops there; a count that is asked for is given.
    pub fn new(count: Option<usize>) -> Result<Self> {
        let count = count.unwrap_or_else(|| {
            let cores = available_parallelism().map_or(1, NonZero::get);
            Config::DEFAULT_WORKERS.min(cores)
        });
        let refused =
            |error| Error::new(ErrorKind::System, "the copy workers could not be started").because(error);
        let pool = ThreadPoolBuilder::new()
            // One thread is needed even for a single worker: the ring drains on it.
            .num_threads(count.saturating_sub(1).max(1))
            .thread_name(|index| format!("llm-copy-{index}"))
            // A panic inside a job is recorded by the job (`Inside`), which fails its caller; the pool lives on.
            .panic_handler(|_| {})
            .build()
            .map_err(refused)?;
        Ok(Workers { pool, count })
    }

    /// How many work at most on one job.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Runs `task` on a worker, some time soon.
    pub fn spawn(&self, task: impl FnOnce() + Send + 'static) {
        self.pool.spawn(task);
    }

    /// Does units `0..units` of `work` and returns when nobody touches it any more. After a failure, or once the
    /// deadline has passed, no further unit is started.
    pub fn run(&self, work: Arc<impl Work>, units: usize, deadline: Deadline) -> Result<()> {
        let job = Arc::new(Job {
            work,
            units,
            deadline,
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            state: Mutex::new(State::default()),
            left: Condvar::new(),
        });
        for _ in 1..self.count.min(units) {
            let job = job.clone();
            self.pool.spawn(move || job.help());
        }
        job.help();
        job.close()
    }
}

struct Job<W> {
    work: Arc<W>,
    units: usize,
    deadline: Deadline,
    next: AtomicUsize,
    stop: AtomicBool,
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Default)]
struct State {
    inside: usize,
    closed: bool,
    failure: Option<Error>,
}

impl<W: Work> Job<W> {
    /// Takes units until there are none, unless the job is already closed.
    fn help(&self) {
        let Some(inside) = Inside::enter(self) else { return };
        while !self.stop.load(Ordering::Relaxed) {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.units {
                break;
            }
            // The first unit of all runs even if the deadline is very short: a small copy never times out spuriously.
            let in_time = if index == 0 { Ok(()) } else { self.deadline.check("copying") };
            if let Err(error) = in_time.and_then(|()| self.work.unit(index)) {
                inside.fail(error);
            }
        }
    }

    /// Lets nobody in any more, waits for those inside, and returns the first failure.
    fn close(&self) -> Result<()> {
        let mut state = self.locked();
        state.closed = true;
        while state.inside > 0 {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failure.take().map_or(Ok(()), Err)
    }
}

impl<W> Job<W> {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A worker inside a job. Leaves on drop, also when the work panics: then the job has failed.
struct Inside<'a, W> {
    job: &'a Job<W>,
}

impl<'a, W> Inside<'a, W> {
    fn enter(job: &'a Job<W>) -> Option<Self> {
        let mut state = job.locked();
        if state.closed {
            return None;
        }
        state.inside += 1;
        drop(state);
        Some(Inside { job })
    }

    fn fail(&self, error: Error) {
        self.job.stop.store(true, Ordering::Relaxed);
        self.job.locked().failure.get_or_insert(error);
    }
}

impl<W> Drop for Inside<'_, W> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(Error::new(ErrorKind::System, "a copy worker panicked"));
        }
        let mut state = self.job.locked();
        state.inside -= 1;
        if state.inside == 0 {
            self.job.left.notify_all();
        }
    }
}
