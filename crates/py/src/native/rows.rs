//! `Rows`: blocks of a cache, and the part of them that moves.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use llm_datadist_core::{BlockRows, RowsCache};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::block_indices;
use super::errors::{invalid, raise};
use super::spans;
use crate::convert::{Any, shown};

/// Blocks of a cache, in order, and optionally only some layers, tokens or bytes of them. It cannot be changed.
///
/// ``cache[...]`` makes it, for local and remote caches alike. It does not keep the cache. Two objects are equal if they have
/// the same cache, the same blocks in the same order, and the same part of them.
#[pyclass(frozen, name = "Rows", module = "llm_datadist.native")]
pub(crate) struct NativeRows {
    /// The object on which `[...]` was called.
    object: Py<PyAny>,
    /// What the core gets.
    pub(crate) rows: BlockRows,
}

impl NativeRows {
    /// Reads the index of `object`, which stands for `cache`.
    pub(crate) fn of(object: &Any<'_>, cache: RowsCache, blocks: &Any<'_>) -> PyResult<Self> {
        let count = match &cache {
            RowsCache::Own(cache) => Some(cache.blocks),
            RowsCache::Peer(_) => None,
        };
        let rows = BlockRows::new(cache, block_indices::read(blocks, count)?);
        Ok(NativeRows { object: object.clone().unbind(), rows })
    }

    /// Returns the rows, narrowed to the spans that are given.
    fn narrowed(
        &self,
        py: Python<'_>,
        layers: Given<'_, '_>,
        tokens: Given<'_, '_>,
        bytes: Given<'_, '_>,
    ) -> PyResult<BlockRows> {
        let mut part = self.rows.part().clone();
        let all = self.extent();
        if let Some(layers) = layers {
            part.layers = Some(once("layers", layers, part.layers.is_none(), all.layers)?);
        }
        if let Some(tokens) = tokens {
            part.tokens = Some(once("tokens", tokens, part.tokens.is_none(), all.tokens)?);
        }
        if let Some(bytes) = bytes {
            part.bytes = Some(once("bytes", bytes, part.bytes.is_none(), all.bytes)?);
        }
        self.rows.with_part(part).map_err(|error| raise(py, &error))
    }

    /// Returns where open slices end. Nothing is known about a cache of a peer.
    fn extent(&self) -> KnownEnds {
        let RowsCache::Own(cache) = self.rows.cache() else { return KnownEnds::default() };
        let tokens = |of_block| u64::from(of_block) * self.rows.blocks().len() as u64;
        let (layers, bytes) = (Some(cache.layers()), Some(cache.row_bytes));
        KnownEnds { layers, tokens: cache.block_tokens.map(tokens), bytes }
    }
}

/// An argument that may be missing.
type Given<'a, 'py> = Option<&'a Any<'py>>;

/// The ends of open slices, where they are known.
#[derive(Default)]
struct KnownEnds {
    layers: Option<u64>,
    tokens: Option<u64>,
    bytes: Option<u64>,
}

/// Reads a span of rows that were not narrowed in the same way before.
fn once(name: &str, given: &Any<'_>, first: bool, end: Option<u64>) -> PyResult<Range<u64>> {
    let range = spans::read(name, given, end)?;
    if first {
        return Ok(range);
    }
    Err(invalid(given.py(), name, shown(given), "given only once for the same rows"))
}

#[pymethods]
impl NativeRows {
    /// The cache to which the blocks belong.
    #[getter(cache)]
    fn cache_object(&self, py: Python<'_>) -> Py<PyAny> {
        self.object.clone_ref(py)
    }

    /// Return the number of blocks.
    fn __len__(&self) -> usize {
        self.rows.blocks().len()
    }

    /// Return the same blocks, narrowed. A range has step 1 and is not empty: ``range``, ``slice`` or a pair.
    ///
    /// A slice of a local cache may have open ends; one of a remote cache needs its end.
    ///
    /// Args:
    ///     layers: layers of the cache, counted from 0. The other end of the transfer must have as many. The engine
    ///         knows layers from the layout, or from ``tensors_per_layer``.
    ///     tokens: tokens of the sequence that the blocks hold in their order, counted from 0. Both caches need a
    ///         layout. If only one end has a range, as many tokens move from the start of the other end.
    ///     bytes: bytes of every block in each tensor, counted from 0. Both ends move as many bytes of a block. Not
    ///         together with ``tokens``.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type, or none is given.
    ///     InvalidArgument: a range is empty, has another step or a negative end; ``tokens`` and ``bytes`` are both
    ///         given; the rows were narrowed in the same way before. A range that exceeds the cache is found by the
    ///         call that uses the rows.
    #[pyo3(name = "part", signature = (*, layers=None, tokens=None, bytes=None))]
    fn with_part(
        &self,
        py: Python<'_>,
        layers: Option<&Any<'_>>,
        tokens: Option<&Any<'_>>,
        bytes: Option<&Any<'_>>,
    ) -> PyResult<Self> {
        if layers.is_none() && tokens.is_none() && bytes.is_none() {
            return Err(PyTypeError::new_err("part() needs layers, tokens or bytes"));
        }
        let rows = self.narrowed(py, layers, tokens, bytes)?;
        Ok(NativeRows { object: self.object.clone_ref(py), rows })
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.rows == other.rows
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.rows.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        self.rows.to_string()
    }
}
