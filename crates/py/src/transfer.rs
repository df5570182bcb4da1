//! An asynchronous call and its event, as Python holds them.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use llm_datadist_core::bindings::this_process;
use llm_datadist_core::{AwaitQueue, Deadline, Error, ErrorKind, Event, Grant, GrantEnd, Transfer};
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use crate::arguments::IntArg;
use crate::error::{Codes, exception, raise};
use crate::events::PeerHandle;
use crate::handles::Handles;
use crate::native::NativeTransfer;
use crate::python_types::PythonTypes;
use crate::{engine, events};

/// A handle of an asynchronous call. Dropping it does not end the call.
#[pyclass(frozen, name = "Transfer", module = "llm_datadist.events")]
pub(crate) struct TransferHandle {
    process: u32,
    transfer: Arc<Transfer>,
    codes: Codes,
    handles: Weak<TransferHandles>,
}

/// The handles of the calls of one engine whose outcome was not taken, by number: an event has the same handle that the
/// call returned.
pub(crate) type TransferHandles = Handles<u64, Py<TransferHandle>>;

/// Makes the event that a grant has ended.
type GrantEnded<'a> = &'a dyn Fn(&Arc<Grant>, GrantEnd) -> PyResult<Py<PyAny>>;

impl TransferHandles {
    /// Returns the handle of a call: the one that exists, or a new one.
    pub(crate) fn of(
        self: &Arc<Self>,
        py: Python<'_>,
        transfer: &Arc<Transfer>,
        codes: Codes,
    ) -> PyResult<Py<TransferHandle>> {
        if let Some(handle) = self.get(&transfer.number(), |handle| handle.clone_ref(py)) {
            return Ok(handle);
        }
        let (process, handles) = (this_process(), Arc::downgrade(self));
        let new = TransferHandle { process, transfer: transfer.clone(), codes, handles };
        let handle = Py::new(py, new)?;
        self.insert(transfer.number(), handle.clone_ref(py));
        Ok(handle)
    }

    /// Returns the handle of a call that has just started. If that fails, nobody could wait for the call, so it is cancelled.
    pub(crate) fn started(
        self: &Arc<Self>,
        py: Python<'_>,
        transfer: &Arc<Transfer>,
        codes: Codes,
    ) -> PyResult<Py<TransferHandle>> {
        self.of(py, transfer, codes).inspect_err(|_| {
            transfer.cancel();
        })
    }

    /// Returns events as Python sees them. After a failure, the handles are all still there.
    pub(crate) fn events(
        self: &Arc<Self>,
        py: Python<'_>,
        events: &[Event],
        codes: Codes,
        grant_ended: GrantEnded<'_>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let made = events
            .iter()
            .map(|event| self.event(py, event, codes, grant_ended))
            .collect::<PyResult<Vec<_>>>()?;
        for event in events {
            if let Event::Completed(transfer) = event {
                drop(self.remove(&transfer.number()));
            }
        }
        Ok(made)
    }

    fn event(
        self: &Arc<Self>,
        py: Python<'_>,
        event: &Event,
        codes: Codes,
        grant_ended: GrantEnded<'_>,
    ) -> PyResult<Py<PyAny>> {
        match event {
            Event::Completed(transfer) => {
                let transfer = self.of(py, transfer, codes)?;
                Ok(Py::new(py, Completed { transfer })?.into_any())
            }
            Event::Notification(message) => events::notification(py, message),
            Event::LinkUp(peer) => events::link_up(py, peer),
            Event::LinkDown(end) => events::link_down(py, end),
            Event::GrantEnded(grant, why) => grant_ended(grant, *why),
            _ => Err(raise(py, &Error::new(ErrorKind::System, "an event that this binding does not know"))),
        }
    }
}

/// The event that an asynchronous call has ended.
#[pyclass(frozen, module = "llm_datadist.events")]
pub(crate) struct Completed {
    /// The call.
    #[pyo3(get)]
    transfer: Py<TransferHandle>,
}

/// What wakes one event loop of `asyncio`.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct LoopQueue {
    queue: Arc<AwaitQueue>,
}

impl TransferHandle {
    /// Returns a handle of a call whose end is no event.
    pub(crate) fn without_event(transfer: &Arc<Transfer>, codes: Codes) -> Self {
        TransferHandle { process: this_process(), transfer: transfer.clone(), codes, handles: Weak::new() }
    }

    fn transfer(&self, py: Python<'_>) -> PyResult<&Arc<Transfer>> {
        // In a forked child, the locks of the copy may be held forever.
        if self.process == this_process() { Ok(&self.transfer) } else { Err(raise(py, &engine::forked())) }
    }

    /// Waits until the call has ended, and takes its failure. Raises `TimeoutError` if it still runs.
    fn failure(&self, timeout_ms: IntArg<'_, '_>) -> PyResult<Option<PyErr>> {
        let (py, transfer) = (timeout_ms.py(), self.transfer(timeout_ms.py())?);
        if !transfer.done() {
            let limit = timeout_ms.optional::<u32>("timeout_ms")?;
            let limit = limit.map_or(Duration::MAX, |millis| Duration::from_millis(millis.into()));
            let deadline = Deadline::after(limit).named("timeout_ms");
            engine::waiting(py, raise, deadline, |deadline| transfer.wait(deadline))?;
        }
        match transfer.outcome() {
            Some(outcome) => {
                self.handles
                    .upgrade()
                    .into_iter()
                    .for_each(|handles| drop(handles.remove(&transfer.number())));
                outcome.err().map(|error| exception(py, &error, self.codes)).transpose()
            }
            None => Err(PyTimeoutError::new_err("the transfer still runs")),
        }
    }
}

#[pymethods]
impl TransferHandle {
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
    fn result(&self, py: Python<'_>, timeout_ms: Option<IntArg<'_, '_>>) -> PyResult<Option<Py<PeerHandle>>> {
        if let Some(failure) = self.exception(py, timeout_ms)? {
            return Err(PyErr::from_value(failure.into_bound(py)));
        }
        self.transfer.peer().map(|peer| PeerHandle::of(py, peer)).transpose()
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

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let transfer = self.transfer(py)?;
        let state = match transfer.peek() {
            None => "running".to_owned(),
            Some(Ok(bytes)) => match transfer.peer() {
                Some(peer) => format!("done, {}", events::shown(peer)),
                None => format!("done, bytes={bytes}"),
            },
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

    /// Has the queue informed of the end of a transfer, by the number that is returned. Returns `None` if it has ended already.
    fn add(&self, transfer: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let py = transfer.py();
        if let Ok(native) = transfer.cast::<NativeTransfer>() {
            return native.get().wake(py, &self.queue);
        }
        let transfer = transfer.cast::<TransferHandle>()?.get().transfer(py)?;
        let waits = transfer.wake(&self.queue).map_err(|error| raise(py, &error))?;
        Ok(waits.then(|| transfer.number()))
    }

    /// Takes the numbers of the transfers that have ended.
    fn take(&self) -> Vec<u64> {
        self.queue.take()
    }
}
