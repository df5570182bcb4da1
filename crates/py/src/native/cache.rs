//! `Cache`: a cache of this engine.

use std::sync::Arc;

use llm_datadist_core::bindings::{Cache, DataDist};
use llm_datadist_core::{Adopted, CacheKind, Error, ErrorKind, OwnCache, Result, RowsCache};
use pyo3::prelude::*;

use super::EngineShared;
use super::cache_form::{self, Given, GivenForm};
use super::errors::raise;
use super::layout::NativeLayout;
use super::rows::NativeRows;
use super::tensors::{self, GivenTensors};
use super::transfer::NativeTransfer;
use super::values::text;
use crate::cache::TensorView;
use crate::convert::Any;
use crate::{cache_buffer, raw};

/// A named set of tensors of this engine, cut into blocks. ``Engine.allocate`` and ``Engine.register`` make it.
///
/// ``llm_datadist.Cache`` is another class, that of LLM-DataDist's API.
///
/// ``cache[blocks]`` selects blocks: an integer, a slice, a list, tuple or range of integers, or a one-dimensional integer array
/// in host memory. ``cache[:]`` is all blocks. The order of a list is kept. Negative numbers do not count from the end. A list is
/// copied, so it may be changed afterwards.
///
/// ``with`` calls ``free`` at the end and waits until it has ended, at most ``Engine.timeout``. Dropping the object does not free
/// the cache.
#[pyclass(frozen, mapping, name = "Cache", module = "llm_datadist.native")]
pub(crate) struct NativeCache {
    shared: Arc<EngineShared>,
    own: Arc<OwnCache>,
    layout: Option<Py<NativeLayout>>,
}

impl NativeCache {
    /// Does `Engine.allocate`, with the numbers of blocks and of tensors.
    pub(crate) fn allocate(
        shared: &Arc<EngineShared>,
        name: &Any<'_>,
        given: GivenForm<'_, '_>,
        blocks: &Any<'_>,
        tensors: Given<'_, '_>,
        contiguous: bool,
    ) -> PyResult<Self> {
        let (py, name) = (name.py(), text("name", name)?);
        let mut form = cache_form::allocated(given, blocks, tensors)?;
        form.contiguous = contiguous;
        let allocate = |engine: &DataDist| OwnCache::allocate(&shared.name, engine, &name, &form);
        Ok(Self::of(shared, given.layout, shared.engine.enter(py, allocate)?))
    }

    /// Does `Engine.register`, with the number of blocks and the bytes from one to the next.
    pub(crate) fn register(
        shared: &Arc<EngineShared>,
        name: &Any<'_>,
        given_tensors: &Any<'_>,
        given: GivenForm<'_, '_>,
        blocks: Given<'_, '_>,
        stride: Given<'_, '_>,
        visible: bool,
    ) -> PyResult<Self> {
        let (py, name) = (name.py(), text("name", name)?);
        let tensors = tensors::read(given_tensors)?;
        let form = cache_form::registered(given, &tensors, blocks, stride)?;
        let (addresses, kept) = match tensors {
            GivenTensors::Addresses(addresses) => (addresses, Vec::new()),
            GivenTensors::Objects(objects) => (objects.addresses, objects.kept),
        };
        let adopted =
            raw::adopt(form.desc(), CacheKind::Blocks, &addresses).map_err(|error| raise(py, &error))?;
        let adopted = (kept_by(adopted, kept), visible);
        let register = |engine: &DataDist| OwnCache::register(&shared.name, engine, &name, &form, adopted);
        Ok(Self::of(shared, given.layout, shared.engine.enter(py, register)?))
    }

    /// Returns the native object of a cache that a call of the original's API made. It has no name that peers know.
    pub(crate) fn of_original(shared: &Arc<EngineShared>, cache: &Cache) -> Self {
        let own = OwnCache::of(&shared.name, &format!("cache {}", cache.id()), cache, (1, None));
        Self::of(shared, None, own)
    }

    fn of(shared: &Arc<EngineShared>, layout: Option<&Bound<'_, NativeLayout>>, own: Arc<OwnCache>) -> Self {
        NativeCache { shared: shared.clone(), own, layout: layout.map(|layout| layout.clone().unbind()) }
    }

    /// Runs `read` on the cache, unless it was freed.
    fn read<T: Send>(
        &self,
        py: Python<'_>,
        read: impl FnOnce(&Arc<Cache>) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.shared.engine.enter(py, |engine| read(&engine.find(self.own.id)?))
    }
}

#[pymethods]
impl NativeCache {
    /// The name of the cache.
    #[getter]
    fn name(&self) -> &str {
        &self.own.name
    }

    /// The number of blocks, the same as ``len(cache)``.
    #[getter]
    fn blocks(&self) -> u64 {
        self.own.blocks
    }

    /// The layout, or ``None`` if the cache has none.
    #[getter]
    fn layout(&self, py: Python<'_>) -> Option<Py<NativeLayout>> {
        self.layout.as_ref().map(|layout| layout.clone_ref(py))
    }

    /// The pool: ``"device"`` or ``"host"``.
    #[getter]
    fn pool(&self) -> String {
        self.own.placement.to_string()
    }

    /// The bytes of one block, over all tensors, without gaps.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.own.row_bytes * u64::from(self.own.tensors)
    }

    /// The bytes of all blocks, without gaps: ``blocks * block_bytes``.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.own.blocks * self.block_bytes()
    }

    /// The engine that owns the cache.
    ///
    /// Raises:
    ///     Closed: the program has dropped the engine.
    #[getter]
    fn engine<'py>(&self, py: Python<'py>) -> PyResult<Any<'py>> {
        self.shared.python(py)
    }

    /// A view of each tensor. Its first dimension is the blocks.
    ///
    /// Raises:
    ///     NotFound: the cache was freed.
    ///     Closed: the engine is closed.
    #[getter]
    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<TensorView>> {
        self.read(py, |cache| TensorView::all(cache, raise))
    }

    /// All bytes of a cache that was allocated with ``contiguous=True``, as one flat view.
    ///
    /// Raises:
    ///     InvalidArgument: the cache is not contiguous.
    ///     NotFound: the cache was freed.
    ///     Closed: the engine is closed.
    #[getter]
    fn buffer<'py>(&self, py: Python<'py>) -> PyResult<Any<'py>> {
        let first = self.read(py, |cache| match cache.one_range() {
            Ok(_) => TensorView::one(cache, 0, raise),
            Err(error) if error.kind() == ErrorKind::InvalidArgument => Err(not_contiguous()),
            Err(error) => Err(error),
        })?;
        cache_buffer::of(py, first)
    }

    /// Select blocks.
    ///
    /// Raises:
    ///     TypeError: not one of the forms above; a ``bool``, a ``float`` or a text; an array with more than one dimension,
    ///         without integers of 16, 32 or 64 bits, or outside host memory.
    ///     InvalidArgument: a negative number or one above 2**32 - 1; a slice or range that does not end inside the cache. Another
    ///         block that the cache does not have is found by the call that uses the rows.
    fn __getitem__(slf: &Bound<'_, Self>, blocks: &Any<'_>) -> PyResult<NativeRows> {
        NativeRows::of(slf.as_any(), RowsCache::Own(slf.get().own.clone()), blocks)
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.own.blocks)?)
    }

    /// End the cache. Its name can be used again at once, and new transfers that name it fail with ``NotFound``.
    ///
    /// The memory of an allocated cache returns to the pool when the last transfer and view of it is gone, so ``free`` has nothing to
    /// wait for: the transfer has ended when it is returned, and there is no ``Completed`` for it. The transfer of a registered cache
    /// ends when no transfer of this engine, and no request of a peer that it serves, uses the memory any more. A pull of a peer that
    /// still reads the memory by process id fails. Grants of the cache end with the reason ``"released"``. Freeing a cache again, or
    /// after ``Engine.close``, ends at once.
    ///
    /// Returns:
    ///     The transfer. ``Timeout``: registered memory is still in use after ``Engine.timeout``, for example because a peer that reads
    ///     the bytes of a push does not answer. Keep the memory, and call ``free`` again.
    ///
    /// Raises:
    ///     Busy: ``max_transfers`` transfers run or have an outcome that was not taken. The registered cache is freed; call ``free``
    ///         again to learn when its memory may be used.
    ///     Closed: this process is a forked child.
    fn free(&self, py: Python<'_>) -> PyResult<Py<NativeTransfer>> {
        let NativeCache { shared, own, .. } = self;
        if !shared.engine.is_open() && !shared.engine.is_inherited() {
            return NativeTransfer::ended(py, shared);
        }
        // Also while the engine closes, because transfers may still use the memory.
        let transfer = shared.engine.attached_while_open(py, |engine| engine.start_free(own.id, None))?;
        NativeTransfer::started(py, shared, &transfer)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind, error, trace, /))]
    #[expect(unused_variables, reason = "the parameters of the protocol")]
    fn __exit__(&self, py: Python<'_>, kind: &Any<'_>, error: &Any<'_>, trace: &Any<'_>) -> PyResult<()> {
        self.free(py)?.get().finished(py)
    }

    fn __repr__(&self) -> String {
        let OwnCache { name, blocks, tensors, placement, .. } = &*self.own;
        format!("<Cache '{name}': {blocks} blocks, {tensors} tensors, pool '{placement}'>")
    }
}

/// Keeps objects until the core has released the memory that belongs to them.
///
/// The core drops them on any thread, also on one of its own, which is not attached to the interpreter. `PyO3` then puts them on
/// a list, and drops them at the next call from Python or at the end of one that waits, such as `Transfer.result`. So no thread of
/// the engine waits for the interpreter, which may be exiting.
fn kept_by(adopted: Adopted, objects: Vec<Py<PyAny>>) -> Adopted {
    if objects.is_empty() { adopted } else { adopted.owned_by(Arc::new(objects)) }
}

#[cold]
fn not_contiguous() -> Error {
    Error::argument("contiguous", "False", "True in Engine.allocate, so that there are no gaps in the cache")
}
