//! A layer-wise transfer whose layers the caller reports, as Python holds it.

use std::sync::Arc;

use llm_datadist_core::LayerTask;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{IntArg, TextArg};
use crate::engine::{self, ProcessOwned};
use crate::error::{Codes, invalid, raise};
use crate::transfer::TransferHandles;

/// The handle of such a transfer. Dropping it ends the destinations that still wait for a layer.
#[pyclass(frozen, name = "LayerTask", module = "llm_datadist.layer_tasks")]
pub(crate) struct LayerTaskHandle {
    task: ProcessOwned<LayerTask>,
    /// The handle of each transfer.
    #[pyo3(get)]
    transfers: Py<PyTuple>,
}

impl LayerTaskHandle {
    /// Creates the handle of `task`, whose failures get these codes. If there is no memory for it, all transfers are
    /// cancelled.
    pub(crate) fn new(
        py: Python<'_>,
        task: LayerTask,
        handles: &Arc<TransferHandles>,
        codes: Codes,
    ) -> PyResult<Self> {
        let made = task.transfers().iter().map(|transfer| handles.of(py, transfer, codes));
        let made = made.collect::<PyResult<Vec<_>>>().and_then(|made| PyTuple::new(py, made));
        if made.is_err() {
            task.transfers().iter().for_each(|transfer| _ = transfer.cancel());
        }
        Ok(LayerTaskHandle { transfers: made?.unbind(), task: ProcessOwned::new(Arc::new(task)) })
    }

    fn task(&self, py: Python<'_>) -> PyResult<&LayerTask> {
        self.task.own().map(|task| &**task).map_err(|error| raise(py, &error))
    }
}

#[pymethods]
impl LayerTaskHandle {
    /// Neither detaches from the interpreter nor waits.
    fn ready(&self, layer: IntArg<'_, '_>) -> PyResult<()> {
        let (py, task) = (layer.py(), self.task(layer.py())?);
        let layer = layer_of(layer, task)?;
        engine::attached(py, raise, || task.ready(layer))
    }

    fn fail(&self, layer: IntArg<'_, '_>, reason: TextArg<'_, '_>) -> PyResult<()> {
        let (py, task) = (layer.py(), self.task(layer.py())?);
        let layer = layer_of(layer, task)?;
        let reason = reason.text("reason")?;
        engine::allow_threads(py, || task.fail(layer, &reason)).map_err(|error| raise(py, &error))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let task = self.task(py)?;
        let done = task.transfers().iter().filter(|transfer| transfer.done()).count();
        let (layers, all) = (task.layers(), task.transfers().len());
        Ok(format!("LayerTask(layers={layers}, transfers={all}, done={done})"))
    }
}

/// Returns the index of a layer of the source cache.
fn layer_of(layer: IntArg<'_, '_>, task: &LayerTask) -> PyResult<u32> {
    let index = layer.any("layer")?;
    let known = u32::try_from(index).ok().filter(|&known| known < task.layers());
    let range = || format!("0 to {}, a layer of the source cache", i64::from(task.layers()) - 1);
    known.ok_or_else(|| invalid(layer.py(), "layer", index, &range()))
}
