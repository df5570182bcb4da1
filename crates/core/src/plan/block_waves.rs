//! Plans lists of equal blocks: waves of block pairs, or of spans where neighbouring blocks join.

use std::sync::Arc;

use super::blocks::Blocks;
use super::order::{self, Ends};
use super::spans::PLAN;
use super::waves::Wave;
use crate::error::Result;
use crate::fallible;

/// Fewer blocks than these are spans: there is nothing to gain.
const FEW: usize = 64;
/// Blocks stay blocks if fewer than one in so many joins its neighbour or continues its step.
const JOINED: usize = 8;

/// The waves of `pairs` of blocks, with the result of copying one after the other in the order given. All of them lie
/// in a tensor.
pub(super) fn waves(
    len: u64,
    (src, dst): (u64, u64),
    pairs: Vec<(u32, u32)>,
    ends: Ends,
) -> Result<Vec<Wave>> {
    let free = apart(&pairs, ends)? || !order::order_matters(&pairs, ends)?;
    let levels = if free { vec![pairs] } else { order::levels(&pairs, ends)? };
    let wave = |mut pairs: Vec<(u32, u32)>| {
        by_source(&mut pairs)?;
        let scattered = scattered(&pairs);
        let blocks = Blocks { len, src, dst, pairs: Arc::new(pairs) };
        if scattered {
            Ok(Wave::of_blocks(blocks))
        } else {
            Wave::new(order::strided(order::contiguous(blocks.pieces())?)?)
        }
    };
    fallible::tried(PLAN, levels.into_iter().map(wave))
}

/// Whether no block is written twice or, in one cache, read and written, of those that lie near each other; `false` also if
/// that takes a longer look.
fn apart(pairs: &[(u32, u32)], ends: Ends) -> Result<bool> {
    let most = pairs.iter().fold(0, |most, &(_, dst)| dst.max(most));
    let Some(words) = usize::try_from(most / 64).ok().filter(|&words| words < pairs.len()) else {
        return Ok(false);
    };
    let (mut bits, mut met) = (fallible::filled(PLAN, 0u64, words + 1)?, 0);
    for &(_, dst) in pairs {
        // None is above `most`, so every one has its bit.
        if let Some(word) = bits.get_mut(dst as usize / 64) {
            let bit = 1 << (dst % 64);
            met |= *word & bit;
            *word |= bit;
        }
    }
    let written = |src: u32| bits.get(src as usize / 64).is_some_and(|word| word >> (src % 64) & 1 != 0);
    let clear = met == 0;
    Ok(clear && (ends == Ends::TwoCaches || !pairs.iter().fold(false, |any, &(src, _)| any | written(src))))
}

/// Sorts pairs by where they read, those that read the same block by where they write.
fn by_source(pairs: &mut Vec<(u32, u32)>) -> Result<()> {
    /// Blocks that one list may leave out for each that it names.
    const SPARSE: usize = 4;
    /// No block is written there: such a list is sorted by comparing.
    const NOWHERE: u32 = u32::MAX;
    if pairs.is_sorted() {
        return Ok(());
    }
    let most = pairs.iter().fold(0, |most, &(src, _)| src.max(most));
    let Some(room) = usize::try_from(most).ok().filter(|&most| most < SPARSE * pairs.len()) else {
        return order::by_source(pairs);
    };
    // A place for each block of the source: most lists read no block twice, and then two passes are enough.
    let mut to = fallible::filled(PLAN, NOWHERE, room + 1)?;
    let mut once = true;
    for &(src, dst) in pairs.iter() {
        // None is above `most`, so every one has its place.
        if let Some(place) = to.get_mut(src as usize) {
            once &= *place == NOWHERE && dst != NOWHERE;
            *place = dst;
        }
    }
    if !once {
        return order::by_source(pairs);
    }
    // Every place is written, the next over it where nothing was there: no branch on what cannot be guessed.
    let mut filled = 0;
    for (src, dst) in (0..).zip(to) {
        if let Some(place) = pairs.get_mut(filled) {
            *place = (src, dst);
        }
        filled += usize::from(dst != NOWHERE);
    }
    Ok(())
}

/// Whether joining would leave nearly as many.
fn scattered(pairs: &[(u32, u32)]) -> bool {
    if pairs.len() < FEW {
        return false;
    }
    let step = |a: (u32, u32), b: (u32, u32)| (b.0.wrapping_sub(a.0), b.1.wrapping_sub(a.1));
    let (first, second, third) = (&pairs[..pairs.len() - 2], &pairs[1..], &pairs[2..]);
    // A join is a step of one on both sides, three at one distance are a stride.
    let counted = first.iter().zip(second).zip(third).fold(0u32, |joined, ((&a, &b), &c)| {
        let (one, two) = (step(a, b), step(b, c));
        joined + u32::from(one == (1, 1) || one == two)
    });
    (counted as usize) < pairs.len() / JOINED
}
