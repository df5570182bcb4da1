//! Checks that a plan touches no byte between two rows of a cache. Such gaps are not part of the cache.

use super::copy_plan::CopyPlan;
use super::spans::Span;
use super::untrusted::PlanAccess;
use super::waves::Wave;
use crate::error::{Error, Result};
use crate::model::RowSizes;

impl CopyPlan {
    /// Checks that every piece lies inside one row if there are gaps between the rows. `src` and `dst` are the rows of the
    /// tensors that are read and written; `None` for a cache that is checked elsewhere. The plan must have passed
    /// [`check_bounds`](Self::check_bounds). Returns `Err(InvalidArgument)` if a piece touches a gap.
    pub fn check_rows(&self, src: Option<RowSizes>, dst: Option<RowSizes>) -> Result<()> {
        for (access, rows) in [(PlanAccess::Read, src), (PlanAccess::Written, dst)] {
            let Some(rows) = rows.filter(|rows| rows.has_gaps()) else { continue };
            self.waves().iter().try_for_each(|wave| access.check_rows(wave, rows))?;
        }
        Ok(())
    }
}

impl PlanAccess {
    fn check_rows(self, wave: &Wave, rows: RowSizes) -> Result<()> {
        let template = wave.template().filter(|template| {
            // Then every place is as far into a row as place 0.
            self.of((template.src_unit, template.dst_unit)).is_multiple_of(rows.stride())
        });
        let outside = match template {
            Some(template) => template.spans.iter().copied().find(|span| self.touches_gap(span, rows)),
            None => wave.spans().find(|span| self.touches_gap(span, rows)),
        };
        let Some(span) = outside else { return Ok(()) };
        Err(Error::invalid("the plan touches bytes between two rows of its tensors")
            .with("which", self.name())
            .with("row_bytes", rows.bytes())
            .with("row_stride", rows.stride())
            .with("span", format_args!("{span:?}")))
    }

    /// Returns whether a piece of `span` is not inside one row. A span whose pieces are not a multiple of the row stride
    /// apart is visited piece by piece; a plan has at most `MOST_PIECES`, or `MOST_TEMPLATE_PIECES` if it has templates.
    fn touches_gap(self, span: &Span, rows: RowSizes) -> bool {
        let (_, step) = self.start(span);
        let count = if step.unsigned_abs().is_multiple_of(rows.stride()) { 1 } else { span.count };
        (0..count).any(|k| !rows.hold(self.of(span.piece(k)), span.len))
    }
}
