//! `Holder`, the memory of `llm-datadist serve`. Its users are `commands/serve.py` and `commands/holder.py`.

use llm_datadist_keeper::Holder;
use pyo3::prelude::*;

use super::errors::raise;
use super::values;
use crate::convert::Any;
use crate::{engine, raw};

/// The memory and the socket of a keeper, from which forked children serve one after the other.
#[pyclass(frozen, name = "Holder", module = "llm_datadist._core")]
pub(crate) struct NativeHolder {
    holder: Holder,
}

#[pymethods]
impl NativeHolder {
    #[new]
    #[pyo3(signature = (*, memory, socket, value, take_over, tokens=None, group=None))]
    fn new(
        py: Python<'_>,
        memory: &Any<'_>,
        socket: &Any<'_>,
        value: &Any<'_>,
        take_over: bool,
        tokens: Option<&Any<'_>>,
        group: Option<&Any<'_>>,
    ) -> PyResult<Self> {
        let options = values::keeper_options(memory, socket, Some(value), tokens, group)?;
        let holder = engine::allow_threads(py, || Holder::open(&options, take_over));
        Ok(NativeHolder { holder: holder.map_err(|error| raise(py, &error))? })
    }

    #[getter]
    fn slots(&self) -> u32 {
        self.holder.slots()
    }

    /// Bytes of a slot.
    #[getter]
    fn slot_bytes(&self) -> u64 {
        self.holder.slot_bytes()
    }

    /// Bytes of all slots.
    #[getter]
    fn bytes(&self) -> u64 {
        self.holder.bytes()
    }

    #[getter]
    fn takes_over(&self) -> bool {
        self.holder.takes_over()
    }

    /// Takes a part of the memory from the system.
    fn prepare(&self, py: Python<'_>, begin: u64, end: u64) -> PyResult<()> {
        engine::allow_threads(py, || self.holder.prepare(begin..end)).map_err(|error| raise(py, &error))
    }

    /// Copies the values of the keeper that has the path, and takes the path, unless the socket `stop` is readable by then. Returns how
    /// many values were copied, and how many were left.
    fn take_over(&self, py: Python<'_>, stop: &Any<'_>) -> PyResult<(u64, u64)> {
        let stop = raw::descriptor(stop)?;
        let taken = engine::allow_threads(py, || self.holder.take_over(&stop));
        let taken = taken.map_err(|error| raise(py, &error))?;
        Ok((taken.values, taken.left))
    }

    /// Serves until the socket `stop` is readable. Returns whether another keeper has taken over.
    ///
    /// Sends messages to `stop`, which must be SOCK_SEQPACKET: first the number of values, then texts about refused clients.
    #[pyo3(signature = (stop, *, empty))]
    fn serve(&self, py: Python<'_>, stop: &Any<'_>, empty: bool) -> PyResult<bool> {
        let stop = raw::descriptor(stop)?;
        engine::allow_threads(py, || self.holder.serve(stop, empty)).map_err(|error| raise(py, &error))
    }
}
