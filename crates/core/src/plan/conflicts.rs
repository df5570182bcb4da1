//! Refuses a peer's plan that writes a byte twice, because two workers would then write it at the same time.
//!
//! Plans made in this process never do so (`order`). The check needs memory in proportion to the plan or to
//! the range it writes, whichever is less.

use super::bit_set::BitSet;
use super::spans::{Span, common_divisor};
use super::template::Template;
use crate::error::{Error, Result};
use crate::fallible;

/// Name of the lists of this check in out-of-memory errors.
const CHECK: &str = "checking a plan";
/// Bytes of memory that the check of a plan may always use, however small the plan.
const MIN_CHECK_BYTES: u64 = 16 << 20;

/// Returns `Err(InvalidArgument)` if two pieces of `templates` write the same byte. Their spans must have passed the checks
/// of `span_limits`, and the end offsets of templates must fit 64 bits. `plan_bytes` is about the size of the plan
/// in its message. The plan is refused if its check would need more than one and a half times that and more than 16 MiB.
pub(super) fn check_templates(templates: &[Template], plan_bytes: usize) -> Result<()> {
    if are_apart(templates, plan_bytes) {
        return templates.iter().try_for_each(|template| check_template(template, plan_bytes));
    }
    let written = || templates.iter().flat_map(Template::placed_spans).map(|span| WrittenSpan::of(&span));
    check_written(&written, || extent_of(templates), plan_bytes)
}

/// Returns `Err(InvalidArgument)` if [`check_templates`] might refuse templates without overlaps, because its check would
/// need too much memory. The sender checks, before it sends a plan, whether the receiver would refuse it.
pub(super) fn check_size(templates: &[Template]) -> Result<()> {
    if !are_apart(templates, 0) {
        return extent_of(templates).map_or(Ok(()), |extent| extent.check_size(0));
    }
    let each = templates.iter().map(written_once);
    let unordered = each.filter(|written| !in_order(written.clone()));
    unordered.filter_map(WrittenExtent::of).try_for_each(|extent| extent.check_size(0))
}

/// Returns whether no position of a template lies between pieces of another position or template. Then each template can be
/// checked alone, by the pieces of one position and the numbers of the positions. This takes a step for each position, and for
/// each span that is not repeated.
fn are_apart(templates: &[Template], plan_bytes: usize) -> bool {
    if templates.iter().any(interleaves) {
        return false;
    }
    let written = || templates.iter().flat_map(hulls);
    templates.len() < 2 || check_written(&written, || WrittenExtent::of(written()), plan_bytes).is_ok()
}

/// Returns what each position of a template writes, with the bytes between its pieces; or each span, if the spans are not
/// repeated.
fn hulls(template: &Template) -> impl Iterator<Item = WrittenSpan> {
    let repeated = Some(template).filter(|template| template.pairs.len() > 1);
    let positions = repeated.into_iter().flat_map(|template| {
        let hull = template.hulls().map_or(0..0, |(_, written)| written);
        let position = move |&(_, number): &(u32, u32)| WrittenSpan {
            low: hull.start + u64::from(number) * template.dst_unit,
            step: 0,
            len: hull.end - hull.start,
            count: 1,
        };
        template.pairs.iter().map(position)
    });
    let spans = repeated.is_none().then(|| template.placed_spans().map(|span| WrittenSpan::of(&span)));
    positions.chain(spans.into_iter().flatten())
}

fn check_template(template: &Template, plan_bytes: usize) -> Result<()> {
    fallible::temporary(|| check_positions(template))?;
    let written = || written_once(template);
    check_written(&written, || WrittenExtent::of(written()), plan_bytes)
}

/// Returns whether a position of the template may lie between pieces of another one, for example small blocks inside larger
/// HND blocks.
fn interleaves(template: &Template) -> bool {
    let written = template.hulls().map_or(0, |(_, written)| written.end - written.start);
    template.pairs.len() > 1 && written > template.dst_unit
}

fn written_once(template: &Template) -> impl Iterator<Item = WrittenSpan> + Clone {
    template.spans.iter().map(WrittenSpan::of)
}

/// Returns what all templates write. This visits each span and each pair of a template once, and not their combinations.
fn extent_of(templates: &[Template]) -> Option<WrittenExtent> {
    let each = templates.iter().filter_map(extent_of_template);
    each.reduce(|all, next| all.joined(&next))
}

fn extent_of_template(template: &Template) -> Option<WrittenExtent> {
    let WrittenExtent { low, end, grid, pieces } = WrittenExtent::of(written_once(template))?;
    let numbers = || template.pairs.iter().map(|&(_, dst)| u64::from(dst));
    let (first, last) = (numbers().min()?, numbers().max()?);
    let grid = if template.pairs.len() > 1 { common_divisor(grid, template.dst_unit) } else { grid };
    Some(WrittenExtent {
        low: low + first * template.dst_unit,
        end: end + last * template.dst_unit,
        grid,
        pieces: pieces.saturating_mul(template.pairs.len() as u64),
    })
}

/// Returns `Err(InvalidArgument)` if two pairs of the template write the same position.
fn check_positions(template: &Template) -> Result<()> {
    let written = || template.pairs.iter().map(|&(_, dst)| dst);
    if written().is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let (count, most) = (template.pairs.len(), written().fold(0, u32::max).into());
    // A bitmap up to the last block costs less than sorting, unless most of its bits would belong to blocks
    // that are not in the list.
    let twice = if BitSet::words(most) <= (count / 2).max(count.saturating_mul(8).min(1 << 17)) {
        let mut bits = BitSet::new(CHECK, most)?;
        written().find(|&block| !bits.add(block.into()))
    } else {
        let mut sorted = fallible::collect(CHECK, written())?;
        sorted.sort_unstable();
        sorted.windows(2).find(|two| two[0] == two[1]).map(|two| two[0])
    };
    twice.map_or(Ok(()), |position| {
        let first = template.spans.first().map_or(0, |span| span.dst);
        Err(written_twice(first.saturating_add(template.dst_unit.saturating_mul(position.into()))))
    })
}

/// The positions that a span writes: `count` pieces of `len` bytes, `step` bytes apart, in ascending order from
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

/// What a list of spans writes: the range of its bytes, a number of which the distances of its pieces are multiples, and the
/// number of pieces.
struct WrittenExtent {
    low: u64,
    end: u64,
    /// 0 if all pieces start at the same byte.
    grid: u64,
    pieces: u64,
}

impl WrittenExtent {
    /// Returns `None` if nothing is written.
    fn of(written: impl Iterator<Item = WrittenSpan>) -> Option<WrittenExtent> {
        let of_span = |span: WrittenSpan| WrittenExtent {
            low: span.low,
            end: span.end(),
            grid: if span.count > 1 { span.step } else { 0 },
            pieces: span.count,
        };
        written.map(of_span).reduce(|all, next| all.joined(&next))
    }

    /// Returns what two lists of spans write.
    fn joined(self, other: &Self) -> Self {
        WrittenExtent {
            low: self.low.min(other.low),
            end: self.end.max(other.end),
            grid: common_divisor(common_divisor(self.grid, other.grid), self.low.abs_diff(other.low)),
            pieces: self.pieces.saturating_add(other.pieces),
        }
    }

    /// Returns the number of units of the grid.
    fn units(&self) -> u64 {
        (self.end - self.low).div_ceil(self.grid.max(1))
    }

    /// Returns the bytes that a check needs: with a bit for each unit, and with a list of the pieces.
    fn needed(&self) -> (u64, u64) {
        (self.units().div_ceil(64).saturating_mul(8), self.pieces.saturating_mul(16))
    }

    /// Returns `Err(InvalidArgument)` if the check needs more than 16 MiB and more than one and a half times `plan_bytes`.
    fn check_size(&self, plan_bytes: usize) -> Result<()> {
        let (of_bits, of_list) = self.needed();
        let most = MIN_CHECK_BYTES.max(plan_bytes as u64 / 2 * 3);
        if of_bits.min(of_list) <= most {
            return Ok(());
        }
        let text = "the pieces of a plan are too many and too irregular to be checked: move fewer blocks in one call";
        Err(Error::invalid(text)
            .with("pieces", self.pieces)
            .with("needed_bytes", of_bits.min(of_list))
            .with("limit", most))
    }
}

fn in_order(written: impl Iterator<Item = WrittenSpan>) -> bool {
    written.is_sorted_by(|a, b| a.end() <= b.low)
}

/// Checks spans in any order. `extent` returns what they write.
fn check_written<I: Iterator<Item = WrittenSpan>>(
    written: &impl Fn() -> I,
    extent: impl FnOnce() -> Option<WrittenExtent>,
    plan_bytes: usize,
) -> Result<()> {
    // Plans are sorted by source, and in most of them this is also the order of the destinations.
    if in_order(written()) {
        return Ok(());
    }
    let Some(extent) = extent() else { return Ok(()) };
    if extent.grid == 0 {
        // Several spans of one piece each, all at the same position.
        return Err(written_twice(extent.low));
    }
    extent.check_size(plan_bytes)?;
    let (of_bits, of_list) = extent.needed();
    fallible::temporary(|| {
        if of_bits <= of_list { by_bits(written(), &extent) } else { by_sorting(written(), extent.pieces) }
    })
}

/// Checks with one bit for each unit of the grid. Every piece starts on the grid, so two pieces that share a
/// unit share its first byte.
fn by_bits(written: impl Iterator<Item = WrittenSpan>, extent: &WrittenExtent) -> Result<()> {
    let unit = |position: u64| (position - extent.low) / extent.grid;
    let mut bits = BitSet::new(CHECK, unit(extent.end - 1))?;
    let mut pieces = written.flat_map(WrittenSpan::pieces);
    let twice = pieces.find(|&(start, end)| !bits.add_all(unit(start), unit(end - 1)));
    twice.map_or(Ok(()), |(start, _)| Err(written_twice(start)))
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

fn written_twice(at: u64) -> Error {
    let text = "a plan writes one destination twice";
    Error::invalid(text).with("dst_offset", at)
}
