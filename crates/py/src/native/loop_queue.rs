//! What wakes the event loops that await transfers.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use llm_datadist_core::bindings::AwaitQueue;
use pyo3::prelude::*;

use super::errors::raise;
use super::transfer::NativeTransfer;
use crate::convert::Any;
use crate::task::TransferTask;

/// What wakes one event loop of `asyncio`.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct LoopQueue {
    queue: Arc<AwaitQueue>,
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
    fn add(&self, transfer: &Any<'_>) -> PyResult<Option<u64>> {
        let py = transfer.py();
        if let Ok(native) = transfer.cast::<NativeTransfer>() {
            return native.get().wake(py, &self.queue);
        }
        transfer.cast::<TransferTask>()?.get().wake(py, &self.queue)
    }

    /// Takes the numbers of the transfers that have ended.
    fn take(&self) -> Vec<u64> {
        self.queue.take()
    }
}
