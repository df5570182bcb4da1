//! Lists the rows that a plan touches.

use super::bit_set::BitSet;
use super::copy_plan::CopyPlan;
use super::range_list::RangeList;
use super::side::Side;
use super::template::Template;
use crate::error::Result;
use crate::fallible;
use crate::model::RowSizes;

/// Name of the lists of rows in out-of-memory errors.
const ROWS: &str = "the rows of a plan";

impl CopyPlan {
    /// Returns the rows of one side that the plan touches, in ascending order, each once; `sizes` says where they lie. A
    /// peer's plan must have passed [`check_bounds`](Self::check_bounds) and [`check_rows`](Self::check_rows); then there are
    /// at most as many rows as the cache has.
    pub fn touched_rows(&self, side: Side, sizes: impl Into<RowSizes>) -> Result<Vec<u64>> {
        rows(self.templates(), side, sizes.into().stride())
    }
}

/// Returns the rows that one side touches. Row `r` is the bytes from `r·row_stride` on, up to the next row. That includes
/// the gap after it, which no piece touches.
fn rows(templates: &[Template], side: Side, row_stride: u64) -> Result<Vec<u64>> {
    if let [template] = templates
        && let Some(positions) = positions(template, side)
        && let Some(rows) = rows_by_bitmap(&positions, side, row_stride)?
    {
        return Ok(rows);
    }
    let mut touched = RangeList::new(ROWS);
    let mut add =
        |start: u64, bytes: u64| touched.add(start / row_stride..(start + (bytes - 1)) / row_stride + 1);
    for template in templates {
        if let Some(Positions { pairs, first, unit, len }) = positions(template, side)
            && len <= row_stride
        {
            // Each position touches the rows of its first and of its last byte, and there is none in between.
            pairs.iter().try_for_each(|&pair| add(first + unit * u64::from(side.of(pair)), len))?;
            continue;
        }
        for span in template.placed_spans() {
            let (_, step) = span.start(side);
            // Steps of at most one row skip no row in between. With longer steps every piece is visited, of which
            // there are at most `MAX_PIECES`.
            if step.unsigned_abs() <= row_stride {
                if let Some(range) = span.hull(side) {
                    add(range.start, range.end - range.start)?;
                }
            } else {
                (0..span.count).try_for_each(|k| add(side.of(span.piece(k)), span.len))?;
            }
        }
    }
    let touched = touched.joined();
    let count: u64 = touched.iter().map(|rows| rows.end - rows.start).sum();
    let rows = touched.into_iter().flatten();
    fallible::collect_growing(ROWS, usize::try_from(count).unwrap_or(usize::MAX), rows)
}

/// Positions of `len` bytes in one tensor: one at `first + unit·number`, for a number of each pair. All of them lie
/// inside the tensor.
struct Positions<'a> {
    pairs: &'a [(u32, u32)],
    first: u64,
    unit: u64,
    len: u64,
}

/// Returns the bytes from the first to the last byte of a template, at each of its positions.
fn positions(template: &Template, side: Side) -> Option<Positions<'_>> {
    let (hull, unit) = (side.of(template.hulls()?), side.of((template.src_unit, template.dst_unit)));
    Some(Positions { pairs: &template.pairs, first: hull.start, unit, len: hull.end - hull.start })
}

/// Returns the rows of `positions` by marking one bit for each row, which takes a fraction of the time and
/// memory of sorting. `None` if the bitmap has more words than there are positions, or if a position may touch
/// more than two rows.
fn rows_by_bitmap(positions: &Positions<'_>, side: Side, row_stride: u64) -> Result<Option<Vec<u64>>> {
    let Positions { pairs, first, unit, len } = *positions;
    let numbers = || pairs.iter().map(|&pair| u64::from(side.of(pair)));
    let end = numbers().fold(0, u64::max) * unit + first + len;
    let last = (end - 1) / row_stride;
    if len > row_stride || BitSet::words(last) > pairs.len() {
        return Ok(None);
    }
    let mut rows = BitSet::new(ROWS, last)?;
    let mut set = |row: u64| {
        rows.add(row);
    };
    if unit == row_stride && first % row_stride + len <= row_stride {
        numbers().for_each(|number| set(first / row_stride + number));
    } else {
        for start in numbers().map(|number| first + number * unit) {
            set(start / row_stride);
            set((start + (len - 1)) / row_stride);
        }
    }
    rows.into_list(ROWS).map(Some)
}
