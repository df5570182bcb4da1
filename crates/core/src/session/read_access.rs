//! Which memory of its peer each side of a link can read in place.

use super::link::Link;
use super::peer_fabric::POOLS_ONLY;
use super::peer_memory::Readable;
use crate::copy::{OwnerMemory, PathKind, PeerTensors, ReadAccess, choose_path};
use crate::error::Result;
use crate::memory::TensorBytes;
use crate::protocol::WireLocation;
use crate::resources::MemoryLocation;

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
        let memory = match location {
            WireLocation::Region { .. } => OwnerMemory::Pool,
            WireLocation::Process { .. } => OwnerMemory::Process,
            WireLocation::Hidden => OwnerMemory::Hidden,
        };
        if let Err(reason) = choose_path(memory, self.reads()) {
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
        let memory = match location {
            MemoryLocation::Pool(..) => OwnerMemory::Pool,
            MemoryLocation::Process(_) => OwnerMemory::Process,
            MemoryLocation::Hidden => OwnerMemory::Hidden,
        };
        choose_path(memory, self.read_by_peer())
    }
}
