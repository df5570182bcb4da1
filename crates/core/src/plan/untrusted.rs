//! Checks plans that come from a peer.
//!
//! The checks of positions are in closed form, so a larger count in a span does not make them slower.
//! `protocol` decodes the bytes of a message.

use std::sync::Arc;

use super::blocks::Blocks;
use super::conflicts::{check_blocks, check_spans, check_template};
use super::copy_plan::CopyPlan;
use super::packed_spans::{Packed, SpanList};
use super::side::Side;
use super::span_limits::{MOST_PIECES, Tally, check_pieces, refused};
use super::spans::{PLAN, Span};
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

    /// Checks that every piece of one side lies inside the tensors of a cache: their number, and the bytes of each. Returns
    /// `Err(InvalidArgument)` if a piece lies outside.
    pub fn check_bounds(&self, side: Side, (tensors, tensor_bytes): (u32, u64)) -> Result<()> {
        let steps = self.tensors(side);
        if steps.end(self.num_tensors()).is_none_or(|end| end > tensors) {
            let (count, first) = (self.num_tensors(), steps.first);
            let text = format!("{count} tensors from tensor {first} are not in a cache");
            return Err(Error::invalid(text).with("which", side.verb()).with("num_tensors", tensors));
        }
        for wave in self.waves() {
            // No byte is written twice within a wave, so a wave cannot write more bytes than the tensor has.
            if side == Side::Destination && wave.tensor_bytes() > tensor_bytes {
                return Err(outside(side, tensor_bytes).with("wave_bytes", wave.tensor_bytes()));
            }
            check_inside(wave, side, tensor_bytes)?;
        }
        Ok(())
    }

    /// Checks that every piece of one side lies inside one row if there are gaps between the rows of the cache. The plan must
    /// have passed [`check_bounds`](Self::check_bounds). Returns `Err(InvalidArgument)` if a piece touches a gap.
    pub fn check_rows(&self, side: Side, rows: RowSizes) -> Result<()> {
        if rows.has_gaps() {
            self.waves().iter().try_for_each(|wave| check_gaps(wave, side, rows))?;
        }
        Ok(())
    }
}

/// Checks that every piece of `wave` lies inside a tensor.
fn check_inside(wave: &Wave, side: Side, tensor_bytes: u64) -> Result<()> {
    let inside = |ends: Option<(u64, u64)>| ends.is_some_and(|ends| side.of(ends) <= tensor_bytes);
    if let Some(blocks) = wave.blocks() {
        let text = || outside(side, tensor_bytes).with("block_bytes", blocks.len);
        return ensure(inside(blocks.end_offsets()), text);
    }
    if let Some(template) = wave.template() {
        let text = || outside(side, tensor_bytes).with("places", template.pairs.len());
        return ensure(inside(template.end_offsets()), text);
    }
    let beyond = |span: &Span| span.hull(side).is_none_or(|range| range.end > tensor_bytes);
    match wave.spans().find(beyond) {
        Some(span) => Err(outside(side, tensor_bytes).with("span", format_args!("{span:?}"))),
        None => Ok(()),
    }
}

fn outside(side: Side, tensor_bytes: u64) -> Error {
    Error::invalid("the plan exceeds the bounds of its tensors")
        .with("which", side.verb())
        .with("tensor_bytes", tensor_bytes)
}

/// Checks that every piece of `wave` lies inside one row.
fn check_gaps(wave: &Wave, side: Side, rows: RowSizes) -> Result<()> {
    let template = wave.template().filter(|template| {
        // Then every place is as far into a row as place 0.
        side.of((template.src_unit, template.dst_unit)).is_multiple_of(rows.stride())
    });
    let outside = match template {
        Some(template) => template.spans.iter().copied().find(|span| touches_gap(span, side, rows)),
        None => wave.spans().find(|span| touches_gap(span, side, rows)),
    };
    let Some(span) = outside else { return Ok(()) };
    Err(Error::invalid("the plan touches bytes between two rows of its tensors")
        .with("which", side.verb())
        .with("row_bytes", rows.bytes())
        .with("row_stride", rows.stride())
        .with("span", format_args!("{span:?}")))
}

/// Returns whether a piece of `span` is not inside one row. A span whose pieces are not a multiple of the row stride
/// apart is visited piece by piece; a plan has at most `MOST_PIECES`, or `MOST_TEMPLATE_PIECES` if it has templates.
fn touches_gap(span: &Span, side: Side, rows: RowSizes) -> bool {
    let (_, step) = span.start(side);
    let count = if step.unsigned_abs().is_multiple_of(rows.stride()) { 1 } else { span.count };
    (0..count).any(|k| !rows.hold(side.of(span.piece(k)), span.len))
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
