//! The paths on which the bytes of a transfer move, and the reason why one does not use a faster path.
//!
//! | memory of the owner | path of a pull, and of a push by the peer |
//! | --- | --- |
//! | a pool that the reader has mapped | the reader copies it ([`DataPath::Mapped`]) |
//! | other memory of a process that the reader may read | the kernel copies it ([`DataPath::Process`]) |
//! | a pool over a link on which both sides use UCX or NIXL | that library reads it ([`DataPath::Fabric`]) |
//! | anything else, and a cache to which this process pushes | the owner sends it ([`DataPath::Sockets`]) |
//!
//! On each path, bytes from or to memory that the CPU cannot address pass host buffers at that end
//! (`copy::staged_copier`, `copy::staged_socket`).

use super::call::Call;
use crate::fabric::EngineFabric;
use crate::memory::Reach;
use crate::resources::MemoryLocation;
use crate::session::{KnownCache, PeerSnapshot, Readable};
use crate::stats::DataPath;

impl Call {
    /// Begins a pull in place, or returns the reason why the owner must send the bytes.
    pub(super) fn in_place<'a>(&'a self, known: &'a KnownCache) -> Readable<PeerSnapshot<'a>> {
        PeerSnapshot::begin(&self.link, known)
    }

    /// Returns `Err` with the reason if the peer cannot read the source of a push in place.
    pub(super) fn readable_by_peer(&self, source: &MemoryLocation) -> Readable<()> {
        self.link.readable_by_peer(source)
    }

    /// Whether a failure of the library fails the call: the configuration requires it, and this link uses it.
    pub(super) fn only_fabric(&self) -> bool {
        let required = self.resources.fabric.as_ref().is_ok_and(EngineFabric::is_required);
        required && self.link.fabric().is_ok()
    }

    /// Records why this transfer uses sockets. Logs the reason when it differs from the previous one.
    pub(super) fn use_sockets(&self, reason: impl Into<std::borrow::Cow<'static, str>>) {
        let reason = reason.into();
        if self.link.paths.use_sockets(reason.clone()) {
            let cluster = self.link.cluster();
            tracing::info!(target: "llm_datadist::links", "transfers with cluster {cluster} use sockets: {reason}");
        }
    }

    /// Counts a plan that was read in place. `staged` is whether its bytes passed host buffers.
    pub(super) fn count_read(&self, known: &KnownCache, bytes: u64, staged: bool) {
        let path = match known.tensors.as_ref().map(|tensors| tensors.reach()) {
            Ok(Reach::Process) => DataPath::Process,
            Ok(Reach::Fabric) => DataPath::Fabric,
            _ => DataPath::Mapped,
        };
        self.link.paths.count(path, bytes, staged);
    }

    /// Counts a plan whose bytes the peer has read in place.
    pub(super) fn count_fetched(&self, in_process: bool, bytes: u64) {
        let path = match (self.link.peer_memory(), in_process) {
            (None, _) => DataPath::Fabric,
            (Some(_), true) => DataPath::Process,
            (Some(_), false) => DataPath::Mapped,
        };
        self.link.paths.count(path, bytes, false);
    }

    /// Counts a plan whose bytes went through sockets.
    pub(super) fn count_sent(&self, bytes: u64) {
        let staged = self.local.tensors().reach() == Reach::Device;
        self.link.paths.count(DataPath::Sockets, bytes, staged);
    }
}
