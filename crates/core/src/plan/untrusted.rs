//! Checks plans that come from a peer, and lists the rows that a plan touches.
//!
//! The checks of positions are in closed form, so a larger count in a span does not make them slower.
//! `protocol` decodes the bytes of a message.

use std::sync::Arc;

use super::blocks::Blocks;
use super::conflicts::{check_blocks, check_spans, check_template};
use super::copy_plan::CopyPlan;
use super::packed_spans::{Packed, SpanList};
use super::range_list::RangeList;
use super::span_limits::{MOST_PIECES, Tally, check_pieces, refused};
use super::spans::{PLAN, Span, hull};
use super::template::Template;
use super::tensor_steps::TensorSteps;
use super::waves::Wave;
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::fallible;
use crate::model::RowSizes;

/// Maximum number of waves of a peer's plan. Blocks with one destination need one wave each.
pub const MOST_WAVES: usize = 1 << 16;
/// A plan with up to this many spans is unpacked.
const FEW: usize = 4096;
/// Name of the lists of rows in out-of-memory errors.
const ROWS: &str = "the rows of a plan";

impl CopyPlan {
    /// Builds the plan of a peer from unpacked spans.
    ///
    /// Returns `Err(InvalidArgument)` for a plan that no cache could satisfy, for example if two pieces of
    /// one wave write the same byte. [`check_bounds`](Self::check_bounds) checks whether it fits a cache.
    pub fn from_parts(
        num_tensors: u32,
        src_tensor: u32,
        dst_tensor: u32,
        waves: Vec<Vec<Span>>,
    ) -> Result<CopyPlan> {
        consecutive_tensors(num_tensors, src_tensor, dst_tensor)?;
        check_wave_count(waves.len())?;
        let mut tally = Tally::default();
        waves.iter().flatten().try_for_each(|span| tally.add(span))?;
        total(tally.bytes(), num_tensors)?;
        let taken = waves.iter().map(|wave| size_of_val(&wave[..])).sum();
        waves.iter().try_for_each(|wave| check_spans(&wave.iter().copied(), taken))?;
        let waves = fallible::try_collect(PLAN, waves.into_iter().map(Wave::new))?;
        Ok(CopyPlan::new(num_tensors, waves).in_tensors(src_tensor, dst_tensor, num_tensors))
    }

    /// Builds the plan of a peer from packed spans; `counts` is the number of spans in each wave.
    ///
    /// Returns `Err` as [`from_parts`](Self::from_parts) does, and `Err(NotLinked)` if a wave has no spans or
    /// the counts do not add up to the number of spans.
    pub fn from_list(
        num_tensors: u32,
        src_tensor: u32,
        dst_tensor: u32,
        counts: &[u32],
        spans: SpanList,
    ) -> Result<CopyPlan> {
        check_wave_count(counts.len())?;
        let sum = counts.iter().fold(0u64, |sum, &count| sum + u64::from(count));
        if counts.contains(&0) || sum != spans.len() as u64 {
            let text = "the wave and span counts of the peer's plan do not match";
            return Err(Error::new(ErrorKind::NotLinked, text));
        }
        if spans.len() <= FEW {
            let mut rest = spans.iter();
            let wave =
                |&count| fallible::collect_growing(PLAN, count as usize, rest.by_ref().take(count as usize));
            let waves = fallible::try_collect(PLAN, counts.iter().map(wave))?;
            return Self::from_parts(num_tensors, src_tensor, dst_tensor, waves);
        }
        consecutive_tensors(num_tensors, src_tensor, dst_tensor)?;
        let mut tally = Tally::default();
        spans.iter().try_for_each(|span| tally.add(&span))?;
        total(tally.bytes(), num_tensors)?;
        let (spans, mut at) = (Arc::new(spans), 0);
        let wave = |&count: &u32| {
            let wave = Packed::new(&spans, at, count as usize)?;
            let (wave, bytes, next) = wave.ok_or_else(|| refused("fewer spans than it names"))?;
            at = next;
            check_spans(&wave.iter(), spans.packed_bytes())?;
            Ok(Wave::of_packed(wave, bytes))
        };
        let waves = fallible::try_collect(PLAN, counts.iter().map(wave))?;
        Ok(CopyPlan::new(num_tensors, waves).in_tensors(src_tensor, dst_tensor, num_tensors))
    }

    /// Builds the plan of a peer that is one wave of equal blocks.
    ///
    /// Returns `Err` as [`from_parts`](Self::from_parts) does.
    pub fn from_blocks(
        num_tensors: u32,
        src_tensor: u32,
        dst_tensor: u32,
        blocks: Blocks,
    ) -> Result<CopyPlan> {
        consecutive_tensors(num_tensors, src_tensor, dst_tensor)?;
        let count = blocks.pairs.len() as u64;
        check_pieces(count, MOST_PIECES)?;
        let bytes = blocks.end_offsets().and_then(|_| blocks.len.checked_mul(count));
        let bytes = bytes.ok_or_else(|| {
            let (src, dst, len) = (blocks.src, blocks.dst, blocks.len);
            refused(&format!("{count} blocks of {len} bytes, read from {src} and written from {dst} on"))
        })?;
        total(bytes, num_tensors)?;
        check_blocks(&blocks)?;
        let waves = vec![Wave::of_blocks(blocks)];
        Ok(CopyPlan::new(num_tensors, waves).in_tensors(src_tensor, dst_tensor, num_tensors))
    }

    /// Builds the plan of a peer whose waves are templates, for the first `num_tensors` tensors of `src` and `dst`. A
    /// template of equal blocks becomes a wave of blocks, which runs faster.
    ///
    /// Returns `Err` as [`from_parts`](Self::from_parts) does.
    pub fn from_templates(
        num_tensors: u32,
        src: TensorSteps,
        dst: TensorSteps,
        waves: Vec<Template>,
    ) -> Result<CopyPlan> {
        tensors(num_tensors, src, dst)?;
        check_wave_count(waves.len())?;
        let mut tally = Tally::default();
        waves.iter().try_for_each(|template| tally.add_template(template))?;
        total(tally.bytes(), num_tensors)?;
        // A pair takes 8 bytes here and at least 2 in its message, so a quarter is counted.
        let taken = waves.iter().map(|template| size_of_val(&template.pairs[..]) / 4).sum();
        waves.iter().try_for_each(|template| check_template(template, taken))?;
        let wave = |template: Template| match template.into_blocks() {
            Ok(blocks) => Ok(Wave::of_blocks(blocks)),
            Err(template) => Wave::of_template(template),
        };
        let waves = fallible::try_collect(PLAN, waves.into_iter().map(wave))?;
        Ok(CopyPlan::new(num_tensors, waves).in_tensor_steps(src, dst, num_tensors))
    }

    /// Checks that every piece lies inside the tensors that are read and written. `src` and `dst` are the
    /// number of tensors and the bytes of each; `None` for a cache that is checked elsewhere. Returns
    /// `Err(InvalidArgument)` if a piece lies outside.
    pub fn check_bounds(&self, src: Option<(u32, u64)>, dst: Option<(u32, u64)>) -> Result<()> {
        for (access, of, steps) in
            [(PlanAccess::Read, src, self.src_tensors()), (PlanAccess::Written, dst, self.dst_tensors())]
        {
            let Some((tensors, tensor_bytes)) = of else { continue };
            if steps.end(self.num_tensors()).is_none_or(|end| end > tensors) {
                let (count, first) = (self.num_tensors(), steps.first);
                let text = format!("{count} tensors from tensor {first} are not in a cache");
                return Err(Error::invalid(text).with("which", access.name()).with("num_tensors", tensors));
            }
            for wave in self.waves() {
                // No byte is written twice within a wave, so a wave cannot write more bytes than the tensor
                // has.
                if access == PlanAccess::Written && wave.tensor_bytes() > tensor_bytes {
                    return Err(outside(access, tensor_bytes).with("wave_bytes", wave.tensor_bytes()));
                }
                access.check(wave, tensor_bytes)?;
            }
        }
        Ok(())
    }

    /// Returns the rows that are read, in ascending order, each once; `sizes` says where they lie. A peer's plan must
    /// have passed [`check_bounds`](Self::check_bounds) and [`check_rows`](Self::check_rows); then there are at most as
    /// many rows as the cache has.
    pub fn src_rows(&self, sizes: impl Into<RowSizes>) -> Result<Vec<u64>> {
        rows(self.waves(), sizes.into().stride(), PlanAccess::Read)
    }

    /// Returns the rows that are written; otherwise like [`src_rows`](Self::src_rows).
    pub fn dst_rows(&self, sizes: impl Into<RowSizes>) -> Result<Vec<u64>> {
        rows(self.waves(), sizes.into().stride(), PlanAccess::Written)
    }
}

/// Places of `len` bytes in one tensor: one at `first + unit·number`, for a number of each pair. All of them lie
/// inside the tensor.
struct Places<'a> {
    pairs: &'a [(u32, u32)],
    first: u64,
    unit: u64,
    len: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PlanAccess {
    Read,
    Written,
}

impl PlanAccess {
    pub(super) fn name(self) -> &'static str {
        if self == PlanAccess::Read { "read" } else { "written" }
    }

    pub(super) fn of<T>(self, ends: (T, T)) -> T {
        if self == PlanAccess::Read { ends.0 } else { ends.1 }
    }

    /// Checks that every piece of `wave` lies inside a tensor.
    fn check(self, wave: &Wave, tensor_bytes: u64) -> Result<()> {
        let inside = |ends: Option<(u64, u64)>| ends.is_some_and(|ends| self.of(ends) <= tensor_bytes);
        if let Some(blocks) = wave.blocks() {
            let text = || outside(self, tensor_bytes).with("block_bytes", blocks.len);
            return ensure(inside(blocks.end_offsets()), text);
        }
        if let Some(template) = wave.template() {
            let text = || outside(self, tensor_bytes).with("places", template.pairs.len());
            return ensure(inside(template.end_offsets()), text);
        }
        let reach = |span: &Span| if self == PlanAccess::Read { span.reads() } else { span.writes() };
        let beyond = |span: &Span| reach(span).is_none_or(|range| range.end > tensor_bytes);
        match wave.spans().find(beyond) {
            Some(span) => Err(outside(self, tensor_bytes).with("span", format_args!("{span:?}"))),
            None => Ok(()),
        }
    }

    /// Returns the start of the first piece of `span`, and the distance to the next piece.
    pub(super) fn start(self, span: &Span) -> (u64, i64) {
        self.of(((span.src, span.src_step), (span.dst, span.dst_step)))
    }

    /// Returns the rows of `blocks` if they are in ascending order and each block is exactly one row.
    fn rows_if_sorted(self, blocks: &Blocks, row_stride: u64) -> Result<Option<Vec<u64>>> {
        let first = self.of((blocks.src, blocks.dst));
        let numbers = || blocks.pairs.iter().map(|&pair| u64::from(self.of(pair)));
        if blocks.len != row_stride
            || !first.is_multiple_of(row_stride)
            || !numbers().is_sorted_by(|a, b| a < b)
        {
            return Ok(None);
        }
        fallible::collect(ROWS, numbers().map(|number| first / row_stride + number)).map(Some)
    }

    /// Returns the bytes from the first to the last byte of a template, at each of its places.
    fn template_places(self, wave: &Wave) -> Option<Places<'_>> {
        let template = wave.template()?;
        let (hull, unit) = (self.of(template.hulls()?), self.of((template.src_unit, template.dst_unit)));
        Some(Places { pairs: &template.pairs, first: hull.start, unit, len: hull.end - hull.start })
    }

    /// Returns the rows of a wave of blocks or of a template. `None` if a list of ranges takes less memory.
    fn rows_of_places(self, wave: &Wave, row_stride: u64) -> Result<Option<Vec<u64>>> {
        if let Some(blocks) = wave.blocks() {
            let sorted = self.rows_if_sorted(blocks, row_stride)?;
            if sorted.is_some() || blocks.end_offsets().is_none() {
                return Ok(sorted);
            }
            let (first, len) = (self.of((blocks.src, blocks.dst)), blocks.len);
            return self.rows_by_bitmap(&Places { pairs: &blocks.pairs, first, unit: len, len }, row_stride);
        }
        let places = self.template_places(wave);
        places.map_or(Ok(None), |places| self.rows_by_bitmap(&places, row_stride))
    }

    /// Returns the rows of `places` by marking one bit for each row, which takes a fraction of the time and
    /// memory of sorting. `None` if the bitmap has more words than there are places, or if a place may touch
    /// more than two rows.
    fn rows_by_bitmap(self, places: &Places<'_>, row_stride: u64) -> Result<Option<Vec<u64>>> {
        let Places { pairs, first, unit, len } = *places;
        let numbers = || pairs.iter().map(|&pair| u64::from(self.of(pair)));
        let end = numbers().fold(0, u64::max) * unit + first + len;
        let words = usize::try_from(end.div_ceil(row_stride).div_ceil(64)).unwrap_or(usize::MAX);
        if len > row_stride || words > pairs.len() {
            return Ok(None);
        }
        let mut bits = fallible::filled(ROWS, 0u64, words)?;
        let mut set = |row: u64| {
            // No row lies beyond the end of the places, so every row has its word.
            if let Some(word) = usize::try_from(row / 64).ok().and_then(|at| bits.get_mut(at)) {
                *word |= 1 << (row % 64);
            }
        };
        if unit == row_stride && first % row_stride + len <= row_stride {
            numbers().for_each(|number| set(first / row_stride + number));
        } else {
            for start in numbers().map(|number| first + number * unit) {
                set(start / row_stride);
                set((start + (len - 1)) / row_stride);
            }
        }
        let mut rows =
            fallible::with_capacity(ROWS, bits.iter().map(|word| word.count_ones() as usize).sum())?;
        for (at, mut word) in (0u64..).step_by(64).zip(bits) {
            while word != 0 {
                rows.push(at + u64::from(word.trailing_zeros()));
                word &= word - 1;
            }
        }
        Ok(Some(rows))
    }
}

fn outside(access: PlanAccess, tensor_bytes: u64) -> Error {
    Error::invalid("the plan exceeds the bounds of its tensors")
        .with("which", access.name())
        .with("tensor_bytes", tensor_bytes)
}

fn check_wave_count(count: usize) -> Result<()> {
    ensure(count <= MOST_WAVES, || refused(&format!("{count} waves, more than {MOST_WAVES}")))
}

fn tensors(count: u32, src: TensorSteps, dst: TensorSteps) -> Result<()> {
    let sound = |steps: TensorSteps| count > 0 && steps.step > 0 && steps.end(count).is_some();
    ensure(sound(src) && sound(dst), || {
        let steps = |TensorSteps { first, step }: TensorSteps| format!("tensor {first} with step {step}");
        refused(&format!("{count} tensors, read from {} and written from {}", steps(src), steps(dst)))
    })
}

fn consecutive_tensors(count: u32, src: u32, dst: u32) -> Result<()> {
    tensors(count, TensorSteps::consecutive(src), TensorSteps::consecutive(dst))
}

fn total(bytes: u64, tensors: u32) -> Result<()> {
    let total = bytes.checked_mul(u64::from(tensors));
    ensure(total.is_some_and(|total| i64::try_from(total).is_ok()), || {
        refused(&format!("{bytes} bytes in each of {tensors} tensors, 2^63 or more in all"))
    })
}

/// Returns the rows that `access` touches. Row `r` is the bytes from `r·row_stride` on, up to the next row. That includes
/// the gap after it, which no piece touches.
fn rows(waves: &[Wave], row_stride: u64, access: PlanAccess) -> Result<Vec<u64>> {
    if let [wave] = waves
        && let Some(rows) = access.rows_of_places(wave, row_stride)?
    {
        return Ok(rows);
    }
    let mut touched = RangeList::new(ROWS);
    let mut add =
        |start: u64, bytes: u64| touched.add(start / row_stride..(start + (bytes - 1)) / row_stride + 1);
    for wave in waves {
        if let Some(blocks) = wave.blocks() {
            blocks.pieces().try_for_each(|piece| add(access.of((piece.src, piece.dst)), piece.len))?;
            continue;
        }
        if let Some(Places { pairs, first, unit, len }) = access.template_places(wave)
            && len <= row_stride
        {
            // Each place touches the rows of its first and of its last byte, and there is none in between.
            pairs.iter().try_for_each(|&pair| add(first + unit * u64::from(access.of(pair)), len))?;
            continue;
        }
        for span in wave.spans() {
            let (start, step) = access.start(&span);
            // Steps of at most one row skip no row in between. With longer steps every piece is visited, of which
            // there are at most `MOST_PIECES`, or `MOST_TEMPLATE_PIECES` in a plan of templates.
            if step.unsigned_abs() <= row_stride {
                if let Some(range) = hull(start, step, span.count, span.len) {
                    add(range.start, range.end - range.start)?;
                }
            } else {
                (0..span.count).try_for_each(|k| add(access.of(span.piece(k)), span.len))?;
            }
        }
    }
    let touched = touched.joined();
    let count: u64 = touched.iter().map(|rows| rows.end - rows.start).sum();
    let rows = touched.into_iter().flatten();
    fallible::collect_growing(ROWS, usize::try_from(count).unwrap_or(usize::MAX), rows)
}
