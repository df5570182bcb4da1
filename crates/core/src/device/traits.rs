//! The traits of devices: the copies that they make, and the memory that they own.

use std::fmt::Debug;

use crate::error::Result;
use crate::memory::Region;
use crate::memory::kernels::{Copy, Kernel};

/// How data in host memory reaches a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostReach {
    /// The device reads host memory in place, so a swap-in is one copy.
    Direct,
    /// Data must pass through buffers of the device, so a swap-in uses the staging ring.
    #[cfg_attr(not(feature = "testing"), expect(dead_code, reason = "only the simulated device is so"))]
    Staged,
}

/// Copies bytes between windows.
pub trait Copier: Debug + Send + Sync {
    /// Makes all copies of `batch`, in any order, and returns when the bytes are in place. The caller holds
    /// the tensors from which the windows were cut, so these stay valid until then. `kernel` is the copy
    /// kernel to use, if this copier uses kernels.
    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<()>;

    /// Returns how many entries are worth passing in one batch.
    fn batch(&self) -> usize {
        64
    }

    /// Returns the least and the most bytes of the units into which a copy is cut. They are large enough that
    /// taking a unit costs little, and small enough that the last worker does not keep the others waiting.
    fn unit(&self) -> (u64, u64) {
        (128 << 10, 512 << 10)
    }

    /// Returns whether the given kernel makes a difference. If not, the speed of a copy gives no information
    /// about kernels.
    fn uses_kernels(&self) -> bool {
        true
    }
}

/// A kind of memory, together with the copies that it supports.
pub trait Device: Copier {
    /// Allocates `len` bytes, which are released when the region drops. `name` appears in reports.
    fn allocate(&self, name: &str, len: u64) -> Result<Region>;

    /// Returns how host memory reaches this device.
    fn host_reach(&self) -> HostReach;
}
