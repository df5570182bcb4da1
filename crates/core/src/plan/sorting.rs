//! Sorts pieces by the place that they read, so that neighbours can be joined and memory is read in order.

use super::order::Pair;
use super::spans::PLAN;
use crate::error::Result;
use crate::fallible;

/// Sorts pairs by the place they read, and pairs that read the same place by the place they write.
pub(super) fn by_source<T: Pair>(pairs: &mut Vec<T>) -> Result<()> {
    sort_by_number(pairs, |pair| pair.places().0)?;
    for fan in pairs.chunk_by_mut(|a, b| a.places().0 == b.places().0) {
        fan.sort_unstable_by_key(|pair| pair.places().1);
    }
    Ok(())
}

/// Sorts by a number, stably.
///
/// Lists of blocks are long and their numbers differ in few bits. So long lists are sorted by radix, in a
/// fraction of the time of a comparison sort (`tests/integration/plan.rs` compares the results).
fn sort_by_number<T: Copy>(items: &mut Vec<T>, number: impl Fn(&T) -> u64) -> Result<()> {
    const MIN_RADIX: usize = 512;
    if items.is_sorted_by_key(&number) {
        return Ok(());
    }
    if items.len() < MIN_RADIX {
        items.sort_by_key(number);
        return Ok(());
    }
    let (all, any) =
        items.iter().fold((u64::MAX, 0), |(all, any), item| (all & number(item), any | number(item)));
    let differing = all ^ any;
    let (low, high) = (differing.trailing_zeros(), u64::BITS - differing.leading_zeros());
    // As few digits as possible, but no more values of a digit than there are items (at least 8 bits, at most
    // 16).
    let most = items.len().ilog2().clamp(8, 16);
    let digits = (high - low).div_ceil(most);
    let width = (high - low).div_ceil(digits.max(1));
    let mut dealt = fallible::copied(PLAN, items)?;
    let mut next = fallible::filled(PLAN, 0usize, 1 << width)?;
    for turn in 0..digits {
        let shift = low + turn * width;
        let digit = |item: &T| usize::try_from((number(item) >> shift) & ((1 << width) - 1)).unwrap_or(0);
        next.fill(0);
        for item in items.iter() {
            next[digit(item)] += 1;
        }
        let mut start = 0;
        for place in &mut next {
            start += std::mem::replace(place, start);
        }
        for item in items.iter() {
            let place = &mut next[digit(item)];
            dealt[*place] = *item;
            *place += 1;
        }
        std::mem::swap(items, &mut dealt);
    }
    Ok(())
}

/// Sorts pairs of block numbers as [`by_source`] does. If no block is read twice, two passes over a table suffice.
pub(super) fn pairs_by_source(pairs: &mut Vec<(u32, u32)>) -> Result<()> {
    /// Largest number of source blocks per pair for which the table below is used.
    const SPARSE: usize = 4;
    /// Marks a place without a destination. A list that writes this block number is sorted by comparison
    /// instead.
    const NOWHERE: u32 = u32::MAX;
    if pairs.is_sorted() {
        return Ok(());
    }
    let most = pairs.iter().fold(0, |most, &(src, _)| src.max(most));
    let Some(room) = usize::try_from(most).ok().filter(|&most| most < SPARSE * pairs.len()) else {
        return by_source(pairs);
    };
    // One place for each source block.
    let mut to = fallible::filled(PLAN, NOWHERE, room + 1)?;
    let mut once = true;
    for &(src, dst) in pairs.iter() {
        // No block number exceeds `most`, so every one has its place.
        if let Some(place) = to.get_mut(src as usize) {
            once &= *place == NOWHERE && dst != NOWHERE;
            *place = dst;
        }
    }
    if !once {
        return by_source(pairs);
    }
    // Every place is stored, and the next store overwrites an empty one. This avoids a branch that the
    // processor could not predict.
    let mut filled = 0;
    for (src, dst) in (0..).zip(to) {
        if let Some(place) = pairs.get_mut(filled) {
            *place = (src, dst);
        }
        filled += usize::from(dst != NOWHERE);
    }
    Ok(())
}
