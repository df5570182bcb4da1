//! Plans the moves of a checked request. Neighbouring pieces are joined if enough of them follow each other.

use smallvec::{SmallVec, smallvec};

use super::copy_plan::{CopyPlan, Plans};
use super::joining::{joined, scattered};
use super::order::{self, CacheCount};
use super::request::{Moves, Pieces};
use super::sorting;
use super::spans::{PLAN, Piece, Span};
use super::template::Template;
use super::template_list::MAX_TEMPLATE_SPANS;
use super::tensor_steps::TensorSteps;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;

impl CopyPlan {
    /// Plans moves between two caches, with the same result as moving piece after piece in the order given: bytes that a
    /// later piece writes again are left out. Takes the pieces out of `moves`. `Err(InvalidArgument)` if a row has a number of
    /// 2^32 or above. A message can carry the spans of the plan.
    pub fn moves(moves: &mut Moves) -> Result<CopyPlan> {
        between_caches(moves, MAX_TEMPLATE_SPANS)
    }

    /// Plans moves within one cache or between two, with the same result as moving piece after piece in the order given. The
    /// plans must run one after the other. Within one cache there are several if a piece writes bytes that another piece reads or
    /// writes. A piece that is copied onto itself is left out. No plan is empty. A message may be unable to carry them. Otherwise
    /// like [`moves`](Self::moves).
    pub fn moves_in_order(moves: &mut Moves, caches: CacheCount) -> Result<Plans> {
        let one = |plan: CopyPlan| if plan.is_empty() { smallvec![] } else { smallvec![plan] };
        if caches == CacheCount::Two || !may_overlap(&moves.pieces) {
            return between_caches(moves, usize::MAX).map(one);
        }
        let (mut template, None) = taken(moves)? else {
            return Err(Error::new(ErrorKind::System, "blocks within one cache are moved whole"));
        };
        template.pairs.retain(|(src, dst)| src != dst);
        let alone = |template| plan(moves, smallvec![repeated(template, usize::MAX)?]);
        if !order::order_matters(&template.pairs, CacheCount::One)? {
            return alone(template).map(one);
        }
        let groups = order::groups(std::mem::take(&mut template.pairs))?.into_iter();
        let planned = groups.map(|pairs| alone(template.at_pairs(pairs)?));
        fallible::try_collect(PLAN, planned).map(Plans::from_vec)
    }
}

/// Plans moves between two caches, as a plan of at most `most` spans if neighbours are joined.
fn between_caches(moves: &mut Moves, most: usize) -> Result<CopyPlan> {
    let (mut template, short) = taken(moves)?;
    if template.pairs.len() > 1 {
        order::keep_last(&mut template.pairs)?;
    }
    let Some(short) = short else { return plan(moves, smallvec![repeated(template, most)?]) };
    let last = written_last(short, &mut template)?;
    let left = most - last.len();
    plan(moves, smallvec![repeated(template, left)?, Template::of_spans(last)])
}

/// Takes the pieces out of `moves`. They are not copied, because allocating memory for a long list costs more than planning it.
fn taken(moves: &mut Moves) -> Result<(Template, Option<Piece>)> {
    moves.pieces.check_numbers()?;
    let Pieces { template, short, .. } = std::mem::take(&mut moves.pieces);
    Ok((template, short))
}

fn plan(moves: &Moves, templates: SmallVec<[Template; 1]>) -> Result<CopyPlan> {
    let [src, dst] = [moves.src_tensor, moves.dst_tensor].map(TensorSteps::consecutive);
    CopyPlan::new(moves.num_tensors, (src, dst), templates.into())
}

/// Returns whether a byte that one piece reads may be written by another one, if both are in the same cache. Parts of rows
/// are either equal on both sides or do not overlap (`validate::sub_rows`).
fn may_overlap(pieces: &Pieces) -> bool {
    pieces.template.spans.iter().any(|span| span.src == span.dst)
}

/// Returns the template that copies the one piece of `template` at each of its pairs. Pairs that join their neighbours become
/// spans, if these are at most `most`.
pub(super) fn repeated(mut template: Template, most: usize) -> Result<Template> {
    if template.pairs.len() <= 1 {
        return Ok(template);
    }
    sorting::by_source(&mut template.pairs)?;
    let spans = if scattered(&template.pairs) { None } else { joined(template.first_pieces(), most)? };
    Ok(spans.map_or(template, Template::of_spans))
}

/// Returns the spans that copy the `short` last piece, and what it leaves of the piece of `template` that writes the same row.
/// That pair is removed.
fn written_last(short: Piece, template: &mut Template) -> Result<Vec<Span>> {
    let mut spans = fallible::with_capacity(PLAN, 2)?;
    spans.push(Span::single(short.src, short.dst, short.len));
    let covered = template.first_pieces().position(|piece| piece.dst == short.dst);
    if let Some(at) = covered {
        let pair = template.pairs.swap_remove(at);
        let Piece { src, dst, len } = template.first_piece_at(pair);
        spans.push(Span::single(src + short.len, dst + short.len, len - short.len));
    }
    Ok(spans)
}
