//! Builds a [`CopyPlan`] from a checked request: which bytes of every tensor go where, and in what order.

use std::sync::Arc;

use super::block_waves;
use super::order::{self, Ends};
use super::request::{BlockPairs, CopyRange, Moves, Pieces};
use super::spans::{PLAN, Piece, Span};
use super::waves::Wave;
use crate::error::Result;
use crate::fallible;

/// Waves of spans, each to be finished before the next, the same in each of `num_tensors` tensors: from tensor
/// `src_tensor + t` into tensor `dst_tensor + t`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    num_tensors: u32,
    pub(super) src_tensor: u32,
    pub(super) dst_tensor: u32,
    /// Shared by the plans of all layers of one transfer.
    waves: Arc<Vec<Wave>>,
}

impl CopyPlan {
    /// One range in every tensor. A range onto itself is nothing to do.
    pub fn range(range: &CopyRange, ends: Ends) -> Result<Self> {
        let onto_itself = ends == Ends::OneCache && range.src_offset == range.dst_offset;
        let spans = if onto_itself {
            vec![]
        } else {
            vec![Span::single(range.src_offset, range.dst_offset, range.bytes)]
        };
        Ok(Self::new(range.num_tensors, vec![Wave::new(spans)?]))
    }

    /// Whole blocks, with the result of copying the pairs one after the other in the order given.
    pub fn blocks(request: &BlockPairs, ends: Ends) -> Result<Self> {
        let len = request.block_bytes;
        let moved = |&(src, dst): &(u64, u64)| ends == Ends::TwoCaches || src != dst;
        let any = request.pairs.iter().fold(0, |any, &(src, dst)| any | src | dst);
        let waves = if u32::try_from(any).is_ok() {
            #[expect(clippy::cast_possible_truncation, reason = "no number has a higher bit")]
            let narrow = request.pairs.iter().map(|&(src, dst)| (src as u32, dst as u32));
            let mut pairs = fallible::collect(PLAN, narrow)?;
            if !request.pairs.iter().all(moved) {
                pairs.retain(|(src, dst)| src != dst);
            }
            block_waves::waves(len, (0, 0), pairs, ends)?
        } else {
            let piece = |&(src, dst): &(u64, u64)| Piece { src: src * len, dst: dst * len, len };
            let mut pairs = fallible::copied(PLAN, &request.pairs)?;
            pairs.retain(moved);
            in_order(pairs, ends, piece)?
        };
        Ok(Self::new(request.num_tensors, waves))
    }

    /// What a pull or push moves between two caches, with the result of moving piece after piece in the order given.
    /// Takes the pieces out of `moves`.
    pub fn moves(moves: &mut Moves) -> Result<Self> {
        // Taken, not copied: fresh memory for a long list costs more than planning it.
        let waves = match std::mem::take(&mut moves.pieces) {
            Pieces::Blocks { len, first, pairs } => block_waves::waves(len, first, pairs, Ends::TwoCaches)?,
            Pieces::Listed(pieces) => in_order(pieces, Ends::TwoCaches, |&piece| piece)?,
        };
        let plan = Self::new(moves.num_tensors, waves);
        Ok(CopyPlan { src_tensor: moves.src_tensor, dst_tensor: moves.dst_tensor, ..plan })
    }

    pub(super) fn new(num_tensors: u32, mut waves: Vec<Wave>) -> Self {
        waves.retain(|wave| wave.count() > 0);
        CopyPlan { num_tensors, src_tensor: 0, dst_tensor: 0, waves: Arc::new(waves) }
    }

    /// The same spans in other tensors: from tensor `src_tensor + t` into tensor `dst_tensor + t`, for each of
    /// `num_tensors`. How a plan is cut by layer; nothing is planned again.
    #[must_use]
    pub fn in_tensors(&self, src_tensor: u32, dst_tensor: u32, num_tensors: u32) -> Self {
        CopyPlan { num_tensors, src_tensor, dst_tensor, waves: self.waves.clone() }
    }

    /// In how many tensors.
    #[must_use]
    pub fn num_tensors(&self) -> u32 {
        self.num_tensors
    }

    /// The first tensor read.
    #[must_use]
    pub fn src_tensor(&self) -> u32 {
        self.src_tensor
    }

    /// The first tensor written.
    #[must_use]
    pub fn dst_tensor(&self) -> u32 {
        self.dst_tensor
    }

    /// The waves, in the order they must run.
    #[must_use]
    pub fn waves(&self) -> &[Wave] {
        &self.waves
    }

    /// Bytes in all tensors and waves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let one: u64 = self.waves.iter().map(Wave::tensor_bytes).sum();
        one.saturating_mul(u64::from(self.num_tensors))
    }

    /// The pieces of bytes `from..to` of the whole plan, counted wave after wave and in each as
    /// [`Wave::across_tensors`] does, each with its tensor, counted from [`src_tensor`](Self::src_tensor) and
    /// [`dst_tensor`](Self::dst_tensor).
    pub fn pieces(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
        let tensors = u64::from(self.num_tensors);
        let starts = self.waves.iter().scan(0u64, move |end, wave| {
            let start = *end;
            *end = start.saturating_add(wave.tensor_bytes().saturating_mul(tensors));
            Some((wave, start, *end))
        });
        starts.filter(move |&(_, start, end)| start < to && from < end).flat_map(move |(wave, start, end)| {
            wave.across_tensors(from.max(start) - start, to.min(end) - start)
        })
    }
}

/// The waves of pieces, merged.
fn in_order<T: order::Pair>(pieces: Vec<T>, ends: Ends, piece: impl Fn(&T) -> Piece) -> Result<Vec<Wave>> {
    let levels =
        if order::order_matters(&pieces, ends)? { order::levels(&pieces, ends)? } else { vec![pieces] };
    let wave = |mut wave: Vec<T>| {
        order::by_source(&mut wave)?;
        Wave::new(order::strided(order::contiguous(wave.iter().map(&piece))?)?)
    };
    fallible::tried(PLAN, levels.into_iter().map(wave))
}
