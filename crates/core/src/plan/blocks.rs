//! Equal blocks: a pair of block numbers for each instead of a span.
//!
//! Shuffled lists of thousands of blocks have hardly two neighbours to join. Eight bytes a block instead of the 56 of a
//! span and its end are what makes planning, writing, reading and checking them cheap (docs/performance.md). Not for: lists
//! whose blocks join (`order`).

use std::sync::Arc;

use super::order::Pair;
use super::spans::{Piece, Span};

/// Equal blocks of one tensor: pair `(s, d)` is `len` bytes from `src + len·s` to `dst + len·d`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Bytes of one block.
    pub len: u64,
    /// Where block 0 is read, from the start of the tensor.
    pub src: u64,
    /// Where block 0 is written, from the start of the tensor.
    pub dst: u64,
    /// Number read and number written. Shared with the message that carries the plan.
    pub pairs: Arc<Vec<(u32, u32)>>,
}

impl Pair for (u32, u32) {
    fn ends(&self) -> (u64, u64) {
        (self.0.into(), self.1.into())
    }
}

impl Blocks {
    /// The `at`-th piece, whole.
    pub(super) fn piece(&self, at: usize) -> Option<Piece> {
        let &(src, dst) = self.pairs.get(at)?;
        let src = self.src + u64::from(src) * self.len;
        let dst = self.dst + u64::from(dst) * self.len;
        Some(Piece { src, dst, len: self.len })
    }

    /// Behind the last byte read and behind the last byte written; `None` beyond 64 bits, or without bytes.
    pub(super) fn reach(&self) -> Option<(u64, u64)> {
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

    /// The pieces, whole.
    pub(super) fn pieces(&self) -> impl ExactSizeIterator<Item = Piece> + '_ {
        let one = |&(src, dst): &(u32, u32)| Piece {
            src: self.src + u64::from(src) * self.len,
            dst: self.dst + u64::from(dst) * self.len,
            len: self.len,
        };
        self.pairs.iter().map(one)
    }

    /// As spans, one for each block.
    pub(super) fn single_spans(&self) -> impl ExactSizeIterator<Item = Span> + '_ {
        self.pieces().map(|Piece { src, dst, len }| Span::single(src, dst, len))
    }
}
