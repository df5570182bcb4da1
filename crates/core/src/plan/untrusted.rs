//! Checks plans that come from a peer.
//!
//! The checks of positions are in closed form, so a larger count in a span does not make them slower.
//! `protocol` decodes the bytes of a message.

use super::conflicts::check_templates;
use super::copy_plan::CopyPlan;
use super::side::Side;
use super::span_limits::{Tally, refused};
use super::spans::Span;
use super::template::{Template, Templates};
use super::tensor_steps::TensorSteps;
use crate::error::{Error, Result, ensure};
use crate::model::RowSizes;

impl CopyPlan {
    /// Builds the plan of a peer, for the first `num_tensors` tensors of `src` and `dst`.
    ///
    /// Returns `Err(InvalidArgument)` for a plan that no cache could satisfy, for example if two pieces write the same
    /// byte. [`check_bounds`](Self::check_bounds) checks whether it fits a cache.
    pub fn from_templates(
        num_tensors: u32,
        src: TensorSteps,
        dst: TensorSteps,
        templates: Templates,
    ) -> Result<CopyPlan> {
        check_tensors(num_tensors, src, dst)?;
        let mut tally = Tally::default();
        templates.iter().try_for_each(|template| tally.add_template(template))?;
        check_total(tally.bytes(), num_tensors)?;
        // A pair takes 8 bytes here and at least 2 in its message, so a quarter is counted.
        let taken = templates.iter().map(|template| size_of_val(&template.pairs[..]) / 4).sum();
        check_templates(&templates, taken)?;
        CopyPlan::new(num_tensors, (src, dst), templates)
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
        // No byte is written twice, so a plan cannot write more bytes than the tensor has.
        if side == Side::Destination && self.tensor_bytes() > tensor_bytes {
            return Err(outside(side, tensor_bytes).with("plan_bytes", self.tensor_bytes()));
        }
        self.templates().iter().try_for_each(|template| check_inside(template, side, tensor_bytes))
    }

    /// Checks that every piece of one side lies inside one row if there are gaps between the rows of the cache. The plan must
    /// have passed [`check_bounds`](Self::check_bounds). Returns `Err(InvalidArgument)` if a piece touches a gap.
    pub fn check_rows(&self, side: Side, rows: RowSizes) -> Result<()> {
        if rows.has_gaps() {
            self.templates().iter().try_for_each(|template| check_gaps(template, side, rows))?;
        }
        Ok(())
    }
}

/// Checks that every piece of `template` lies inside a tensor.
fn check_inside(template: &Template, side: Side, tensor_bytes: u64) -> Result<()> {
    let inside = template.end_offsets().is_some_and(|ends| side.of(ends) <= tensor_bytes);
    ensure(inside, || outside(side, tensor_bytes).with("places", template.pairs.len()))
}

fn outside(side: Side, tensor_bytes: u64) -> Error {
    Error::invalid("the plan exceeds the bounds of its tensors")
        .with("which", side.verb())
        .with("tensor_bytes", tensor_bytes)
}

/// Checks that every piece of `template` lies inside one row.
fn check_gaps(template: &Template, side: Side, rows: RowSizes) -> Result<()> {
    let touches = |span: &Span| touches_gap(span, side, rows);
    let outside = if side.of((template.src_unit, template.dst_unit)).is_multiple_of(rows.stride()) {
        // Every position is as far into a row as position 0.
        template.spans.iter().copied().find(touches)
    } else {
        template.placed_spans().find(touches)
    };
    let Some(span) = outside else { return Ok(()) };
    Err(Error::invalid("the plan touches bytes between two rows of its tensors")
        .with("which", side.verb())
        .with("row_bytes", rows.bytes())
        .with("row_stride", rows.stride())
        .with("span", format_args!("{span:?}")))
}

/// Returns whether a piece of `span` is not inside one row. A span whose pieces are not a multiple of the row stride
/// apart is visited piece by piece; a plan has at most `MAX_PIECES`.
fn touches_gap(span: &Span, side: Side, rows: RowSizes) -> bool {
    let (_, step) = span.start(side);
    let count = if step.unsigned_abs().is_multiple_of(rows.stride()) { 1 } else { span.count };
    (0..count).any(|k| !rows.hold(side.of(span.piece(k)), span.len))
}

fn check_tensors(count: u32, src: TensorSteps, dst: TensorSteps) -> Result<()> {
    let sound = |steps: TensorSteps| count > 0 && steps.step > 0 && steps.end(count).is_some();
    ensure(sound(src) && sound(dst), || {
        let steps = |TensorSteps { first, step }: TensorSteps| format!("tensor {first} with step {step}");
        refused(&format!("{count} tensors, read from {} and written from {}", steps(src), steps(dst)))
    })
}

fn check_total(bytes: u64, tensors: u32) -> Result<()> {
    let total = bytes.checked_mul(u64::from(tensors));
    ensure(total.is_some_and(|total| i64::try_from(total).is_ok()), || {
        refused(&format!("{bytes} bytes in each of {tensors} tensors, 2^63 or more in all"))
    })
}
