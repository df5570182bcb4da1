//! Counts transfers by path, notes their speed, records why the owner has to send the bytes of one, and leases rings for those that
//! should use them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call::Call;
use crate::copy::{FasterPath, PathJob, PathKind, compares_rings, prefers_rings};
use crate::fabric::EngineFabric;
use crate::memory::{Access, Reach};
use crate::model::Verify;
use crate::plan::{CopyPlan, Side};
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

    /// Returns an idle stream with rings if a transfer of `bytes` bytes should use it instead of `path`. `end` is the end of the
    /// transfer that the local cache is.
    pub(super) fn preferred_rings(&self, path: PathKind, bytes: u64, end: Side) -> Option<StreamLease> {
        let local = self.local.tensors();
        // A stream needs the whole local cache to be mapped. For a push, a read by process id needs only the rows of the plan.
        let usable = prefers_rings(path, bytes, end)
            && local.host_addressable()
            && local.check_mapped(Access::Read).is_ok();
        if !usable || (self.compares(bytes) && !self.faster_path(end).rings_next()) {
            return None;
        }
        self.link.lease_idle_rings()
    }

    /// Returns the time if the speed of a transfer of `bytes` bytes is to be noted.
    pub(super) fn timed(&self, bytes: u64) -> Option<Instant> {
        self.compares(bytes).then(Instant::now)
    }

    /// Notes the speed of a transfer of `bytes` bytes, if its `time` was taken.
    pub(super) fn note_speed(&self, end: Side, path: PathKind, bytes: u64, time: Option<Duration>) {
        if let Some(time) = time {
            self.faster_path(end).note(path, bytes, time);
        }
    }

    /// Whether the link compares the paths of this transfer.
    fn compares(&self, bytes: u64) -> bool {
        // With `Verify::Full`, some transfers through rings also sum the bytes.
        compares_rings(bytes) && self.verify != Verify::Full
    }

    fn faster_path(&self, end: Side) -> &FasterPath {
        if end == Side::Source { &self.link.push_path } else { &self.link.pull_path }
    }
}
