//! One region split by one pool: where allocated caches get their memory, and where it returns.
//!
//! The pool is numbers, the region is memory; this is the only place where they meet. Not for: whose cache it is
//! (`table`).

use std::sync::{Arc, Mutex, PoisonError};

use super::{Extent, Pool, PoolState};
use crate::config::PoolConfig;
use crate::device::Device;
use crate::error::Result;
use crate::fallible;
use crate::memory::{Region, Tensors};
use crate::model::{Geometry, Placement};

/// The memory of one placement.
#[derive(Debug)]
pub struct Arena {
    placement: Placement,
    region: Arc<Region>,
    pool: Mutex<Pool>,
}

impl Arena {
    /// The pool of `config`, on `device`.
    pub fn open(device: &dyn Device, config: PoolConfig, placement: Placement) -> Result<Arc<Arena>> {
        let pool = Pool::new(config.memory_size, config.page_shift)?;
        let name = format!("llm_datadist {placement} pool");
        let region = Arc::new(device.allocate(&name, config.memory_size)?);
        Ok(Arc::new(Arena { placement, region, pool: Mutex::new(pool) }))
    }

    /// Memory for every tensor of `geometry`, each on a page, or an error and the pool as before. It returns when the
    /// tensors drop.
    pub fn allocate(self: &Arc<Self>, geometry: &Geometry) -> Result<Tensors> {
        let bytes = geometry.tensor_bytes();
        let (extents, rounded) = {
            let mut pool = self.locked();
            let extents = pool.allocate_tensors(bytes, geometry.num_tensors());
            (
                extents.map_err(|error| error.with("pool", self.placement))?,
                pool.rounded(bytes).unwrap_or(bytes),
            )
        };
        let lease = Lease { arena: self.clone(), extents };
        let tensors = lease
            .extents
            .iter()
            .flat_map(|extent| (0..extent.bytes / rounded).map(|i| extent.offset + i * rounded));
        // From here on a failure gives the extents back: the lease drops.
        let count = geometry.num_tensors() as usize;
        let tensors = fallible::gathered("the addresses of tensors", count, tensors)?;
        Tensors::carved(self.region.clone(), tensors, bytes, Box::new(lease))
    }

    /// Its region, for the descriptor behind it.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The same, for whoever keeps it beside the arena.
    #[must_use]
    pub fn shared(&self) -> Arc<Region> {
        self.region.clone()
    }

    /// The pool as numbers.
    #[must_use]
    pub fn state(&self) -> PoolState {
        self.locked().state()
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Pool> {
        // No code that holds the lock can panic half-way through a change that matters more than the numbers.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Extents in use; freed when dropped.
struct Lease {
    arena: Arc<Arena>,
    extents: Vec<Extent>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut pool = self.arena.locked();
        for extent in &self.extents {
            let freed = pool.free(*extent);
            debug_assert!(freed, "an extent is freed once, by its only lease");
        }
    }
}
