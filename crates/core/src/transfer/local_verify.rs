//! Compares the destination of a copy or swap within this engine with its source, after each wave of the plan.
//!
//! A later wave may write what an earlier one has read, and a wave never writes what it reads. So the blocks of a wave
//! are compared before the next one begins, under the pins of the call.

use super::compared::{block_sizes, differ};
use super::local_copy::LocalCopy;
use crate::cache::Cache;
use crate::checksums::{ByteRange, Checksums};
use crate::copy::Limit;
use crate::error::Result;
use crate::fallible;
use crate::memory::random;
use crate::model::{Name, Verify};
use crate::plan::{CopyPlan, Piece, Side};

/// Name of these lists in out-of-memory errors.
const BLOCKS: &str = "the blocks that are compared";

impl LocalCopy {
    /// Compares what `wave`, a plan of one wave, has copied, if the engine verifies. Returns `Err(VerifyFailed)` if a
    /// block differs.
    pub(super) fn compare(&self, wave: &CopyPlan, limit: Limit) -> Result<()> {
        let (resources, src, dst) = (&self.resources, &self.src, &self.dst);
        #[cfg(feature = "testing")]
        if let Some(moved) = super::MOVED.get() {
            moved(dst);
        }
        let sampled = resources.config.verify == Verify::Sample;
        let sample = if sampled { Some(u64::from_ne_bytes(random()?)) } else { None };
        let blocks = wave.final_blocks(block_sizes(dst, wave, Side::Destination), sample)?;
        let (name, tensors) = (Name::Row { cache: dst.id(), row: 0 }, wave.num_tensors());
        let checksums = Checksums::bound_to(name, dst.id(), 0, 0)?;
        let sums = |cache: &Cache, first: u32, start: fn(&Piece) -> u64| {
            let ranges = blocks.iter().map(|block| ByteRange { start: start(block), len: block.len });
            let (memory, ranges) = ((cache.tensors(), cache.placement()), fallible::collect(BLOCKS, ranges)?);
            resources.copy_engine.block_sums(memory, first..first + tensors, ranges, checksums.clone(), limit)
        };
        let read = sums(src, wave.src_tensor(), |block| block.src)?;
        let written = sums(dst, wave.dst_tensor(), |block| block.dst)?;
        let mut different = Vec::new();
        for ((block, _), _) in
            blocks.iter().zip(&read).zip(&written).filter(|((_, read), written)| read != written)
        {
            fallible::push(BLOCKS, &mut different, *block)?;
        }
        resources.stats.count_verified(blocks.len(), different.len());
        if different.is_empty() {
            return Ok(());
        }
        Err(differ(dst, wave, Side::Destination, blocks.len(), &different))
    }
}
