//! A running layer-wise transfer, as the package's thread and the public `CacheTask` hold it.
//!
//! Only Python calls the synchronizer. The methods that its thread calls (`wanted`, `ready`, `not_ready`, `broken`) never
//! detach and never wait, so that a process can exit at any time.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::{AwaitQueue, CacheTask, Outcome, StatusCode};
use llm_datadist_core::{Deadline, Error, ErrorKind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arguments::IntArg;
use crate::engine::{self, ProcessOwned};
use crate::error::{Codes, exception, raise};
use crate::python_types::PythonTypes;

/// The handle of one transfer. Dropping it ends the destinations that still wait for a layer.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct TransferTask {
    task: ProcessOwned<CacheTask>,
    codes: Codes,
}

impl TransferTask {
    /// Creates a handle of `task`, whose failures get these codes.
    pub(crate) fn new(task: CacheTask, codes: Codes) -> Self {
        TransferTask { task: ProcessOwned::new(Arc::new(task)), codes }
    }

    fn code(&self, py: Python<'_>, outcome: &Outcome) -> PyResult<Option<&'static Py<PyAny>>> {
        match outcome {
            Outcome::Unreached | Outcome::UnderWay => Ok(None),
            Outcome::Done => status(py, StatusCode::Success).map(Some),
            Outcome::Failed(error) => status(py, (self.codes)(error.kind())).map(Some),
        }
    }

    fn reason(&self, py: Python<'_>, error: Option<&Error>) -> PyResult<Option<Py<PyAny>>> {
        let error = error.map(|error| exception(py, error, self.codes)).transpose()?;
        Ok(error.map(|error| error.into_value(py).into_any()))
    }

    fn task(&self, py: Python<'_>) -> PyResult<&CacheTask> {
        self.task.own().map(|task| &**task).map_err(|error| raise(py, &error))
    }

    /// Has `queue` informed of the end of the transfer, by the number that is returned. Returns `None` if it has ended already.
    pub(crate) fn wake(&self, py: Python<'_>, queue: &Arc<AwaitQueue>) -> PyResult<Option<u64>> {
        let transfer = self.task(py)?.transfer();
        let waits = transfer.wake(queue).map_err(|error| raise(py, &error))?;
        Ok(waits.then(|| transfer.number()))
    }

    /// Reports a layer. It neither detaches from the interpreter nor waits.
    fn with<T>(&self, py: Python<'_>, call: impl FnOnce(&CacheTask) -> T) -> PyResult<T> {
        let task = self.task(py)?;
        engine::attached(py, raise, || Ok(call(task)))
    }
}

#[pymethods]
impl TransferTask {
    fn layers(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.with(py, CacheTask::layers)
    }

    fn wanted(&self, py: Python<'_>, layer: u32) -> PyResult<bool> {
        self.with(py, |task| task.wanted(layer))
    }

    fn ready(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        // The thread of the transfer reports each layer once.
        self.with(py, |task| task.ready(layer))?.map_err(|error| raise(py, &error))
    }

    fn not_ready(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        self.with(py, |task| task.not_ready(layer))
    }

    fn broken(&self, py: Python<'_>, layer: u32, why: &str) -> PyResult<()> {
        self.with(py, |task| task.broken(layer, why))
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        let task = self.task(py)?;
        Ok(engine::allow_threads(py, || task.cancel()))
    }

    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, CacheTask::done)
    }

    fn wait(&self, timeout_in_millis: IntArg<'_, '_>) -> PyResult<bool> {
        let (py, task) = (timeout_in_millis.py(), self.task(timeout_in_millis.py())?);
        let limit = timeout_in_millis.optional::<u32>("timeout_in_millis")?;
        let limit = limit.map_or(Duration::MAX, |millis| Duration::from_millis(millis.into()));
        engine::waiting(py, raise, Deadline::after(limit).named("timeout_in_millis"), |deadline| {
            task.wait(deadline)
        })
    }

    fn results(&self, py: Python<'_>) -> PyResult<Vec<Option<&'static Py<PyAny>>>> {
        let outcomes = self.with(py, CacheTask::outcomes)?;
        outcomes.iter().map(|outcome| self.code(py, outcome)).collect()
    }

    fn errors(&self, py: Python<'_>) -> PyResult<Vec<Option<Py<PyAny>>>> {
        let reasons = self.with(py, CacheTask::reasons)?;
        reasons.iter().map(|reason| self.reason(py, reason.as_ref())).collect()
    }

    fn progress(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32, u64)>> {
        let progress = self.with(py, CacheTask::progress)?;
        Ok(progress.into_iter().map(|one| (one.layers, one.of_layers, one.bytes)).collect())
    }

    /// Returns the time limit that is passed to the synchronizer: its attribute at the start of the transfer.
    #[getter]
    fn timeout_in_millis(&self, py: Python<'_>) -> PyResult<Option<u128>> {
        let layer_timeout = self.with(py, CacheTask::layer_timeout)?;
        Ok(layer_timeout.map(|layer_timeout| layer_timeout.as_millis()))
    }

    #[getter]
    fn timeout_code(&self, py: Python<'_>) -> PyResult<&'static Py<PyAny>> {
        status(py, (self.codes)(ErrorKind::Timeout))
    }
}

fn status(py: Python<'_>, code: StatusCode) -> PyResult<&'static Py<PyAny>> {
    PythonTypes::get(py)?.status(code).ok_or_else(|| PyRuntimeError::new_err(code.name()))
}
