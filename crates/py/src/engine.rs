//! Calls into the engine: the check of the process, detaching from the interpreter, Ctrl-C, and the mapping of errors.
//!
//! Nothing else in this crate detaches from the interpreter.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, PoisonError, RwLock};

use llm_datadist_core::bindings::{remember_process, this_process};
use llm_datadist_core::{Config, DataDist, Deadline, Error, ErrorKind, Mode, Result};
use pyo3::prelude::*;

use crate::error::{self, Codes};

/// A shared engine object that only the process which made it may release.
///
/// A forked child has a copy of the handle, but not the threads behind it, and locks in whatever state they were in:
/// there the object is left alone for ever instead of being dropped (test: `tests/test_lifecycle.py`).
pub(crate) struct Held<T: Send + Sync> {
    process: u32,
    value: Option<Arc<T>>,
}

impl<T: Send + Sync> Held<T> {
    /// Holds `value` for the current process.
    pub(crate) fn new(value: Arc<T>) -> Self {
        Held { process: this_process(), value: Some(value) }
    }

    /// The object, which is there until drop.
    pub(crate) fn get(&self) -> Result<&Arc<T>> {
        self.value.as_ref().ok_or_else(|| Error::new(ErrorKind::Closed, "the object was released"))
    }

    /// The object, in the process that made it: locks of a forked child's copy may never open.
    pub(crate) fn own(&self) -> Result<&Arc<T>> {
        if self.process == this_process() { self.get() } else { Err(forked()) }
    }

    /// Lets go on a thread that is detached already.
    fn release(mut self) {
        drop(self.last());
    }

    /// The object, if this was the last reference to it in the process that made it.
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

/// The last reference may unmap a pool of gigabytes, so it goes detached (test: `tests/test_views.py`). Python drops its
/// objects attached; the deleter of a capsule may come from any thread, and at a time when there is no interpreter.
impl<T: Send + Sync> Drop for Held<T> {
    fn drop(&mut self) {
        let Some(last) = self.last() else { return };
        let mut last = Some(last);
        Python::try_attach(|py| py.detach(|| drop(last.take())));
    }
}

/// The engine as Python holds it: open, or closed for ever.
pub(crate) struct Engine {
    process: u32,
    codes: Codes,
    open: RwLock<Option<Held<DataDist>>>,
}

impl Engine {
    /// Opens an engine.
    pub(crate) fn open(py: Python<'_>, config: Config) -> PyResult<Self> {
        let codes = error::codes_of(config.mode);
        remember_process();
        crate::log::install();
        let engine = detached(py, codes, || Ok(DataDist::open(config)?.interrupted_by(interrupted)))?;
        Ok(Engine { process: this_process(), codes, open: RwLock::new(Some(Held::new(Arc::new(engine)))) })
    }

    /// Runs `call` on the engine, detached from the interpreter, and maps its error.
    pub(crate) fn enter<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&DataDist) -> Result<T> + Send,
    ) -> PyResult<T> {
        detached(py, self.codes, || call(&*self.engine()?))
    }

    /// Which code a kind of error has here.
    pub(crate) fn codes(&self) -> Codes {
        self.codes
    }

    /// Closes the engine: later calls fail, those under way end normally, memory lives as long as views of it.
    pub(crate) fn close(&self, py: Python<'_>) {
        // In a forked child another thread may have held the lock for ever: there the handle is merely forgotten.
        if self.process == this_process() {
            py.detach(|| {
                let held = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
                held.map(Held::release)
            });
        }
    }

    fn engine(&self) -> Result<Arc<DataDist>> {
        if self.process != this_process() {
            return Err(forked());
        }
        match self.open.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
            Some(engine) => engine.get().map(Arc::clone),
            None => Err(Error::new(ErrorKind::Closed, "the engine was finalized")),
        }
    }
}

#[cold]
fn forked() -> Error {
    let text = "this process was forked after init; the engine belongs to its parent";
    Error::new(ErrorKind::Forked, text)
}

/// Runs `call`, which waits until `deadline` at most, detached; a signal handler that raises ends it early.
pub(crate) fn waiting<T: Send>(
    py: Python<'_>,
    deadline: Deadline,
    call: impl FnOnce(Deadline) -> Result<T> + Send,
) -> PyResult<T> {
    detached(py, error::codes_of(Mode::CacheManager), || call(deadline.watched(Some(interrupted))))
}

/// Runs `call`, which does not use the engine, detached from the interpreter.
pub(crate) fn allow_threads<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> T {
    py.detach(call)
}

/// Closes in a forked child the sockets it inherited, so that peers notice when the parent is gone.
#[pyfunction]
pub(crate) fn abandon_sockets() {
    llm_datadist_core::bindings::abandon_sockets();
}

/// Runs `call`, which neither blocks nor moves bytes, without detaching.
pub(crate) fn attached<T>(py: Python<'_>, call: impl FnOnce() -> Result<T>) -> PyResult<T> {
    survived(call).map_err(|error| error::raise(py, &error))
}

thread_local! {
    /// What a signal handler raised while this thread waited in the engine.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
}

/// Whether a signal handler raised meanwhile: the engine asks now and then on the thread of a call that waits, and the
/// call then fails with what was raised (test: `tests/test_link_arguments.py`).
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

fn detached<T: Send>(py: Python<'_>, codes: Codes, call: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let result = py.detach(|| survived(call));
    match RAISED.take() {
        Some(raised) => Err(raised),
        None => result.map_err(|error| error::raise_as(py, &error, codes)),
    }
}

/// A panic of the engine as its error: `except Exception` is to catch it, which a `PanicException` escapes.
fn survived<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    // Unwind safe: what outlives a call is behind locks of the engine, which keep their data whole or are let go by
    // drop, and nothing that the call borrowed from here is looked at again.
    panic::catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|cause| {
        let text =
            cause.downcast_ref::<&str>().copied().or(cause.downcast_ref::<String>().map(String::as_str));
        Err(Error::new(
            ErrorKind::System,
            format!("the engine panicked: {}", text.unwrap_or("no reason given")),
        ))
    })
}
