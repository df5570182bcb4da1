//! Plans as lists of templates: for messages, and for requests for checksums.

use super::conflicts::check_size;
use super::copy_plan::CopyPlan;
use super::segment::Segment;
use super::side::Side;
use super::span_limits::Tally;
use super::spans::PLAN;
use super::template::Template;
use crate::error::{Error, Result, ensure};
use crate::fallible;

/// Maximum number of templates in a message. A plan has one for each distinct length of a run of tokens.
pub const MOST_TEMPLATES: usize = 256;
/// Maximum number of spans in a message, in all templates together: 3 MiB in memory.
pub const MOST_TEMPLATE_SPANS: usize = 1 << 16;

impl CopyPlan {
    /// Returns the template of each segment.
    pub fn templates(&self) -> impl ExactSizeIterator<Item = &Template> {
        self.segments().iter().map(Segment::template)
    }

    /// Returns the number of pairs of all templates.
    pub fn num_pairs(&self) -> usize {
        self.templates().map(|template| template.pairs.len()).sum()
    }

    /// Returns `Err(InvalidArgument)` if a peer would refuse the templates.
    pub fn check_sendable(&self) -> Result<()> {
        check_counts(self.segments().len(), self.templates().map(|template| template.spans.len()).sum())?;
        let mut tally = Tally::default();
        self.templates().try_for_each(|template| tally.add_template(template))?;
        check_size(self.segments())
    }

    /// Returns a plan of some pairs of this one, `templates`, in the same tensors.
    pub(super) fn with_templates(&self, templates: Vec<Template>) -> Result<CopyPlan> {
        let segments = fallible::try_collect(PLAN, templates.into_iter().map(Segment::of_template))?;
        let plan = CopyPlan::new(self.num_tensors(), segments);
        Ok(plan.in_tensor_steps(
            self.tensors(Side::Source),
            self.tensors(Side::Destination),
            self.num_tensors(),
        ))
    }
}

/// Returns `Err(InvalidArgument)` if a message cannot carry as many templates, or as many spans in them.
pub fn check_counts(templates: usize, spans: usize) -> Result<()> {
    for (what, count, most) in
        [("templates", templates, MOST_TEMPLATES), ("spans of templates", spans, MOST_TEMPLATE_SPANS)]
    {
        ensure(count <= most, || {
            let text = format!(
                "the plan has more than {most} {what}, the limit of a message: move fewer blocks in one call"
            );
            Error::invalid(text).with("count", count)
        })?;
    }
    Ok(())
}
