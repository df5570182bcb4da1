//! Devices: who owns memory of a kind, and how bytes get in, out and around.
//!
//! One trait, one file per device. Host memory is always there; `sim` is a fake device for tests whose addresses the
//! CPU must not touch. Not for: which bytes move (`plan`), on which workers and by which way (`engine`).

mod host;
#[cfg(feature = "testing")]
pub mod sim;

pub use host::HostDevice;

use std::fmt::Debug;
use std::sync::Arc;

use crate::desc::Placement;
use crate::error::Result;
use crate::mem::kernel::Kernel;
use crate::mem::{Region, Window};

/// Bytes to copy: a window to read, and one of equal length to write.
#[derive(Clone, Copy, Debug)]
pub struct Copy<'a> {
    /// Read.
    pub src: Window<'a>,
    /// Written.
    pub dst: Window<'a>,
}

/// How a host-to-device copy may travel on this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostReach {
    /// Host memory can be read in place: a swap-in is one copy.
    Direct,
    /// Only through buffers of the device: a swap-in goes through the ring.
    Staged,
}

/// A kind of memory and the copies it can do.
pub trait Device: Debug + Send + Sync {
    /// `len` bytes, named for reports; given back when the region drops.
    fn allocate(&self, name: &str, len: u64) -> Result<Region>;

    /// How host memory reaches it.
    fn host_reach(&self) -> HostReach;

    /// Does all of `batch`, in any order, and returns when the bytes are in place. The windows stay valid until then
    /// because the caller holds what they were cut from.
    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<()>;
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
