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
use crate::fallible;

impl CopyPlan {
    /// Plans moves between two caches, with the same result as moving piece after piece in the order given: bytes that a
    /// later piece writes again are left out. Takes the pieces out of `moves`.
    pub fn moves(moves: &mut Moves) -> Result<CopyPlan> {
        // The pieces are taken, not copied: allocating memory for a long list costs more than planning it.
        let segment = match std::mem::take(&mut moves.pieces) {
            Pieces::Repeated(mut template) => {
                let mut pairs = taken_pairs(&mut template)?;
                order::keep_last(&mut pairs)?;
                repeated(template, pairs)?
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
    /// writes. A piece that is copied onto itself is left out. Takes the pieces out of `moves`.
    pub fn moves_in_order(moves: &mut Moves, caches: CacheCount) -> Result<Vec<CopyPlan>> {
        if caches == CacheCount::Two || !may_overlap(&moves.pieces) {
            let plan = Self::moves(moves)?;
            let some = usize::from(!plan.is_empty());
            return fallible::collect(PLAN, std::iter::once(plan).take(some));
        }
        match std::mem::take(&mut moves.pieces) {
            Pieces::Repeated(mut template) => {
                let mut pairs = taken_pairs(&mut template)?;
                pairs.retain(|(src, dst)| src != dst);
                let mut groups = order::groups(pairs)?;
                let last = groups.pop();
                let mut plans = fallible::with_capacity(PLAN, groups.len() + 1)?;
                for pairs in groups {
                    plans.push(plan(moves, repeated(template.at_pairs(Arc::default())?, pairs)?));
                }
                if let Some(pairs) = last {
                    plans.push(plan(moves, repeated(template, pairs)?));
                }
                Ok(plans)
            }
            Pieces::Listed(mut pieces) => {
                pieces.retain(|piece| piece.src != piece.dst);
                let groups = order::groups(pieces)?.into_iter();
                fallible::try_collect(PLAN, groups.map(|pieces| Ok(plan(moves, listed(pieces)?))))
            }
        }
    }
}

fn plan(moves: &Moves, segment: Option<Segment>) -> CopyPlan {
    CopyPlan::new(moves.num_tensors, segment.into_iter().collect()).in_tensors(
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

fn taken_pairs(template: &mut Template) -> Result<Vec<(u32, u32)>> {
    let pairs = std::mem::take(&mut template.pairs);
    Arc::try_unwrap(pairs).or_else(|shared| fallible::copied(PLAN, &shared))
}

/// Returns the segment that copies the one piece of `template` at each of `pairs`. Pairs that join their neighbours become
/// spans.
pub(super) fn repeated(mut template: Template, mut pairs: Vec<(u32, u32)>) -> Result<Option<Segment>> {
    sorting::pairs_by_source(&mut pairs)?;
    let scattered = scattered(&pairs);
    template.pairs = Arc::new(pairs);
    if template.pairs.is_empty() {
        Ok(None)
    } else if scattered {
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
