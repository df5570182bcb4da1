//! Transfers, as Python holds them.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::AwaitQueue;
use llm_datadist_core::{Deadline, Error, ErrorKind, LayerTask, Transfer};
use pyo3::exceptions::PyTimeoutError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use super::errors::raise;
use super::owner::TransferOwner;
use super::shared::EngineShared;
use super::values;
use crate::convert::Any;
use crate::engine::{self, ProcessOwned};

/// The handle of an operation that was started. Its outcome is a result or an error, and never changes.
///
/// The result of ``Engine.link`` is a ``Peer``, that of ``Store.start_get`` and ``Store.start_put`` is a list, and that of every
/// other operation is ``None``. ``await transfer`` waits in an event loop without a thread. ``asyncio.ensure_future``, ``wait_for``
/// and ``gather`` take a transfer, and ``create_task`` does not. Several threads and several event loops may wait for one transfer,
/// and each gets the outcome. Cancelling a coroutine that waits does not cancel the transfer: its blocks must not be reused before
/// ``done``.
///
/// Unless somebody takes the outcome with ``result`` or ``await`` first, ``events`` of its engine or store returns one
/// ``Completed`` for it. Dropping the handle does not end the transfer, and its event still comes. A layer-wise push that is
/// dropped before its last ``ready`` is cancelled, because nobody could report its layers.
///
/// Handles compare and hash by identity.
#[pyclass(frozen, weakref, generic, name = "Transfer", module = "llm_datadist.native")]
pub(crate) struct NativeTransfer {
    /// `None` for an operation that had nothing to do.
    transfer: Option<Arc<Transfer>>,
    owner: TransferOwner,
    /// What reports the layers of a layer-wise push. In a box, because few transfers have it.
    layers: Option<Box<ProcessOwned<LayerTask>>>,
}

impl NativeTransfer {
    fn new(owner: &TransferOwner, transfer: Option<&Arc<Transfer>>) -> Self {
        NativeTransfer { transfer: transfer.cloned(), owner: owner.clone(), layers: None }
    }

    /// Returns the handle of a transfer of an engine that has just started.
    pub(crate) fn started(
        py: Python<'_>,
        shared: &Arc<EngineShared>,
        transfer: &Arc<Transfer>,
    ) -> PyResult<Py<Self>> {
        Self::started_by(py, &TransferOwner::Engine(shared.clone()), transfer)
    }

    /// Returns the handle of a transfer that has just started. If that fails, nobody could wait for the transfer, so it is
    /// cancelled.
    pub(crate) fn started_by(
        py: Python<'_>,
        owner: &TransferOwner,
        transfer: &Arc<Transfer>,
    ) -> PyResult<Py<Self>> {
        Self::kept(py, owner, transfer).inspect_err(|_| {
            transfer.cancel();
            // Its event needs an entry.
            owner.transfers().insert(transfer.number(), py.None());
        })
    }

    /// Returns the handle of a layer-wise push that has just started.
    pub(crate) fn of_layers(
        py: Python<'_>,
        shared: &Arc<EngineShared>,
        task: LayerTask,
    ) -> PyResult<Py<Self>> {
        let transfer = task.transfer().clone();
        let layers = Some(Box::new(ProcessOwned::new(Arc::new(task))));
        let owner = TransferOwner::Engine(shared.clone());
        let handle = Py::new(py, NativeTransfer { layers, ..Self::new(&owner, Some(&transfer)) })?;
        let weak = PyWeakrefReference::new(handle.bind(py).as_any())?;
        shared.transfers.insert(transfer.number(), weak.into_any().unbind());
        Ok(handle)
    }

    /// Returns the handle of an operation that had nothing to do: it has succeeded, and there is no event.
    pub(crate) fn ended(py: Python<'_>, shared: &Arc<EngineShared>) -> PyResult<Py<Self>> {
        Py::new(py, Self::new(&TransferOwner::Engine(shared.clone()), None))
    }

    /// Returns the handle of a transfer for its event: the one that the program has, or a new one.
    pub(crate) fn of_event(
        py: Python<'_>,
        owner: &TransferOwner,
        transfer: &Arc<Transfer>,
    ) -> PyResult<Py<Self>> {
        owner.ended(transfer);
        let held = owner.transfers().get(&transfer.number(), |handle| handle.clone_ref(py));
        let Some(held) = held.map(|held| held.into_bound(py)) else {
            return Self::kept(py, owner, transfer);
        };
        let handle = match held.cast::<PyWeakrefReference>() {
            Ok(weak) => weak.upgrade(),
            Err(_) => Some(held).filter(|held| !held.is_none()),
        };
        match handle {
            Some(handle) => Ok(handle.cast_into::<Self>()?.unbind()),
            None => Self::kept(py, owner, transfer),
        }
    }

    fn kept(py: Python<'_>, owner: &TransferOwner, transfer: &Arc<Transfer>) -> PyResult<Py<Self>> {
        let handle = Py::new(py, Self::new(owner, Some(transfer)))?;
        if transfer.has_event() {
            owner.transfers().insert(transfer.number(), handle.clone_ref(py).into_any());
        }
        Ok(handle)
    }

    /// Returns the record; `None` if there was nothing to do. In a forked child, the locks of its copy may be held for ever.
    fn record(&self, py: Python<'_>) -> PyResult<Option<&Arc<Transfer>>> {
        self.owner.check_process(py)?;
        Ok(self.transfer.as_ref())
    }

    /// Has `queue` informed of the end of the transfer, by the number that is returned. Returns `None` if it has ended already.
    pub(crate) fn wake(&self, py: Python<'_>, queue: &Arc<AwaitQueue>) -> PyResult<Option<u64>> {
        let Some(transfer) = self.record(py)? else { return Ok(None) };
        let waits = transfer.wake(queue).map_err(|error| raise(py, &error))?;
        Ok(waits.then(|| transfer.number()))
    }

    /// Waits until the transfer has ended, and takes its outcome.
    pub(crate) fn finished(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py, Duration::MAX)
    }

    fn wait(&self, py: Python<'_>, limit: Duration) -> PyResult<()> {
        let Some(transfer) = self.record(py)? else { return Ok(()) };
        let deadline = Deadline::after(limit);
        if !transfer.done() && !engine::waiting(py, raise, deadline, |deadline| transfer.wait(deadline))? {
            return Err(PyTimeoutError::new_err("the transfer still runs"));
        }
        self.error(py)?.map_or(Ok(()), Err)
    }

    /// Returns the error of a transfer that has ended. It takes the outcome.
    fn error(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let Some(transfer) = self.record(py)? else { return Ok(None) };
        let outcome = transfer.outcome();
        if outcome.is_some() {
            drop(self.owner.transfers().remove(&transfer.number()));
            self.owner.ended(transfer);
        }
        Ok(outcome.and_then(Result::err).map(|error| self.owner.raise(py, &error)))
    }
}

#[pymethods]
impl NativeTransfer {
    /// The number of bytes that are known to be in place. Final when the transfer has ended.
    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.record(py)?.map_or(0, |transfer| transfer.progress().done))
    }

    /// The number of bytes that the transfer moves in all; 0 until it is known.
    #[getter]
    fn total(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.record(py)?.map_or(0, |transfer| transfer.progress().total))
    }

    /// Nanoseconds from the start of the transfer to its end, or until now.
    ///
    /// Those of a transfer of a store begin when a thread begins it. Before, they are 0.
    #[getter]
    fn nanos(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.record(py)?.map_or(0, |transfer| self.owner.nanos(transfer)))
    }

    /// Return whether the transfer has ended. Then nothing of it touches memory any more.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(transfer) = self.record(py)? else { return Ok(true) };
        let done = transfer.done();
        if done {
            self.owner.ended(transfer);
        }
        Ok(done)
    }

    /// Wait until the transfer has ended. Return its result, or raise its error. Ctrl-C interrupts the wait.
    ///
    /// Args:
    ///     timeout: seconds to wait, 0 or above. ``None``: until it ends, which the time limit of the operation bounds.
    ///         A layer-wise push has no such limit while it waits for ``ready``.
    ///
    /// Raises:
    ///     TypeError: ``timeout`` has the wrong type.
    ///     InvalidArgument: ``timeout`` is negative or not finite, or it is the outcome of the transfer.
    ///     TimeoutError: ``timeout`` has passed and the transfer continues. If the error is also a ``Timeout``, it is
    ///         the outcome of the transfer.
    ///     Error: the outcome of the transfer, as the call that started it describes.
    #[pyo3(signature = (timeout=None))]
    fn result(&self, py: Python<'_>, timeout: Option<&Any<'_>>) -> PyResult<Py<PyAny>> {
        let limit = timeout.map(|limit| values::seconds_from_zero("timeout", limit)).transpose()?;
        self.wait(py, limit.unwrap_or(Duration::MAX))?;
        self.record(py)?.map_or_else(|| Ok(py.None()), |transfer| self.owner.result(py, transfer))
    }

    /// Ask the transfer to end with ``Cancelled``, without waiting for its end.
    ///
    /// A transfer that waits ends at once, or within 100 ms if it waits for a peer. A copy of memory that has begun is finished
    /// first; a transfer of a store only finishes the part of its values that it copies. Until ``done``, the transfer may touch its
    /// memory.
    ///
    /// Returns:
    ///     ``True`` if the transfer will end with ``Cancelled``, ``False`` if its outcome can no longer change.
    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(transfer) = self.record(py)? else { return Ok(false) };
        Ok(engine::allow_threads(py, || transfer.cancel()))
    }

    /// Report that a layer is computed, and start to send it. The call never waits.
    ///
    /// Only for a push with ``layerwise=True``. Layers may come in any order and from any thread. From now on the layer must not
    /// be written until the transfer has ended. The transfer succeeds when all layers of its rows were reported and are in
    /// place. Reporting a layer after the transfer has failed does nothing.
    ///
    /// Args:
    ///     layer: layer of the source cache, counted from 0.
    ///
    /// Raises:
    ///     TypeError: ``layer`` is not an integer.
    ///     InvalidArgument: the transfer is not layer-wise; the cache has no such layer; it was reported before.
    #[pyo3(signature = (layer, /))]
    fn ready(&self, py: Python<'_>, layer: &Any<'_>) -> PyResult<()> {
        let layer = values::int32("layer", layer, 0)?;
        let Some(task) = &self.layers else {
            let text = "ready is for transfers of push(..., layerwise=True)";
            return Err(raise(py, &Error::new(ErrorKind::InvalidArgument, text)));
        };
        let task = task.own().map_err(|error| raise(py, &error))?;
        engine::attached(py, raise, || task.ready(layer))
    }

    fn __await__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        let py = slf.py();
        let waiting =
            py.import(intern!(py, "llm_datadist._await"))?.getattr(intern!(py, "await_transfer"))?;
        waiting.call1((slf,))?.call_method0(intern!(py, "__await__")).map(Bound::unbind)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Some(transfer) = self.record(py)? else { return Ok("Transfer(done)".to_owned()) };
        let state = match transfer.peek() {
            None => "running".to_owned(),
            Some(Ok(bytes)) => match transfer.peer() {
                Some(peer) => format!("done, peer '{}'", peer.name),
                None => format!("done, bytes={bytes}"),
            },
            Some(Err(error)) => format!("failed: {error}"),
        };
        Ok(format!("Transfer(number={}, {state})", transfer.number()))
    }
}
