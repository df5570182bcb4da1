//! Devices: traits for memory of one kind and for the copies into, out of and inside it, and their
//! implementations.
//!
//! A [`Copier`] copies; a [`Device`] also owns memory. There is one file for each implementation. Host memory
//! always exists. `process_reader` copies out of other processes, and `fabric_reader` out of
//! other hosts. The simulated device of the tests is in
//! `crates/testing`; the CPU must not dereference its addresses.

mod fabric_reader;
mod host;
mod process_reader;
mod traits;

pub use crate::memory::kernels::Copy;
pub use fabric_reader::FabricReader;
pub use host::HostDevice;
pub use process_reader::ProcessReader;
pub use traits::{Copier, Device, HostReach};

use std::sync::Arc;

use crate::model::Placement;

/// The two devices of one engine: host memory, and the device for caches placed on the device.
#[derive(Clone, Debug)]
pub struct DeviceSet {
    host: Arc<dyn Device>,
    device: Arc<dyn Device>,
}

impl DeviceSet {
    /// Returns host memory for both, which every machine supports.
    pub fn host_only() -> Self {
        DeviceSet { host: Arc::new(HostDevice), device: Arc::new(HostDevice) }
    }

    /// Returns host memory, and `device` for caches placed on the device.
    #[cfg(feature = "testing")]
    pub fn with_device(device: Arc<dyn Device>) -> Self {
        DeviceSet { host: Arc::new(HostDevice), device }
    }

    /// Returns the device that owns memory of `placement`.
    pub fn at(&self, placement: Placement) -> &Arc<dyn Device> {
        match placement {
            Placement::Host => &self.host,
            Placement::Device => &self.device,
        }
    }
}
