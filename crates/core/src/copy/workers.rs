//! The copy workers: the calling thread, and rayon threads that live as long as the engine.
//!
//! A job is cut into units of equal bytes. Every worker takes the next unit until none is left, so tensors
//! and blocks of any size keep all workers busy. A call never waits for a worker that has not started: the
//! calling thread works too, closes the job when no unit is left, and then waits only for the workers inside.

use std::sync::{Arc, mpsc};
use std::thread::{Builder, JoinHandle, current};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::Limit;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, OnDrop, Ordering};

/// Longest wait for a thread to start. A thread that is later is no error.
const START: Duration = Duration::from_secs(1);

/// Work that is cut into units, which may run in any order and at the same time. It is called with the index of
/// each unit.
pub trait Work: Fn(usize) -> Result<()> + Send + Sync + 'static {}

impl<F: Fn(usize) -> Result<()> + Send + Sync + 'static> Work for F {}

/// Persistent workers. Drop joins their threads.
#[derive(Debug)]
pub struct Workers {
    /// `None` only during drop.
    pool: Option<ThreadPool>,
    threads: Vec<JoinHandle<()>>,
    count: usize,
}

impl Workers {
    /// Starts `count` workers, including the calling thread, or [`Config::DEFAULT_WORKERS`] if `count` is
    /// `None`. Each thread is named `role` and a number, of which the kernel shows 15 bytes
    /// (`tests/test_engine_threads.py`). Returns `Err(System)` if a thread cannot be started.
    pub fn new(role: &str, count: Option<usize>) -> Result<Self> {
        let count = count.unwrap_or(Config::DEFAULT_WORKERS);
        let refused =
            |error| Error::new(ErrorKind::System, "the copy workers could not be started").because(error);
        let mut threads = Vec::new();
        // At least one, for spawned tasks: the ring drains on a set of workers of its own.
        let helpers = count.saturating_sub(1).max(1);
        let pool = ThreadPoolBuilder::new()
            .num_threads(helpers)
            .spawn_handler(|thread| {
                let named = Builder::new().name(format!("{role}-{}", thread.index()));
                threads.push(named.spawn(|| thread.run())?);
                Ok(())
            })
            // The job records a panic (`Participant`) and fails its caller. The pool survives.
            .panic_handler(|_| {})
            .build()
            .map_err(refused)?;
        // The first thread of a process that waits for work initializes a lock of `crossbeam-epoch`. A child that is
        // forked in that moment could not start workers of its own, so this waits until a thread is past it
        // (`child_has_no_handles_of_its_parent_and_may_create_its_own` in the C library).
        let (started, is_started) = mpsc::sync_channel(1);
        pool.spawn(move || {
            let _ = started.try_send(());
        });
        let _ = is_started.recv_timeout(START);
        Ok(Workers { pool: Some(pool), threads, count })
    }

    /// Maximum number of threads that work on one job, including the calling thread.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Queues `task` for a worker thread and returns at once.
    pub fn spawn(&self, task: impl FnOnce() + Send + 'static) {
        if let Some(pool) = &self.pool {
            pool.spawn(task);
        }
    }

    /// Runs units `0..units` of `work`, and returns when no thread touches `work` any more. After a failure,
    /// or once a [`Limit::Whole`] has passed, no further unit starts. Returns the first failure.
    pub fn run(&self, work: Arc<impl Work>, units: usize, limit: impl Into<Limit>) -> Result<()> {
        let job = Arc::new(CopyJob {
            units,
            limit: limit.into(),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            state: Mutex::new(State { work: Some(work), inside: 0, failure: None }),
            left: Condvar::new(),
        });
        for _ in 1..self.count.min(units) {
            let job = job.clone();
            self.spawn(move || job.help());
        }
        // Also closes the job if the work panics on this thread, so that code that catches the panic finds no
        // worker inside.
        let closing = OnDrop(|| job.close());
        job.help();
        drop(closing);
        job.outcome()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        // Makes the threads end once their queue is empty.
        drop(self.pool.take());
        for thread in self.threads.drain(..) {
            // A worker that drops the last handle of its engine cannot join itself. It is about to end.
            if thread.thread().id() != current().id() {
                let _ = thread.join();
            }
        }
    }
}

struct CopyJob<W> {
    units: usize,
    limit: Limit,
    next: AtomicUsize,
    stop: AtomicBool,
    state: Mutex<State<W>>,
    left: Condvar,
}

struct State<W> {
    /// `None` once the job is closed, so that a late worker finds no work and keeps nothing alive.
    work: Option<Arc<W>>,
    inside: usize,
    failure: Option<Error>,
}

impl<W: Work> CopyJob<W> {
    /// Runs units until none is left, unless the job is already closed.
    fn help(&self) {
        let Some(mut inside) = Participant::enter(self) else { return };
        while !self.stop.load(Ordering::Relaxed) {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.units {
                break;
            }
            // The first unit runs even if the deadline is very short, so that a small transfer never times
            // out spuriously.
            let in_time = if index == 0 { Ok(()) } else { self.limit.check("copying") };
            if let Err(error) = in_time.and_then(|()| inside.unit(index)) {
                inside.fail(error);
            }
        }
        inside.done = true;
    }
}

impl<W> CopyJob<W> {
    /// Lets no further worker in, and waits for those inside.
    fn close(&self) {
        let mut state = self.state.lock();
        state.work = None;
        while state.inside > 0 {
            state = self.left.wait(state);
        }
    }

    /// Returns the first failure, if there is one.
    fn outcome(&self) -> Result<()> {
        self.state.lock().failure.take().map_or(Ok(()), Err)
    }
}

/// A worker inside a job; it leaves on drop. If `done` is not set by then, its work panicked and the job has
/// failed.
struct Participant<'a, W> {
    job: &'a CopyJob<W>,
    work: Option<Arc<W>>,
    done: bool,
}

impl<'a, W: Work> Participant<'a, W> {
    fn enter(job: &'a CopyJob<W>) -> Option<Self> {
        let mut state = job.state.lock();
        let work = state.work.clone()?;
        state.inside += 1;
        drop(state);
        Some(Participant { job, work: Some(work), done: false })
    }

    fn unit(&self, index: usize) -> Result<()> {
        self.work.as_ref().map_or(Ok(()), |work| work(index))
    }
}

impl<W> Participant<'_, W> {
    fn fail(&self, error: Error) {
        self.job.stop.store(true, Ordering::Relaxed);
        self.job.state.lock().failure.get_or_insert(error);
    }
}

impl<W> Drop for Participant<'_, W> {
    fn drop(&mut self) {
        if !self.done {
            self.fail(Error::new(ErrorKind::System, "a copy worker panicked"));
        }
        // Before leaving: once no worker is inside, none of them holds the work.
        self.work = None;
        let mut state = self.job.state.lock();
        state.inside -= 1;
        if state.inside == 0 {
            self.job.left.notify_all();
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
