//! Chooses how bytes get from one kind of memory to another one.
//!
//! Between two engines, the location of the owner's memory decides the path ([`choose_path`]). The kind of memory at the reader
//! decides how many copies the path needs ([`DataPath::hops`](super::DataPath::hops)).
//!
//! | memory of the owner | path | into host memory | into memory of a device |
//! | --- | --- | --- | --- |
//! | a pool, which the reader has mapped | mapped | one copy | one, if the device reads host memory; else two |
//! | other memory of a process that the reader may read | process, or rings for some sizes ([`prefers_rings`]) | one copy | two |
//! | a pool, over a link with UCX | fabric | one read | a read and a copy |
//! | anything else, and memory that the reader cannot read | rings, or sockets | received in place | received and copied |
//!
//! The call stream decides whether the owner sends the bytes through rings or a socket. The owner also sends them while this engine
//! pushes to the cache that it pulls from (`session::peer_snapshot`), and if the kernel or UCX refuses a read that was
//! possible when the link was made.
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
use crate::plan::Side;

/// Where memory of a cache lies, as its owner tells the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerMemory {
    /// In a pool of the engine.
    Pool,
    /// Elsewhere in its process.
    Process,
    /// At a location that the owner does not send, such as in a device.
    Hidden,
}

/// What one side of a link can read of the other one's memory, or the reasons why it cannot.
#[derive(Clone, Copy, Debug)]
pub struct ReadAccess<'a> {
    /// The path for pools.
    pub pools: std::result::Result<PathKind, &'a str>,
    /// The path for other memory of the process.
    pub process: std::result::Result<PathKind, &'a str>,
    /// Why it cannot read memory whose location the owner does not send.
    pub hidden: &'a str,
}

/// Returns the path on which a reader with `access` reads `memory` of its peer in place, or the reason why the owner has to
/// send it.
pub fn choose_path(memory: OwnerMemory, access: ReadAccess<'_>) -> std::result::Result<PathKind, &str> {
    match memory {
        OwnerMemory::Pool => access.pools,
        OwnerMemory::Process => access.process,
        OwnerMemory::Hidden => Err(access.hidden),
    }
}

/// Minimum number of bytes for which the speeds of rings and of reads by process id are compared. Shorter pulls do not use rings,
/// and shorter pushes always prefer them.
const COMPARED_FROM: u64 = 256 << 10;
/// Maximum number of bytes for which rings are preferred.
const RINGS_TO: u64 = 2 << 20;

/// Returns whether a transfer of `bytes` bytes should use rings instead of `path`, if the link has an idle stream with rings.
/// `local` is the end of the transfer that lies in the calling process.
///
/// The kernel examines each page that it reads in another process, and a thread of its own waits for it. For a push, the two
/// copies through a ring take less time, because the peer has to take part in any case. A pull by process id needs nobody at the
/// owner, so pulls use rings only from 256 KiB on, where this takes less time even if the owner sleeps (with pages of 4 KiB).
/// Above 2 MiB, several threads read at the same time (docs/performance.md). From 256 KiB on, the link also compares both paths
/// ([`compares_rings`]).
pub fn prefers_rings(path: PathKind, bytes: u64, local: Side) -> bool {
    let from = if local == Side::Source { 0 } else { COMPARED_FROM };
    path == PathKind::Process && (from..=RINGS_TO).contains(&bytes)
}

/// Returns whether a link compares the speeds of both paths ([`FasterPath`](super::FasterPath)) for a transfer of `bytes` bytes
/// that may use rings.
pub fn compares_rings(bytes: u64) -> bool {
    (COMPARED_FROM..=RINGS_TO).contains(&bytes)
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
        // The stages of the ring would wait for a process whose memory does not answer (`reader_threads`).
        return Err(Error::new(ErrorKind::System, "a local copy cannot read memory of a peer"));
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
