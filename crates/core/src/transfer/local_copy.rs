//! One copy or swap within this engine.

use std::sync::Arc;

use super::asynchronous::HeldRows;
use crate::cache::{Cache, pin};
use crate::copy::{Limit, Progress, Staging};
use crate::error::Result;
use crate::model::Deadline;
use crate::plan::{Aliasing, CopyPlan, Moves};
use crate::resources::Resources;
use crate::stats::Op;

/// A copy between caches of this engine.
pub(crate) struct LocalCopy {
    pub(crate) resources: Arc<Resources>,
    pub(crate) op: Op,
    pub(crate) src: Arc<Cache>,
    pub(crate) dst: Arc<Cache>,
    pub(crate) staging: Staging,
}

impl LocalCopy {
    /// Plans the moves, pins both ends, moves the bytes, and counts them.
    pub(crate) fn run(&self, mut moves: Moves, deadline: Deadline) -> Result<u64> {
        let plan = self.plan(&mut moves)?;
        if plan.waves().is_empty() {
            return Ok(0);
        }
        let _pins = pin((&self.src, moves.src_rows), (&self.dst, moves.dst_rows), deadline)?;
        self.copy(plan, &Arc::default(), deadline)
    }

    /// Does the same for an asynchronous call, whose rows are held already.
    pub(crate) fn run_held(&self, mut moves: Moves, held: &HeldRows, deadline: Deadline) -> Result<u64> {
        let plan = self.plan(&mut moves)?;
        if plan.waves().is_empty() {
            return Ok(0);
        }
        let progress = Arc::new(Progress::default());
        held.transfer().copies(progress.clone(), plan.bytes());
        self.copy(plan, &progress, deadline)
    }

    fn plan(&self, moves: &mut Moves) -> Result<CopyPlan> {
        let one_cache = Arc::ptr_eq(&self.src, &self.dst);
        CopyPlan::moves(moves, if one_cache { Aliasing::OneCache } else { Aliasing::TwoCaches })
    }

    fn copy(&self, plan: CopyPlan, progress: &Arc<Progress>, deadline: Deadline) -> Result<u64> {
        let LocalCopy { resources, src, dst, .. } = self;
        resources.still_registered(src)?;
        resources.still_registered(dst)?;
        let (from, to) = ((src.tensors(), src.placement()), (dst.tensors(), dst.placement()));
        let limit = Limit::Start(deadline);
        let outcome = resources.copy_engine.run(plan, from, to, self.staging, limit, progress)?;
        resources.stats.count_copy(self.op, &outcome);
        resources.merger.note_use(outcome.bytes);
        Ok(outcome.bytes)
    }
}
