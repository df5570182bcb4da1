//! Compares what a call has moved between KV layouts with its source, by the pairs of the plan's templates.
//!
//! The bytes of a block lie in another order on each side. So each request carries a plan of the pairs that it asks for,
//! and both sides hash the bytes of a pair in the order of that plan.

use super::call::Call;
use super::compared::block_sizes;
use super::compared_sums::{COMPARING, Compared};
use crate::copy::PairBlocks;
use crate::error::Result;
use crate::plan::{CopyPlan, PartLimits, Side, Template, parts};
use crate::protocol::{MAX_CHECKSUMS, MAX_HASHED, Request, WirePlan};
use crate::session::{KnownCache, limit_ms};

impl Call {
    /// Compares all pairs of a plan, or a sample. Returns `None` if the remote cache has changed.
    pub(super) fn compare_pairs(
        &self,
        known: &KnownCache,
        plan: &CopyPlan,
        local: Side,
        sample: Option<u64>,
    ) -> Result<Option<Compared>> {
        let templates = plan.compared_templates(block_sizes(&self.local, plan, local), sample)?;
        let bytes = MAX_HASHED / u64::from(plan.num_tensors()).max(1);
        let mut compared = Compared::default();
        for part in parts(&templates, PartLimits { bytes, pairs: MAX_CHECKSUMS }) {
            let part = plan.with_templates(part?)?;
            self.deadline.waiting(COMPARING)?;
            let Some(equal) = self.compare_part(known, &part, local)? else { return Ok(None) };
            let blocks = part.templates()?;
            compared.add(blocks.iter().flat_map(Template::pair_blocks), &equal)?;
        }
        Ok(Some(compared))
    }

    /// Returns for each pair of `part` whether both sides have the same bytes; `None` if the remote cache has changed.
    fn compare_part(&self, known: &KnownCache, part: &CopyPlan, local: Side) -> Result<Option<Vec<bool>>> {
        let request = Request::PairChecksums {
            name: self.name.into(),
            cache: known.cache.0,
            plan: WirePlan::try_from(part)?,
            side: local.other(),
            grant: self.grant_id(),
            limit_ms: limit_ms(self.deadline),
        };
        let (engine, memory) = (&self.resources.copy_engine, (self.local.tensors(), self.local.placement()));
        self.compare(known, &request, part.num_pairs(), |checksums| {
            engine.pair_sums(memory, PairBlocks::of(part, local)?, checksums, self.deadline)
        })
    }
}
