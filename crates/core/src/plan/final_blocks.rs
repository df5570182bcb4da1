//! The blocks that a plan leaves in place, for comparing them with their source.
//!
//! A block is a piece that lies in one row of the local cache, and at most `most` bytes of it. If several pieces write
//! the same bytes, only the last one counts.

use std::collections::BinaryHeap;

use super::copy_plan::CopyPlan;
use super::side::Side;
use super::spans::{PLAN, Piece};
use crate::error::Result;
use crate::fallible;
use crate::model::RowSizes;

/// One block of every `SAMPLED` is chosen.
const SAMPLED: u64 = 64;

/// How pieces are cut into blocks: at the rows of the local cache, and after each `most` bytes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Which side of the plan is the local cache.
    pub local: Side,
    /// Where the rows of the local cache lie.
    pub rows: RowSizes,
    /// Most bytes of a block.
    pub most: u64,
}

impl CopyPlan {
    /// Returns the blocks of one tensor that are in place after the plan has run: all of them, or one in 64 and at least
    /// one, chosen by the random number `sample`.
    pub fn final_blocks(&self, sizes: BlockSizes, sample: Option<u64>) -> Result<Vec<Piece>> {
        if let [wave] = self.waves() {
            // No byte is written twice within a wave.
            let blocks = || wave.pieces(0, wave.tensor_bytes()).flat_map(|piece| cut(piece, sizes));
            return chosen(&blocks, sample);
        }
        let last = self.last_writers(sizes)?;
        chosen(&|| last.iter().copied(), sample)
    }

    /// Returns the blocks of all waves, without bytes that a later wave writes again.
    fn last_writers(&self, sizes: BlockSizes) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        for (number, wave) in self.waves().iter().enumerate() {
            for piece in wave.pieces(0, wave.tensor_bytes()) {
                fallible::push(PLAN, &mut pieces, (piece, number))?;
            }
        }
        pieces.sort_unstable_by_key(|&(piece, _)| piece.dst);
        let mut last = Vec::new();
        // Goes through the bytes that are written, from the first to the last. `open` has the pieces that write the byte
        // `at`; the one of the last wave counts.
        let (mut at, mut rest) = (0, pieces.iter().peekable());
        let mut open = BinaryHeap::new();
        open.try_reserve(pieces.len()).map_err(|_| fallible::out_of_memory(PLAN, size_of_val(&*pieces)))?;
        loop {
            while open.peek().is_some_and(|&(_, dst, _, len)| dst + len <= at) {
                open.pop();
            }
            let Some(&(wave, dst, src, len)) = open.peek() else {
                let Some((piece, wave)) = rest.next() else { return Ok(last) };
                at = piece.dst;
                open.push((*wave, piece.dst, piece.src, piece.len));
                continue;
            };
            let mut until = dst + len;
            while let Some((piece, number)) = rest.next_if(|(piece, _)| piece.dst < until) {
                open.push((*number, piece.dst, piece.src, piece.len));
                if *number > wave {
                    until = piece.dst;
                }
            }
            let part = Piece { src: src + (at - dst), dst: at, len: until - at };
            for block in cut(part, sizes) {
                fallible::push(PLAN, &mut last, block)?;
            }
            at = until;
        }
    }
}

/// Cuts a piece into blocks.
pub(super) fn cut(piece: Piece, sizes: BlockSizes) -> impl Iterator<Item = Piece> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let left = piece.len.checked_sub(done).filter(|&left| left > 0)?;
        let in_row = sizes.rows.place_in_row(piece.start(sizes.local) + done);
        let most = sizes.most.max(1);
        let room = (sizes.rows.bytes() - in_row).min(most - in_row % most);
        let block = Piece { src: piece.src + done, dst: piece.dst + done, len: left.min(room) };
        done += block.len;
        Some(block)
    })
}

/// Returns all of `blocks`, or a sample.
fn chosen<I: Iterator<Item = Piece>>(blocks: &dyn Fn() -> I, sample: Option<u64>) -> Result<Vec<Piece>> {
    let count = blocks().count();
    let Some(random) = sample else { return fallible::collect_growing(PLAN, count, blocks()) };
    let sampled = Sampled::new(count as u64, random);
    let some = (0..).zip(blocks()).filter(|&(index, _)| sampled.picks(index)).map(|(_, block)| block);
    let most = usize::try_from((count as u64).div_ceil(SAMPLED)).unwrap_or(usize::MAX);
    fallible::collect_growing(PLAN, most, some)
}

/// Chooses one of every 64 blocks, and at least one.
pub(super) struct Sampled {
    random: u64,
    /// Blocks of a group from which one is chosen.
    of: u64,
}

impl Sampled {
    pub(super) fn new(count: u64, random: u64) -> Sampled {
        // Each block of a last group that is not full is chosen with probability 1/64, as in a full group. If this group is
        // the only one, one of its blocks is always chosen.
        Sampled { random, of: count.clamp(1, SAMPLED) }
    }

    /// Returns whether the block with this index is in the sample.
    pub(super) fn picks(&self, index: u64) -> bool {
        index % SAMPLED == scrambled(self.random.wrapping_add(index / SAMPLED)) % self.of
    }
}

/// Returns a number whose bits all depend on all bits of `number` (`SplitMix64`).
fn scrambled(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
