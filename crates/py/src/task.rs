//! A layer-wise transfer under way, as the front's thread and the public `CacheTask` hold it.
//!
//! Not for: arguments (`layerwise`), or calling the synchronizer, which only Python does. What that thread calls
//! (`wanted`, `ready`, `refuse`) never detaches and never waits, so that a process which ends does not find it in here.

use std::os::fd::{IntoRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::{Deadline, Error, ErrorKind, Outcome, StatusCode, Task};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::convert::optional_int;
use crate::door::{self, Held};
use crate::error::{Codes, exception, raise};
use crate::front::Front;

type Any<'py> = Bound<'py, PyAny>;

/// One transfer. It goes on without this handle.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct TransferTask {
    task: Held<Task>,
    codes: Codes,
}

impl TransferTask {
    /// A handle on `task`, whose failures have these codes.
    pub(crate) fn new(task: Arc<Task>, codes: Codes) -> Self {
        TransferTask { task: Held::new(task), codes }
    }

    fn code(&self, py: Python<'_>, outcome: &Outcome) -> PyResult<Option<&'static Py<PyAny>>> {
        match outcome {
            Outcome::Unreached | Outcome::UnderWay => Ok(None),
            Outcome::Done => status(py, StatusCode::Success).map(Some),
            Outcome::Failed(error) => status(py, (self.codes)(error.kind())).map(Some),
        }
    }

    fn reason(&self, py: Python<'_>, outcome: &Outcome) -> PyResult<Option<Py<PyAny>>> {
        match outcome {
            Outcome::Failed(error) => Ok(Some(exception(py, error, self.codes)?.into_value(py).into_any())),
            _ => Ok(None),
        }
    }

    fn task(&self, py: Python<'_>) -> PyResult<&Arc<Task>> {
        self.task.own().map_err(|error| raise(py, &error))
    }
}

#[pymethods]
impl TransferTask {
    fn layers(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(self.task(py)?.layers())
    }

    fn wanted(&self, py: Python<'_>, layer: u32) -> PyResult<bool> {
        Ok(self.task(py)?.wanted(layer))
    }

    fn ready(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        self.task(py)?.ready(layer);
        Ok(())
    }

    /// `failed`: whether nobody knows about the layer, as against knowing that it will not come.
    fn refuse(&self, py: Python<'_>, layer: u32, reason: String, failed: bool) -> PyResult<()> {
        let kind = if failed { ErrorKind::Timeout } else { ErrorKind::InvalidArgument };
        self.task(py)?.refuse(layer, &Error::new(kind, reason));
        Ok(())
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        let task = self.task(py)?;
        Ok(door::aside(py, || task.cancel()))
    }

    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.task(py)?.done())
    }

    fn wait(&self, timeout_in_millis: &Any<'_>) -> PyResult<bool> {
        let (py, task) = (timeout_in_millis.py(), self.task(timeout_in_millis.py())?);
        let limit = optional_int::<u32>("timeout_in_millis", timeout_in_millis)?;
        let limit = limit.map_or(Duration::MAX, |millis| Duration::from_millis(millis.into()));
        door::waiting(py, Deadline::after(limit).named("timeout_in_millis"), |deadline| task.wait(deadline))
    }

    fn results(&self, py: Python<'_>) -> PyResult<Vec<Option<&'static Py<PyAny>>>> {
        self.task(py)?.outcomes().iter().map(|outcome| self.code(py, outcome)).collect()
    }

    fn errors(&self, py: Python<'_>) -> PyResult<Vec<Option<Py<PyAny>>>> {
        self.task(py)?.outcomes().iter().map(|outcome| self.reason(py, outcome)).collect()
    }

    fn progress(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32, u64)>> {
        let carried = self.task(py)?.progress();
        Ok(carried.into_iter().map(|one| (one.layers, one.of_layers, one.bytes)).collect())
    }

    fn descriptor(&self, py: Python<'_>) -> PyResult<RawFd> {
        let descriptor = self.task(py)?.descriptor().map_err(|error| raise(py, &error))?;
        Ok(descriptor.into_raw_fd())
    }

    #[getter]
    fn timeout_code(&self, py: Python<'_>) -> PyResult<&'static Py<PyAny>> {
        status(py, (self.codes)(ErrorKind::Timeout))
    }
}

fn status(py: Python<'_>, code: StatusCode) -> PyResult<&'static Py<PyAny>> {
    Front::get(py)?.status(code).ok_or_else(|| PyRuntimeError::new_err(code.name()))
}
