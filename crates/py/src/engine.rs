//! Calls into the engine: the check of the process, detaching from the interpreter, Ctrl-C, and the mapping of errors.
//!
//! Except for `hixl::engine`, nothing else in this crate detaches from the interpreter.

use std::cell::Cell;
use std::net::SocketAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use llm_datadist_core::bindings::{Config, DataDist, Mode};
use llm_datadist_core::bindings::{remember_process, this_process};
use llm_datadist_core::{ClusterId, Deadline, Error, ErrorKind, Result};
use pyo3::prelude::*;

use crate::error::{self, Codes, Raise};

/// A shared object of an engine that only the process which created it releases.
///
/// A forked child has a copy of the handle, but not the threads behind it, and its locks may be held. So the child leaks
/// the object instead of dropping it (`tests/test_lifecycle.py`).
pub(crate) struct ProcessOwned<T: Send + Sync> {
    process: u32,
    value: Option<Arc<T>>,
}

impl<T: Send + Sync> ProcessOwned<T> {
    /// Holds `value` for the current process.
    pub(crate) fn new(value: Arc<T>) -> Self {
        ProcessOwned { process: this_process(), value: Some(value) }
    }

    /// Returns the object.
    pub(crate) fn get(&self) -> Result<&Arc<T>> {
        self.value.as_ref().ok_or_else(|| Error::new(ErrorKind::Closed, "the object was released"))
    }

    /// Returns the object in the process that created it. In a forked child, locks of the copy may be held forever.
    pub(crate) fn own(&self) -> Result<&Arc<T>> {
        if self.process == this_process() { self.get() } else { Err(forked()) }
    }

    /// Releases the object on a thread that is already detached from the interpreter.
    fn release(mut self) {
        drop(self.last());
    }

    /// Takes the object out if this was the last reference to it in the process that created it.
    fn last(&mut self) -> Option<T> {
        let value = self.value.take()?;
        if self.process == this_process() {
            Arc::into_inner(value)
        } else {
            std::mem::forget(value);
            None
        }
    }
}

/// The last reference is dropped while detached from the interpreter, because it may unmap gigabytes
/// (`tests/test_views.py`). The deleter of a capsule may run on any thread, and when there is no interpreter any more.
impl<T: Send + Sync> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        let Some(last) = self.last() else { return };
        let mut last = Some(last);
        Python::try_attach(|py| py.detach(|| drop(last.take())));
    }
}

/// Counts the engines of this process, so that each has a unique number.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// The engine that a Python object holds: open, or closed for good. The objects of both APIs may share one, and fail with other
/// exceptions.
pub(crate) struct Engine {
    codes: Codes,
    raise: Raise,
    opened: Arc<OpenedEngine>,
}

/// What all references to an engine share.
struct OpenedEngine {
    process: u32,
    cluster: ClusterId,
    one_sided: bool,
    mode: Mode,
    number: u64,
    /// Whether calls are refused, because the engine closes.
    closing: AtomicBool,
    /// Where it listened when it was opened.
    first_address: Option<SocketAddr>,
    /// Where it listened when it was closed.
    last_address: OnceLock<Option<SocketAddr>>,
    open: RwLock<Option<ProcessOwned<DataDist>>>,
}

impl Engine {
    /// Opens an engine whose calls fail with the exceptions of `raise`.
    pub(crate) fn open(py: Python<'_>, config: Config, raise: Raise) -> PyResult<Self> {
        let (cluster, one_sided, mode) = (config.cluster, config.remote_accessible, config.mode);
        let codes = error::codes_of(mode);
        remember_process();
        crate::log::install();
        let engine = detached(py, raise, || Ok(DataDist::open(config)?.interrupted_by(interrupted)))?;
        let opened = OpenedEngine {
            process: this_process(),
            cluster,
            one_sided,
            mode,
            number: OPENED.fetch_add(1, Ordering::Relaxed),
            closing: AtomicBool::new(false),
            first_address: engine.listening(),
            last_address: OnceLock::new(),
            open: RwLock::new(Some(ProcessOwned::new(Arc::new(engine)))),
        };
        Ok(Engine { codes, raise, opened: Arc::new(opened) })
    }

    /// Returns the same engine for callers whose calls fail with the exceptions of `raise`.
    pub(crate) fn failing_with(&self, raise: Raise) -> Self {
        Engine { codes: self.codes, raise, opened: self.opened.clone() }
    }

    /// Runs `call` on the engine, detached from the interpreter, and maps its error.
    pub(crate) fn enter<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&DataDist) -> Result<T> + Send,
    ) -> PyResult<T> {
        detached(py, self.raise, || call(&*self.engine()?))
    }

    /// Runs `call` on the engine without detaching from the interpreter. It neither waits nor moves more bytes than a short call, which
    /// takes less time than detaching and attaching again beside a busy thread.
    pub(crate) fn attached<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&DataDist) -> Result<T>,
    ) -> PyResult<T> {
        self.attached_to(py, self.engine(), call)
    }

    /// Does the same as [`attached`](Self::attached), also while the engine closes.
    pub(crate) fn attached_while_open<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&DataDist) -> Result<T>,
    ) -> PyResult<T> {
        self.attached_to(py, self.held(), call)
    }

    fn attached_to<T>(
        &self,
        py: Python<'_>,
        engine: Result<Arc<DataDist>>,
        call: impl FnOnce(&DataDist) -> Result<T>,
    ) -> PyResult<T> {
        let engine = engine.map_err(|error| (self.raise)(py, &error))?;
        let result = survived(|| call(&engine)).map_err(|error| (self.raise)(py, &error));
        // If another thread has closed the engine meanwhile, this is its end, which may wait for threads.
        if let Some(last) = Arc::into_inner(engine) {
            py.detach(|| drop(last));
        }
        result
    }

    /// Returns the function that gives the status code of an error kind for this engine.
    pub(crate) fn codes(&self) -> Codes {
        self.codes
    }

    /// Returns its cluster id.
    pub(crate) fn cluster(&self) -> ClusterId {
        self.opened.cluster
    }

    /// Whether transfers are one-sided (`llm.EnableRemoteCacheAccessible`).
    pub(crate) fn one_sided(&self) -> bool {
        self.opened.one_sided
    }

    /// Returns which manager it serves.
    pub(crate) fn mode(&self) -> Mode {
        self.opened.mode
    }

    /// Returns its number, which no other engine of this process ever has.
    pub(crate) fn number(&self) -> u64 {
        self.opened.number
    }

    /// Closes the engine. Later calls fail, running calls end normally, and memory lives as long as views of it.
    pub(crate) fn close(&self, py: Python<'_>) {
        // In a forked child the lock may be held forever, so nothing is done there.
        if self.opened.process == this_process() {
            py.detach(|| {
                let held = self.opened.open.write().unwrap_or_else(PoisonError::into_inner).take();
                held.map(|engine| {
                    // Other threads may still be in calls of the engine, and keep it for a while.
                    let _ = engine.get().map(|engine| {
                        let _ = self.opened.last_address.set(engine.listening());
                        engine.end_transfers();
                    });
                    engine.release();
                })
            });
        }
    }

    /// Refuses new calls from now on, waits until no asynchronous call runs, at most `limit`, and closes the engine. If a signal
    /// handler raises meanwhile, the engine stays as it is, and refuses calls.
    pub(crate) fn close_within(&self, py: Python<'_>, limit: Duration) -> PyResult<()> {
        let open = if limit.is_zero() { None } else { self.held().ok() };
        self.opened.closing.store(true, Ordering::Release);
        if let Some(engine) = open {
            // This reference ends before `close`, so that the engine ends there.
            detached(py, self.raise, move || engine.drain(limit))?;
        }
        self.close(py);
        Ok(())
    }

    /// Returns the address at which the engine listens, or listened until it was closed.
    pub(crate) fn address(&self, py: Python<'_>) -> Option<String> {
        let closed = || self.opened.last_address.get().copied().unwrap_or(self.opened.first_address);
        let at = self.attached_while_open(py, |engine| Ok(engine.listening())).unwrap_or_else(|_| closed());
        at.map(|at| at.to_string())
    }

    /// Whether calls are refused: the engine was closed, or closes, or belongs to the parent of this process.
    pub(crate) fn closed(&self) -> bool {
        self.is_inherited() || self.opened.closing.load(Ordering::Acquire) || !self.is_open()
    }

    /// Whether it was opened in this process and not closed yet.
    pub(crate) fn is_open(&self) -> bool {
        self.held().is_ok()
    }

    /// Whether this process is a forked child of the one that opened the engine.
    pub(crate) fn is_inherited(&self) -> bool {
        self.opened.process != this_process()
    }

    fn engine(&self) -> Result<Arc<DataDist>> {
        if self.opened.closing.load(Ordering::Acquire) && !self.is_inherited() {
            Err(Error::closed())
        } else {
            self.held()
        }
    }

    fn held(&self) -> Result<Arc<DataDist>> {
        if self.is_inherited() {
            return Err(forked());
        }
        match self.opened.open.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
            Some(engine) => engine.get().map(Arc::clone),
            None => Err(Error::closed()),
        }
    }
}

#[cold]
pub(crate) fn forked() -> Error {
    let text = "this process was forked after the engine was opened; the engine belongs to its parent";
    Error::new(ErrorKind::Forked, text)
}

/// Runs `call`, which waits until `deadline` at most, detached from the interpreter. A signal handler that raises ends it
/// early. Errors become the exceptions of `raise`.
pub(crate) fn waiting<T: Send>(
    py: Python<'_>,
    raise: Raise,
    deadline: Deadline,
    call: impl FnOnce(Deadline) -> Result<T> + Send,
) -> PyResult<T> {
    detached(py, raise, || call(deadline.watched(Some(interrupted))))
}

/// Runs `call`, which does not use the engine, detached from the interpreter.
pub(crate) fn allow_threads<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> T {
    py.detach(call)
}

/// Closes the sockets that a forked child inherited, so that peers notice when the parent has ended.
#[pyfunction]
pub(crate) fn abandon_sockets() {
    llm_datadist_core::bindings::abandon_sockets();
}

/// Runs `call`, which neither blocks nor moves bytes, without detaching from the interpreter.
pub(crate) fn attached<T>(py: Python<'_>, raise: Raise, call: impl FnOnce() -> Result<T>) -> PyResult<T> {
    survived(call).map_err(|error| raise(py, &error))
}

thread_local! {
    /// The exception that a signal handler raised while this thread waited in the engine.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
}

/// Whether a signal handler raised an exception. The engine calls this from time to time on the thread of a waiting call,
/// which then fails with that exception (`tests/test_link_arguments.py`).
fn interrupted() -> bool {
    let asked = Python::try_attach(|py| match py.check_signals() {
        Ok(()) => false,
        Err(raised) => {
            RAISED.set(Some(raised));
            true
        }
    });
    asked.unwrap_or(false)
}

fn detached<T: Send>(py: Python<'_>, raise: Raise, call: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let result = py.detach(|| survived(call));
    match RAISED.take() {
        Some(raised) => Err(raised),
        None => result.map_err(|error| raise(py, &error)),
    }
}

/// Turns a panic of the engine into an error, because `except Exception` does not catch a `PanicException`.
fn survived<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    // Unwind safe: what outlives the call is behind locks of the engine that stay consistent, and nothing that the call
    // borrowed is used again.
    panic::catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|cause| {
        let text =
            cause.downcast_ref::<&str>().copied().or(cause.downcast_ref::<String>().map(String::as_str));
        Err(Error::new(
            ErrorKind::System,
            format!("the engine panicked: {}", text.unwrap_or("no reason given")),
        ))
    })
}
