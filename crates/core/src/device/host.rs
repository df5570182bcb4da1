//! Host memory as a device: shared mappings, copied by the CPU.

use super::traits::{Copier, Device, HostReach};
use crate::error::Result;
use crate::memory::Region;
use crate::memory::kernels::{self, Copy, Kernel};

/// Host memory. It has no state of its own.
#[derive(Debug)]
pub struct HostDevice;

impl Device for HostDevice {
    fn allocate(&self, name: &str, len: u64) -> Result<Region> {
        Region::shared(name, len)
    }

    fn host_reach(&self) -> HostReach {
        HostReach::Direct
    }
}

impl Copier for HostDevice {
    /// Returns the number of 4 KiB blocks in a unit of the maximum size (512 KiB). A smaller batch is slower,
    /// because a kernel does not prefetch beyond a batch and ends each one with a fence.
    fn batch(&self) -> usize {
        128
    }

    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<()> {
        kernels::copy_all(batch, kernel)
    }
}
