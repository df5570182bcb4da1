//! `RemoteCache`: a cache of a peer, by its name.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use llm_datadist_core::{PeerCache, RowsCache};
use pyo3::prelude::*;

use super::peer::NativePeer;
use super::rows::NativeRows;
use crate::convert::Any;

/// A cache of a peer, by its name: ``peer["kv"]``. Making it sends nothing.
///
/// The peer is asked when a transfer first uses the name. If it has no such cache, the transfer ends with ``NotFound``. If it
/// frees the cache and makes another one of the same name, later transfers use the new one. ``cache[blocks]`` selects blocks as
/// for ``Cache``, but a slice needs its end, because the number of blocks is not known here. Two objects are equal if peer and name are equal.
#[pyclass(frozen, mapping, name = "RemoteCache", module = "llm_datadist.native")]
pub(crate) struct NativeRemoteCache {
    peer: Py<NativePeer>,
    cache: Arc<PeerCache>,
}

impl NativeRemoteCache {
    /// Creates the object for `cache` of `peer`.
    pub(crate) fn new(peer: &Bound<'_, NativePeer>, cache: Arc<PeerCache>) -> Self {
        NativeRemoteCache { peer: peer.clone().unbind(), cache }
    }
}

#[pymethods]
impl NativeRemoteCache {
    /// The name of the cache.
    #[getter]
    fn name(&self) -> &str {
        &self.cache.name
    }

    /// The peer that owns the cache.
    #[getter]
    fn peer(&self, py: Python<'_>) -> Py<NativePeer> {
        self.peer.clone_ref(py)
    }

    /// Select blocks.
    ///
    /// Raises:
    ///     TypeError: not one of the forms of ``Cache``; a ``bool``, a ``float`` or a text; an array with more than one
    ///         dimension, without integers of 16, 32 or 64 bits, or outside host memory.
    ///     InvalidArgument: a negative number or one above 2**32 - 1; a slice without an end, because the number of blocks is not
    ///         known here.
    fn __getitem__(slf: &Bound<'_, Self>, blocks: &Any<'_>) -> PyResult<NativeRows> {
        NativeRows::of(slf.as_any(), RowsCache::Peer(slf.get().cache.clone()), blocks)
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.cache == other.cache
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.cache.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!("<RemoteCache '{}' of peer '{}'>", self.cache.name, self.peer.get().info.name)
    }
}
