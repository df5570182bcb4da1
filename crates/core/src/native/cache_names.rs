//! What rows need to know about the cache that they belong to, of this engine or of a peer.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use super::cache_form::CacheForm;
use crate::cache::Cache;
use crate::engine::{DataDist, End, RemoteName};
use crate::error::{Error, Result, ensure};
use crate::memory::Adopted;
use crate::model::{CacheId, CacheKind, ClusterId, Placement};
use crate::validate;

/// Which engine caches and peers belong to: its name, which peers and errors show. Only clones of one value are equal, so that it
/// tells engines of the same name apart.
#[derive(Clone, Debug)]
pub struct EngineName(Arc<str>);

impl EngineName {
    /// Names an engine that no other value names.
    pub fn new(name: &str) -> Self {
        EngineName(name.into())
    }
}

impl Deref for EngineName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl PartialEq for EngineName {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A cache of this engine, without keeping it alive.
#[derive(Clone)]
pub struct OwnCache {
    /// The engine.
    pub engine: EngineName,
    /// Its id, which no other cache of the engine ever has.
    pub id: CacheId,
    /// Its name.
    pub name: String,
    /// The pool.
    pub placement: Placement,
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes of a block in one tensor, without gaps.
    pub row_bytes: u64,
    /// Number of tensors.
    pub tensors: u32,
    /// Number of tensors in one layer.
    pub tensors_per_layer: u32,
    /// Number of tokens in a block, if the cache has a layout.
    pub block_tokens: Option<u32>,
}

impl OwnCache {
    /// Allocates a cache of `engine`, which is called `owner`.
    pub fn allocate(
        owner: &EngineName,
        engine: &DataDist,
        name: &str,
        form: &CacheForm,
    ) -> Result<Arc<Self>> {
        form.check_pool(engine)?;
        let cache = engine.allocate_named(name, form.desc(), form.contiguous)?;
        Ok(Self::of(owner, name, &cache, form.layers()))
    }

    /// Registers memory as a cache of `engine`, which is called `owner`. Peers find it if it is `shared`.
    pub fn register(
        owner: &EngineName,
        engine: &DataDist,
        name: &str,
        form: &CacheForm,
        (adopted, shared): (Adopted, bool),
    ) -> Result<Arc<Self>> {
        ensure(!form.contiguous, || {
            Error::argument("form", "contiguous", "without contiguous, which is for allocated caches")
        })?;
        let same = adopted.desc() == form.desc() && adopted.layout().kind == CacheKind::Blocks;
        ensure(same, || {
            let required = "that of the memory: CacheForm::desc and CacheKind::Blocks of Adopted::new";
            Error::argument("form", format_args!("{:?}", form.desc()), required)
        })?;
        let cache = engine.register_named(name, adopted, shared)?;
        Ok(Self::of(owner, name, &cache, form.layers()))
    }

    /// Describes a cache of `engine`, with the number of tensors in one layer and of tokens in one block, if it has a layout.
    pub fn of(
        engine: &EngineName,
        name: &str,
        cache: &Cache,
        (tensors_per_layer, block_tokens): (u32, Option<u32>),
    ) -> Arc<Self> {
        Arc::new(OwnCache {
            engine: engine.clone(),
            id: cache.id(),
            name: name.to_owned(),
            placement: cache.placement(),
            blocks: cache.rows(),
            row_bytes: cache.geometry().row_bytes(),
            tensors: cache.num_tensors(),
            tensors_per_layer,
            block_tokens,
        })
    }

    /// Returns it as one end of a call of the engine.
    pub fn end(&self) -> End {
        End::Managed(self.id)
    }

    /// Returns the number of its layers.
    pub fn layers(&self) -> u64 {
        u64::from(self.tensors / self.tensors_per_layer.max(1))
    }
}

impl fmt::Debug for OwnCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnCache").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

impl PartialEq for OwnCache {
    fn eq(&self, other: &Self) -> bool {
        self.engine == other.engine && self.id == other.id
    }
}

impl Eq for OwnCache {}

impl Hash for OwnCache {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

/// A cache of a peer, by its name there. Each call asks the peer which cache has this name, unless that is known.
#[derive(Clone)]
pub struct PeerCache {
    /// The engine that knows the peer.
    pub engine: EngineName,
    /// The cluster id of the peer. A native engine has its incarnation as cluster id, and no other one ever has it.
    pub cluster: ClusterId,
    /// The name of the cache.
    pub name: Arc<str>,
}

impl PeerCache {
    /// Names a cache of the engine with this cluster id, which need not be a peer of `engine` now. Sends nothing. Returns
    /// `Err(InvalidArgument)` if no cache can have the name.
    pub fn new(engine: &EngineName, cluster: ClusterId, name: &str) -> Result<Arc<Self>> {
        validate::cache_name(name)?;
        Ok(Arc::new(PeerCache { engine: engine.clone(), cluster, name: name.into() }))
    }

    /// Returns what calls of the engine name it by.
    pub fn remote_name(&self) -> RemoteName<Arc<str>> {
        RemoteName { cluster: self.cluster, name: self.name.clone() }
    }
}

impl fmt::Debug for PeerCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerCache")
            .field("cluster", &self.cluster)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RowsCache {
    /// One of this engine.
    Own(Arc<OwnCache>),
    /// One of a peer.
    Peer(Arc<PeerCache>),
}

impl RowsCache {
    /// Returns its name.
    pub fn name(&self) -> &str {
        match self {
            RowsCache::Own(cache) => &cache.name,
            RowsCache::Peer(cache) => &cache.name,
        }
    }
}
