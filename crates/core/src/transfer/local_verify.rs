//! Compares the destination of a copy or swap within this engine with its source, after each plan of the call.
//!
//! A later plan may write what an earlier one has read, and a plan never writes what it reads. So the blocks of a plan
//! are compared before the next one begins, under the pins of the call.

use super::compared::{block_sizes, differ, sample};
use super::compared_sums::Compared;
use super::local_copy::LocalCopy;
use crate::cache::Cache;
use crate::checksums::Checksums;
use crate::copy::Limit;
use crate::error::Result;
use crate::fallible;
use crate::model::Name;
use crate::plan::{CopyPlan, Side, Template};
use crate::resources::Resources;

/// Name of these lists in out-of-memory errors.
const BLOCKS: &str = "the blocks that are compared";

impl LocalCopy {
    /// Compares what `plan` has copied: all of it, or a sample. Returns `Err(VerifyFailed)` if a block differs.
    pub(super) fn compare(&self, resources: &Resources, plan: &CopyPlan, limit: Limit) -> Result<()> {
        let (src, dst) = (&self.src, &self.dst);
        #[cfg(feature = "testing")]
        if let Some(moved) = super::MOVED.get() {
            moved(dst);
        }
        let sizes = block_sizes(dst, plan, Side::Destination);
        let blocks = plan.compared(sizes, sample(resources.config.verify)?)?;
        let checksums = Checksums::bound_to(Name::Row { cache: dst.id(), row: 0 }, dst.id(), 0, 0)?;
        let sums = |cache: &Cache, side| {
            let memory = (cache.tensors(), cache.placement());
            resources.copy_engine.block_sums(memory, (&blocks, side), checksums.clone(), limit)
        };
        let (read, written) = (sums(src, Side::Source)?, sums(dst, Side::Destination)?);
        let equal =
            fallible::collect(BLOCKS, read.iter().zip(&written).map(|(read, written)| read == written))?;
        let mut compared = Compared::default();
        compared.add(blocks.templates().flat_map(Template::pair_blocks), &equal)?;
        resources.stats.count_verified(compared.checked, compared.different.len());
        if compared.different.is_empty() {
            return Ok(());
        }
        Err(differ(dst, plan, Side::Destination, compared.checked, &compared.different))
    }
}
