//! Waves of equal blocks: a pair of numbers for each instead of a span.
//!
//! Shuffled lists of thousands of blocks have hardly two neighbours to join. Eight bytes a block instead of the 56 of a
//! span and its end are what makes planning, writing, reading and checking them cheap (docs/performance.md). Not for: lists
//! whose blocks join (`order`).

use std::sync::Arc;

use super::Ends;
use super::order::{self, Pair};
use super::wave::{Piece, Span, Wave};
use crate::error::Result;
use crate::fallible;

/// Fewer blocks than these are spans: there is nothing to gain.
const FEW: usize = 64;
/// Blocks stay blocks if fewer than one in so many joins its neighbour or continues its step.
const JOINED: usize = 8;

/// Equal blocks of one tensor: pair `(s, d)` is `len` bytes from `src + len·s` to `dst + len·d`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Bytes of one block.
    pub len: u64,
    /// Where block 0 is read, from the start of the tensor.
    pub src: u64,
    /// Where block 0 is written, from the start of the tensor.
    pub dst: u64,
    /// Number read and number written. Shared with the message that carries the plan.
    pub pairs: Arc<Vec<(u32, u32)>>,
}

impl Pair for (u32, u32) {
    fn ends(&self) -> (u64, u64) {
        (self.0.into(), self.1.into())
    }
}

impl Blocks {
    /// The `at`-th piece, whole.
    pub(super) fn piece(&self, at: usize) -> Option<Piece> {
        let &(src, dst) = self.pairs.get(at)?;
        let src = self.src + u64::from(src) * self.len;
        let dst = self.dst + u64::from(dst) * self.len;
        Some(Piece { src, dst, len: self.len })
    }

    /// Behind the last byte read and behind the last byte written; `None` beyond 64 bits, or without bytes.
    pub(super) fn reach(&self) -> Option<(u64, u64)> {
        if self.len == 0 || self.pairs.is_empty() {
            return None;
        }
        let most = |(src, dst): (u32, u32), &(s, d): &(u32, u32)| (src.max(s), dst.max(d));
        let (src, dst) = self.pairs.iter().fold((0, 0), most);
        let end = |first: u64, number: u32| {
            self.len.checked_mul(u64::from(number) + 1).and_then(|bytes| first.checked_add(bytes))
        };
        Some((end(self.src, src)?, end(self.dst, dst)?))
    }

    /// The pieces, whole.
    pub(super) fn pieces(&self) -> impl ExactSizeIterator<Item = Piece> + '_ {
        let one = |&(src, dst): &(u32, u32)| Piece {
            src: self.src + u64::from(src) * self.len,
            dst: self.dst + u64::from(dst) * self.len,
            len: self.len,
        };
        self.pairs.iter().map(one)
    }

    /// As spans, one for each block.
    pub(super) fn single_spans(&self) -> impl ExactSizeIterator<Item = Span> + '_ {
        self.pieces().map(|Piece { src, dst, len }| Span::single(src, dst, len))
    }
}

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
    fallible::tried(order::PLAN, levels.into_iter().map(wave))
}

/// Whether no block is written twice or, in one cache, read and written, of those that lie near each other; `false` also if
/// that takes a longer look.
fn apart(pairs: &[(u32, u32)], ends: Ends) -> Result<bool> {
    let most = pairs.iter().fold(0, |most, &(_, dst)| dst.max(most));
    let Some(words) = usize::try_from(most / 64).ok().filter(|&words| words < pairs.len()) else {
        return Ok(false);
    };
    let (mut bits, mut met) = (fallible::filled(order::PLAN, 0u64, words + 1)?, 0);
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
    let mut to = fallible::filled(order::PLAN, NOWHERE, room + 1)?;
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
