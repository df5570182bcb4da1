//! Frozen handles on the caches of an engine and on CPU caches, and views of single tensors.
//!
//! The public `Cache` class is in the Python package; raw pointers are in `raw`.

#![allow(clippy::doc_markdown, reason = "the comments of classes and methods are the docstrings of Python")]

use std::sync::Arc;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::bindings::{Cache, End};
use llm_datadist_core::{CacheId, CacheKind, DataType, Error, Result};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::arguments::{AddressesArg, DescArg};
use crate::engine::ProcessOwned;
use crate::error::{Raise, raise};
use crate::numpy::import_numpy;
use crate::raw::{self, CachePart, DL_CPU};

/// A CPU cache: memory of the caller that no engine knows.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct LooseCache {
    cache: ProcessOwned<Cache>,
}

#[pymethods]
impl LooseCache {
    #[new]
    fn new(cache_desc: DescArg<'_, '_>, addrs: AddressesArg<'_, '_>) -> PyResult<Self> {
        let addrs = addrs.addresses("addrs")?;
        let adopted = raw::adopt(&cache_desc.read(CacheKind::Blocks, &[])?, CacheKind::Blocks, &addrs);
        let adopted = adopted.map_err(|error| raise(cache_desc.py(), &error))?;
        Ok(LooseCache { cache: ProcessOwned::new(Cache::loose(adopted)) })
    }

    fn views(&self, py: Python<'_>) -> PyResult<Vec<TensorView>> {
        let views = self.cache.get().and_then(|cache| TensorView::all(cache, raise));
        views.map_err(|error| raise(py, &error))
    }
}

impl LooseCache {
    /// Returns the cache as one end of a copy.
    pub(crate) fn end(&self) -> Result<End> {
        self.cache.get().cloned().map(End::Loose)
    }
}

/// The data of a cache's handle: enough to name the cache, without keeping it alive.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct ManagedCache {
    engine: u64,
    id: CacheId,
    kind: CacheKind,
    addrs: Arc<Vec<u64>>,
}

impl ManagedCache {
    /// Creates the handle of `cache`, which the engine with this number made.
    pub(crate) fn of(engine: u64, cache: &Cache) -> Self {
        ManagedCache { engine, id: cache.id(), kind: cache.kind(), addrs: cache.shared_addrs() }
    }

    /// Returns whether its rows are batch slots or blocks.
    pub(crate) fn kind(&self) -> CacheKind {
        self.kind
    }

    /// Returns its id if the engine with this number made it.
    pub(crate) fn id_in(&self, engine: u64) -> Option<CacheId> {
        (self.engine == engine).then_some(self.id)
    }
}

#[pymethods]
impl ManagedCache {
    #[getter]
    fn cache_id(&self) -> i64 {
        self.id.0
    }

    fn tensor_addrs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.addrs.iter())
    }
}

/// One tensor of a cache, without a copy.
///
/// ``numpy.asarray``, ``numpy.from_dlpack``, ``torch.from_dlpack`` and similar functions accept it. The memory is
/// writable, and C-contiguous except for the gaps between blocks of a cache with a ``stride``. Pool memory stays mapped
/// as long as the view, or an array made from it, exists. Memory that was registered by address belongs to the program,
/// and no view keeps it alive.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct TensorView {
    cache: ProcessOwned<Cache>,
    index: usize,
    /// The exceptions of the API that made the view.
    pub(crate) raise: Raise,
}

impl TensorView {
    /// Creates a view of every tensor of `cache`, after checking that the memory is mapped.
    pub(crate) fn all(cache: &Arc<Cache>, raise: Raise) -> Result<Vec<Self>> {
        cache.check_views()?;
        let view = |index| TensorView { cache: ProcessOwned::new(cache.clone()), index, raise };
        fallible::collect("the views of tensors", (0..cache.addrs().len()).map(view))
    }

    /// Creates a view of one tensor of `cache`.
    pub(crate) fn one(cache: &Arc<Cache>, index: usize, raise: Raise) -> Result<Self> {
        let view = Self::all(cache, raise)?.into_iter().nth(index);
        view.ok_or_else(|| Error::argument("tensor_index", index, "a tensor of the cache"))
    }

    /// Returns the cache that the tensor belongs to.
    pub(crate) fn cache(&self, py: Python<'_>) -> PyResult<&Arc<Cache>> {
        self.cache.get().map_err(|error| (self.raise)(py, &error))
    }
}

/// Refuses what an export of CPU memory without a copy cannot give to a `DLPack` consumer.
pub(crate) fn cpu_only(
    stream: Option<&Bound<'_, PyAny>>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<()> {
    if stream.is_some() || dl_device.is_some_and(|device| device != DL_CPU) || copy == Some(true) {
        return Err(PyBufferError::new_err(
            "a view is CPU memory and supports no stream, no other device and no copy",
        ));
    }
    Ok(())
}

#[pymethods]
impl TensorView {
    /// The dimensions, outermost first. The first one is the blocks.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.cache(py)?.shape())
    }

    /// The address of the first byte.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.cache(py)?.addrs()[self.index])
    }

    /// The size in bytes, gaps between blocks not included.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        let geometry = self.cache(py)?.geometry();
        Ok(geometry.rows() * geometry.row_bytes())
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let cache = self.cache(py)?;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", PyTuple::new(py, cache.shape())?)?;
        if let Some(strides) = raw::strides_with_gaps(cache) {
            let bytes = cache.data_type().bytes().cast_signed();
            interface.set_item("strides", PyTuple::new(py, strides.iter().map(|stride| stride * bytes))?)?;
        }
        interface.set_item("typestr", typestr(cache.data_type())?)?;
        interface.set_item("data", (cache.addrs()[self.index], false))?;
        Ok(interface)
    }

    /// Return a ``numpy.ndarray`` over the same memory. ``bfloat16`` appears as ``uint16``.
    ///
    /// The array stays valid after ``Cache.free`` and ``Engine.close``, unless the memory was registered by address.
    ///
    /// Raises:
    ///     ImportError: numpy is not installed. ``pip install llm-datadist[numpy]`` installs it.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        import_numpy(slf.py(), "TensorView.numpy()")?.call_method1("asarray", (slf,))
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
        let cache = self.cache(py)?;
        let part = CachePart::OneTensor(self.index, dlpack_type(cache.data_type())?);
        raw::capsule(py, cache, part, max_version.is_some_and(|(major, _)| major >= 1), self.raise)
    }

    #[expect(clippy::unused_self, reason = "a method in the protocol")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        DL_CPU
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let cache = self.cache(py)?;
        let (name, address) = (cache.data_type().name(), cache.addrs()[self.index]);
        let shape = cache.shape();
        Ok(format!("TensorView(shape={shape:?}, data_type=DataType.{name}, address={address:#x})"))
    }
}

#[cold]
fn no_type(data_type: DataType, protocol: &str) -> PyErr {
    PyTypeError::new_err(format!("{protocol} has no element type for DataType.{}", data_type.name()))
}

/// Returns numpy's name of an element type. numpy has none for bfloat16, which appears as a 16-bit unsigned integer.
pub(crate) fn typestr(data_type: DataType) -> PyResult<&'static str> {
    Ok(match data_type {
        DataType::Float => "<f4",
        DataType::Float16 => "<f2",
        DataType::Int8 => "|i1",
        DataType::Int16 => "<i2",
        DataType::Uint16 | DataType::Bf16 => "<u2",
        DataType::Uint8 => "|u1",
        DataType::Int32 => "<i4",
        DataType::Int64 => "<i8",
        DataType::Uint32 => "<u4",
        DataType::Uint64 => "<u8",
        DataType::Bool => "|b1",
        DataType::Double => "<f8",
        DataType::String => return Err(no_type(data_type, "numpy's array interface")),
    })
}

/// Returns the type code and the bits of an element type in `DLPack`.
pub(crate) fn dlpack_type(data_type: DataType) -> PyResult<raw::Element> {
    const INT: u8 = 0;
    const UINT: u8 = 1;
    const FLOAT: u8 = 2;
    const BFLOAT: u8 = 4;
    const BOOL: u8 = 6;
    let (code, bits) = match data_type {
        DataType::Float => (FLOAT, 32),
        DataType::Float16 => (FLOAT, 16),
        DataType::Bf16 => (BFLOAT, 16),
        DataType::Int8 => (INT, 8),
        DataType::Int16 => (INT, 16),
        DataType::Uint16 => (UINT, 16),
        DataType::Uint8 => (UINT, 8),
        DataType::Int32 => (INT, 32),
        DataType::Int64 => (INT, 64),
        DataType::Uint32 => (UINT, 32),
        DataType::Uint64 => (UINT, 64),
        DataType::Bool => (BOOL, 8),
        DataType::Double => (FLOAT, 64),
        DataType::String => return Err(no_type(data_type, "DLPack")),
    };
    Ok(raw::Element { code, bits, lanes: 1 })
}
