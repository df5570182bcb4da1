//! Reads of a peer's memory in place, and the check that the memory did not change while it was copied.
//!
//! The owner is not asked and takes no lock, so it may write, free or reuse the memory during the copy. A reader
//! therefore begins a [`PeerSnapshot`], copies, and accepts the bytes only if [`PeerSnapshot::validate`] finds the
//! owner's generation number unchanged and no push of this process to the same cache in between. Otherwise it
//! discards them. This is a sequence lock across processes (`pull_never_mixes_generations`).
//!
//! The copies of this lock are not atomic. If the owner is another engine of this process and writes meanwhile, this is a data
//! race by the rules of Rust. For another process, the rules say nothing. The copy uses the instructions of
//! `memory::kernels`, `memmove` or a system call, through raw pointers and never through a reference. So the compiler
//! cannot assume that a value is stable, and a torn byte is only a wrong byte. Nothing depends on the bytes before they
//! are validated. An acquire fence separates the copy from the load of the generation
//! (`memory::PeerGenerations::still`); the owner raises the number before it writes. If the owner writes into
//! a cache without freeing it, peers that pull it may get a mix of old and new bytes (docs/links.md).

use super::known_cache::KnownCache;
use super::remote_view::RemoteView;
use crate::copy::{DataPath, PathKind, PeerTensors};

/// Why a pull does not read a cache in place while this process pushes to it.
pub(crate) const BEING_PUSHED: &str = "this process pushes to the same cache";

/// A read in progress of the memory of one remote cache.
pub(crate) struct PeerSnapshot<'a> {
    view: &'a RemoteView,
    known: &'a KnownCache,
    memory: &'a PeerTensors,
    /// The pushes of this process that had begun before.
    pushes: u64,
}

/// Whether the bytes that were read are those of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Validity {
    Valid,
    /// This process pushed to the cache meanwhile. The owner, which pins rows, has to send the bytes.
    Pushed,
    /// The description of the cache is out of date. The cache itself may be the same.
    Changed,
}

impl<'a> PeerSnapshot<'a> {
    /// Begins a read. Returns the reason if this process cannot read the memory, or is pushing to the cache.
    pub(crate) fn begin(
        view: &'a RemoteView,
        known: &'a KnownCache,
    ) -> std::result::Result<PeerSnapshot<'a>, &'a str> {
        let memory = known.tensors.as_ref().map_err(|reason| &**reason)?;
        let pushes = view.pushes().none_now(known.cache).ok_or(BEING_PUSHED)?;
        Ok(PeerSnapshot { view, known, memory, pushes })
    }

    /// Returns the memory to read.
    pub(crate) fn memory(&self) -> &'a PeerTensors {
        self.memory
    }

    /// Returns the path on which it is read.
    pub(crate) fn kind(&self) -> PathKind {
        self.memory.kind()
    }

    /// Decides about everything that was read since [`begin`](Self::begin).
    pub(crate) fn validate(&self) -> Validity {
        if !self.view.pushes().none_since(self.known.cache, self.pushes) {
            Validity::Pushed
        } else if !self.kind().sees_generations() {
            // Generations are not visible here, so the owner must be asked.
            Validity::Changed
        } else if self.view.current(self.known) {
            Validity::Valid
        } else {
            Validity::Changed
        }
    }
}
