//! Decides the way of a copy: straight, or through the ring; and which device does it.
//!
//! The rule for a swap-in: straight where the device reads host memory in place, because that is one copy instead of
//! two; through the ring where it cannot. Measured in `docs/performance.md`. Not for: running it.

use std::sync::Arc;

use super::End;
use crate::config::SwapInPath;
use crate::desc::Placement;
use crate::device::{Device, DeviceSet, HostReach};
use crate::error::{Error, ErrorKind, Result};

/// The way of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Source to destination.
    Direct,
    /// Host to a ring buffer of the device, and from there to its place.
    Ring,
}

/// The way from `src` to `dst`. Only host to device has a choice.
pub(super) fn choose(devices: &DeviceSet, src: End<'_>, dst: End<'_>, forced: SwapInPath) -> Result<Route> {
    if (src.1, dst.1) != (Placement::Host, Placement::Device) {
        return Ok(Route::Direct);
    }
    let reach = copier(devices, src, dst).host_reach();
    match (forced, reach) {
        (SwapInPath::Auto, HostReach::Staged) | (SwapInPath::Ring, _) => Ok(Route::Ring),
        (SwapInPath::Auto | SwapInPath::Direct, HostReach::Direct) => Ok(Route::Direct),
        (SwapInPath::Direct, HostReach::Staged) => {
            let text =
                "llm.SwapInPath = direct, but this device reads host memory only through buffers of its own";
            Err(Error::new(ErrorKind::NotEnabled, text))
        }
    }
}

/// Who copies between two ends: the CPU where it can address both, else the device.
pub(super) fn copier<'a>(devices: &'a DeviceSet, src: End<'_>, dst: End<'_>) -> &'a Arc<dyn Device> {
    let host = src.0.host_addressable() && dst.0.host_addressable();
    devices.at(if host { Placement::Host } else { Placement::Device })
}
