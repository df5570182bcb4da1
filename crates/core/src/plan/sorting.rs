//! Sorts pairs by the block that they read, so that neighbours can be joined and memory is read in order.

use super::spans::PLAN;
use crate::error::Result;
use crate::fallible;

/// Sorts pairs by the block that they read, and pairs that read the same block by the block that they write.
///
/// Lists of blocks are long and their numbers differ in few bits. So long lists are sorted by radix, in a
/// fraction of the time of a comparison sort (`tests/integration/plan.rs` compares the results).
fn by_source(pairs: &mut Vec<(u32, u32)>) -> Result<()> {
    const MIN_RADIX: usize = 512;
    if pairs.len() < MIN_RADIX {
        pairs.sort_unstable();
        return Ok(());
    }
    let (all, any) = pairs.iter().fold((u32::MAX, 0), |(all, any), &(src, _)| (all & src, any | src));
    let differing = all ^ any;
    let (low, high) = (differing.trailing_zeros(), u32::BITS - differing.leading_zeros());
    // As few digits as possible, but no more values of a digit than there are pairs (at least 8 bits, at most
    // 16).
    let most = pairs.len().ilog2().clamp(8, 16);
    let digits = high.saturating_sub(low).div_ceil(most);
    let width = high.saturating_sub(low).div_ceil(digits.max(1));
    let mut dealt = fallible::copied(PLAN, pairs)?;
    let mut next = fallible::filled(PLAN, 0usize, 1 << width)?;
    for pass in 0..digits {
        let shift = low + pass * width;
        let digit = |&(src, _): &(u32, u32)| (src >> shift) as usize & ((1 << width) - 1);
        next.fill(0);
        for pair in pairs.iter() {
            next[digit(pair)] += 1;
        }
        let mut start = 0;
        for entry in &mut next {
            start += std::mem::replace(entry, start);
        }
        for pair in pairs.iter() {
            let entry = &mut next[digit(pair)];
            dealt[*entry] = *pair;
            *entry += 1;
        }
        std::mem::swap(pairs, &mut dealt);
    }
    for fan in pairs.chunk_by_mut(|a, b| a.0 == b.0) {
        fan.sort_unstable_by_key(|pair| pair.1);
    }
    Ok(())
}

/// Sorts pairs as [`by_source`] does. If no block is read twice, two passes over a table suffice.
pub(super) fn pairs_by_source(pairs: &mut Vec<(u32, u32)>) -> Result<()> {
    /// Largest number of source blocks per pair for which the table below is used.
    const MAX_SPARSENESS: usize = 4;
    /// Marks a position without a destination. A list that writes this block number is sorted by comparison
    /// instead.
    const NOWHERE: u32 = u32::MAX;
    if pairs.is_sorted() {
        return Ok(());
    }
    let most = pairs.iter().fold(0, |most, &(src, _)| src.max(most));
    let Some(room) = usize::try_from(most).ok().filter(|&most| most < MAX_SPARSENESS * pairs.len()) else {
        return by_source(pairs);
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
        return by_source(pairs);
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
    Ok(())
}
