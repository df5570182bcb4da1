//! The waves of a plan as templates: for messages, and for the checksums of a plan between layouts.

use std::sync::Arc;

use super::blocks::Blocks;
use super::conflicts::check_template_size;
use super::copy_plan::CopyPlan;
use super::side::Side;
use super::span_limits::{MOST_PIECES, Tally, check_pieces};
use super::spans::{PLAN, Span};
use super::template::Template;
use super::waves::Wave;
use crate::error::{Error, Result, ensure};
use crate::fallible;

/// Maximum number of templates in a message. A plan has one for each distinct length of a run of tokens.
pub const MOST_TEMPLATES: usize = 256;
/// Maximum number of spans in a message, in all templates together: 3 MiB in memory.
pub const MOST_TEMPLATE_SPANS: usize = 1 << 16;

impl CopyPlan {
    /// Returns whether only templates describe the plan: it has a wave that is one, or it skips tensors.
    pub fn needs_templates(&self) -> bool {
        (self.tensors(Side::Source).step, self.tensors(Side::Destination).step) != (1, 1)
            || self.waves().iter().any(|wave| wave.template().is_some())
    }

    /// Returns whether the blocks of the plan are compared by pairs of templates (`compared_templates`), because a block
    /// takes several pieces, in another order on each side. Rows that are merely further apart are compared by ranges
    /// (`final_blocks`), which also knows which of several writes of a row is the last one.
    pub fn is_compared_by_pairs(&self) -> bool {
        let one_piece = |template: &Template| matches!(template.spans[..], [Span { count: 1, .. }]);
        (self.tensors(Side::Source).step, self.tensors(Side::Destination).step) != (1, 1)
            || self.waves().iter().filter_map(Wave::template).any(|template| !one_piece(template))
    }

    /// Returns each wave as a template. A wave of spans is one with the single pair (0, 0).
    pub fn templates(&self) -> Result<Vec<Template>> {
        fallible::try_collect(PLAN, self.waves().iter().map(template_of))
    }

    /// Returns the number of pairs of all templates.
    pub fn num_pairs(&self) -> usize {
        let pairs = |wave: &Wave| match (wave.template(), wave.blocks()) {
            (Some(Template { pairs, .. }), _) | (None, Some(Blocks { pairs, .. })) => pairs.len(),
            (None, None) => 1,
        };
        self.waves().iter().map(pairs).sum()
    }

    /// Returns each wave as a template. `Err(InvalidArgument)` if a peer would refuse them.
    pub fn sendable_templates(&self) -> Result<Vec<Template>> {
        let templates = self.templates()?;
        check_counts(templates.len(), templates.iter().map(|template| template.spans.len()).sum())?;
        let mut tally = Tally::default();
        for template in &templates {
            tally.add_template(template)?;
            check_template_size(template)?;
        }
        Ok(templates)
    }

    /// Returns `Err(InvalidArgument)` if the plan has more pieces than a peer accepts in a list of spans.
    pub fn check_span_pieces(&self) -> Result<()> {
        check_pieces(self.waves().iter().fold(0, |sum, wave| wave.count().saturating_add(sum)), MOST_PIECES)
    }

    /// Returns a plan of some pairs of this one, `templates`, in the same tensors.
    pub fn with_templates(&self, templates: Vec<Template>) -> Result<CopyPlan> {
        let waves = fallible::try_collect(PLAN, templates.into_iter().map(Wave::of_template))?;
        let plan = CopyPlan::new(self.num_tensors(), waves);
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

fn template_of(wave: &Wave) -> Result<Template> {
    if let Some(template) = wave.template() {
        let spans = fallible::copied(PLAN, &template.spans)?;
        return Ok(Template { pairs: template.pairs.clone(), spans, ..*template });
    }
    if let Some(blocks) = wave.blocks() {
        return Ok(Template::of_blocks(blocks));
    }
    let spans = fallible::collect_growing(PLAN, wave.num_spans(), wave.spans())?;
    Ok(Template { src_unit: 0, dst_unit: 0, pairs: Arc::new(vec![(0, 0)]), spans })
}
