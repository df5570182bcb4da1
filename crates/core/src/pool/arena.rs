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

#[cfg(all(test, feature = "testing", not(loom)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::device::HostDevice;
    use crate::error::ErrorKind;
    use crate::memory::kernels::{Kernel, copy};
    use crate::memory::{MapBudget, PeerMapping, Window};
    use crate::model::{CacheDesc, DataType, Deadline};

    fn all(tensors: &Tensors) -> Window<'_> {
        tensors.window(0, 0, tensors.tensor_bytes()).unwrap()
    }

    /// The pages of a pool are independent of those of memory: a region consists of whole pages of memory, however small the pool is.
    #[test]
    fn pool_smaller_than_a_page_of_memory_is_used_to_its_last_byte() {
        const LEN: usize = 1 << 10;
        let config = PoolConfig { memory_size: LEN as u64, page_shift: 10 };
        let arena = Arena::open(&HostDevice, config, Placement::Host).unwrap();
        let desc = CacheDesc {
            num_tensors: 1,
            shape: vec![1, i64::try_from(LEN).unwrap()],
            data_type: DataType::Uint8,
            placement: Placement::Host,
            row_stride: None,
            kv_layout: None,
        };
        let geometry = Geometry::new(&desc).unwrap();
        let tensors = arena.allocate(&geometry).unwrap();
        assert_eq!(arena.allocate(&geometry).unwrap_err().kind(), ErrorKind::OutOfMemory);
        let (written, mut read) = ([7; LEN], [0; LEN]);
        copy(Window::of_slice(&written), all(&tensors), Kernel::PLAIN).unwrap();
        // As a peer maps it.
        let (descriptor, soon) =
            (arena.region().descriptor().unwrap(), Deadline::after(Duration::from_secs(5)));
        let descriptor = descriptor.try_clone_to_owned().unwrap();
        let mapping = PeerMapping::map(descriptor, LEN as u64, &MapBudget::new(None), soon).unwrap();
        let remote = Tensors::mapped(mapping, vec![0], LEN as u64).unwrap();
        copy(all(&remote), Window::of_slice_mut(&mut read), Kernel::PLAIN).unwrap();
        assert_eq!(read, written);
    }
}
