//! What this side sees of one peer: the memory that either side reads in place, and the descriptions of remote caches.

use std::sync::Arc;

use super::known_cache::{KnownCache, KnownCaches, KnownNames};
use super::peer_memory::{PeerMemory, Readable};
use super::pushes_in_flight::PushesInFlight;
use crate::copy::{PathKind, PeerTensors, ReadAccess};
use crate::error::Result;
use crate::fabric::PeerFabric;
use crate::memory::PeerGenerations;
use crate::model::Name;
use crate::protocol::{EntryVersion, WireLocation};
use crate::resources::MemoryLocation;
use crate::sync::Mutex;

/// The reason why registered memory is not read by UCX.
const POOLS_ONLY: &str = "UCX reads only pools, not registered memory or memory of a device";

/// The memory of a peer that this process reads in place.
#[derive(Debug)]
pub(super) enum ReadableMemory {
    /// Memory of a process on this host.
    Local(PeerMemory),
    /// The pools, which UCX reads.
    Fabric(PeerFabric),
    /// None, for this reason.
    None(String),
}

/// The side of a link that reads the memory of the other side.
#[derive(Clone, Copy)]
enum Reader {
    Here,
    Peer,
}

/// What this side sees of one peer. [`end`](Self::end) has the memory released soon; a reader keeps what it uses.
#[derive(Debug)]
pub(crate) struct RemoteView {
    memory: ReadableMemory,
    records: Mutex<KnownCaches>,
    granted: Mutex<KnownCaches>,
    pub(super) names: Mutex<KnownNames>,
    /// The pushes to the engine of the peer, over any link.
    pushes: Arc<PushesInFlight>,
}

impl RemoteView {
    pub(super) fn new(memory: ReadableMemory, pushes: Arc<PushesInFlight>) -> RemoteView {
        let (records, granted) = (Mutex::new(KnownCaches::of_link()), Mutex::new(KnownCaches::of_grants()));
        RemoteView { memory, records, granted, names: Mutex::new(KnownNames::of_link()), pushes }
    }

    /// Has new links wait until the memory is unmapped, and ends reads by UCX, because the link has broken.
    pub(super) fn end(&self) {
        match &self.memory {
            ReadableMemory::Local(memory) => memory.release_soon(),
            ReadableMemory::Fabric(fabric) => fabric.end(),
            ReadableMemory::None(_) => {}
        }
    }

    /// Returns the pushes to the engine of the peer.
    pub(crate) fn pushes(&self) -> &PushesInFlight {
        &self.pushes
    }

    /// Returns the memory of the peer on this host, if this process can read any.
    pub(super) fn local(&self) -> Option<&PeerMemory> {
        if let ReadableMemory::Local(memory) = &self.memory { Some(memory) } else { None }
    }

    /// Whether UCX reads the pools.
    pub(crate) fn uses_fabric(&self) -> bool {
        matches!(self.memory, ReadableMemory::Fabric(_))
    }

    /// Returns what `reader` can read of the other side's memory. With UCX, the peer does not report it, so this side assumes the
    /// same of the peer, which answers `Unreachable` if it cannot read.
    fn access(&self, reader: Reader) -> ReadAccess<'_> {
        let (pools, reason) = match (&self.memory, reader) {
            (ReadableMemory::Local(memory), Reader::Here) => return memory.reads(),
            (ReadableMemory::Local(memory), Reader::Peer) => return memory.read_by_peer(),
            (ReadableMemory::Fabric(_), _) => (Ok(PathKind::Fabric), POOLS_ONLY),
            (ReadableMemory::None(reason), _) => (Err(reason.as_str()), reason.as_str()),
        };
        ReadAccess { pools, process: Err(reason), hidden: reason }
    }

    /// Returns `count` tensors of `bytes` bytes at `location` of the peer, or the reason why this process cannot read them in
    /// place. Returns `Err` if the location is invalid.
    pub(super) fn tensors(
        &self,
        location: &WireLocation,
        count: u32,
        bytes: u64,
    ) -> Result<Readable<PeerTensors>> {
        let reads = self.access(Reader::Here);
        let path = match location {
            WireLocation::Pool { .. } => reads.pools,
            WireLocation::Process { .. } => reads.process,
            WireLocation::Hidden => Err(reads.hidden),
        };
        if let Err(reason) = path {
            return Ok(Err(reason.to_owned().into()));
        }
        let tensors = match (&self.memory, location) {
            (ReadableMemory::Local(memory), _) => memory.tensors(location, count, bytes)?,
            (ReadableMemory::Fabric(fabric), WireLocation::Pool { pool, runs }) => fabric
                .tensors(*pool, runs, count, bytes)?
                .map(|(tensors, pool)| PeerTensors::Fabric(tensors, pool)),
            _ => None,
        };
        Ok(tensors.ok_or("the cache lies in a pool that the peer has not offered".into()))
    }

    /// Returns the path on which the peer reads the memory at `location` of this process, or the reason why it cannot.
    pub(crate) fn path_of_peer(&self, location: &MemoryLocation) -> std::result::Result<PathKind, &str> {
        let read = self.access(Reader::Peer);
        match location {
            MemoryLocation::Pool(..) => read.pools,
            MemoryLocation::Process(_) => read.process,
            MemoryLocation::Hidden => Err(read.hidden),
        }
    }

    /// Returns the stored descriptions, among them that of the remote cache `name`.
    pub(super) fn records(&self, name: &Name) -> &Mutex<KnownCaches> {
        if matches!(name, Name::Grant(_)) { &self.granted } else { &self.records }
    }

    /// Stores the description of a remote cache if there is room.
    pub(crate) fn remember(&self, name: Name, known: Arc<KnownCache>) {
        self.records(&name).lock().remember(name, known);
    }

    /// Removes the description of a remote cache.
    pub(crate) fn forget(&self, name: &Name) {
        self.records(name).lock().remove(name);
    }

    /// Whether the cache is unchanged since its owner described it, and the grant by which it was described lasts, as far as
    /// this process can see. Without a mapping of the owner's generations this is always true; then the owner compares.
    pub(super) fn current(&self, known: &KnownCache) -> bool {
        let EntryVersion { index, generation } = known.at;
        self.generations().is_none_or(|generations| generations.still(index, generation))
            && self.grant_lasts(known)
    }

    /// Whether the grant under which a cache was described lasts, as far as this process sees. Without a view of the owner's
    /// generations, the owner checks.
    pub(super) fn grant_lasts(&self, known: &KnownCache) -> bool {
        let (Some((grant, _)), Some(of_peer)) = (&known.granted, self.generations()) else { return true };
        of_peer.grant_still(grant.slot, grant.generation)
    }

    fn generations(&self) -> Option<&PeerGenerations> {
        self.local().and_then(PeerMemory::generations)
    }

    /// Returns how memory of the peer is read, for the log.
    pub(super) fn report(&self) -> String {
        let memory = match &self.memory {
            ReadableMemory::Local(memory) => memory,
            ReadableMemory::Fabric(_) => return "pools by UCX, registered memory by sockets".into(),
            ReadableMemory::None(_) => return "sockets".into(),
        };
        let pools = match memory.unmapped() {
            Some(why) => &format!("pools sent by the owner ({why}), "),
            None if memory.pools() == "mapped" => "pools mapped, ",
            None => "",
        };
        let how = memory.refusal().map_or("by process id".into(), |why| format!("sent by the owner ({why})"));
        format!("{pools}registered memory {how}")
    }
}
