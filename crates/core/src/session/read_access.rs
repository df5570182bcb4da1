//! Which memory of its peer each side of a link can read in place, and what both offer for reads by UCX when the link is made.

use super::link::Link;
use super::peer_memory::{NOTHING_SHARED, Readable};
use super::shared::Shared;
use crate::copy::{PathKind, PeerTensors, ReadAccess};
use crate::error::{Error, ErrorKind, Result};
use crate::fabric::{EngineFabric, PeerFabric};
use crate::memory::TensorBytes;
use crate::net::Stream;
use crate::protocol::{FabricOffer, WireLocation};
use crate::resources::MemoryLocation;

/// The reason why registered memory is not read by UCX.
const POOLS_ONLY: &str = "UCX reads only pools, not registered memory or memory of a device";

impl Shared {
    /// Returns what the peer on `stream` may read by UCX. `None` if the stream carries descriptors, because the peer
    /// then maps the memory.
    pub(super) fn fabric_offer(&self, stream: &Stream) -> Option<FabricOffer> {
        let fabric = self.resources.fabric.as_ref().ok().filter(|_| !stream.about.carries_descriptors);
        fabric.map(EngineFabric::offer)
    }

    /// Takes the offer of the peer on `stream`, or returns the reason why UCX is not used. Returns `Err(LinkFailed)`
    /// with the reason if the configuration names UCX.
    pub(super) fn take_fabric(
        &self,
        stream: &Stream,
        offer: Option<&FabricOffer>,
    ) -> Result<Readable<PeerFabric>> {
        if stream.about.carries_descriptors {
            return Ok(Err(NOTHING_SHARED.into()));
        }
        let taken = match (&self.resources.fabric, offer) {
            (Err(reason), _) => {
                Err(format!("{NOTHING_SHARED}, and this side does not use UCX: {reason}").into())
            }
            (Ok(_), None) => Err("the peer does not use UCX".into()),
            (Ok(fabric), Some(offer)) => fabric.take(offer).map_err(|error| error.to_string().into()),
        };
        match taken {
            Err(reason) => match &self.resources.fabric {
                Ok(fabric) if fabric.is_required() => {
                    let text = format!("llm.TransferBackend=ucx, but {reason}");
                    Err(Error::new(ErrorKind::LinkFailed, text).with("peer", &stream.about.peer))
                }
                _ => Ok(Err(reason)),
            },
            taken => Ok(taken),
        }
    }
}

impl Link {
    /// Returns what this side can read of the peer's memory.
    fn reads(&self) -> ReadAccess<'_> {
        self.peer_memory().map_or_else(|| self.fabric_access(), |memory| memory.reads())
    }

    /// Returns what the peer can read of this side's memory.
    fn read_by_peer(&self) -> ReadAccess<'_> {
        self.peer_memory().map_or_else(|| self.fabric_access(), |memory| memory.read_by_peer())
    }

    /// Returns what either side can read through UCX. The peer does not report this, so this side assumes the same of
    /// the peer, which answers `Unreachable` if it cannot read.
    fn fabric_access(&self) -> ReadAccess<'_> {
        let (pools, reason) = match self.fabric() {
            Ok(_) => (Ok(PathKind::Fabric), POOLS_ONLY),
            Err(reason) => (Err(&**reason), &**reason),
        };
        ReadAccess { pools, process: Err(reason), hidden: reason }
    }

    /// Returns `count` tensors of these `bytes` at `location` of the peer, or the reason why this process cannot read them in
    /// place. Returns `Err` if the location is invalid.
    pub(crate) fn tensors(
        &self,
        location: &WireLocation,
        count: u32,
        bytes: impl Into<TensorBytes>,
    ) -> Result<Readable<PeerTensors>> {
        let reads = self.reads();
        let path = match location {
            WireLocation::Region { .. } => reads.pools,
            WireLocation::Process { .. } => reads.process,
            WireLocation::Hidden => Err(reads.hidden),
        };
        if let Err(reason) = path {
            return Ok(Err(reason.to_owned().into()));
        }
        let tensors = match (self.peer_memory(), self.fabric(), location) {
            (Some(memory), ..) => memory.tensors(location, count, bytes)?,
            (None, Ok(fabric), WireLocation::Region { region, runs }) => fabric
                .tensors(*region, runs, count, bytes)?
                .map(|(tensors, pool)| PeerTensors::Fabric(tensors, pool)),
            _ => None,
        };
        Ok(tensors.ok_or("the cache lies in a pool that the peer has not offered".into()))
    }

    /// Returns the path on which the peer reads the memory at `location` of this process, or the reason why it cannot.
    pub(crate) fn path_of_peer(&self, location: &MemoryLocation) -> std::result::Result<PathKind, &str> {
        let read = self.read_by_peer();
        match location {
            MemoryLocation::Pool(..) => read.pools,
            MemoryLocation::Process(_) => read.process,
            MemoryLocation::Hidden => Err(read.hidden),
        }
    }
}
