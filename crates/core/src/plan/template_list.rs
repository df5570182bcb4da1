//! Limits on the templates of a plan that a message carries.

use super::conflicts::check_size;
use super::copy_plan::CopyPlan;
use super::span_limits::Tally;
use crate::error::{Error, Result, ensure};

/// Maximum number of templates in a message. A plan has one for each distinct length of a run of tokens.
pub const MAX_TEMPLATES: usize = 256;
/// Maximum number of spans in a message, in all templates together: 3 MiB in memory.
pub const MAX_TEMPLATE_SPANS: usize = 1 << 16;

impl CopyPlan {
    /// Returns `Err(InvalidArgument)` if a peer would refuse the templates.
    pub fn check_sendable(&self) -> Result<()> {
        let templates = self.templates();
        check_counts(templates.len(), templates.iter().map(|template| template.spans.len()).sum())?;
        let mut tally = Tally::default();
        templates.iter().try_for_each(|template| tally.add_template(template))?;
        check_size(templates)
    }
}

/// Returns `Err(InvalidArgument)` if a message cannot carry as many templates, or as many spans in them.
pub fn check_counts(templates: usize, spans: usize) -> Result<()> {
    for (what, count, most) in
        [("templates", templates, MAX_TEMPLATES), ("spans of templates", spans, MAX_TEMPLATE_SPANS)]
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
