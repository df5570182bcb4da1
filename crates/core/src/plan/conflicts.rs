//! Refuses a peer's plan that writes a byte twice in one wave, because two workers would then write it at the
//! same time.
//!
//! Waves planned in this process never do so (`order`). The check needs memory in proportion to the plan or to
//! the range it writes, whichever is less.

use super::blocks::Blocks;
use super::spans::Span;
use super::template::Template;
use crate::error::{Error, Result};
use crate::fallible;

/// Name of the lists of this check in out-of-memory errors.
const CHECK: &str = "checking a plan";
/// Bytes of memory that the check of a wave may always use, however small the plan.
const LEAST: u64 = 16 << 20;

/// Returns `Err(InvalidArgument)` if two of `blocks` are written to the same place.
pub(super) fn check_blocks(blocks: &Blocks) -> Result<()> {
    check_places(&blocks.pairs, blocks.dst, blocks.len)
}

/// Returns `Err(InvalidArgument)` if two pieces of `template` write the same byte. Its spans must have passed the
/// checks of `span_limits`, and its end offsets must fit 64 bits. `plan_bytes` as in [`check_spans`].
pub(super) fn check_template(template: &Template, plan_bytes: usize) -> Result<()> {
    let written = template.hulls().map_or(0, |(_, written)| written.end - written.start);
    if template.pairs.len() > 1 && written > template.dst_unit {
        // The places interleave, as those of blocks inside larger blocks whose heads are outside.
        return check_spans(&template.placed_spans(), plan_bytes);
    }
    check_places(&template.pairs, 0, template.dst_unit)?;
    check_spans(&template.spans.iter().copied(), plan_bytes)
}

/// Returns `Err(InvalidArgument)` if two of `pairs` are written to the same place. Place 0 is at byte `first`, and the
/// places are `unit` bytes apart.
fn check_places(pairs: &[(u32, u32)], first: u64, unit: u64) -> Result<()> {
    let written = || pairs.iter().map(|&(_, dst)| dst);
    if written().is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let (count, most) = (pairs.len(), written().fold(0, u32::max));
    let again = |place: u32| Err(written_twice(first.saturating_add(unit.saturating_mul(place.into()))));
    let words = most as usize / 64 + 1;
    // A bitmap up to the last block costs less than sorting, unless most of its bits would belong to blocks
    // that are not in the list.
    if words <= (count / 2).max(count.saturating_mul(8).min(1 << 17)) {
        let mut bits = fallible::filled(CHECK, 0u64, words)?;
        for block in written() {
            // No block number exceeds `most`, so every one has its bit.
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

/// The places that a span writes: `count` pieces of `len` bytes, `step` bytes apart, in ascending order from
/// `low`.
#[derive(Clone, Copy)]
struct WrittenSpan {
    low: u64,
    step: u64,
    len: u64,
    count: u64,
}

impl WrittenSpan {
    /// Returns the span of `span`, which must have passed the checks of `span_limits`.
    fn of(span: &Span) -> WrittenSpan {
        let last = span.piece(span.count - 1).1;
        let step = span.dst_step.unsigned_abs();
        WrittenSpan { low: span.dst.min(last), step, len: span.len, count: span.count }
    }

    fn end(&self) -> u64 {
        self.low + self.step * (self.count - 1) + self.len
    }

    /// Returns the start and end of each piece, in ascending order.
    fn pieces(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.count).map(move |k| {
            let start = self.low + k * self.step;
            (start, start + self.len)
        })
    }
}

/// Returns `Err(InvalidArgument)` if two pieces of `spans` write the same byte. The spans must have passed
/// the checks of `span_limits`. `plan_bytes` is the memory that the spans of the plan take; a wave is refused
/// if its check would need more than one and a half times that and more than 16 MiB.
pub(super) fn check_spans(spans: &(impl Iterator<Item = Span> + Clone), plan_bytes: usize) -> Result<()> {
    let written = || spans.clone().map(|span| WrittenSpan::of(&span));
    let Some(first) = written().next() else { return Ok(()) };
    // Waves are sorted by source, and in most plans this is also the order of the destinations.
    if written().is_sorted_by(|a, b| a.end() <= b.low) {
        return Ok(());
    }
    let (mut low, mut end) = (first.low, first.end());
    let (mut grid, mut pieces) = (0, 0u64);
    for span in written() {
        (low, end) = (low.min(span.low), end.max(span.end()));
        let step = if span.count > 1 { span.step } else { 0 };
        grid = common_divisor(common_divisor(grid, step), first.low.abs_diff(span.low));
        pieces = pieces.saturating_add(span.count);
    }
    if grid == 0 {
        // Several spans of one piece each, all at the same place.
        return Err(written_twice(low));
    }
    let units = (end - low).div_ceil(grid);
    let (of_bits, of_list) = (units.div_ceil(64).saturating_mul(8), pieces.saturating_mul(16));
    let most = LEAST.max(plan_bytes as u64 / 2 * 3);
    if of_bits.min(of_list) > most {
        let text = "the pieces of a plan are too many and too irregular to be checked";
        return Err(Error::invalid(text)
            .with("pieces", pieces)
            .with("needed_bytes", of_bits.min(of_list))
            .with("limit", most));
    }
    if of_bits <= of_list { by_bits(written(), low, grid, units) } else { by_sorting(written(), pieces) }
}

/// Checks with one bit for each unit of the grid. Every piece starts on the grid, so two pieces that share a
/// unit share its first byte.
fn by_bits(written: impl Iterator<Item = WrittenSpan>, low: u64, grid: u64, units: u64) -> Result<()> {
    let words = usize::try_from(units.div_ceil(64)).unwrap_or(usize::MAX);
    let mut bits = fallible::filled(CHECK, 0u64, words)?;
    for (start, end) in written.flat_map(WrittenSpan::pieces) {
        let (mut unit, last) = ((start - low) / grid, (end - 1 - low) / grid);
        while unit <= last {
            let (word, bit) = (unit / 64, unit % 64);
            let count = (64 - bit).min(last - unit + 1);
            let mask = (u64::MAX >> (64 - count)) << bit;
            // The last unit of the last piece has the highest number, so every unit has its word.
            if let Some(word) = usize::try_from(word).ok().and_then(|at| bits.get_mut(at)) {
                if *word & mask != 0 {
                    return Err(written_twice(start));
                }
                *word |= mask;
            }
            unit += count;
        }
    }
    Ok(())
}

/// Checks by sorting the pieces.
fn by_sorting(written: impl Iterator<Item = WrittenSpan>, pieces: u64) -> Result<()> {
    let pieces = usize::try_from(pieces).unwrap_or(usize::MAX);
    let mut list = fallible::collect_growing(CHECK, pieces, written.flat_map(WrittenSpan::pieces))?;
    list.sort_unstable();
    match list.windows(2).find(|two| two[0].1 > two[1].0) {
        Some(two) => Err(written_twice(two[1].0)),
        None => Ok(()),
    }
}

fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

fn written_twice(at: u64) -> Error {
    let text = "a plan writes one destination twice in one wave";
    Error::invalid(text).with("dst_offset", at)
}
