//! The door between Python and the engine: which process it belongs to, the detach, and the error mapping.
//!
//! Not for: conversions, or any one operation. Nothing else in this crate detaches from the interpreter.

use std::process;
use std::sync::{Arc, PoisonError, RwLock};

use llm_datadist_core::{Config, DataDist, Error, ErrorKind, Result};
use pyo3::prelude::*;

use crate::error;

/// A shared engine object that only the process which made it may release.
///
/// A forked child has a copy of the handle, but not the threads behind it, and locks in whatever state they were in:
/// there the object is left alone for ever instead of being dropped (test: `tests/test_lifecycle.py`).
pub(crate) struct Held<T> {
    process: u32,
    value: Option<Arc<T>>,
}

impl<T> Held<T> {
    /// Holds `value` for the current process.
    pub(crate) fn new(value: Arc<T>) -> Self {
        Held { process: process::id(), value: Some(value) }
    }

    /// The object, which is there until drop.
    pub(crate) fn get(&self) -> Result<&Arc<T>> {
        self.value.as_ref().ok_or_else(|| Error::new(ErrorKind::Closed, "the object was released"))
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        if self.process != process::id() {
            std::mem::forget(self.value.take());
        }
    }
}

/// The engine as Python holds it: open, or closed for ever.
pub(crate) struct Engine {
    process: u32,
    open: RwLock<Option<Held<DataDist>>>,
}

impl Engine {
    /// Opens an engine.
    pub(crate) fn open(py: Python<'_>, config: Config) -> PyResult<Self> {
        let engine = detached(py, || DataDist::open(config))?;
        Ok(Engine { process: process::id(), open: RwLock::new(Some(Held::new(Arc::new(engine)))) })
    }

    /// Runs `call` on the engine, detached from the interpreter, and maps its error.
    pub(crate) fn enter<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&DataDist) -> Result<T> + Send,
    ) -> PyResult<T> {
        detached(py, || call(&*self.engine()?))
    }

    /// Closes the engine: later calls fail, those under way end normally, memory lives as long as views of it.
    pub(crate) fn close(&self, py: Python<'_>) {
        // In a forked child another thread may have held the lock for ever: there the handle is merely forgotten.
        if self.process == process::id() {
            py.detach(|| drop(self.open.write().unwrap_or_else(PoisonError::into_inner).take()));
        }
    }

    fn engine(&self) -> Result<Arc<DataDist>> {
        if self.process != process::id() {
            let text = "this process was forked after init; the engine belongs to its parent";
            return Err(Error::new(ErrorKind::Forked, text));
        }
        match self.open.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
            Some(engine) => engine.get().map(Arc::clone),
            None => Err(Error::new(ErrorKind::Closed, "the engine was finalized")),
        }
    }
}

fn detached<T: Send>(py: Python<'_>, call: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    py.detach(call).map_err(|error| error::raise(py, &error))
}
