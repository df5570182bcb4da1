//! Whether a wave of a peer's plan writes a byte twice: then two workers would write it at the same time.
//!
//! Waves that are planned here never do (`order`), so only plans from a peer are looked at. The memory for it is bounded by
//! the plan or by what it writes, whichever is less. Not for: bounds (`parts`).

use super::blocks::Blocks;
use super::spans::Span;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;

/// Name of these lists in out-of-memory errors.
const CHECK: &str = "checking a plan";
/// A wave may always be checked with this much memory.
const LEAST: u64 = 16 << 20;

/// `Err` if two of `blocks` are written to one place.
pub(super) fn check_blocks(blocks: &Blocks) -> Result<()> {
    let written = || blocks.pairs.iter().map(|&(_, dst)| dst);
    if written().is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let (count, most) = (blocks.pairs.len(), written().fold(0, u32::max));
    let again = |block: u32| Err(twice(blocks.dst.saturating_add(blocks.len.saturating_mul(block.into()))));
    let words = most as usize / 64 + 1;
    // A bit for each block up to the last costs less than sorting, until they are mostly blocks that nobody named.
    if words <= (count / 2).max(count.saturating_mul(8).min(1 << 17)) {
        let mut bits = fallible::filled(CHECK, 0u64, words)?;
        for block in written() {
            // None is above `most`, so every one has its bit.
            if let Some(word) = bits.get_mut(block as usize / 64) {
                let bit = 1 << (block % 64);
                if *word & bit != 0 {
                    return again(block);
                }
                *word |= bit;
            }
        }
        return Ok(());
    }
    let mut sorted = fallible::collect(CHECK, written())?;
    sorted.sort_unstable();
    match sorted.windows(2).find(|two| two[0] == two[1]) {
        Some(two) => again(two[0]),
        None => Ok(()),
    }
}

/// Where a span writes: `count` pieces of `len` bytes, `step` apart, from the lowest on.
#[derive(Clone, Copy)]
struct Comb {
    low: u64,
    step: u64,
    len: u64,
    count: u64,
}

impl Comb {
    /// Of a sound span.
    fn of(span: &Span) -> Comb {
        let last = span.piece(span.count - 1).1;
        let step = span.dst_step.unsigned_abs();
        Comb { low: span.dst.min(last), step, len: span.len, count: span.count }
    }

    fn end(&self) -> u64 {
        self.low + self.step * (self.count - 1) + self.len
    }

    /// Each piece, from the lowest on.
    fn pieces(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.count).map(move |k| {
            let start = self.low + k * self.step;
            (start, start + self.len)
        })
    }
}

/// `Err` if two pieces of `spans`, which are sound, write one byte. `plan_bytes` is what the spans take: a wave that could
/// only be checked with much more memory than that is refused.
pub(super) fn check_spans(spans: &(impl Iterator<Item = Span> + Clone), plan_bytes: usize) -> Result<()> {
    let combs = || spans.clone().map(|span| Comb::of(&span));
    let Some(first) = combs().next() else { return Ok(()) };
    // Waves are sorted by where they read, and mostly that is the order of what they write.
    if combs().is_sorted_by(|a, b| a.end() <= b.low) {
        return Ok(());
    }
    let (mut low, mut end) = (first.low, first.end());
    let (mut grid, mut pieces) = (0, 0u64);
    for comb in combs() {
        (low, end) = (low.min(comb.low), end.max(comb.end()));
        let step = if comb.count > 1 { comb.step } else { 0 };
        grid = common_divisor(common_divisor(grid, step), first.low.abs_diff(comb.low));
        pieces = pieces.saturating_add(comb.count);
    }
    if grid == 0 {
        // Several spans of one piece each, all at the same place.
        return Err(twice(low));
    }
    let units = (end - low).div_ceil(grid);
    let (of_bits, of_list) = (units.div_ceil(64).saturating_mul(8), pieces.saturating_mul(16));
    let most = LEAST.max(plan_bytes as u64 / 2 * 3);
    if of_bits.min(of_list) > most {
        let text = "the pieces of a plan are too many and too irregular to be checked";
        return Err(Error::new(ErrorKind::InvalidArgument, text)
            .with("pieces", pieces)
            .with("needed_bytes", of_bits.min(of_list))
            .with("limit", most));
    }
    if of_bits <= of_list { by_bits(combs(), low, grid, units) } else { by_sorting(combs(), pieces) }
}

/// By a bit for each unit of the grid. Every piece starts on the grid, so two that share a unit share its first byte.
fn by_bits(combs: impl Iterator<Item = Comb>, low: u64, grid: u64, units: u64) -> Result<()> {
    let words = usize::try_from(units.div_ceil(64)).unwrap_or(usize::MAX);
    let mut bits = fallible::filled(CHECK, 0u64, words)?;
    for (start, end) in combs.flat_map(Comb::pieces) {
        let (mut unit, last) = ((start - low) / grid, (end - 1 - low) / grid);
        while unit <= last {
            let (word, bit) = (unit / 64, unit % 64);
            let count = (64 - bit).min(last - unit + 1);
            let mask = (u64::MAX >> (64 - count)) << bit;
            // The last unit of the last piece is the last of all, so every one has its word.
            if let Some(word) = usize::try_from(word).ok().and_then(|at| bits.get_mut(at)) {
                if *word & mask != 0 {
                    return Err(twice(start));
                }
                *word |= mask;
            }
            unit += count;
        }
    }
    Ok(())
}

/// By sorting the pieces.
fn by_sorting(combs: impl Iterator<Item = Comb>, pieces: u64) -> Result<()> {
    let pieces = usize::try_from(pieces).unwrap_or(usize::MAX);
    let mut list = fallible::gathered(CHECK, pieces, combs.flat_map(Comb::pieces))?;
    list.sort_unstable();
    match list.windows(2).find(|two| two[0].1 > two[1].0) {
        Some(two) => Err(twice(two[1].0)),
        None => Ok(()),
    }
}

fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cold]
fn twice(at: u64) -> Error {
    let text = "a plan writes one destination twice in one wave";
    Error::new(ErrorKind::InvalidArgument, text).with("dst_offset", at)
}
