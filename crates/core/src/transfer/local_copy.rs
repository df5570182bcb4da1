//! One copy or swap within this engine.

use std::sync::Arc;
use std::time::Duration;

use super::async_call::Execution;
use crate::cache::{Cache, CallRows};
use crate::copy::{CopyOutcome, Limit, Progress, Staging};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Deadline, Verify};
use crate::plan::{CacheCount, CopyPlan, Moves};
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
        let (reads, writes) = (moves.src_rows, moves.dst_rows);
        let _pin = CallRows::copy((self.src.clone(), reads), (self.dst.clone(), writes)).pin(deadline)?;
        self.copy(plan, &Arc::default(), deadline)
    }

    /// Does the same for an asynchronous call, which has its rows already.
    pub(crate) fn execute(&self, mut moves: Moves, execution: &Execution, deadline: Deadline) -> Result<u64> {
        let plan = self.plan(&mut moves)?;
        if plan.waves().is_empty() {
            return Ok(0);
        }
        execution.pin(deadline)?;
        let progress = execution.transfer().attempt(plan.bytes());
        self.copy(plan, &progress, deadline)
    }

    fn plan(&self, moves: &mut Moves) -> Result<CopyPlan> {
        let one_cache = Arc::ptr_eq(&self.src, &self.dst);
        CopyPlan::moves(moves, if one_cache { CacheCount::One } else { CacheCount::Two })
    }

    fn copy(&self, plan: CopyPlan, progress: &Arc<Progress>, deadline: Deadline) -> Result<u64> {
        let LocalCopy { resources, src, dst, .. } = self;
        resources.still_registered(src)?;
        resources.still_registered(dst)?;
        let (from, to) = ((src.tensors(), src.placement()), (dst.tensors(), dst.placement()));
        let limit = Limit::Start(deadline);
        let run = |plan: Arc<CopyPlan>, limit: Limit, progress: &Arc<Progress>| {
            resources.copy_engine.run(plan, from, to, self.staging, limit, progress)
        };
        let outcome = if resources.config.verify == Verify::Off {
            run(Arc::new(plan), limit, progress)?
        } else {
            self.copy_compared(&plan, limit, progress, run)?
        };
        resources.stats.count_copy(self.op, &outcome);
        resources.merger.note_use(outcome.bytes);
        Ok(outcome.bytes)
    }

    /// Copies wave after wave with `run`, and compares each before the next one. `limit` is that of the first one.
    fn copy_compared(
        &self,
        plan: &CopyPlan,
        mut limit: Limit,
        progress: &Progress,
        run: impl Fn(Arc<CopyPlan>, Limit, &Arc<Progress>) -> Result<CopyOutcome>,
    ) -> Result<CopyOutcome> {
        let (mut bytes, mut last) = (0, None);
        for wave in plan.each_wave() {
            let wave = Arc::new(wave);
            let outcome = run(wave.clone(), limit, &Arc::default())?;
            self.compare(&wave, limit)?;
            progress.done(bytes, bytes + outcome.bytes);
            (bytes, last) = (bytes + outcome.bytes, Some(outcome.route));
            // The rest of a copy that has begun has no limit.
            limit = Limit::Start(Deadline::after(Duration::MAX));
        }
        // Every plan that gets here has a wave.
        let route = last.ok_or_else(|| Error::new(ErrorKind::System, "a copy without a wave"))?;
        Ok(CopyOutcome { bytes, route })
    }
}
