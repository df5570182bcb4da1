//! Counts transfers by path, records why the owner has to send the bytes of one, and leases rings for those that take them.

use std::sync::Arc;

use super::call::Call;
use crate::copy::{PathJob, PathKind, takes_rings};
use crate::fabric::EngineFabric;
use crate::memory::{Access, Reach};
use crate::plan::CopyPlan;
use crate::session::StreamLease;

impl Call {
    /// Returns what a path needs to move the bytes of `plan` for this call.
    pub(super) fn job<'a>(&'a self, plan: &'a Arc<CopyPlan>) -> PathJob<'a> {
        PathJob { engine: &self.resources.copy_engine, plan, deadline: self.deadline }
    }

    /// Whether a failure of UCX fails the call: the configuration requires it, and this link uses it.
    pub(super) fn only_fabric(&self) -> bool {
        let required = self.resources.fabric.as_ref().is_ok_and(EngineFabric::is_required);
        required && self.link.fabric().is_ok()
    }

    /// Records why the owner sends the bytes of this transfer. Logs the reason when it differs from the previous one.
    pub(super) fn owner_sends(&self, reason: &str) {
        if self.link.paths.owner_sends(reason) {
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

    /// Returns an idle stream with rings if a transfer of `bytes` bytes takes it instead of `path`.
    pub(super) fn rings_instead_of(&self, path: PathKind, bytes: u64) -> Option<StreamLease> {
        let local = self.local.tensors();
        // A stream needs the whole local cache to be mapped. For a push, a read by process id needs only the rows of the plan.
        let usable =
            takes_rings(path, bytes) && local.host_addressable() && local.check_mapped(Access::Read).is_ok();
        if usable { self.link.lease_idle_rings() } else { None }
    }
}
