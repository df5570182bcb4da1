//! Plans the copying of equal blocks, as waves of block pairs or, where neighbouring blocks join, of spans.

use std::sync::Arc;

use super::blocks::Blocks;
use super::order::{self, CacheCount};
use super::spans::{PLAN, Piece};
use super::template::Template;
use super::waves::Wave;
use crate::error::Result;
use crate::fallible;

/// Lists with fewer blocks than this become spans if any block joins its neighbour or continues a stride.
const FEW: usize = 64;
/// A longer list stays blocks if fewer than one block in this many does so.
const JOINED: usize = 8;

/// Returns the waves of `pairs` of blocks. Running them has the same result as copying the pairs one by one
/// in the order given. Every block must lie inside its tensor.
pub(super) fn waves(
    len: u64,
    (src, dst): (u64, u64),
    pairs: Vec<(u32, u32)>,
    caches: CacheCount,
) -> Result<Vec<Wave>> {
    ordered(pairs, caches, |pairs, scattered| {
        let blocks = Blocks { len, src, dst, pairs };
        if scattered { Ok(Wave::of_blocks(blocks)) } else { joined(blocks.pieces()) }
    })
}

/// Returns the waves of `pairs` of rows, of each of which the one piece of `template` is copied. Otherwise like [`waves`].
pub(super) fn waves_of_rows(
    template: &Template,
    pairs: Vec<(u32, u32)>,
    caches: CacheCount,
) -> Result<Vec<Wave>> {
    let (src_unit, dst_unit) = (template.src_unit, template.dst_unit);
    ordered(pairs, caches, |pairs, scattered| {
        let spans = fallible::copied(PLAN, &template.spans)?;
        let template = Template { src_unit, dst_unit, pairs, spans };
        // Repeated blocks within one cache make one wave each, and a short wave is a list of spans.
        let few = template.pairs.len() < FEW;
        if scattered && !few { Wave::of_template(template) } else { joined(template.first_pieces()) }
    })
}

/// Splits pairs into waves, sorts each, and has `wave` make it from its pairs and from whether they are scattered. Pairs
/// between two caches are one wave.
fn ordered(
    mut pairs: Vec<(u32, u32)>,
    caches: CacheCount,
    wave: impl Fn(Arc<Vec<(u32, u32)>>, bool) -> Result<Wave>,
) -> Result<Vec<Wave>> {
    let free = pairs.len() < 2 || apart(&pairs, caches)? || !order::order_matters(&pairs, caches)?;
    let waves = match caches {
        CacheCount::One if !free => order::waves(&pairs)?,
        CacheCount::Two if !free => {
            order::keep_last(&mut pairs)?;
            vec![pairs]
        }
        _ => vec![pairs],
    };
    let sorted = |mut pairs: Vec<(u32, u32)>| {
        by_source(&mut pairs)?;
        let scattered = scattered(&pairs);
        wave(Arc::new(pairs), scattered)
    };
    fallible::try_collect(PLAN, waves.into_iter().map(sorted))
}

fn joined(pieces: impl ExactSizeIterator<Item = Piece>) -> Result<Wave> {
    Wave::new(order::strided(order::contiguous(pieces)?)?)
}

/// Returns whether no block is written twice and, if source and destination are one cache, no written block
/// is read. `false` also if the numbers of the written blocks are too sparse for the bitmap that this check
/// uses.
fn apart(pairs: &[(u32, u32)], caches: CacheCount) -> Result<bool> {
    let most = pairs.iter().fold(0, |most, &(_, dst)| dst.max(most));
    let Some(words) = usize::try_from(most / 64).ok().filter(|&words| words < pairs.len()) else {
        return Ok(false);
    };
    let (mut bits, mut overlap) = (fallible::filled(PLAN, 0u64, words + 1)?, 0);
    for &(_, dst) in pairs {
        // No block number exceeds `most`, so every one has its bit.
        if let Some(word) = bits.get_mut(dst as usize / 64) {
            let bit = 1 << (dst % 64);
            overlap |= *word & bit;
            *word |= bit;
        }
    }
    let written = |src: u32| bits.get(src as usize / 64).is_some_and(|word| word >> (src % 64) & 1 != 0);
    let clear = overlap == 0;
    Ok(clear && (caches == CacheCount::Two || !pairs.iter().fold(false, |any, &(src, _)| any | written(src))))
}

/// Sorts pairs by the block they read, and pairs that read the same block by the block they write.
fn by_source(pairs: &mut Vec<(u32, u32)>) -> Result<()> {
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
        return order::by_source(pairs);
    };
    // One place for each source block. Most lists read no block twice, and then two passes suffice.
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
        return order::by_source(pairs);
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

/// Returns whether joining neighbours would leave nearly as many spans as there are blocks.
fn scattered(pairs: &[(u32, u32)]) -> bool {
    let step = |a: (u32, u32), b: (u32, u32)| (b.0.wrapping_sub(a.0), b.1.wrapping_sub(a.1));
    if pairs.len() < FEW {
        let joins = |pairs: &[(u32, u32)]| step(pairs[0], pairs[1]) == (1, 1);
        let continues = |pairs: &[(u32, u32)]| step(pairs[0], pairs[1]) == step(pairs[1], pairs[2]);
        return !pairs.windows(2).any(joins) && !pairs.windows(3).any(continues);
    }
    let (first, second, third) = (&pairs[..pairs.len() - 2], &pairs[1..], &pairs[2..]);
    // A step of one on both sides is a join; three blocks at one distance are a stride.
    let counted = first.iter().zip(second).zip(third).fold(0u32, |joined, ((&a, &b), &c)| {
        let (one, two) = (step(a, b), step(b, c));
        joined + u32::from(one == (1, 1) || one == two)
    });
    (counted as usize) < pairs.len() / JOINED
}
