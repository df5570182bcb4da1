//! Sorts pairs by the block that they read, so that neighbours can be joined and memory is read in order.

use super::spans::PLAN;
use crate::error::Result;
use crate::fallible;

/// Sorts pairs by the block that they read, and pairs that read the same block by the block that they write.
pub(super) fn by_source(pairs: &mut [(u32, u32)]) -> Result<()> {
    if !pairs.is_sorted() && !placed(pairs)? {
        // One comparison of 64 bits is faster than two of 32.
        pairs.sort_unstable_by_key(|&(src, dst)| (u64::from(src) << 32) | u64::from(dst));
    }
    Ok(())
}

/// Sorts pairs in two passes over a table (benches/results/log.md, "Sorting by placing"). Returns `false`, and changes nothing, if
/// a block is read twice or the numbers are sparse.
fn placed(pairs: &mut [(u32, u32)]) -> Result<bool> {
    /// Largest number of source blocks per pair for which the table is used.
    const MAX_SPARSENESS: usize = 4;
    /// Marks a position without a destination. The table is not used for a list that writes this block number.
    const NOWHERE: u32 = u32::MAX;
    let most = pairs.iter().fold(0, |most, &(src, _)| src.max(most));
    let Some(room) = usize::try_from(most).ok().filter(|&most| most < MAX_SPARSENESS * pairs.len()) else {
        return Ok(false);
    };
    // One position for each source block.
    let mut to = fallible::filled(PLAN, NOWHERE, room + 1)?;
    let mut once = true;
    for &(src, dst) in pairs.iter() {
        // No block number exceeds `most`, so every one has its position.
        if let Some(entry) = to.get_mut(src as usize) {
            once &= *entry == NOWHERE && dst != NOWHERE;
            *entry = dst;
        }
    }
    if !once {
        return Ok(false);
    }
    // Every position is stored, and the next store overwrites an empty one. This avoids a branch that the
    // processor could not predict.
    let mut filled = 0;
    for (src, dst) in (0..).zip(to) {
        if let Some(entry) = pairs.get_mut(filled) {
            *entry = (src, dst);
        }
        filled += usize::from(dst != NOWHERE);
    }
    Ok(true)
}
