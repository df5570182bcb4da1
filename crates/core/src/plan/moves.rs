//! Plans the moves of a checked request. Neighbouring pieces are joined if enough of them follow each other.

use std::sync::Arc;

use super::copy_plan::CopyPlan;
use super::joining::{joined, scattered};
use super::order::{self, CacheCount};
use super::request::{Moves, Pieces};
use super::segment::Segment;
use super::sorting;
use super::spans::{PLAN, Piece};
use super::template::Template;
use crate::error::Result;
use crate::fallible::{self, OneOrMany};

impl CopyPlan {
    /// Plans moves between two caches, with the same result as moving piece after piece in the order given: bytes that a
    /// later piece writes again are left out. Takes the pieces out of `moves`.
    pub fn moves(moves: &mut Moves) -> Result<CopyPlan> {
        // The pieces are taken, not copied: allocating memory for a long list costs more than planning it.
        let segment = match std::mem::take(&mut moves.pieces) {
            Pieces::Repeated(mut template) => {
                order::keep_last(own_pairs(&mut template)?)?;
                repeated(template)?
            }
            Pieces::Listed(mut pieces) => {
                order::keep_last_bytes(&mut pieces)?;
                listed(pieces)?
            }
        };
        Ok(plan(moves, segment))
    }

    /// Plans moves within one cache or between two, with the same result as moving piece after piece in the order given. The
    /// plans must run one after the other. Within one cache there are several if a piece writes bytes that another piece reads or
    /// writes. A piece that is copied onto itself is left out. No plan is empty. Takes the pieces out of `moves`.
    pub fn moves_in_order(moves: &mut Moves, caches: CacheCount) -> Result<OneOrMany<CopyPlan>> {
        if caches == CacheCount::Two || !may_overlap(&moves.pieces) {
            return Self::moves(moves).map(one);
        }
        match std::mem::take(&mut moves.pieces) {
            Pieces::Repeated(mut template) => {
                let pairs = own_pairs(&mut template)?;
                pairs.retain(|(src, dst)| src != dst);
                if !order::order_matters(pairs, CacheCount::One)? {
                    return Ok(one(plan(moves, repeated(template)?)));
                }
                let groups = order::groups(std::mem::take(pairs))?.into_iter();
                let planned = groups.map(|pairs| {
                    let template = template.at_pairs(Arc::new(pairs))?;
                    Ok(plan(moves, repeated(template)?))
                });
                fallible::try_collect(PLAN, planned).map(OneOrMany::Many)
            }
            Pieces::Listed(mut pieces) => {
                pieces.retain(|piece| piece.src != piece.dst);
                if !order::order_matters(&pieces, CacheCount::One)? {
                    return Ok(one(plan(moves, listed(pieces)?)));
                }
                let groups = order::groups(pieces)?.into_iter();
                let planned = groups.map(|pieces| Ok(plan(moves, listed(pieces)?)));
                fallible::try_collect(PLAN, planned).map(OneOrMany::Many)
            }
        }
    }
}

/// Returns the plan, unless it is empty.
fn one(plan: CopyPlan) -> OneOrMany<CopyPlan> {
    if plan.is_empty() { OneOrMany::default() } else { OneOrMany::One(plan) }
}

fn plan(moves: &Moves, segment: Option<Segment>) -> CopyPlan {
    CopyPlan::of(moves.num_tensors, segment.map_or_else(OneOrMany::default, OneOrMany::One)).in_tensors(
        moves.src_tensor,
        moves.dst_tensor,
        moves.num_tensors,
    )
}

/// Returns whether a byte that one piece reads may be written by another one, if both are in the same cache. Parts of rows
/// are either equal on both sides or do not overlap (`validate::sub_rows`).
fn may_overlap(pieces: &Pieces) -> bool {
    match pieces {
        Pieces::Repeated(template) => template.spans.iter().all(|span| span.src == span.dst),
        Pieces::Listed(_) => true,
    }
}

/// Returns the pairs of `template`, which shares them with nobody then.
fn own_pairs(template: &mut Template) -> Result<&mut Vec<(u32, u32)>> {
    if Arc::get_mut(&mut template.pairs).is_none() {
        template.pairs = Arc::new(fallible::copied(PLAN, &template.pairs)?);
    }
    // Copies nothing, because nobody else has them.
    Ok(Arc::make_mut(&mut template.pairs))
}

/// Returns the segment that copies the one piece of `template` at each of its pairs. Pairs that join their neighbours become
/// spans.
pub(super) fn repeated(mut template: Template) -> Result<Option<Segment>> {
    let pairs = own_pairs(&mut template)?;
    sorting::pairs_by_source(pairs)?;
    if pairs.is_empty() {
        Ok(None)
    } else if scattered(pairs) {
        Segment::of_template(template).map(Some)
    } else {
        joined(template.first_pieces()).and_then(Segment::of_spans).map(Some)
    }
}

/// Returns the segment that copies `pieces`, with neighbours joined.
fn listed(mut pieces: Vec<Piece>) -> Result<Option<Segment>> {
    sorting::by_source(&mut pieces)?;
    let spans = joined(pieces.into_iter())?;
    if spans.is_empty() { Ok(None) } else { Segment::of_spans(spans).map(Some) }
}
