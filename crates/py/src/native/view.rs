//! `StoreView`, as Python holds it, and the objects behind its buffers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use llm_datadist_core::Result;
use llm_datadist_keeper::{StoreView, ViewedValue};
use pyo3::exceptions::{PyBufferError, PyIndexError, PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyMemoryView, PyTuple, PyType};

use super::errors::raise;
use crate::convert::Any;
use crate::engine::{self, ProcessOwned};
use crate::raw::{self, ExportsBytes};

/// The values of keys where they lie in the memory of the keeper. ``Store.view`` makes it.
///
/// Use it in a ``with`` statement, and call ``valid`` in it after the last use of the values::
///
///     with store.view(keys, ttl=5) as view:
///         sums = [value and crc32(value) for value in view.values]
///         right = view.valid()
///
/// The bytes may change at any time: the keeper may have refused a lease, another store may drop a value, or the time of the leases may be
/// over. What was computed from a value counts only if ``valid`` says that the value was right. A ``with`` statement that ends
/// without a call of ``valid`` after the last use of ``values`` raises.
///
/// Wait for every read to finish before you call ``valid``. A copy to a device and a send without a copy may read later: synchronize the
/// stream first.
///
/// The end of the ``with`` statement releases ``values``, and ends the leases without waiting for the keeper. An array or a slice that was
/// made from a value stays readable as long as it lives, but its bytes may be those of other keys later. A value whose buffer another
/// object holds at that time, such as a ``pickle.PickleBuffer`` or a call in another thread, is not released. What stays readable keeps
/// all memory of the keeper in use, also after the keeper has ended.
///
/// A view does not need the keeper. After the keeper has ended, after ``Store.close`` and in a forked child, its values stay readable and
/// ``valid`` answers. Several threads may use it.
#[pyclass(frozen, weakref, name = "StoreView", module = "llm_datadist.native")]
pub(crate) struct NativeView {
    view: ProcessOwned<StoreView>,
    /// Made when they are first used.
    values: PyOnceLock<Py<PyTuple>>,
    /// Whether values were handed out since the last call of `valid`.
    unchecked: AtomicBool,
    ended: AtomicBool,
}

impl NativeView {
    pub(crate) fn new(view: StoreView) -> Self {
        NativeView {
            view: ProcessOwned::new(Arc::new(view)),
            values: PyOnceLock::new(),
            unchecked: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        }
    }

    fn view(&self, py: Python<'_>) -> PyResult<&Arc<StoreView>> {
        self.view.get().map_err(|error| raise(py, &error))
    }

    /// Makes the values unusable, apart from those whose buffer another object holds.
    fn release_values(&self, py: Python<'_>) -> PyResult<()> {
        let Some(values) = self.values.get(py) else { return Ok(()) };
        for value in values.bind(py).iter().filter(|value| !value.is_none()) {
            match value.call_method0(intern!(py, "release")) {
                Err(error) if !error.is_instance_of::<PyBufferError>(py) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

#[pymethods]
impl NativeView {
    /// For each key a read-only ``memoryview`` of its value, or ``None`` if the keeper does not have it.
    ///
    /// ``numpy.frombuffer`` and similar functions accept it, without a copy. Each use of this property needs a call of ``valid`` after it.
    ///
    /// Raises:
    ///     ValueError: the ``with`` statement has ended.
    #[getter]
    fn values<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let (py, this) = (slf.py(), slf.get());
        let values = this.values.get_or_try_init(py, || buffers_of(slf))?.bind(py).clone();
        // Afterwards: the end releases what was made before it.
        if this.ended.load(Ordering::SeqCst) {
            return Err(PyValueError::new_err("the view has ended"));
        }
        if values.iter().any(|value| !value.is_none()) {
            this.unchecked.store(true, Ordering::Relaxed);
        }
        Ok(values)
    }

    /// For each key whether the keeper has leased its value.
    ///
    /// A value without a lease is likelier to become invalid.
    #[getter]
    fn leased(&self, py: Python<'_>) -> PyResult<Vec<bool>> {
        Ok(self.view(py)?.leased().into())
    }

    /// Say which values are still right. Then everything that was read of them so far is right.
    ///
    /// The first call counts hits and misses, as ``Store.get`` does. It may be called again after more reads. If the store has checksums,
    /// each call reads all bytes of the values, and a value without its checksum is not right.
    ///
    /// Returns:
    ///     For each key whether its value is right. ``False`` for a key without a value.
    fn valid(&self, py: Python<'_>) -> PyResult<Vec<bool>> {
        let view = self.view(py)?;
        self.unchecked.store(false, Ordering::Relaxed);
        engine::allow_threads(py, || view.valid()).map_err(|error| raise(py, &error))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind, error, trace, /))]
    #[expect(unused_variables, reason = "the parameters of the protocol")]
    fn __exit__(&self, py: Python<'_>, kind: &Any<'_>, error: &Any<'_>, trace: &Any<'_>) -> PyResult<()> {
        let view = self.view(py)?;
        self.ended.store(true, Ordering::SeqCst);
        engine::allow_threads(py, || view.end());
        self.release_values(py)?;
        if kind.is_none() && self.unchecked.load(Ordering::Relaxed) {
            let text = "values of the view were used without a call of valid() afterwards, so they may have been wrong";
            return Err(PyRuntimeError::new_err(text));
        }
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let view = self.view(py)?;
        let keys = view.leased().len();
        let found = (0..keys).filter(|&at| view.value(at).is_some()).count();
        Ok(format!("StoreView(keys={keys}, found={found})"))
    }
}

/// Makes the buffers of a view: one for each key with a value.
fn buffers_of(view: &Bound<'_, NativeView>) -> PyResult<Py<PyTuple>> {
    let (py, values) = (view.py(), view.get().view(view.py())?);
    let buffer = |at| match values.value(at) {
        Some(_) => PyMemoryView::from(&class(py)?.call1((view, at))?).map(Some),
        None => Ok(None),
    };
    let buffers: PyResult<Vec<_>> = (0..values.leased().len()).map(buffer).collect();
    PyTuple::new(py, buffers?).map(Bound::unbind)
}

/// The bytes of a value. It is the base of the class that has the buffer protocol.
#[pyclass(frozen, subclass, module = "llm_datadist._core")]
pub(crate) struct SlotBytes {
    value: ProcessOwned<ViewedValue>,
}

#[pymethods]
impl SlotBytes {
    /// Creates the object behind the buffer of a value of `view`.
    #[new]
    fn new(view: &Bound<'_, NativeView>, at: usize) -> PyResult<Self> {
        let value = view.get().view(view.py())?.value(at);
        let value = value.ok_or_else(|| PyIndexError::new_err("the view has no such value"))?;
        Ok(SlotBytes { value: ProcessOwned::new(Arc::new(value)) })
    }
}

impl ExportsBytes for SlotBytes {
    const WRITABLE: bool = false;

    fn exported(&self) -> Result<(u64, u64)> {
        let window = self.value.get()?.window()?;
        Ok((window.addr(), window.len()))
    }
}

/// The class that has the buffer protocol. A process makes its module only once.
static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();

fn class(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    let make = || raw::exporting_class::<SlotBytes>(py, c"llm_datadist._core.SlotBuffer").map(Bound::unbind);
    CLASS.get_or_try_init(py, make).map(|class| class.bind(py))
}
