//! An asynchronous call and its event, as Python holds them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::{AwaitQueue, Deadline, Error, Event, Transfer as CoreTransfer};
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use crate::arguments::IntArg;
use crate::engine::{self, ProcessOwned};
use crate::error::{Codes, exception, raise};
use crate::python_types::PythonTypes;

/// A handle of an asynchronous call. Dropping it does not end the call.
#[pyclass(frozen, module = "llm_datadist.events")]
pub(crate) struct Transfer {
    transfer: ProcessOwned<CoreTransfer>,
    codes: Codes,
}

/// The event that an asynchronous call has ended.
#[pyclass(frozen, module = "llm_datadist.events")]
pub(crate) struct Completed {
    /// The call.
    #[pyo3(get)]
    transfer: Py<Transfer>,
}

/// What wakes one event loop of `asyncio`.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct LoopQueue {
    queue: Arc<AwaitQueue>,
}

impl Transfer {
    /// Creates a handle of `transfer`, whose failures get these codes.
    pub(crate) fn new(transfer: Arc<CoreTransfer>, codes: Codes) -> Self {
        Transfer { transfer: ProcessOwned::new(transfer), codes }
    }

    fn transfer(&self, py: Python<'_>) -> PyResult<&Arc<CoreTransfer>> {
        self.transfer.own().map_err(|error| raise(py, &error))
    }

    /// Waits until the call has ended, and takes its failure. Raises `TimeoutError` if it still runs.
    fn failure(&self, timeout_ms: IntArg<'_, '_>) -> PyResult<Option<PyErr>> {
        let (py, transfer) = (timeout_ms.py(), self.transfer(timeout_ms.py())?);
        if !transfer.done() {
            let limit = timeout_ms.optional::<u32>("timeout_ms")?;
            let limit = limit.map_or(Duration::MAX, |millis| Duration::from_millis(millis.into()));
            let deadline = Deadline::after(limit).named("timeout_ms");
            engine::waiting(py, deadline, |deadline| transfer.wait(deadline))?;
        }
        match transfer.outcome() {
            Some(outcome) => outcome.err().map(|error| exception(py, &error, self.codes)).transpose(),
            None => Err(PyTimeoutError::new_err("the transfer still runs")),
        }
    }
}

#[pymethods]
impl Transfer {
    /// Returns a number that no other transfer of this process has.
    #[getter]
    fn number(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.transfer(py)?.number())
    }

    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.transfer(py)?.done())
    }

    fn cancelled(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.transfer(py)?.cancelled())
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        let transfer = self.transfer(py)?;
        Ok(engine::allow_threads(py, || transfer.cancel()))
    }

    #[pyo3(signature = (timeout_ms=None))]
    fn result(&self, py: Python<'_>, timeout_ms: Option<IntArg<'_, '_>>) -> PyResult<()> {
        self.exception(py, timeout_ms)?.map_or(Ok(()), |failure| Err(PyErr::from_value(failure.into_bound(py))))
    }

    #[pyo3(signature = (timeout_ms=None))]
    fn exception(&self, py: Python<'_>, timeout_ms: Option<IntArg<'_, '_>>) -> PyResult<Option<Py<PyAny>>> {
        let none = py.None();
        let none = IntArg::extract(none.bind_borrowed(py))?;
        let failure = self.failure(timeout_ms.unwrap_or(none))?;
        Ok(failure.map(|failure| failure.into_value(py).into_any()))
    }

    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.transfer(py)?.progress().done)
    }

    #[getter]
    fn nanos(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.transfer(py)?.nanos())
    }

    fn progress(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let progress = self.transfer(py)?.progress();
        Ok((progress.done, progress.total))
    }

    fn __await__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        let py = slf.py();
        let waiting = PythonTypes::get(py)?.await_transfer.call1(py, (slf,))?;
        waiting.call_method0(py, "__await__")
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Ok(other) = other.cast::<Transfer>() else { return Ok(false) };
        Ok(self.number(py)? == other.get().number(py)?)
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<u64> {
        let mut hasher = DefaultHasher::new();
        self.number(py)?.hash(&mut hasher);
        Ok(hasher.finish())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let transfer = self.transfer(py)?;
        let state = match transfer.peek() {
            None => "running".to_owned(),
            Some(Ok(bytes)) => format!("done, bytes={bytes}"),
            Some(Err(error)) => format!("failed: {error}"),
        };
        Ok(format!("Transfer(number={}, {state})", transfer.number()))
    }
}

#[pymethods]
impl Completed {
    #[classattr]
    fn __match_args__() -> (&'static str,) {
        ("transfer",)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Completed({})", self.transfer.get().__repr__(py)?))
    }
}

#[pymethods]
impl LoopQueue {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let queue = AwaitQueue::new().map_err(|error| raise(py, &error))?;
        Ok(LoopQueue { queue: Arc::new(queue) })
    }

    fn fileno(&self) -> RawFd {
        self.queue.descriptor().as_raw_fd()
    }

    /// Has the queue informed of the end of a transfer. Returns `False` if it has ended already.
    fn add(&self, py: Python<'_>, transfer: &Bound<'_, Transfer>) -> PyResult<bool> {
        Ok(transfer.get().transfer(py)?.wake(&self.queue))
    }

    /// Takes the numbers of the transfers that have ended.
    fn take(&self) -> Vec<u64> {
        self.queue.take()
    }
}

/// Returns an event as Python sees it.
pub(crate) fn event(py: Python<'_>, event: Event, codes: Codes) -> PyResult<Py<PyAny>> {
    match event {
        Event::Completed(transfer) => {
            let transfer = Py::new(py, Transfer::new(transfer, codes))?;
            Ok(Py::new(py, Completed { transfer })?.into_any())
        }
        other => {
            let text = format!("an event that this binding does not know: {other:?}");
            Err(raise(py, &Error::new(llm_datadist_core::ErrorKind::System, text)))
        }
    }
}
