//! A bounded queue of the engine's log lines, which Python empties.
//!
//! Engine threads never call Python. They add a line and write one byte to a socket, which a Python thread reads
//! (`llm_datadist.engine_log`). Levels and formats are those of Python's logging.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use llm_datadist_core::bindings::{above_standard_streams, engine_of_thread};
use llm_datadist_embed::{Level, Line, Sink, install_log};
use pyo3::prelude::*;

use crate::python_types::PythonTypes;

/// Maximum number of lines in a queue. Beyond it, the oldest are dropped and counted
/// (`test_log_that_nobody_reads_is_bounded`).
const MAX_WAITING: usize = 1024;

/// The queue of the first process. Each forked child appends one of its own.
static FIRST: Generation = Generation::new();
/// How many forks lie between the first process and this one.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// The queue of one generation of forked processes. A child cannot use the queue of its parent, because a thread that the
/// child does not have may hold its lock (`test_forked_child_logs_and_exits`).
struct Generation {
    queue: Mutex<Queue>,
    child: OnceLock<&'static Generation>,
}

impl Generation {
    const fn new() -> Generation {
        Generation { queue: Mutex::new(Queue::new()), child: OnceLock::new() }
    }

    /// Returns the generation of this process.
    fn of_this_process() -> &'static Generation {
        let forks = FORKS.load(Ordering::Relaxed);
        std::iter::successors(Some(&FIRST), |parent| parent.child.get().copied()).nth(forks).unwrap_or(&FIRST)
    }
}

struct Queue {
    waiting: VecDeque<Waiting>,
    /// Lines dropped since Python last took lines.
    dropped: u64,
    /// The descriptor that wakes the Python thread, while there is one.
    wake: Option<UnixStream>,
    /// Whether the descriptor holds an unread byte.
    woken: bool,
}

/// A line, the name of its thread, and its time in seconds since 1970.
struct Waiting(Line, String, f64);

/// A line for Python: level, target, text, file, line, thread, time.
type Taken = (u8, &'static str, String, &'static str, u32, String, f64);

impl Queue {
    const fn new() -> Queue {
        Queue { waiting: VecDeque::new(), dropped: 0, wake: None, woken: false }
    }

    fn add(&mut self, waiting: Waiting) {
        if self.waiting.len() == MAX_WAITING {
            self.waiting.pop_front();
            self.dropped += 1;
        }
        self.waiting.push_back(waiting);
        self.ring();
    }

    fn ring(&mut self) {
        if let Some(wake) = self.wake.as_mut().filter(|_| !self.woken) {
            // Fails only if nobody reads.
            self.woken = wake.write(&[1]).is_ok();
        }
    }
}

/// Returns the queue of this process.
fn queue() -> MutexGuard<'static, Queue> {
    Generation::of_this_process().queue.lock().unwrap_or_else(PoisonError::into_inner)
}

struct ToPython;

impl Sink for ToPython {
    fn wants(&self, level: Level) -> bool {
        level <= Level::DEBUG
    }

    fn take(&self, line: Line) {
        let thread = thread::current().name().unwrap_or("unnamed").to_owned();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        queue().add(Waiting(line, thread, now));
    }
}

/// Sends the engine's lines to the queue. The extension has its own copy of `tracing`, so this does not affect other parts
/// of the process.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        install_log(ToPython, engine_of_thread);
    });
}

/// Hands the queued lines to Python's logging, so that they are logged before a call returns.
pub(crate) fn drain(py: Python<'_>) -> PyResult<()> {
    PythonTypes::get(py)?.drain_log.call0(py).map(drop)
}

/// Returns the outcome of a pull or push. If it has failed, drains the queue first, because the lines report broken links.
pub(crate) fn after_transfer<T>(py: Python<'_>, outcome: PyResult<T>) -> PyResult<T> {
    if outcome.is_err() {
        drain(py)?;
    }
    outcome
}

/// Returns a descriptor that becomes readable when lines are queued, which the caller closes.
#[pyfunction]
pub(crate) fn open_log() -> PyResult<i32> {
    let mut queue = queue();
    let (wake, reader) = UnixStream::pair()?;
    let [wake, reader] =
        [wake, reader].map(|end| above_standard_streams(end.into()).map_err(io::Error::from));
    let (wake, reader) = (UnixStream::from(wake?), reader?);
    wake.set_nonblocking(true)?;
    queue.wake = Some(wake);
    queue.woken = false;
    if !queue.waiting.is_empty() {
        queue.ring();
    }
    Ok(reader.into_raw_fd())
}

/// Ends the descriptor of `open_log`. A reader finds its end, even if a forked child holds it as well.
#[pyfunction]
pub(crate) fn close_log() {
    let wake = queue().wake.take();
    if let Some(wake) = wake {
        // Fails only if the other end is closed.
        let _ = wake.shutdown(Shutdown::Both);
    }
}

/// Returns how many lines were dropped, and the queued lines, oldest first.
#[pyfunction]
pub(crate) fn take_log() -> (u64, Vec<Taken>) {
    let mut queue = queue();
    queue.woken = false;
    let (dropped, waiting) = (std::mem::take(&mut queue.dropped), std::mem::take(&mut queue.waiting));
    drop(queue);
    let taken = |Waiting(line, thread, time): Waiting| {
        (level(line.level), line.target, line.text, line.file, line.line, thread, time)
    };
    (dropped, waiting.into_iter().map(taken).collect())
}

/// Gives a forked child a queue of its own.
#[pyfunction]
pub(crate) fn log_after_fork() {
    let parent = Generation::of_this_process();
    // The child has one thread, so nobody else sets this; the queue lasts as long as the process.
    if parent.child.set(Box::leak(Box::new(Generation::new()))).is_ok() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // A thread of the parent may have held the lock.
    if let Ok(mut queue) = parent.queue.try_lock() {
        queue.wake = None;
        queue.waiting.clear();
    }
}

/// Returns the number of a level in Python's logging.
fn level(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        _ => 10,
    }
}
