//! One copy or swap within this engine, and the comparison of its destination with its source.

use std::sync::Arc;
use std::time::Duration;

use super::SHORT_CALL;
use super::async_call::Execution;
use super::compared::{BLOCKS, Compared, block_sizes, differ, sample};
use crate::cache::{Cache, CallRows, Pin, RowUse};
use crate::checksums::Checksums;
use crate::copy::{Limit, Progress, Route, Staging};
use crate::error::Result;
use crate::fallible;
use crate::model::{Deadline, Name, Verify};
use crate::plan::{CacheCount, CopyPlan, Moves, Plans, Side, Template};
use crate::resources::Resources;
use crate::stats::Op;

/// Name of the planning in errors of the deadline.
const PLANNING: &str = "planning the copy";

/// A copy between caches of this engine.
pub(crate) struct LocalCopy {
    pub(crate) op: Op,
    pub(crate) src: Arc<Cache>,
    pub(crate) dst: Arc<Cache>,
    pub(crate) moves: Moves,
    pub(crate) staging: Staging,
    /// How thoroughly the destination is compared with the source.
    pub(crate) verify: Verify,
}

impl LocalCopy {
    /// Plans the moves, pins both ends, moves the bytes, and counts them. An asynchronous call, which has an `execution`, has
    /// its rows already.
    pub(crate) fn run(
        mut self,
        resources: &Resources,
        execution: Option<&Execution>,
        deadline: Deadline,
    ) -> Result<u64> {
        let plans = self.plan()?;
        if plans.is_empty() {
            return Ok(0);
        }
        deadline.check(PLANNING)?;
        if let Some(execution) = execution {
            execution.pin(deadline)?;
            let bytes = plans.iter().map(CopyPlan::bytes).sum();
            return self.copy_all(resources, plans, &execution.transfer().new_progress(bytes), deadline);
        }
        let _pin = self.take_rows().pin(deadline)?;
        self.copy_all(resources, plans, &Arc::default(), deadline)
    }

    /// Does the same on the calling thread, and returns the rows as well, if the copy is short and need not wait. Returns `None`
    /// otherwise.
    pub(crate) fn run_now(
        &mut self,
        resources: &Resources,
        deadline: Deadline,
    ) -> Option<(Result<u64>, Option<Pin>)> {
        let LocalCopy { src, dst, moves, .. } = self;
        let bytes = moves.pieces.bytes().saturating_mul(moves.num_tensors.into());
        // A device or the staging ring may have to be waited for.
        let host = src.tensors().host_addressable() && dst.tensors().host_addressable();
        if bytes > SHORT_CALL || !host || self.staging.forces_ring() {
            return None;
        }
        let (reads, writes) = ((src.clone(), moves.src_rows.clone()), (dst.clone(), moves.dst_rows.clone()));
        let pin = CallRows::copy(reads, writes).pin_now()?;
        let copied = self.plan().and_then(|plans| {
            if plans.is_empty() { Ok(0) } else { self.copy_all(resources, plans, &Arc::default(), deadline) }
        });
        Some((copied, Some(pin)))
    }

    /// Takes the rows that are read and written.
    pub(crate) fn take_rows(&mut self) -> CallRows {
        let [reads, writes] = [&mut self.moves.src_rows, &mut self.moves.dst_rows].map(std::mem::take);
        CallRows::copy((self.src.clone(), reads), (self.dst.clone(), writes))
    }

    /// Takes the rows that are read and written, for a call that uses others as well.
    pub(crate) fn take_used(&mut self) -> [(Arc<Cache>, RowUse); 2] {
        let [reads, writes] = [&mut self.moves.src_rows, &mut self.moves.dst_rows].map(std::mem::take);
        let reads = RowUse { reads, ..RowUse::default() };
        [(self.src.clone(), reads), (self.dst.clone(), RowUse { writes, ..RowUse::default() })]
    }

    /// Returns the plans, which run one after the other. None of them is empty.
    fn plan(&mut self) -> Result<Plans> {
        let one_cache = Arc::ptr_eq(&self.src, &self.dst);
        let caches = if one_cache { CacheCount::One } else { CacheCount::Two };
        CopyPlan::moves_in_order(&mut self.moves, caches)
    }

    /// Runs the plans one after the other. `deadline` is that of the first one: the rest of a copy that has begun has no
    /// limit.
    fn copy_all(
        &self,
        resources: &Resources,
        plans: Plans,
        progress: &Arc<Progress>,
        deadline: Deadline,
    ) -> Result<u64> {
        let LocalCopy { src, dst, .. } = self;
        resources.still_registered(src)?;
        resources.still_registered(dst)?;
        let (from, to) = ((src.tensors(), src.placement()), (dst.tensors(), dst.placement()));
        let verifies = self.verify != Verify::Off;
        // Positions of a plan that runs alone and is not compared are those of the whole copy.
        let alone = plans.len() == 1 && !verifies;
        let (mut all, mut route) = (0, Route::Direct);
        let mut limit = Limit::Start(deadline);
        for plan in plans {
            let (bytes, compared) = (plan.bytes(), verifies.then(|| plan.clone()));
            let part = if alone { progress } else { &Arc::default() };
            route = resources.copy_engine.run(plan, from, to, self.staging, limit, part)?;
            if let Some(plan) = compared {
                self.compare(resources, &plan, limit)?;
            }
            if !alone {
                progress.done(all, all + bytes);
                limit = Limit::Start(Deadline::after(Duration::MAX));
            }
            all += bytes;
        }
        resources.stats.count_copy(self.op, all, route);
        Ok(all)
    }

    /// Compares what `plan` has copied: all of it, or a sample. Returns `Err(VerifyFailed)` if a block differs.
    ///
    /// A later plan may write what an earlier one has read, and a plan never writes what it reads. So the blocks of a plan are
    /// compared before the next one begins, under the pins of the call.
    fn compare(&self, resources: &Resources, plan: &CopyPlan, limit: Limit) -> Result<()> {
        let (src, dst) = (&self.src, &self.dst);
        #[cfg(feature = "testing")]
        if let Some(moved) = super::MOVED.get() {
            moved(dst);
        }
        let sizes = block_sizes(dst, Side::Destination);
        let blocks = plan.compared(sizes, sample(self.verify)?)?;
        let checksums = Checksums::bound_to(Name::Row { cache: dst.id(), row: 0 }, dst.id(), 0, 0)?;
        let sums = |cache: &Cache, side| {
            let memory = (cache.tensors(), cache.placement());
            resources.copy_engine.block_sums(memory, (&blocks, side), checksums.clone(), limit)
        };
        let (read, written) = (sums(src, Side::Source)?, sums(dst, Side::Destination)?);
        let equal =
            fallible::collect(BLOCKS, read.iter().zip(&written).map(|(read, written)| read == written))?;
        let mut compared = Compared::default();
        compared.add(blocks.templates().iter().flat_map(Template::pair_blocks), &equal)?;
        resources.stats.count_verified(compared.checked, compared.different.len());
        if compared.different.is_empty() {
            return Ok(());
        }
        Err(differ(dst, Side::Destination, compared.checked, &compared.different))
    }
}

/// Runs the copies of one call one after the other. It has the rows of all. Returns the number of bytes; an error names the part,
/// and those before it are in place then.
pub(crate) fn run_in_order(
    copies: Vec<LocalCopy>,
    resources: &Resources,
    execution: &Execution,
    deadline: Deadline,
) -> Result<u64> {
    let mut bytes = 0;
    for (index, copy) in copies.into_iter().enumerate() {
        let begun = execution.transfer().proceed();
        let moved = begun.and_then(|()| copy.run(resources, Some(execution), deadline));
        let moved = moved.map_err(|error| error.with("part", index))?;
        execution.transfer().part_done(moved);
        bytes += moved;
    }
    Ok(bytes)
}
