//! A bounded queue of the engine's log lines, which Python empties.
//!
//! Engine threads never call Python. They add a line and write one byte to a socket, which a Python thread reads
//! (`llm_datadist.engine_log`). Levels and formats are those of Python's logging.

use std::collections::VecDeque;
use std::io::Write;
use std::net::Shutdown;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use llm_datadist_core::{Level, Line, Sink, install_log};
use pyo3::prelude::*;

use crate::front::Front;

/// Lines that wait at most; the oldest go first, and are counted (`test_log_that_nobody_reads_is_bounded`).
const MOST: usize = 1024;
/// How many forks within forks have a log.
const GENERATIONS: usize = 64;

/// One queue for each generation of forked processes: a child cannot use its parent's, whose lock may have been held by
/// a thread that the child does not have (`test_forked_child_logs_and_exits`).
static QUEUES: [Mutex<Queue>; GENERATIONS] = [const { Mutex::new(Queue::new()) }; GENERATIONS];
static GENERATION: AtomicUsize = AtomicUsize::new(0);

struct Queue {
    waiting: VecDeque<Waiting>,
    /// Lines that were dropped since Python last looked.
    dropped: u64,
    /// Wakes the thread of Python, while there is one.
    wake: Option<UnixStream>,
    /// Whether a byte is on its way.
    woken: bool,
}

/// A line, the name of its thread, and seconds since 1970.
struct Waiting(Line, String, f64);

/// A line as Python takes it: level, target, text, file, line, thread, time.
type Taken = (u8, &'static str, String, &'static str, u32, String, f64);

impl Queue {
    const fn new() -> Queue {
        Queue { waiting: VecDeque::new(), dropped: 0, wake: None, woken: false }
    }

    fn add(&mut self, waiting: Waiting) {
        if self.waiting.len() == MOST {
            self.waiting.pop_front();
            self.dropped += 1;
        }
        self.waiting.push_back(waiting);
        self.ring();
    }

    fn ring(&mut self) {
        if let Some(wake) = self.wake.as_mut().filter(|_| !self.woken) {
            // Fails only if nobody reads, who then needs no waking.
            self.woken = wake.write(&[1]).is_ok();
        }
    }
}

/// The queue of this process; `None` after too many forks.
fn queue() -> Option<MutexGuard<'static, Queue>> {
    QUEUES.get(GENERATION.load(Ordering::Relaxed)).map(locked)
}

fn locked(queue: &'static Mutex<Queue>) -> MutexGuard<'static, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

struct ToPython;

impl Sink for ToPython {
    fn wants(&self, level: Level) -> bool {
        level <= Level::DEBUG
    }

    fn take(&self, line: Line) {
        let thread = thread::current().name().unwrap_or("unnamed").to_owned();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        if let Some(mut queue) = queue() {
            queue.add(Waiting(line, thread, now));
        }
    }
}

/// Sends the engine's lines to the queue. The extension has a copy of `tracing` for itself, so this is no subscriber of
/// any other part of the process.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        install_log(ToPython);
    });
}

/// Hands the lines that wait to Python's logging, so that the reasons of what a call says are there when it returns.
pub(crate) fn drain(py: Python<'_>) -> PyResult<()> {
    Front::get(py)?.drain_log.call0(py).map(drop)
}

/// Starts to wake whoever reads the descriptor that is returned, which is theirs to close; `None` after too many forks.
#[pyfunction]
pub(crate) fn open_log() -> PyResult<Option<i32>> {
    let Some(mut queue) = queue() else { return Ok(None) };
    let (wake, reader) = UnixStream::pair()?;
    wake.set_nonblocking(true)?;
    queue.wake = Some(wake);
    queue.woken = false;
    if !queue.waiting.is_empty() {
        queue.ring();
    }
    Ok(Some(reader.into_raw_fd()))
}

/// Ends the descriptor of `open_log`: who reads it finds its end, also where a forked child holds it too.
#[pyfunction]
pub(crate) fn close_log() {
    if let Some(wake) = queue().and_then(|mut queue| queue.wake.take()) {
        // Fails only if the other end is closed.
        let _ = wake.shutdown(Shutdown::Both);
    }
}

/// How many lines were dropped, and those that wait, oldest first.
#[pyfunction]
pub(crate) fn take_log() -> (u64, Vec<Taken>) {
    let Some((dropped, waiting)) = queue().map(|mut queue| {
        queue.woken = false;
        (std::mem::take(&mut queue.dropped), std::mem::take(&mut queue.waiting))
    }) else {
        return (0, Vec::new());
    };
    let taken = |Waiting(line, thread, time): Waiting| {
        (level(line.level), line.target, line.text, line.file, line.line, thread, time)
    };
    (dropped, waiting.into_iter().map(taken).collect())
}

/// To be called in a forked child, which has none of its parent's threads: from now on it has a queue of its own.
#[pyfunction]
pub(crate) fn log_after_fork() {
    let parents = GENERATION.fetch_add(1, Ordering::Relaxed);
    // A thread of the parent may have held the lock for ever.
    if let Some(Ok(mut queue)) = QUEUES.get(parents).map(Mutex::try_lock) {
        queue.wake = None;
        queue.waiting.clear();
    }
}

/// The number that Python's logging has for a level.
fn level(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        _ => 10,
    }
}
