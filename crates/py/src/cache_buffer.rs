//! The buffer of a cache: one flat view of all its bytes, for `DLPack` and the buffer protocol.

#![allow(clippy::doc_markdown, reason = "the comments of classes and methods are the docstrings of Python")]

use std::sync::Arc;

use llm_datadist_core::Result;
use llm_datadist_core::bindings::Cache;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyMemoryView, PyType};

use crate::cache::{TensorView, cpu_only};
use crate::engine::ProcessOwned;
use crate::error::Raise;
use crate::numpy::import_numpy;
use crate::raw::{self, CachePart, DL_CPU, ExportsBytes};

/// All bytes of a contiguous cache as one flat array of ``uint8``, without a copy. ``Cache.buffer`` makes it.
///
/// ``memoryview``, ``numpy.frombuffer``, ``torch.from_dlpack`` and similar functions accept it. The memory is writable,
/// and stays mapped as long as the view, or an array made from it, exists.
#[pyclass(frozen, subclass, module = "llm_datadist._core")]
pub(crate) struct FlatView {
    cache: ProcessOwned<Cache>,
    address: u64,
    raise: Raise,
}

impl ExportsBytes for FlatView {
    const WRITABLE: bool = true;

    fn exported(&self) -> Result<(u64, u64)> {
        let cache = self.cache.get()?;
        Ok((cache.one_range()?, cache.bytes()))
    }
}

/// The public class. A process makes its module only once.
static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Returns the public class.
pub(crate) fn class(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    let make = || raw::exporting_class::<FlatView>(py, c"llm_datadist._core.CacheBuffer").map(Bound::unbind);
    CLASS.get_or_try_init(py, make).map(|class| class.bind(py))
}

/// Returns the buffer of the cache to which `view` belongs.
pub(crate) fn of(py: Python<'_>, view: TensorView) -> PyResult<Bound<'_, PyAny>> {
    class(py)?.call1((view,))
}

impl FlatView {
    fn cache(&self, py: Python<'_>) -> PyResult<&Arc<Cache>> {
        self.cache.get().map_err(|error| (self.raise)(py, &error))
    }
}

#[pymethods]
impl FlatView {
    /// Creates the buffer of the cache to which `view` belongs.
    #[new]
    fn new(view: &Bound<'_, TensorView>) -> PyResult<Self> {
        let (py, raise) = (view.py(), view.get().raise);
        let cache = view.get().cache(py)?;
        let address = cache.one_range().map_err(|error| raise(py, &error))?;
        Ok(FlatView { cache: ProcessOwned::new(cache.clone()), address, raise })
    }

    /// The address of the first byte.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// The size in bytes.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.cache(py)?.bytes())
    }

    /// Return a ``numpy.ndarray`` of ``uint8`` over the same memory.
    ///
    /// Raises:
    ///     ImportError: numpy is not installed. ``pip install llm-datadist[numpy]`` installs it.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        import_numpy(slf.py(), "CacheBuffer.numpy()")?.call_method1("asarray", (slf,))
    }

    /// Python 3.12 and later have this method for every class with the buffer protocol.
    #[pyo3(signature = (flags, /))]
    #[expect(unused_variables, reason = "the memoryview asks for everything")]
    fn __buffer__<'py>(slf: &Bound<'py, Self>, flags: i32) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(i64, i64)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        cpu_only(stream, dl_device, copy)?;
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        raw::capsule(py, self.cache(py)?, CachePart::AllBytes, versioned, self.raise)
    }

    #[expect(clippy::unused_self, reason = "a method in the protocol")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        DL_CPU
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("CacheBuffer(nbytes={}, address={:#x})", self.nbytes(py)?, self.address))
    }
}
