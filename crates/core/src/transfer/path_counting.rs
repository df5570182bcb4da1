//! Counts transfers by path, and records why one uses sockets.

use std::sync::Arc;

use super::call::Call;
use crate::copy::{PathJob, PathKind};
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

    /// Records why this transfer uses sockets. Logs the reason when it differs from the previous one.
    pub(super) fn use_sockets(&self, reason: &str) {
        if self.link.paths.use_sockets(reason) {
            let cluster = self.link.cluster();
            tracing::info!(target: "llm_datadist::links", "transfers with cluster {cluster} use sockets: {reason}");
        }
    }

    /// Counts a plan whose bytes took `path`. `staged` is whether they passed host buffers at this end.
    pub(super) fn count(&self, path: PathKind, bytes: u64, staged: bool) {
        self.link.paths.count(path, bytes, staged);
    }

    /// Counts a plan whose bytes went through sockets.
    pub(super) fn count_sent(&self, bytes: u64) {
        self.count(PathKind::Sockets, bytes, self.local.tensors().reach() == Reach::Device);
    }
}
