//! One region divided by one pool: allocated caches get their memory here, and it returns here.
//!
//! The pool is only numbers and the region is memory; they meet in this type alone.

use std::sync::Arc;

use super::{Extent, Pool, PoolState};
use crate::config::PoolConfig;
use crate::device::Device;
use crate::error::Result;
use crate::fallible;
use crate::memory::{Region, Spaced, Tensors};
use crate::model::{Geometry, Placement};
use crate::sync::Mutex;

/// The memory of one placement.
#[derive(Debug)]
pub struct Arena {
    placement: Placement,
    region: Arc<Region>,
    pool: Mutex<Pool>,
}

impl Arena {
    /// Allocates the region that `config` describes on `device`, with a pool over it.
    pub fn open(device: &dyn Device, config: PoolConfig, placement: Placement) -> Result<Arc<Arena>> {
        let pool = Pool::new(config.memory_size, config.page_shift)?;
        let name = format!("llm_datadist {placement} pool");
        let region = Arc::new(device.allocate(&name, config.memory_size)?);
        Ok(Arc::new(Arena { placement, region, pool: Mutex::new(pool) }))
    }

    /// Allocates memory for every tensor of `geometry`, each on a page boundary. The memory returns to the
    /// pool when the tensors drop. After an error the pool is as before.
    pub fn allocate(self: &Arc<Self>, geometry: &Geometry) -> Result<Tensors> {
        let bytes = geometry.tensor_bytes();
        let (extents, rounded) = {
            let mut pool = self.pool.lock();
            let extents = pool.allocate_tensors(bytes, geometry.num_tensors());
            (
                extents.map_err(|error| error.with("pool", self.placement))?,
                pool.rounded(bytes).unwrap_or(bytes),
            )
        };
        let lease = ExtentLease { arena: self.clone(), extents };
        // From here on a failure returns the extents to the pool, because it drops the lease.
        let spaced =
            |extent: &Extent| Spaced { first: extent.offset, step: rounded, count: extent.bytes / rounded };
        let offsets =
            fallible::collect_inline::<1, _>("the offsets of tensors", lease.extents.iter().map(spaced))?;
        Tensors::spaced(self.region.clone(), offsets, geometry.num_tensors() as usize, bytes, lease)
    }

    /// Allocates memory for the tensors of `geometry` in one extent of the pool, one after the other and without
    /// gaps. Only the first tensor starts on a page boundary. Elements need no gap for their alignment, because the
    /// size of a tensor is a multiple of the size of an element.
    ///
    /// After an error the pool is as before. `Err(OutOfMemory)` if no free run of the pool is long enough, even
    /// if the free runs together are.
    pub fn allocate_contiguous(self: &Arc<Self>, geometry: &Geometry) -> Result<Tensors> {
        // One tensor of all bytes takes exactly one extent.
        let extents = self.pool.lock().allocate_tensors(geometry.bytes(), 1);
        let lease = ExtentLease {
            arena: self.clone(),
            extents: extents.map_err(|error| error.with("pool", self.placement))?,
        };
        let offset = lease.extents.first().map_or(u64::MAX, |extent| extent.offset);
        let (count, bytes) = (geometry.num_tensors(), geometry.tensor_bytes());
        Tensors::contiguous(self.region.clone(), offset, count, bytes, lease)
    }

    /// Returns the placement of its memory.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Returns the region, for the descriptor behind it.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns a shared reference to the region, for use beside the arena.
    pub fn shared(&self) -> Arc<Region> {
        self.region.clone()
    }

    pub fn state(&self) -> PoolState {
        self.pool.lock().state()
    }
}

/// Extents in use; returned to the pool on drop.
struct ExtentLease {
    arena: Arc<Arena>,
    extents: Vec<Extent>,
}

impl Drop for ExtentLease {
    fn drop(&mut self) {
        let mut pool = self.arena.pool.lock();
        self.extents.drain(..).for_each(|extent| pool.free(extent));
    }
}
