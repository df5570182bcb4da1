//! Counts transfers by path, and records why none could be read in place.

use std::sync::Arc;

use super::call::Call;
use crate::copy::{PathJob, PathKind, prefers_rings};
use crate::fabric::EngineFabric;
use crate::memory::Reach;
use crate::plan::CopyPlan;

impl Call {
    /// Returns what a path needs to move the bytes of `plan` for this call.
    pub(super) fn job<'a>(&'a self, plan: &'a Arc<CopyPlan>) -> PathJob<'a> {
        PathJob { engine: &self.resources.copy_engine, plan, deadline: self.deadline }
    }

    /// Whether a failure of the library fails the call: the configuration requires it, and this link uses it.
    pub(super) fn only_fabric(&self) -> bool {
        let required = self.resources.fabric.as_ref().is_ok_and(EngineFabric::is_required);
        required && self.link.fabric().is_ok()
    }

    /// Records why the owner sends the bytes of this transfer. Logs the reason when it differs from the previous one.
    pub(super) fn use_sockets(&self, reason: &str) {
        if self.link.paths.use_sockets(reason) {
            let cluster = self.link.cluster();
            tracing::info!(target: "llm_datadist::links", "the owner sends the bytes of transfers with cluster {cluster}: {reason}");
        }
    }

    /// Counts a plan whose bytes took `path`. `staged` is whether they passed host buffers at this end.
    pub(super) fn count(&self, path: PathKind, bytes: u64, staged: bool) {
        self.link.paths.count(path, bytes, staged);
    }

    /// Counts a plan whose bytes went through streams on `path`.
    pub(super) fn count_sent(&self, path: PathKind, bytes: u64) {
        self.count(path, bytes, self.local.tensors().reach() == Reach::Device);
    }

    /// Whether the transfer uses rings although `bytes` bytes could take `path`.
    pub(super) fn uses_rings(&self, path: PathKind, bytes: u64) -> bool {
        prefers_rings(path, bytes) && self.local.tensors().host_addressable() && self.link.has_idle_rings()
    }
}
