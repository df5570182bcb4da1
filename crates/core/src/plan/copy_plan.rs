//! Builds a [`CopyPlan`] from a checked request: which bytes of each tensor are copied to where, and in what
//! order.

use std::sync::Arc;

use super::block_waves;
use super::blocks::Blocks;
use super::order::{self, CacheCount};
use super::request::{Moves, Pieces};
use super::side::Side;
use super::spans::{PLAN, Piece, Span};
use super::template::Template;
use super::tensor_steps::TensorSteps;
use super::waves::Wave;
use crate::error::Result;
use crate::fallible;
use crate::model::TensorSpan;

/// A plan of waves, each of which must finish before the next begins.
///
/// The waves apply to each of `num_tensors` tensors: each tensor of `src` is copied into the tensor of `dst` with the
/// same index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    num_tensors: u32,
    src: TensorSteps,
    dst: TensorSteps,
    /// Shared by the plans of all layers of one transfer.
    waves: Arc<Vec<Wave>>,
    /// The first of the waves that this plan runs, and the one after the last.
    part: (usize, usize),
}

impl CopyPlan {
    /// Plans the moves of a call, with the same result as moving piece after piece in the order given. A piece
    /// that is copied onto itself is left out, and so are bytes between two caches that a later piece writes again. Takes the pieces out of `moves`.
    pub fn moves(moves: &mut Moves, caches: CacheCount) -> Result<Self> {
        let one_cache = caches == CacheCount::One;
        // The pieces are taken, not copied: allocating memory for a long list costs more than planning it.
        let waves = match std::mem::take(&mut moves.pieces) {
            Pieces::Blocks(Blocks { len, src, dst, pairs }) => {
                let mut pairs = unshared(pairs)?;
                if one_cache {
                    pairs.retain(|(src, dst)| src != dst);
                }
                block_waves::waves(len, (src, dst), pairs, caches)?
            }
            Pieces::Rows(template) => row_waves(template, caches)?,
            Pieces::Listed(mut pieces) => {
                if one_cache {
                    pieces.retain(|piece| piece.src != piece.dst);
                }
                in_order(pieces, caches)?
            }
        };
        let plan = Self::new(moves.num_tensors, waves);
        Ok(plan.in_tensors(moves.src_tensor, moves.dst_tensor, moves.num_tensors))
    }

    pub(super) fn new(num_tensors: u32, mut waves: Vec<Wave>) -> Self {
        waves.retain(|wave| wave.count() > 0);
        let first = TensorSteps::consecutive(0);
        CopyPlan { num_tensors, src: first, dst: first, part: (0, waves.len()), waves: Arc::new(waves) }
    }

    /// Returns the same waves for `num_tensors` other tensors, from tensor `src_tensor` of the source and tensor
    /// `dst_tensor` of the destination on, with the same steps. This cuts a plan by layer without planning again.
    #[must_use]
    pub fn in_tensors(&self, src_tensor: u32, dst_tensor: u32, num_tensors: u32) -> Self {
        let src = TensorSteps { first: src_tensor, ..self.src };
        let dst = TensorSteps { first: dst_tensor, ..self.dst };
        self.in_tensor_steps(src, dst, num_tensors)
    }

    /// Returns the same waves for the first `num_tensors` tensors of `src` and of `dst`.
    #[must_use]
    pub fn in_tensor_steps(&self, src: TensorSteps, dst: TensorSteps, num_tensors: u32) -> Self {
        CopyPlan { num_tensors, src, dst, waves: self.waves.clone(), part: self.part }
    }

    /// Returns a plan that covers this plan and `next`. Returns `None` unless both are the same plan and `next` starts at the
    /// following tensor on both sides.
    #[must_use]
    pub fn followed_by(&self, next: &Self) -> Option<Self> {
        let same = Arc::ptr_eq(&self.waves, &next.waves) && self.part == next.part;
        let follows = |this: TensorSteps, next: TensorSteps| {
            this.step == next.step && this.number(self.num_tensors) == next.first
        };
        let joins = same && follows(self.src, next.src) && follows(self.dst, next.dst);
        let num_tensors = self.num_tensors.checked_add(next.num_tensors).filter(|_| joins)?;
        Some(self.in_tensor_steps(self.src, self.dst, num_tensors))
    }

    /// Returns a plan for each wave, which does what that wave does.
    pub fn each_wave(&self) -> impl Iterator<Item = Self> + '_ {
        let (from, to) = self.part;
        (from..to).map(|wave| CopyPlan { part: (wave, wave + 1), ..self.clone() })
    }

    pub fn num_tensors(&self) -> u32 {
        self.num_tensors
    }

    /// Returns the tensors of one side.
    pub fn tensors(&self, side: Side) -> TensorSteps {
        side.of((self.src, self.dst))
    }

    /// Returns the tensors of the cache of one side that the plan touches.
    pub fn tensors_at(&self, side: Side) -> TensorSpan {
        let TensorSteps { first, step } = self.tensors(side);
        TensorSpan { first, step, count: self.num_tensors }
    }

    /// Returns the first tensor that is read.
    pub fn src_tensor(&self) -> u32 {
        self.src.first
    }

    /// Returns the first tensor that is written.
    pub fn dst_tensor(&self) -> u32 {
        self.dst.first
    }

    /// Returns the waves, in the order in which they must run.
    pub fn waves(&self) -> &[Wave] {
        self.waves.get(self.part.0..self.part.1).unwrap_or_default()
    }

    pub fn bytes(&self) -> u64 {
        let one: u64 = self.waves().iter().map(Wave::tensor_bytes).sum();
        one.saturating_mul(u64::from(self.num_tensors))
    }

    /// Returns the pieces of bytes `from..to` of the whole plan, each with the index of its tensor in
    /// [`src_tensors`](Self::src_tensors) and [`dst_tensors`](Self::dst_tensors). Bytes are counted wave after
    /// wave, and within a wave as in [`Wave::spans_across_tensors`].
    pub fn pieces(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
        let each =
            |PlannedSpan { tensor, span, .. }: PlannedSpan| span.pieces().map(move |piece| (tensor, piece));
        self.spans(from, to).flat_map(each)
    }

    /// Returns the same pieces as [`pieces`](Self::pieces), as spans.
    pub fn spans(&self, from: u64, to: u64) -> impl Iterator<Item = PlannedSpan> + '_ {
        let tensors = u64::from(self.num_tensors);
        let starts = self.waves().iter().enumerate().scan(0u64, move |end, (index, wave)| {
            let start = *end;
            *end = start.saturating_add(wave.tensor_bytes().saturating_mul(tensors));
            Some((index, wave, start, *end))
        });
        let between = starts.filter(move |&(_, _, start, end)| start < to && from < end);
        between.flat_map(move |(index, wave, start, end)| {
            let spans = wave.spans_across_tensors(from.max(start) - start, to.min(end) - start);
            spans.map(move |(tensor, span)| PlannedSpan { wave: index, tensor, span })
        })
    }
}

/// A span of a plan, or the part of one that lies in a range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedSpan {
    /// Index of its wave in [`CopyPlan::waves`].
    pub wave: usize,
    /// Index of its tensor in [`CopyPlan::src_tensors`] and [`CopyPlan::dst_tensors`].
    pub tensor: usize,
    pub span: Span,
}

fn unshared(pairs: Arc<Vec<(u32, u32)>>) -> Result<Vec<(u32, u32)>> {
    Arc::try_unwrap(pairs).or_else(|shared| fallible::copied(PLAN, &shared))
}

/// Returns the waves of the same part of many rows.
fn row_waves(mut template: Template, caches: CacheCount) -> Result<Vec<Wave>> {
    let mut pairs = unshared(std::mem::take(&mut template.pairs))?;
    // Within one cache, the part that is read and the part that is written are equal or do not overlap
    // (`validate::sub_rows`). In the second case no byte is both read and written, as between two caches.
    let equal = template.spans.iter().all(|span| span.src == span.dst);
    let caches = if equal { caches } else { CacheCount::Two };
    if caches == CacheCount::One {
        pairs.retain(|(src, dst)| src != dst);
    }
    block_waves::waves_of_rows(&template, pairs, caches)
}

/// Returns the waves of `pieces`, with neighbours joined.
fn in_order(mut pieces: Vec<Piece>, caches: CacheCount) -> Result<Vec<Wave>> {
    let waves = match caches {
        CacheCount::One if order::order_matters(&pieces, caches)? => order::waves(&pieces)?,
        CacheCount::Two if order::order_matters(&pieces, caches)? => {
            order::keep_last_bytes(&mut pieces)?;
            vec![pieces]
        }
        _ => vec![pieces],
    };
    let wave = |mut wave: Vec<Piece>| {
        order::by_source(&mut wave)?;
        Wave::new(order::strided(order::contiguous(wave.into_iter())?)?)
    };
    fallible::try_collect(PLAN, waves.into_iter().map(wave))
}
