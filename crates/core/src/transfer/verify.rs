//! Compares what a call has moved with its source: both sides hash their own memory, and this side compares the
//! checksums. A pull of a stream may have compared them while the bytes arrived (`Moved::Equal`).
//!
//! This happens before a key is released and before a notification is delivered, while the local rows are pinned. The
//! owner pins its rows while it hashes them. Between the move and that moment the owner's program must not write them.

use std::ops::Range;

use super::call::{Call, Moved};
use super::compared::{block_sizes, differ};
use super::compared_sums::{COMPARING, Compared};
use crate::checksums::ByteRange;
use crate::error::Result;
use crate::fallible;
use crate::memory::random;
use crate::model::Verify;
use crate::plan::{CopyPlan, Piece, Side};
use crate::protocol::{MAX_CHECKSUMS, MAX_HASHED, Request};
use crate::session::{KnownCache, limit_ms};

/// Name of these lists in out-of-memory errors.
const BLOCKS: &str = "the blocks that are compared";

/// The tensors of both ends of a transfer, and the end that is here.
struct Ends {
    local: Side,
    here: Range<u32>,
    there: u32,
}

impl Call {
    /// Compares the blocks of `plan`, which were moved, if this call verifies. Returns `Moved::Stale` if the remote cache
    /// has changed since it was described, and `Err(VerifyFailed)` if a block differs.
    ///
    /// Pieces of most plans are contiguous on both sides, and are compared by their ranges. A plan between layouts is
    /// compared by the pairs of its templates (`layout_verify.rs`).
    pub(super) fn verified(
        &self,
        moved: Moved,
        known: &KnownCache,
        plan: &CopyPlan,
        local: Side,
    ) -> Result<Moved> {
        if self.verify == Verify::Off || matches!(moved, Moved::Stale) {
            return Ok(moved);
        }
        #[cfg(feature = "testing")]
        let moved = if changed(&self.local) { moved.unknown() } else { moved };
        if let Moved::Equal(bytes) = moved {
            self.resources.stats.count_verified(self.num_blocks(plan, local)?, 0);
            return Ok(Moved::Bytes(bytes));
        }
        let sample = if self.verify == Verify::Sample { Some(u64::from_ne_bytes(random()?)) } else { None };
        let compared = if plan.is_compared_by_pairs() {
            self.compare_pairs(known, plan, local, sample)?
        } else {
            self.compare_ranges(known, plan, local, sample)?
        };
        let Some(Compared { checked, different }) = compared else { return Ok(Moved::Stale) };
        self.resources.stats.count_verified(checked, different.len());
        if different.is_empty() {
            return Ok(moved);
        }
        Err(differ(&self.local, plan, local, checked, &different))
    }

    /// Returns the number of blocks of a plan that are compared.
    fn num_blocks(&self, plan: &CopyPlan, local: Side) -> Result<usize> {
        let sizes = block_sizes(&self.local, plan, local);
        if !plan.is_compared_by_pairs() {
            return Ok(plan.final_blocks(sizes, None)?.len());
        }
        Ok(plan.compared_templates(sizes, None)?.iter().map(|template| template.pairs.len()).sum())
    }

    /// Compares ranges that are contiguous on both sides. Returns `None` if the remote cache has changed.
    fn compare_ranges(
        &self,
        known: &KnownCache,
        plan: &CopyPlan,
        local: Side,
        sample: Option<u64>,
    ) -> Result<Option<Compared>> {
        let blocks = plan.final_blocks(block_sizes(&self.local, plan, local), sample)?;
        let (here, there) = (plan.tensors(local).first, plan.tensors(local.other()).first);
        let ends = Ends { local, here: here..here + plan.num_tensors(), there };
        let most = (MAX_HASHED / u64::from(plan.num_tensors()).max(1))
            .min(known.remote.sizes_of(there).tensor_bytes());
        let mut compared = Compared::default();
        for some in chunks(&blocks, most) {
            self.deadline.waiting(COMPARING)?;
            let Some(equal) = self.compare_chunk(known, some, &ends)? else { return Ok(None) };
            compared.add(some.iter().copied(), &equal)?;
        }
        Ok(Some(compared))
    }

    /// Returns for each of `blocks` whether both sides have the same bytes; `None` if the remote cache has changed.
    fn compare_chunk(&self, known: &KnownCache, blocks: &[Piece], ends: &Ends) -> Result<Option<Vec<bool>>> {
        let remote = |piece: &Piece| (piece.start(ends.local.other()), piece.len);
        let request = Request::Checksums {
            name: self.name.into(),
            cache: known.cache.0,
            first_tensor: ends.there,
            num_tensors: ends.here.end - ends.here.start,
            ranges: fallible::collect(BLOCKS, blocks.iter().map(remote))?,
            grant: self.grant_id(),
            limit_ms: limit_ms(self.deadline),
        };
        let range = |piece: &Piece| ByteRange { start: piece.start(ends.local), len: piece.len };
        let (engine, memory) = (&self.resources.copy_engine, (self.local.tensors(), self.local.placement()));
        self.compare(known, &request, blocks.len(), |checksums| {
            let ranges = fallible::collect(BLOCKS, blocks.iter().map(range))?;
            engine.block_sums(memory, ends.here.clone(), ranges, checksums, self.deadline)
        })
    }
}

/// Returns `blocks` in parts of at most [`MAX_CHECKSUMS`] blocks and `most` bytes, each of at least one block.
fn chunks(mut blocks: &[Piece], most: u64) -> impl Iterator<Item = &[Piece]> {
    std::iter::from_fn(move || {
        if blocks.is_empty() {
            return None;
        }
        let mut bytes = 0u64;
        let fits = |block: &&Piece| {
            bytes = bytes.saturating_add(block.len);
            bytes <= most
        };
        let count = blocks.iter().take(MAX_CHECKSUMS).take_while(fits).count().max(1);
        let (first, rest) = blocks.split_at(count);
        blocks = rest;
        Some(first)
    })
}

/// What a test does with the local cache between the move and the comparison. Returns whether it changed the cache.
#[cfg(feature = "testing")]
pub static MOVED: std::sync::OnceLock<fn(&crate::cache::Cache) -> bool> = std::sync::OnceLock::new();

#[cfg(feature = "testing")]
fn changed(cache: &crate::cache::Cache) -> bool {
    MOVED.get().is_some_and(|moved| moved(cache))
}
