//! Compares what a call has moved with its source: both sides hash their own memory, and this side compares the
//! checksums.
//!
//! This happens before a key is released and before a notification is delivered, while the local rows are pinned. The
//! owner pins its rows while it hashes them. Between the move and that moment the owner's program must not write them.

use std::ops::Range;

use super::call::{Call, Moved};
use super::compared::{block_sizes, differ};
use crate::checksums::{ByteRange, Checksums};
use crate::error::Result;
use crate::fallible;
use crate::memory::random;
use crate::model::Verify;
use crate::plan::{CopyPlan, LocalEnd, Piece};
use crate::protocol::{MAX_CHECKSUMS, MAX_HASHED, Reply, Request};
use crate::session::{KnownCache, limit_ms, send_message};

/// Name of these lists in out-of-memory errors.
const BLOCKS: &str = "the blocks that are compared";
/// The tensors of both ends of a transfer, and the end that is here.
struct Ends {
    local: LocalEnd,
    here: Range<u32>,
    there: u32,
}

impl Call {
    /// Compares the blocks of `plan`, which were moved, if this call verifies. Returns `Moved::Stale` if the remote cache
    /// has changed since it was described, and `Err(VerifyFailed)` if a block differs.
    pub(super) fn verified(
        &self,
        moved: Moved,
        known: &KnownCache,
        plan: &CopyPlan,
        local: LocalEnd,
    ) -> Result<Moved> {
        if self.verify == Verify::Off || matches!(moved, Moved::Stale) {
            return Ok(moved);
        }
        #[cfg(feature = "testing")]
        if let Some(moved) = MOVED.get() {
            moved(&self.local);
        }
        let sample = if self.verify == Verify::Sample { Some(u64::from_ne_bytes(random()?)) } else { None };
        let blocks = plan.final_blocks(block_sizes(&self.local, local), sample)?;
        let (here, there) = match local {
            LocalEnd::Source => (plan.src_tensor(), plan.dst_tensor()),
            LocalEnd::Destination => (plan.dst_tensor(), plan.src_tensor()),
        };
        let ends = Ends { local, here: here..here + plan.num_tensors(), there };
        let most = (MAX_HASHED / u64::from(plan.num_tensors()).max(1))
            .min(known.remote.layout.geometry.tensor_bytes());
        let mut different = Vec::new();
        for some in chunks(&blocks, most) {
            self.deadline.waiting("comparing blocks with their source")?;
            let Some(equal) = self.compare(known, some, &ends)? else { return Ok(Moved::Stale) };
            for (block, _) in some.iter().zip(equal).filter(|(_, equal)| !equal) {
                fallible::push(BLOCKS, &mut different, *block)?;
            }
        }
        self.resources.stats.count_verified(blocks.len(), different.len());
        if different.is_empty() {
            return Ok(moved);
        }
        Err(differ(&self.local, local, blocks.len(), &different))
    }

    /// Returns for each of `blocks` whether both sides have the same bytes; `None` if the remote cache has changed.
    fn compare(&self, known: &KnownCache, blocks: &[Piece], ends: &Ends) -> Result<Option<Vec<bool>>> {
        let remote = |piece: &Piece| match ends.local {
            LocalEnd::Source => (piece.dst, piece.len),
            LocalEnd::Destination => (piece.src, piece.len),
        };
        let request = Request::Checksums {
            name: self.name.into(),
            cache: known.cache.0,
            first_tensor: ends.there,
            num_tensors: ends.here.end - ends.here.start,
            ranges: fallible::collect(BLOCKS, blocks.iter().map(remote))?,
            grant: self.grant_id(),
            limit_ms: limit_ms(self.deadline),
        };
        let mut lease = self.link.lease(self.deadline)?;
        let mut own = Ok(Vec::new());
        let send = || {
            send_message(lease.stream(), &request, self.deadline)?;
            // Both sides hash at the same time.
            own = self.own_sums(known, known.at.generation, blocks, ends);
            Ok(())
        };
        let answer = self.link.exchange_with(&lease, self.deadline, send);
        let reply = answer.map_err(|error| self.link.break_reason_or(error))?;
        lease.reusable = true;
        drop(lease);
        let own = own?;
        match self.link.refusal(reply)? {
            Reply::Stale => Ok(None),
            Reply::Checksums { generation, sums } if sums.len() == blocks.len() => {
                let own = if generation == known.at.generation {
                    own
                } else if self.same_cache(known)? {
                    self.own_sums(known, generation, blocks, ends)?
                } else {
                    return Ok(None);
                };
                fallible::collect(BLOCKS, own.iter().zip(&sums).map(|(own, theirs)| own == theirs)).map(Some)
            }
            reply => Err(self.link.unexpected(&reply)),
        }
    }

    /// Returns whether the remote cache is still the one that was described, although its generation has changed, for
    /// example because a key was released.
    fn same_cache(&self, known: &KnownCache) -> Result<bool> {
        let now = self.link.describe(self.name, self.deadline)?;
        Ok(now.cache == known.cache && now.remote == known.remote)
    }

    /// Returns the checksums of this side, bound to a generation of the remote cache.
    fn own_sums(
        &self,
        known: &KnownCache,
        generation: u64,
        blocks: &[Piece],
        ends: &Ends,
    ) -> Result<Vec<u64>> {
        let range = |piece: &Piece| ByteRange { start: ends.local.of(piece), len: piece.len };
        let ranges = fallible::collect(BLOCKS, blocks.iter().map(range))?;
        let checksums = Checksums::bound_to(self.name, known.cache, generation)?;
        let memory = (self.local.tensors(), self.local.placement());
        self.resources.copy_engine.block_sums(memory, ends.here.clone(), ranges, checksums, self.deadline)
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

/// What a test does with the local cache between the move and the comparison.
#[cfg(feature = "testing")]
pub static MOVED: std::sync::OnceLock<fn(&crate::cache::Cache)> = std::sync::OnceLock::new();
