//! One cache: its id, sizes, memory and pins.
//!
//! The keys of a cache are not stored here but in the table.

use std::sync::Arc;

use smallvec::SmallVec;

use super::row_queues::RowQueues;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Access, Adopted, Tensors};
use crate::model::{CacheDesc, CacheId, CacheKind, CacheLayout, DataType, Geometry, KvGeometry, Placement};
use crate::sync::Mutex;

/// The provider of a cache's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A pool of the engine. The memory returns to it when the last reference is gone.
    Allocated,
    /// The caller, by a register call. Keys find the cache but do not keep it alive.
    Registered,
    /// The caller, without an entry in the table: a handle over host memory (`Cache.create_cpu_cache`).
    Loose,
}

/// A group of equal tensors under one id.
#[derive(Debug)]
pub struct Cache {
    id: CacheId,
    /// The name by which peers find it.
    name: Option<Arc<str>>,
    origin: Origin,
    layout: CacheLayout,
    shape: SmallVec<[i64; 4]>,
    data_type: DataType,
    kv: Option<Arc<KvGeometry>>,
    remote_accessible: bool,
    /// Whether calls do not exclude each other in its rows.
    unordered: bool,
    tensors: Arc<Tensors>,
    pub(super) pins: Mutex<RowQueues>,
}

impl Cache {
    /// Creates a cache over the caller's memory that is in no table; its id is −1.
    pub fn loose(adopted: Adopted) -> Arc<Cache> {
        let (desc, layout, unordered) = (adopted.desc().clone(), adopted.layout(), adopted.is_unordered());
        let (name, tensors) = ((CacheId(-1), None), Tensors::adopted(adopted));
        let cache = Cache::new(name, Origin::Loose, &desc, layout, tensors, false);
        Arc::new(cache.unordered_if(unordered))
    }

    pub(super) fn new(
        (id, name): (CacheId, Option<Arc<str>>),
        origin: Origin,
        desc: &CacheDesc,
        layout: CacheLayout,
        tensors: Tensors,
        remote_accessible: bool,
    ) -> Self {
        // The description was checked when the memory was allocated or adopted.
        let kv = KvGeometry::of(desc, &layout.geometry).ok().flatten();
        Cache {
            id,
            name,
            origin,
            layout,
            shape: desc.shape[..].into(),
            data_type: desc.data_type,
            kv,
            remote_accessible,
            unordered: false,
            tensors: Arc::new(tensors),
            pins: Mutex::default(),
        }
    }

    /// Lets calls use the same rows at the same time if `unordered`.
    pub(super) fn unordered_if(self, unordered: bool) -> Self {
        Cache { unordered, ..self }
    }

    /// Whether calls do not exclude each other in its rows.
    pub(super) fn is_unordered(&self) -> bool {
        self.unordered
    }

    /// Returns the id; −1 for a loose cache.
    pub fn id(&self) -> CacheId {
        self.id
    }

    /// Returns the name by which peers find the cache, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub(crate) fn origin(&self) -> Origin {
        self.origin
    }

    /// Returns the sizes, kind and placement.
    pub fn layout(&self) -> CacheLayout {
        self.layout
    }

    /// Returns the sizes.
    pub fn geometry(&self) -> Geometry {
        self.layout.geometry
    }

    /// Returns the number of tensors.
    pub fn num_tensors(&self) -> u32 {
        self.layout.geometry.num_tensors()
    }

    /// Returns the number of rows, that is batch slots or blocks, in each tensor.
    pub fn rows(&self) -> u64 {
        self.layout.geometry.rows()
    }

    /// Returns the bytes of all tensors, gaps between rows included.
    pub fn bytes(&self) -> u64 {
        self.layout.geometry.bytes()
    }

    /// Returns whether a row is a batch slot or a block.
    pub fn kind(&self) -> CacheKind {
        self.layout.kind
    }

    /// Returns the placement, which selects the pool.
    pub fn placement(&self) -> Placement {
        self.layout.placement
    }

    /// Returns the dimensions of a tensor, outermost first.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Returns the element type.
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Returns what its rows mean, if its description said so.
    pub fn kv(&self) -> Option<&Arc<KvGeometry>> {
        self.kv.as_ref()
    }

    /// Returns whether peers may access it.
    pub fn remote_accessible(&self) -> bool {
        self.remote_accessible
    }

    /// Returns the address of every tensor.
    pub fn addrs(&self) -> &[u64] {
        self.tensors.addrs()
    }

    /// Returns the address of every tensor, as a shared list.
    pub fn shared_addrs(&self) -> Arc<Vec<u64>> {
        self.tensors.shared_addrs()
    }

    /// Checks that the CPU can read and write the tensors at their addresses, and that they have pages there.
    pub fn check_views(&self) -> Result<()> {
        self.tensors.check_present(Access::Read)?;
        self.tensors.check_present(Access::Write)?;
        if self.tensors.host_addressable() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NotEnabled, "the tensors are in memory that the CPU cannot address"))
    }

    /// Returns the address of the first byte of all tensors together, which are
    /// [`bytes`](Self::bytes) long. Makes the checks of [`check_views`](Self::check_views) first.
    /// Returns `Err` of kind [`ErrorKind::InvalidArgument`] unless the cache was allocated as one range of bytes,
    /// or has one tensor, and if there are gaps between rows that the engine did not allocate.
    pub fn one_range(&self) -> Result<u64> {
        self.check_views()?;
        let rows = self.geometry().row_sizes();
        if rows.has_gaps() && self.origin != Origin::Allocated {
            return Err(Error::invalid(
                "registered memory has gaps between the rows that are not part of the cache",
            )
            .with("cache_id", self.id)
            .with("row_bytes", rows.bytes())
            .with("row_stride", rows.stride()));
        }
        self.tensors.one_range().ok_or_else(|| {
            Error::invalid("the tensors of the cache are not contiguous; allocate it with contiguous=True")
                .with("cache_id", self.id)
                .with("tensors", self.addrs().len())
        })
    }

    pub(crate) fn tensors(&self) -> &Arc<Tensors> {
        &self.tensors
    }
}
