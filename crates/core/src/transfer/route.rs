//! Chooses the path on which the bytes of a transfer move, and notes why it is not a faster one.
//!
//! | memory of the owner | path of a pull, and of a push by the peer |
//! | --- | --- |
//! | a pool that the reader has mapped | the reader copies it ([`DataPath::Mapped`]) |
//! | other memory of a process that the reader may read | the kernel copies it ([`DataPath::Process`]) |
//! | anything else, and a cache to which this process pushes | the owner sends it ([`DataPath::Sockets`]) |
//!
//! On each path, bytes from or to memory that the CPU cannot address pass host buffers at that end
//! (`copy::staged_copier`, `copy::staged_socket`).

use super::call::Call;
use crate::memory::Reach;
use crate::resources::MemoryLocation;
use crate::session::{KnownCache, NOTHING_SHARED, PeerSnapshot, Readable};
use crate::stats::DataPath;

impl Call {
    /// Begins a pull in place, or returns the reason why the owner must send the bytes.
    pub(super) fn in_place<'a>(&'a self, known: &'a KnownCache) -> Readable<PeerSnapshot<'a>> {
        PeerSnapshot::begin(&self.link, known)
    }

    /// Returns `Err` with the reason if the peer cannot read the source of a push in place.
    pub(super) fn readable_by_peer(&self, source: &MemoryLocation) -> Readable<()> {
        self.link.peer_memory().map_or(Err(NOTHING_SHARED.into()), |memory| memory.seen(source))
    }

    /// Notes why this transfer uses sockets. The log shows each reason once.
    pub(super) fn use_sockets(&self, reason: impl Into<std::borrow::Cow<'static, str>>) {
        let reason = reason.into();
        if self.link.paths.use_sockets(reason.clone()) {
            let cluster = self.link.cluster();
            tracing::info!(target: "llm_datadist::links", "transfers with cluster {cluster} use sockets: {reason}");
        }
    }

    /// Counts a plan that was read in place. `staged` is whether its bytes passed host buffers.
    pub(super) fn count_read(&self, known: &KnownCache, bytes: u64, staged: bool) {
        let process = known.tensors.as_ref().is_ok_and(|tensors| tensors.reach() == Reach::Process);
        let path = if process { DataPath::Process } else { DataPath::Mapped };
        self.link.paths.count(path, bytes, staged);
    }

    /// Counts a plan whose bytes the peer has read in place.
    pub(super) fn count_fetched(&self, in_process: bool, bytes: u64) {
        let path = if in_process { DataPath::Process } else { DataPath::Mapped };
        self.link.paths.count(path, bytes, false);
    }

    /// Counts a plan whose bytes went through sockets.
    pub(super) fn count_sent(&self, bytes: u64) {
        let staged = self.local.tensors().reach() == Reach::Device;
        self.link.paths.count(DataPath::Sockets, bytes, staged);
    }
}
