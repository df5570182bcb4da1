//! What rows need to know about the cache that they belong to, of this engine or of a peer.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use llm_datadist_core::{CacheId, ClusterId, End, Placement};

use super::EngineShared;

/// A cache of this engine, without keeping it alive.
pub(crate) struct OwnCache {
    /// The engine.
    pub(crate) shared: Arc<EngineShared>,
    /// Its id, which no other cache of the engine ever has.
    pub(crate) id: CacheId,
    /// Its name.
    pub(crate) name: String,
    /// The pool.
    pub(crate) placement: Placement,
    /// Number of blocks.
    pub(crate) blocks: u64,
    /// Bytes of a block in one tensor, without gaps.
    pub(crate) row_bytes: u64,
    /// Number of tensors.
    pub(crate) tensors: u32,
    /// Number of tensors in one layer.
    pub(crate) tensors_per_layer: u32,
    /// Number of tokens in a block, if the cache has a layout.
    pub(crate) block_tokens: Option<u32>,
}

impl OwnCache {
    /// Returns it as one end of a call of the core.
    pub(crate) fn end(&self) -> End {
        End::Managed(self.id)
    }

    /// Returns the number of its layers.
    pub(crate) fn layers(&self) -> u64 {
        u64::from(self.tensors / self.tensors_per_layer.max(1))
    }
}

impl PartialEq for OwnCache {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared) && self.id == other.id
    }
}

impl Eq for OwnCache {}

impl Hash for OwnCache {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

/// A cache of a peer, by its name there. Each call asks the peer which cache has this name, unless that is known.
pub(crate) struct PeerCache {
    /// The engine that knows the peer.
    pub(crate) shared: Arc<EngineShared>,
    /// The cluster id of the peer. An engine of the native API has its incarnation as cluster id, and no other one ever has it.
    pub(crate) cluster: ClusterId,
    /// The name of the peer.
    pub(crate) peer: Arc<str>,
    /// The name of the cache.
    pub(crate) name: Arc<str>,
}

impl PartialEq for PeerCache {
    fn eq(&self, other: &Self) -> bool {
        self.cluster == other.cluster && self.name == other.name
    }
}

impl Eq for PeerCache {}

impl Hash for PeerCache {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.cluster, &self.name).hash(state);
    }
}

/// The cache that rows belong to.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) enum RowsCache {
    /// One of this engine.
    Own(Arc<OwnCache>),
    /// One of a peer.
    Peer(Arc<PeerCache>),
}

impl RowsCache {
    /// Returns its name.
    pub(crate) fn name(&self) -> &str {
        match self {
            RowsCache::Own(cache) => &cache.name,
            RowsCache::Peer(cache) => &cache.name,
        }
    }
}
