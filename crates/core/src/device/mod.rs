//! Devices: who owns memory of a kind, and how bytes get in, out and around.
//!
//! Two traits: a copier copies, a device also owns memory. One file for each; `process` copies out of other processes. Host memory is always there; `sim` is a fake device for tests whose addresses the
//! CPU must not touch. Not for: which bytes move (`plan`), on which workers and by which way (`engine`).

mod host;
mod process;
#[cfg(feature = "testing")]
pub mod sim;

pub use crate::memory::kernels::Copy;
pub use host::HostDevice;
pub use process::ProcessReader;

use std::fmt::Debug;
use std::sync::Arc;

use crate::error::Result;
use crate::memory::Region;
use crate::memory::kernels::Kernel;
use crate::model::Placement;

/// How a host-to-device copy may travel on this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostReach {
    /// Host memory can be read in place: a swap-in is one copy.
    Direct,
    /// Only through buffers of the device: a swap-in goes through the ring.
    Staged,
}

/// Who copies bytes from window to window.
pub trait Copier: Debug + Send + Sync {
    /// Does all of `batch`, in any order, and returns when the bytes are in place. The windows stay valid until then
    /// because the caller holds what they were cut from.
    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<()>;

    /// Pieces worth handing over at once.
    fn batch(&self) -> usize {
        64
    }

    /// Least and most bytes of the units that a copy is cut into: neither so small that taking one costs, nor so large
    /// that the last worker to finish keeps the rest waiting.
    fn unit(&self) -> (u64, u64) {
        (128 << 10, 512 << 10)
    }

    /// Whether the kernel it is told makes a difference; if not, there is nothing to learn from its speed.
    fn uses_kernels(&self) -> bool {
        true
    }
}

/// A kind of memory and the copies it can do.
pub trait Device: Copier {
    /// `len` bytes, named for reports; given back when the region drops.
    fn allocate(&self, name: &str, len: u64) -> Result<Region>;

    /// How host memory reaches it.
    fn host_reach(&self) -> HostReach;
}

/// The two devices of one engine: host memory and the device proper.
#[derive(Clone, Debug)]
pub struct DeviceSet {
    host: Arc<dyn Device>,
    device: Arc<dyn Device>,
}

impl DeviceSet {
    /// Host memory on both sides: what every machine has.
    #[must_use]
    pub fn host_only() -> Self {
        DeviceSet { host: Arc::new(HostDevice), device: Arc::new(HostDevice) }
    }

    /// Host memory, and `device` for what is placed on the device.
    #[must_use]
    pub fn with_device(device: Arc<dyn Device>) -> Self {
        DeviceSet { host: Arc::new(HostDevice), device }
    }

    /// Who owns memory of `placement`.
    #[must_use]
    pub fn at(&self, placement: Placement) -> &Arc<dyn Device> {
        match placement {
            Placement::Host => &self.host,
            Placement::Device => &self.device,
        }
    }
}
