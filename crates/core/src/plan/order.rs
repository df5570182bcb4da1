//! Decides which pieces must wait for others.
//!
//! Between two caches, no byte is both read and written, so only the last piece that writes a byte is copied, and nothing
//! has to wait. Within one cache, a piece that writes bytes which another piece reads or writes keeps its position in the order
//! of the request.

use hashbrown::{HashMap, HashSet};

use super::bit_set::BitSet;
use super::spans::PLAN;
use super::template::Pairs;
use crate::error::Result;
use crate::fallible;

/// Whether a plan reads and writes the same cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheCount {
    /// Source and destination are one cache, so a block may be both read and written.
    One,
    Two,
}

/// Returns whether a pair writes a block that another pair writes or, if the caches are one, that any pair reads.
pub(super) fn order_matters(pairs: &[(u32, u32)], caches: CacheCount) -> Result<bool> {
    if pairs.len() < 2 {
        return Ok(false);
    }
    let mut written = BlockSet::of(pairs)?;
    if pairs.iter().any(|&(_, dst)| !written.add(dst)) {
        return Ok(true);
    }
    Ok(caches == CacheCount::One && pairs.iter().any(|&(src, _)| written.has(src)))
}

/// Keeps, of the pairs that write one block, only the last one. The order of the rest is undefined.
pub(super) fn keep_last(pairs: &mut Pairs) -> Result<()> {
    if order_matters(pairs, CacheCount::Two)? {
        let mut written = BlockSet::of(pairs)?;
        pairs.reverse();
        pairs.retain(|&mut (_, dst)| written.add(dst));
    }
    Ok(())
}

/// A set of blocks: a bitmap if they are dense, as blocks of a cache are, else a hash set.
enum BlockSet {
    Dense(BitSet),
    Sparse(HashSet<u32>),
}

impl BlockSet {
    /// Returns an empty set for the blocks that `pairs` may write.
    fn of(pairs: &[(u32, u32)]) -> Result<BlockSet> {
        let most = pairs.iter().fold(0, |most, &(_, dst)| dst.max(most));
        // A bit is much cheaper than a hash entry. Up to one word for each block, the bitmap is also smaller.
        if BitSet::words(most.into()) <= pairs.len() {
            return BitSet::new(PLAN, most.into()).map(BlockSet::Dense);
        }
        let mut set = HashSet::new();
        let room = set.try_reserve(pairs.len());
        room.map_err(|_| fallible::out_of_memory(PLAN, 2 * size_of_val(pairs)))?;
        Ok(BlockSet::Sparse(set))
    }

    /// Adds a block. Returns `false` if the set already contains it.
    fn add(&mut self, block: u32) -> bool {
        match self {
            BlockSet::Sparse(set) => set.insert(block),
            BlockSet::Dense(bits) => bits.add(block.into()),
        }
    }

    fn has(&self, block: u32) -> bool {
        match self {
            BlockSet::Sparse(set) => set.contains(&block),
            BlockSet::Dense(bits) => bits.has(block.into()),
        }
    }
}

/// Splits pairs within one cache, whose [order matters](order_matters), into groups, which must be copied one after the other.
/// Each pair joins the first group that the earlier pairs at its blocks allow. No group is empty.
pub(super) fn groups(pairs: Pairs) -> Result<Vec<Vec<(u32, u32)>>> {
    /// The first group in which a block may be read, and the first in which it may be written.
    #[derive(Default)]
    struct Free {
        read: u32,
        write: u32,
    }
    let mut groups: Vec<Vec<(u32, u32)>> = Vec::new();
    let mut blocks: HashMap<u32, Free> = fallible::map(PLAN, 2 * pairs.len())?;
    for (src, dst) in pairs {
        let earliest_read = blocks.entry(src).or_default().read;
        let earliest_write = blocks.entry(dst).or_default().write;
        let level = earliest_read.max(earliest_write);
        if groups.len() <= level as usize {
            // At most one group is missing, because every group before it has a pair for which this one waits.
            fallible::push(PLAN, &mut groups, Vec::new())?;
        }
        fallible::push(PLAN, &mut groups[level as usize], (src, dst))?;
        let source = blocks.entry(src).or_default();
        source.write = source.write.max(level + 1);
        let target = blocks.entry(dst).or_default();
        (target.read, target.write) = (level + 1, level + 1);
    }
    Ok(groups)
}
