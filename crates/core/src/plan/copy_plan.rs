//! Builds a [`CopyPlan`] from a checked request: which bytes of each tensor are copied to where, and in what
//! order.

use std::sync::Arc;

use super::block_waves;
use super::order::{self, Ends};
use super::request::{BlockPairs, CopyRange, Moves, Pieces};
use super::spans::{PLAN, Piece, Span};
use super::waves::Wave;
use crate::error::Result;
use crate::fallible;

/// A plan of waves, each of which must finish before the next begins.
///
/// The waves apply to each of `num_tensors` tensors: tensor `src_tensor + t` is copied into tensor
/// `dst_tensor + t`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    num_tensors: u32,
    pub(super) src_tensor: u32,
    pub(super) dst_tensor: u32,
    /// Shared by the plans of all layers of one transfer.
    waves: Arc<Vec<Wave>>,
}

impl CopyPlan {
    /// Plans one range in every tensor. The plan is empty if the range is copied onto itself.
    pub fn range(range: &CopyRange, ends: Ends) -> Result<Self> {
        let onto_itself = ends == Ends::OneCache && range.src_offset == range.dst_offset;
        let spans = if onto_itself {
            vec![]
        } else {
            vec![Span::single(range.src_offset, range.dst_offset, range.bytes)]
        };
        Ok(Self::new(range.num_tensors, vec![Wave::new(spans)?]))
    }

    /// Plans the copying of whole blocks, with the same result as copying the pairs one by one in the order
    /// given.
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

    /// Plans a pull or push between two caches, with the same result as moving piece after piece in the order
    /// given. Takes the pieces out of `moves`.
    pub fn moves(moves: &mut Moves) -> Result<Self> {
        // The pieces are taken, not copied: allocating memory for a long list costs more than planning it.
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

    /// Returns the same waves for other tensors: tensor `src_tensor + t` is copied into tensor `dst_tensor +
    /// t`, for each of `num_tensors` tensors. This cuts a plan by layer without planning again.
    #[must_use]
    pub fn in_tensors(&self, src_tensor: u32, dst_tensor: u32, num_tensors: u32) -> Self {
        CopyPlan { num_tensors, src_tensor, dst_tensor, waves: self.waves.clone() }
    }

    pub fn num_tensors(&self) -> u32 {
        self.num_tensors
    }

    pub fn src_tensor(&self) -> u32 {
        self.src_tensor
    }

    pub fn dst_tensor(&self) -> u32 {
        self.dst_tensor
    }

    /// Returns the waves, in the order in which they must run.
    pub fn waves(&self) -> &[Wave] {
        &self.waves
    }

    pub fn bytes(&self) -> u64 {
        let one: u64 = self.waves.iter().map(Wave::tensor_bytes).sum();
        one.saturating_mul(u64::from(self.num_tensors))
    }

    /// Returns the pieces of bytes `from..to` of the whole plan, each with the index of its tensor. The index
    /// counts from [`src_tensor`](Self::src_tensor) and [`dst_tensor`](Self::dst_tensor). Bytes are counted
    /// wave after wave, and within a wave as in [`Wave::across_tensors`].
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

/// Returns the waves of `pieces`, with neighbours joined.
fn in_order<T: order::Pair>(pieces: Vec<T>, ends: Ends, piece: impl Fn(&T) -> Piece) -> Result<Vec<Wave>> {
    let levels =
        if order::order_matters(&pieces, ends)? { order::levels(&pieces, ends)? } else { vec![pieces] };
    let wave = |mut wave: Vec<T>| {
        order::by_source(&mut wave)?;
        Wave::new(order::strided(order::contiguous(wave.iter().map(&piece))?)?)
    };
    fallible::try_collect(PLAN, levels.into_iter().map(wave))
}
