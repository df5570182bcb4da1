//! The rules for how bytes get from one kind of memory to another one.
//!
//! Between two engines, the first [`Rule`] of this table that fits decides the path. [`ReadAccess`] has those for the location of
//! the owner's memory, and [`takes_rings`] the one for the size of a transfer. `session::remote_view` applies the former to
//! each description of a cache, `transfer` the latter to each transfer. The rules are the same for pulls and pushes.
//!
//! | rule | memory of the owner | path | why |
//! | --- | --- | --- | --- |
//! | `mapped_pool` | a pool that the reader has mapped | mapped | one copy, and the owner does nothing |
//! | `fabric_pool` | a pool, over a link with UCX | fabric | one read, and the owner does nothing |
//! | `short_transfer` | readable by process id, at most 2 MiB, and rings are free | rings | the kernel need not examine each page |
//! | `process_memory` | readable by process id | process | the owner does nothing, and several threads read at once |
//! | `owner_sends` | anything else | rings, or sockets | only the owner can read it; the call stream decides which of the two |
//!
//! Rings are free if a call stream that has some is idle, this side's memory is host memory, and all of its cache has pages. A
//! transfer that has begun keeps its path. There are two exceptions, after which the owner sends the bytes: this engine pushes to
//! the cache that it pulls from (`session::peer_snapshot`), or the kernel or UCX refuses a read that was possible when the link
//! was made. The owner refuses a pull through rings before the first byte if a part of its cache has no pages. The reader then
//! reads by process id. The kind of memory at the reader decides how many copies a path needs ([`DataPath::hops`](super::DataPath::hops)).
//!
//! Within an engine, only copies from host to device have a choice ([`Route`]). A swap-in goes directly if the device can read
//! host memory in place, because that is one copy instead of two. Otherwise it goes through the staging ring. `docs/performance.md` has the
//! measurements.

use std::sync::Arc;

use super::paths::PathKind;
use crate::config::SwapInPath;
use crate::device::{Device, DeviceSet, HostReach};
use crate::error::{Error, ErrorKind, OptionName, Result};
use crate::memory::Tensors;
use crate::model::{Placement, named_enum};

named_enum! {
    /// A row of the table above, under the name that `stats()` gives it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Rule {
        /// The reader has mapped the pool.
        MappedPool = "mapped_pool",
        /// UCX reads the pool.
        FabricPool = "fabric_pool",
        /// The transfer is short enough for rings, although the reader may read the memory by process id.
        ShortTransfer = "short_transfer",
        /// The reader reads the memory by process id.
        ProcessMemory = "process_memory",
        /// Only the owner can read the memory.
        OwnerSends = "owner_sends",
    }
}

impl Rule {
    /// Returns the rule by which a transfer took `path`. `short` is whether [`takes_rings`] decided.
    pub fn of(path: PathKind, short: bool) -> Rule {
        match path {
            PathKind::Mapped => Rule::MappedPool,
            PathKind::Fabric => Rule::FabricPool,
            PathKind::Process => Rule::ProcessMemory,
            PathKind::Rings | PathKind::Sockets if short => Rule::ShortTransfer,
            PathKind::Rings | PathKind::Sockets => Rule::OwnerSends,
        }
    }
}

/// The paths on which one side of a link reads the other one's memory in place, or the reasons why the owner has to send it.
#[derive(Clone, Copy, Debug)]
pub struct ReadAccess<'a> {
    /// The path for pools.
    pub pools: std::result::Result<PathKind, &'a str>,
    /// The path for other memory of the process.
    pub process: std::result::Result<PathKind, &'a str>,
    /// Why it cannot read memory whose location the owner does not send, such as memory of a device.
    pub hidden: &'a str,
}

/// Maximum number of bytes that take rings although the reader may read the memory by process id.
///
/// Measured with 4 KiB pages (`benches/results/log.md`, "Payload in a ring"): through rings, 2 MiB took 230 µs (by process id 312),
/// 1 MiB 120 (175 to 201), 256 KiB 38 (73 to 88), and 16 KiB 6 (12). 4 MiB took 480 µs, where several threads read in 348
/// (`benches/results/figures.md`, `pull_registered`). An owner that sleeps has to be woken: then 16 KiB took 38 µs (17).
const RINGS_UP_TO: u64 = 2 << 20;

/// Returns whether a transfer of `bytes` bytes in all its plans takes rings, if they are free, instead of the path `in_place` of [`ReadAccess`].
pub fn takes_rings(in_place: PathKind, bytes: u64) -> bool {
    in_place == PathKind::Process && bytes <= RINGS_UP_TO
}

/// How a copy from host to device may be staged.
#[derive(Clone, Copy, Debug)]
pub struct Staging {
    /// Route that the configuration forces, if any.
    pub path: SwapInPath,
    /// Size of one buffer in bytes, if the copy goes through the staging ring.
    pub buffer_bytes: u64,
}

impl Staging {
    /// For copies without a block size: buffers of 1 MiB, and no forced route.
    pub const DEFAULT: Staging = Staging { path: SwapInPath::Auto, buffer_bytes: 1 << 20 };

    /// Whether the configuration forces the staging ring, also between memories of the host.
    pub fn forces_ring(&self) -> bool {
        self.path == SwapInPath::Ring
    }
}

/// Memory at one end of a copy, and its placement.
pub type PlacedTensors<'a> = (&'a Arc<Tensors>, Placement);

/// Route of a copy within this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// From the source to the destination in one copy.
    Direct,
    /// From host memory to a buffer of the staging ring, and from there to the destination.
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
        // The stages of the staging ring would wait for a process whose memory does not answer (`reader_threads`).
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
            let text = "a direct swap-in is required, but this device reads host memory only through its own buffers";
            Err(Error::new(ErrorKind::NotEnabled, text).of_option(OptionName::SWAP_IN_PATH))
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
