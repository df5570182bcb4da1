//! Chooses how bytes get from one kind of memory to another one.
//!
//! Between two engines, where the owner's memory lies decides on the path, and the memory of this engine how it gets to that path:
//!
//! | memory of the owner | path | at the reader: host memory | memory of a device |
//! | --- | --- | --- | --- |
//! | a pool, which the reader has mapped | mapped | one copy | one, if the device reads host memory; else two |
//! | other memory of a process that the reader may read | process | one copy | two |
//! | a pool, over a link with UCX or NIXL | fabric | one read | a read and a copy |
//! | anything else, or if the reader has none of these | sockets | received in place | received and copied |
//!
//! [`path`] is the first decision, which each side of a link makes for itself. [`DataPath::hops`](super::DataPath::hops) is the
//! second one.
//!
//! Within an engine, only copies from host to device have a choice ([`Route`]). A swap-in goes directly if the device can read
//! host memory in place, because that is one copy instead of two. Otherwise it goes through the ring. `docs/performance.md` has the
//! measurements.

use std::sync::Arc;

use super::paths::PathKind;
use crate::config::SwapInPath;
use crate::device::{Device, DeviceSet, HostReach};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Tensors;
use crate::model::Placement;

/// Where memory of a cache lies, as its owner tells the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerMemory {
    /// In a pool of the engine.
    Pool,
    /// Elsewhere in its process.
    Process,
    /// Where peers cannot reach it, such as in a device.
    Hidden,
}

/// What one side of a link can read of the other one's memory, or the reasons why it cannot.
#[derive(Clone, Copy, Debug)]
pub struct ReadAccess<'a> {
    /// The path for pools.
    pub pools: std::result::Result<PathKind, &'a str>,
    /// The path for other memory of the process.
    pub process: std::result::Result<PathKind, &'a str>,
    /// Why it cannot read memory that its owner has not located.
    pub hidden: &'a str,
}

/// Returns the path on which the side with this access reads `memory` of the other one in place. Returns the reason if it must go
/// through sockets.
pub fn path(memory: OwnerMemory, access: ReadAccess<'_>) -> std::result::Result<PathKind, &str> {
    match memory {
        OwnerMemory::Pool => access.pools,
        OwnerMemory::Process => access.process,
        OwnerMemory::Hidden => Err(access.hidden),
    }
}

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

/// Route of a copy within this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// From the source to the destination in one copy.
    Direct,
    /// From host memory to a ring buffer of the device, and from there to the destination.
    Ring,
}

/// Returns the route from `src` to `dst`, both in this process. Returns `Err(System)` for memory of another process, and
/// `Err(NotEnabled)` if the device does not support the route that is forced.
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
        return Err(Error::new(ErrorKind::System, "memory of a peer is read on a data path, not by a copy"));
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

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: std::result::Result<PathKind, &str> = Err("not shared");

    #[test]
    fn the_path_follows_from_the_memory_and_what_the_reader_can_read() {
        let both =
            ReadAccess { pools: Ok(PathKind::Mapped), process: Ok(PathKind::Process), hidden: "a device" };
        let library = ReadAccess { pools: Ok(PathKind::Fabric), process: Err("only pools"), ..both };
        let nothing = ReadAccess { pools: NONE, process: NONE, ..both };
        for (access, pool, process) in [
            (both, Ok(PathKind::Mapped), Ok(PathKind::Process)),
            (ReadAccess { process: NONE, ..both }, Ok(PathKind::Mapped), NONE),
            (ReadAccess { pools: NONE, ..both }, NONE, Ok(PathKind::Process)),
            (library, Ok(PathKind::Fabric), Err("only pools")),
            (nothing, NONE, NONE),
        ] {
            assert_eq!(path(OwnerMemory::Pool, access), pool, "{access:?}");
            assert_eq!(path(OwnerMemory::Process, access), process, "{access:?}");
            assert_eq!(path(OwnerMemory::Hidden, access), Err("a device"), "{access:?}");
        }
    }
}
