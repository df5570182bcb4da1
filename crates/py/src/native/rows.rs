//! `Rows`: blocks of a cache, and the part of them that moves.

use std::fmt::{self, Write};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::block_indices;
use super::cache_names::RowsCache;
use super::errors::invalid;
use super::spans;
use crate::convert::{Any, shown};

/// Blocks of a cache, in order, and optionally only some layers, tokens or bytes of them. It cannot be changed.
///
/// ``cache[...]`` makes it, for local and remote caches alike. It does not keep the cache. Two objects are equal if they have
/// the same cache, the same blocks in the same order, and the same part of them.
#[pyclass(frozen, name = "Rows", module = "llm_datadist.native")]
pub(crate) struct BlockRows {
    /// The object on which `[...]` was called.
    object: Py<PyAny>,
    cache: RowsCache,
    /// Shared by all parts of these rows, because a list may be long.
    blocks: Arc<Vec<i64>>,
    part: RowsPart,
}

/// The part of every block that moves. `None` stands for all.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct RowsPart {
    /// Layers of the cache, counted from 0.
    pub(crate) layers: Option<Range<u32>>,
    /// Tokens of the sequence that the blocks hold in their order.
    pub(crate) tokens: Option<Range<u64>>,
    /// Bytes of every block in each tensor.
    pub(crate) bytes: Option<Range<u64>>,
}

impl BlockRows {
    /// Reads the index of `object`, which stands for `cache`.
    pub(crate) fn of(object: &Any<'_>, cache: RowsCache, blocks: &Any<'_>) -> PyResult<Self> {
        let count = match &cache {
            RowsCache::Own(cache) => Some(cache.blocks),
            RowsCache::Peer(_) => None,
        };
        let blocks = Arc::new(block_indices::read(blocks, count)?);
        Ok(BlockRows { object: object.clone().unbind(), cache, blocks, part: RowsPart::default() })
    }

    /// Returns the cache.
    pub(crate) fn cache(&self) -> &RowsCache {
        &self.cache
    }

    /// Returns the blocks. The calls of the core check whether the cache has them.
    pub(crate) fn blocks(&self) -> &[i64] {
        &self.blocks
    }

    /// Returns the part of every block that moves.
    pub(crate) fn part(&self) -> &RowsPart {
        &self.part
    }

    /// Returns the part, narrowed to the spans that are given.
    fn narrowed(
        &self,
        layers: Given<'_, '_>,
        tokens: Given<'_, '_>,
        bytes: Given<'_, '_>,
    ) -> PyResult<RowsPart> {
        let mut part = self.part.clone();
        let all = self.extent();
        if let Some(layers) = layers {
            let range = once("layers", layers, part.layers.is_none(), all.layers)?;
            part.layers = Some(below_2_32(layers, &range)?);
        }
        if let Some(tokens) = tokens {
            part.tokens = Some(once("tokens", tokens, part.tokens.is_none(), all.tokens)?);
        }
        if let Some(bytes) = bytes {
            part.bytes = Some(once("bytes", bytes, part.bytes.is_none(), all.bytes)?);
        }
        match (&part.tokens, &part.bytes, tokens.or(bytes)) {
            (Some(tokens), Some(bytes), Some(given)) => {
                let allowed = format!("left out beside tokens={tokens:?}");
                Err(invalid(given.py(), "bytes", format_args!("{bytes:?}"), &allowed))
            }
            _ => Ok(part),
        }
    }

    /// Returns where open slices end. Nothing is known about a cache of a peer.
    fn extent(&self) -> KnownEnds {
        let RowsCache::Own(cache) = &self.cache else { return KnownEnds::default() };
        let tokens = |of_block| u64::from(of_block) * self.blocks.len() as u64;
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

fn below_2_32(given: &Any<'_>, range: &Range<u64>) -> PyResult<Range<u32>> {
    match (u32::try_from(range.start), u32::try_from(range.end)) {
        (Ok(start), Ok(end)) => Ok(start..end),
        _ => Err(invalid(given.py(), "layers", shown(given), "a range below 2^32")),
    }
}

#[pymethods]
impl BlockRows {
    /// The cache to which the blocks belong.
    #[getter(cache)]
    fn cache_object(&self, py: Python<'_>) -> Py<PyAny> {
        self.object.clone_ref(py)
    }

    /// Return the number of blocks.
    fn __len__(&self) -> usize {
        self.blocks.len()
    }

    /// Return the same blocks, narrowed. A range has step 1 and is not empty: ``range``, ``slice`` or a pair.
    ///
    /// Args:
    ///     layers: layers of the cache, counted from 0. The other end of the transfer must have as many. The engine knows layers
    ///         from the layout, or from ``tensors_per_layer``.
    ///     tokens: tokens of the sequence that the blocks hold in their order, counted from 0. Both caches need a layout. If only
    ///         one end has a range, as many tokens move from the start of the other end.
    ///     bytes: bytes of every block in each tensor, counted from 0. Both ends move as many bytes of a block. Not together
    ///         with ``tokens``.
    ///
    /// A slice of a local cache may have open ends; one of a remote cache needs its end.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type, or none is given.
    ///     InvalidArgument: a range is empty, has another step or a negative end; ``tokens`` and ``bytes`` are both given; the rows
    ///         were narrowed in the same way before. A range that exceeds the cache is found by the call that uses the rows.
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
        let part = self.narrowed(layers, tokens, bytes)?;
        let (object, cache) = (self.object.clone_ref(py), self.cache.clone());
        Ok(BlockRows { object, cache, blocks: self.blocks.clone(), part })
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.cache == other.cache && self.blocks == other.blocks && self.part == other.part
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.cache, &self.blocks, &self.part).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for BlockRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Number of blocks that are shown of a list.
        const SHOWN: usize = 8;
        let (shown, RowsPart { layers, tokens, bytes }) = (self.blocks.len().min(SHOWN), &self.part);
        write!(f, "<Rows of '{}': ", self.cache.name())?;
        if self.blocks.len() > SHOWN {
            write!(f, "{} ", self.blocks.len())?;
        }
        f.write_str("blocks [")?;
        for (at, block) in self.blocks[..shown].iter().enumerate() {
            write!(f, "{}{block}", if at == 0 { "" } else { ", " })?;
        }
        f.write_str(if self.blocks.len() > SHOWN { ", ...]" } else { "]" })?;
        if let Some(layers) = layers {
            write!(f, ", layers {} to {}", layers.start, layers.end - 1)?;
        }
        for (name, range) in [("tokens", tokens), ("bytes", bytes)] {
            if let Some(range) = range {
                write!(f, ", {name} {} to {}", range.start, range.end - 1)?;
            }
        }
        f.write_char('>')
    }
}
