//! Builds the plans of a move between two KV layouts.

use smallvec::SmallVec;

use super::super::copy_plan::CopyPlan;
use super::super::moves::repeated;
use super::super::spans::{PLAN, Span, common_divisor};
use super::super::template::Template;
use super::super::template_list::MAX_TEMPLATE_SPANS;
use super::super::tensor_steps::TensorSteps;
use super::axes::{self, Axis};
use super::part::{KvPart, check_same_model};
use super::tokens::{KvSequence, TokenRun, token_runs};
use crate::error::Result;
use crate::fallible;
use crate::model::{KvGeometry, KvPlanes};

/// Up to this many equal runs of tokens become plain spans, because a template would save nothing.
const MAX_PLAIN_RUNS: usize = 2;

impl CopyPlan {
    /// Plans the move of `part` of some tokens of `src` to `dst`, two caches that may have different KV layouts.
    ///
    /// Returns one plan, or one for the keys and one for the values if only one side has them in tensors of their own. They write
    /// different bytes and may run in any order. There are none if there are no tokens to move.
    ///
    /// Returns `Err(InvalidArgument)` if the layouts are of different models or element types, if one side does not
    /// hold all of `part`, if a token range exceeds its blocks or both have different lengths, or if a block is not
    /// a row of its cache or occurs twice in the destination.
    pub fn between_layouts(
        src: &KvSequence<'_>,
        dst: &KvSequence<'_>,
        part: &KvPart,
    ) -> Result<Vec<CopyPlan>> {
        check_same_model(src.geometry, dst.geometry)?;
        part.check_inside(src.geometry.layout(), dst.geometry.layout())?;
        let runs = token_runs(src, dst)?;
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        let pair = LayoutPair { src: src.geometry, dst: dst.geometry, part };
        let plan = |planes: Planes| {
            let templates = pair.templates(&runs, &planes)?;
            let tensors = (planes.src.tensors, planes.dst.tensors);
            CopyPlan::new(planes.num_tensors, tensors, SmallVec::from_vec(templates).into())
        };
        fallible::try_collect(PLAN, pair.planes().into_iter().map(plan))
    }
}

/// Where one side has the planes that a plan copies.
struct PlanesOfSide {
    tensors: TensorSteps,
    /// Bytes from the start of a row to the first plane.
    offset: u64,
}

/// The planes that one plan copies.
struct Planes {
    src: PlanesOfSide,
    dst: PlanesOfSide,
    num_tensors: u32,
    /// Number of planes in each row that are copied.
    per_row: u64,
}

/// How the bytes of a run of tokens are arranged on both sides.
struct LayoutPair<'a> {
    src: &'a KvGeometry,
    dst: &'a KvGeometry,
    part: &'a KvPart,
}

impl LayoutPair<'_> {
    /// Returns the planes of each plan.
    fn planes(&self) -> Vec<Planes> {
        let (src, dst) = (self.src.layout(), self.dst.layout());
        let layers = self.part.layers.end - self.part.layers.start;
        if src.kv == dst.kv {
            let all = |side: &KvGeometry| {
                let layout = side.layout();
                let first = (self.part.layers.start - layout.layers.start) * layout.tensors_per_layer();
                PlanesOfSide { tensors: TensorSteps::consecutive(first), offset: 0 }
            };
            return vec![Planes {
                src: all(self.src),
                dst: all(self.dst),
                num_tensors: layers * src.tensors_per_layer(),
                per_row: src.planes_per_row().into(),
            }];
        }
        let one = |plane: u32| Planes {
            src: self.plane(self.src, plane),
            dst: self.plane(self.dst, plane),
            num_tensors: layers,
            per_row: 1,
        };
        vec![one(0), one(1)]
    }

    /// Returns where one side has the keys (`plane` 0) or the values (1) of the first layer.
    fn plane(&self, side: &KvGeometry, plane: u32) -> PlanesOfSide {
        let layer = self.part.layers.start - side.layout().layers.start;
        if side.layout().kv == KvPlanes::Separate {
            PlanesOfSide { tensors: TensorSteps { first: 2 * layer + plane, step: 2 }, offset: 0 }
        } else {
            let offset = u64::from(plane) * side.plane_bytes();
            PlanesOfSide { tensors: TensorSteps::consecutive(layer), offset }
        }
    }

    /// Returns the spans of a run of tokens whose first token is at position 0.
    fn spans(&self, tokens: u64, planes: &Planes) -> Result<Vec<Span>> {
        let along = |count: u64, step: fn(&KvGeometry) -> u64| Axis {
            count,
            src_step: step(self.src),
            dst_step: step(self.dst),
        };
        let axes = [
            along(planes.per_row, KvGeometry::plane_bytes),
            along(tokens, KvGeometry::token_step),
            along(self.part.heads.len() as u64, KvGeometry::head_step),
        ];
        let first = |side: &KvGeometry, planes: &PlanesOfSide| {
            let head = self.part.heads.start - side.layout().heads.start;
            planes.offset + u64::from(head) * side.head_step()
        };
        let first = (first(self.src, &planes.src), first(self.dst, &planes.dst));
        axes::spans(self.src.head_bytes(), &axes, first)
    }

    /// Returns the templates that copy all runs of tokens.
    fn templates(&self, runs: &[TokenRun], planes: &Planes) -> Result<Vec<Template>> {
        let (mut templates, mut joinable, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        for group in runs.chunk_by(|a, b| a.tokens == b.tokens) {
            let spans = self.spans(group[0].tokens, planes)?;
            let units = Units::of(group);
            if group.len() <= MAX_PLAIN_RUNS || !units.fit(group) {
                fallible::grow(PLAN, &mut rest, group.len().saturating_mul(spans.len()))?;
                for run in group {
                    let placed =
                        |span: &Span| Span { src: span.src + run.src, dst: span.dst + run.dst, ..*span };
                    rest.extend(spans.iter().map(placed));
                }
            } else {
                let (template, joins) = template_of_group(group, spans, units)?;
                fallible::push(PLAN, if joins { &mut joinable } else { &mut templates }, template)?;
            }
        }
        // Joining may use what all others leave of the spans of a message. A template that is not joined has one.
        let others = templates.iter().map(|template: &Template| template.spans.len()).sum::<usize>();
        let mut left = MAX_TEMPLATE_SPANS.saturating_sub(others + rest.len() + joinable.len());
        for template in joinable {
            let template = repeated(template, left)?;
            left = left.saturating_sub(template.spans.len());
            fallible::push(PLAN, &mut templates, template)?;
        }
        if !rest.is_empty() {
            fallible::push(PLAN, &mut templates, Template::of_spans(rest))?;
        }
        Ok(templates)
    }
}

/// Numbers of which the positions of a group of runs are multiples.
#[derive(Clone, Copy)]
struct Units {
    src: u64,
    dst: u64,
}

impl Units {
    fn of(runs: &[TokenRun]) -> Units {
        let divisor = |of: fn(&TokenRun) -> u64| {
            runs.iter().fold(0, |divisor, run| common_divisor(of(run), divisor)).max(1)
        };
        Units { src: divisor(|run| run.src), dst: divisor(|run| run.dst) }
    }

    /// Returns the numbers of the positions of a run. They must fit 32 bits.
    fn pair(self, run: &TokenRun) -> Option<(u32, u32)> {
        Some((u32::try_from(run.src / self.src).ok()?, u32::try_from(run.dst / self.dst).ok()?))
    }

    /// Returns whether the numbers of all positions fit 32 bits.
    fn fit(self, runs: &[TokenRun]) -> bool {
        runs.iter().all(|run| self.pair(run).is_some())
    }

    /// Returns whether both units are multiples of `len`.
    fn multiple_of(self, len: u64) -> bool {
        self.src.is_multiple_of(len) && self.dst.is_multiple_of(len)
    }
}

/// Returns the template of runs of equal length, and whether neighbours can be joined: if each run is one piece and all positions
/// are multiples of its length.
fn template_of_group(runs: &[TokenRun], spans: Vec<Span>, units: Units) -> Result<(Template, bool)> {
    let of_len = match spans[..] {
        [Span { len, count: 1, .. }] if units.multiple_of(len) => Some(Units { src: len, dst: len }),
        _ => None,
    };
    let joinable = of_len.filter(|units| units.fit(runs));
    let units = joinable.unwrap_or(units);
    let template = Template::new((units.src, units.dst), pairs(runs, units)?, spans);
    Ok((template, joinable.is_some()))
}

/// Returns the numbers of the positions of `runs`, which must fit 32 bits.
fn pairs(runs: &[TokenRun], units: Units) -> Result<Vec<(u32, u32)>> {
    fallible::collect_growing(PLAN, runs.len(), runs.iter().filter_map(|run| units.pair(run)))
}
