//! Equal blocks of a plan, each stored as a pair of block numbers instead of a span.
//!
//! In a shuffled list, hardly any two neighbours join. A block takes 8 bytes; a span and its end take 56
//! (docs/performance.md). Lists whose blocks join become spans (`order`).

use std::sync::Arc;

use super::order::Pair;
use super::spans::{Piece, Span};

/// Equal blocks of one tensor. Pair `(s, d)` copies `len` bytes from `src + len·s` to `dst + len·d`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    pub len: u64,
    /// Offset at which source block 0 starts, in bytes from the start of the tensor.
    pub src: u64,
    /// Offset at which destination block 0 starts, in bytes from the start of the tensor.
    pub dst: u64,
    /// Source and destination block numbers. Shared with the message that carries the plan.
    pub pairs: Arc<Vec<(u32, u32)>>,
}

impl Pair for (u32, u32) {
    fn places(&self) -> (u64, u64) {
        (self.0.into(), self.1.into())
    }
}

impl Blocks {
    /// Returns the complete piece at index `at`.
    pub(super) fn piece(&self, at: usize) -> Option<Piece> {
        self.pairs.get(at).map(|&pair| self.piece_of(pair))
    }

    pub(super) fn piece_of(&self, (src, dst): (u32, u32)) -> Piece {
        let at = |first: u64, number: u32| first + u64::from(number) * self.len;
        Piece { src: at(self.src, src), dst: at(self.dst, dst), len: self.len }
    }

    /// Returns the ends of the highest source block and of the highest destination block, in bytes from the
    /// start of the tensor. `None` if an end exceeds 64 bits or there are no bytes.
    pub(super) fn end_offsets(&self) -> Option<(u64, u64)> {
        if self.len == 0 || self.pairs.is_empty() {
            return None;
        }
        let most = |(src, dst): (u32, u32), &(s, d): &(u32, u32)| (src.max(s), dst.max(d));
        let (src, dst) = self.pairs.iter().fold((0, 0), most);
        let end = |first: u64, number: u32| {
            self.len.checked_mul(u64::from(number) + 1).and_then(|bytes| first.checked_add(bytes))
        };
        Some((end(self.src, src)?, end(self.dst, dst)?))
    }

    /// Returns the pieces, each complete.
    pub(super) fn pieces(&self) -> impl ExactSizeIterator<Item = Piece> + '_ {
        self.pairs.iter().map(|&pair| self.piece_of(pair))
    }

    pub(super) fn single_spans(&self) -> impl ExactSizeIterator<Item = Span> + '_ {
        self.pieces().map(|Piece { src, dst, len }| Span::single(src, dst, len))
    }
}
