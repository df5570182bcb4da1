//! One job in progress: its units, the threads inside, and whether its caller has left it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, OptionName, Result};
use crate::model::Deadline;
use crate::sync::guarded;
use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, Ordering, SPIN_BEFORE_PARK, poll};

/// Work that is cut into units, which may run in any order and at the same time. It is called with the index of
/// each unit.
pub trait Work: Fn(usize) -> Result<()> + Send + Sync + 'static {}

impl<F: Fn(usize) -> Result<()> + Send + Sync + 'static> Work for F {}

/// Name of the fact in an error after which the kernel may still write to the destination rows. Its value is
/// the id of the process that is read.
pub const STILL_READING: &str = "still_reading_pid";

/// How long a call that has ended waits for a kernel call that still makes progress. One unit takes a few
/// milliseconds.
const GRACE: Duration = Duration::from_millis(100);
const DOING: &str = "reading the memory of the peer's process";

/// One job in progress. Threads take its units one by one, until none is left or one has failed.
pub(super) struct UnitJob {
    units: usize,
    next: AtomicUsize,
    /// Number of units that are done.
    ended: AtomicUsize,
    stop: AtomicBool,
    /// No thread is inside, and no unit is left to start.
    over: AtomicBool,
    abandoned: AtomicBool,
    state: Mutex<State>,
    left: Condvar,
}

struct State {
    /// `None` once the caller has left, so that a late thread finds no work and keeps nothing alive.
    work: Option<Arc<dyn Work>>,
    /// Number of threads inside.
    inside: usize,
    failure: Option<Error>,
}

impl UnitJob {
    pub(super) fn new(work: Arc<dyn Work>, units: usize) -> Self {
        UnitJob {
            units,
            next: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            over: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            state: Mutex::new(State { work: Some(work), inside: 0, failure: None }),
            left: Condvar::new(),
        }
    }

    /// Runs units until none is left, unless the caller has left. A panic is a failure of the job.
    pub(super) fn help(&self) {
        let work = {
            let mut state = self.state.lock();
            let Some(work) = state.work.clone() else { return };
            state.inside += 1;
            work
        };
        let done = guarded("copying", || self.take(&*work));
        let done = done.unwrap_or_else(|| Err(Error::new(ErrorKind::System, "a copy worker panicked")));
        if done.is_err() {
            self.stop.store(true, Ordering::Relaxed);
        }
        // Before leaving: once no thread is inside, none of them holds the work.
        drop(work);
        let mut state = self.state.lock();
        state.inside -= 1;
        if let Err(error) = done {
            state.failure.get_or_insert(error);
        }
        let stopped = self.stop.load(Ordering::Relaxed);
        if state.inside == 0 && (stopped || self.next.load(Ordering::Relaxed) >= self.units) {
            self.over.store(true, Ordering::Release);
            self.left.notify_all();
        }
    }

    fn take(&self, work: &dyn Work) -> Result<()> {
        while !self.stop.load(Ordering::Relaxed) {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.units {
                break;
            }
            work(index)?;
            self.ended.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Lets no further thread in, waits for those inside, and returns the first failure.
    pub(super) fn close(&self) -> Result<()> {
        let mut state = self.state.lock();
        let work = state.work.take();
        self.stop.store(true, Ordering::Relaxed);
        while state.inside > 0 {
            state = self.left.wait(state);
        }
        let failure = state.failure.take();
        drop(state);
        drop(work);
        failure.map_or(Ok(()), Err)
    }

    /// Waits until no thread is inside and no unit is left, until the deadline, or until no unit has ended
    /// for `silence`. In the last two cases, threads that are still inside after [`GRACE`] keep the work, and
    /// the error carries [`STILL_READING`].
    pub(super) fn wait(&self, pid: i32, deadline: Deadline, silence: Option<Duration>) -> Result<()> {
        poll(SPIN_BEFORE_PARK, || self.over());
        let mut state = self.state.lock();
        let mut ended = Ok(());
        let mut last = (self.ended.load(Ordering::Relaxed), Instant::now());
        while !self.over() && ended.is_ok() {
            let wait_limit = deadline.wait_limit().min(silence.unwrap_or(Duration::MAX));
            state = self.left.wait_timeout(state, wait_limit).0;
            if !self.over() {
                // Without the lock, because a signal handler may use the engine.
                drop(state);
                ended = deadline.waiting(DOING).and_then(|()| self.check_silence(&mut last, silence));
                state = self.state.lock();
            }
        }
        // From here on, no thread can enter.
        let work = state.work.take();
        self.stop.store(true, Ordering::Relaxed);
        let grace = Instant::now() + GRACE;
        while state.inside > 0 {
            let left = grace.saturating_duration_since(Instant::now());
            // Once the job is over, a late thread finds no unit and leaves by itself.
            if left.is_zero() && !self.over() {
                self.abandoned.store(true, Ordering::Release);
                break;
            }
            let wait_limit = left.max(Duration::from_millis(1));
            state = self.left.wait_timeout(state, wait_limit).0;
        }
        let (failure, inside) = (state.failure.take(), state.inside);
        drop(state);
        drop(work);
        match (inside, failure) {
            (0, Some(error)) => Err(error),
            (0, None) => ended,
            (_, failure) => Err(still_reading(pid, ended.err().or(failure), deadline)),
        }
    }

    /// Returns `Err(Timeout)` once no unit has ended for `silence`. `last` is the number of ended units, and
    /// when it changed.
    fn check_silence(&self, last: &mut (usize, Instant), silence: Option<Duration>) -> Result<()> {
        let (now, Some(silence)) = (self.ended.load(Ordering::Relaxed), silence) else { return Ok(()) };
        if now != last.0 {
            *last = (now, Instant::now());
        } else if last.1.elapsed() >= silence {
            return Err(Deadline::after(silence)
                .named("the limit of silence")
                .error(DOING)
                .of_option(OptionName::SILENCE));
        }
        Ok(())
    }

    fn over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Whether the caller has left before the job ended.
    pub(super) fn abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }
}

/// Error of a call that returns before the kernel has finished.
fn still_reading(pid: i32, why: Option<Error>, deadline: Deadline) -> Error {
    let why = why.unwrap_or_else(|| deadline.error(DOING));
    let text = "the memory of the peer's process does not respond, and the kernel may still write to the destination rows: \
                they stay in use until the read or that process ends";
    Error::new(why.kind(), text).with(STILL_READING, pid).because(why)
}

#[cfg(all(test, loom))]
mod loom_tests;
