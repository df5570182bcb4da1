//! Chooses the route of a copy, and the device that runs it.
//!
//! A swap-in goes directly if the device can read host memory in place, because that is one copy instead of
//! two. Otherwise it goes through the ring. `docs/performance.md` has the measurements. Memory of another process
//! goes through host buffers if the device cannot read it.

use std::sync::Arc;
use std::time::Duration;

use crate::config::SwapInPath;
use crate::device::{Copier, Device, DeviceSet, FabricReader, HostReach, ProcessReader};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Reach, Tensors};
use crate::model::{Deadline, Placement};

/// How a copy from host to device may be staged.
#[derive(Clone, Copy, Debug)]
pub struct Staging {
    /// Route that the configuration forces, if any.
    pub path: SwapInPath,
    /// Size of one ring buffer in bytes, if the copy goes through the ring.
    pub buffer_bytes: u64,
}

impl Staging {
    /// For copies without a block size: buffers of 1 MiB, and no forced route.
    pub const DEFAULT: Staging = Staging { path: SwapInPath::Auto, buffer_bytes: 1 << 20 };
}

/// Memory at one end of a copy, and its placement.
pub type PlacedTensors<'a> = (&'a Arc<Tensors>, Placement);

/// Route of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// From the source to the destination in one copy.
    Direct,
    /// From host memory to a ring buffer of the device, and from there to the destination.
    Ring,
    /// From memory of another process to a host buffer, and from there to the destination.
    Staged,
}

/// Returns the route from `src` to `dst`. Only copies from host to device of this process have a choice. Returns
/// `Err(System)` if the destination is memory of another process, and `Err(NotEnabled)` if the device does
/// not support the route that is forced.
pub(super) fn choose(
    devices: &DeviceSet,
    src: PlacedTensors<'_>,
    dst: PlacedTensors<'_>,
    forced: SwapInPath,
) -> Result<Route> {
    if !dst.0.reach().writable() {
        return Err(Error::new(ErrorKind::System, "cannot write to memory of another process"));
    }
    if src.0.reach().is_peer() {
        return Ok(from_peer(devices, src, dst));
    }
    if (src.1, dst.1) != (Placement::Host, Placement::Device) {
        return Ok(Route::Direct);
    }
    let reach = device(devices, src, dst).host_reach();
    match (forced, reach) {
        (SwapInPath::Auto, HostReach::Staged) | (SwapInPath::Ring, _) => Ok(Route::Ring),
        (SwapInPath::Auto | SwapInPath::Direct, HostReach::Direct) => Ok(Route::Direct),
        (SwapInPath::Direct, HostReach::Staged) => {
            let text =
                "llm.SwapInPath=direct, but this device reads host memory only through its own buffers";
            Err(Error::new(ErrorKind::NotEnabled, text))
        }
    }
}

/// Memory of another process never passes the ring, which is for swap-ins: its stages do not leave a process whose memory
/// does not answer (`reader_threads`).
fn from_peer(devices: &DeviceSet, src: PlacedTensors<'_>, dst: PlacedTensors<'_>) -> Route {
    let direct = device(devices, src, dst).host_reach() == HostReach::Direct;
    if dst.0.host_addressable() || (src.0.host_addressable() && direct) {
        Route::Direct
    } else {
        Route::Staged
    }
}

/// The deadline of a read of a peer, and how long its memory may give no sign of life.
pub(super) type ReadLimits = (Deadline, Option<Duration>);

/// Returns what reads `src` into host memory: the system's kernel if it is read by process id, UCX if it is on another
/// host, otherwise the CPU.
pub(super) fn reader(devices: &DeviceSet, src: PlacedTensors<'_>, limits: ReadLimits) -> Arc<dyn Copier> {
    match (src.0.process(), src.0.fabric()) {
        (Some(process), _) => Arc::new(ProcessReader::new(process.clone())),
        (None, Some(region)) => Arc::new(FabricReader::new(region.clone(), limits.0, limits.1)),
        (None, None) => devices.at(Placement::Host).clone(),
    }
}

/// Returns the copier for two ends: what reads a peer's memory if it is not mapped, otherwise the device.
pub(super) fn copier(
    devices: &DeviceSet,
    src: PlacedTensors<'_>,
    dst: PlacedTensors<'_>,
    limits: ReadLimits,
) -> Arc<dyn Copier> {
    match src.0.reach() {
        Reach::Process | Reach::Fabric => reader(devices, src, limits),
        _ => device(devices, src, dst).clone(),
    }
}

/// Returns the device for a copy: the CPU if it can address both ends, otherwise the device of the device
/// placement.
pub(super) fn device<'a>(
    devices: &'a DeviceSet,
    src: PlacedTensors<'_>,
    dst: PlacedTensors<'_>,
) -> &'a Arc<dyn Device> {
    let host = src.0.host_addressable() && dst.0.host_addressable();
    devices.at(if host { Placement::Host } else { Placement::Device })
}
