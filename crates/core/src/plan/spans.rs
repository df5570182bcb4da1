//! Pieces and spans: which bytes of a tensor are read, and where they are written.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::side::Side;

/// Name of the lists of a plan in out-of-memory errors.
pub(super) const PLAN: &str = "a plan";

/// `count` pieces of `len` bytes in one tensor. Piece `k` is copied from `src + k·src_step` to `dst +
/// k·dst_step`.
///
/// One span describes a contiguous run (`count` 1), a run written backwards (`dst_step` below 0), every n-th
/// block (steps above `len`), or one block copied to many positions (`src_step` 0). In a message, the fields are
/// encoded in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// First byte read, from the start of the tensor.
    pub src: u64,
    /// First byte written, from the start of the tensor.
    pub dst: u64,
    pub len: u64,
    pub count: u64,
    /// Bytes from the start of one piece read to the start of the next.
    pub src_step: i64,
    /// Bytes from the start of one piece written to the start of the next.
    pub dst_step: i64,
}

impl Span {
    pub(super) fn single(src: u64, dst: u64, len: u64) -> Self {
        Span { src, dst, len, count: 1, src_step: 0, dst_step: 0 }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.len * self.count
    }

    /// Returns the smallest range of one side that contains all bytes; `None` if it exceeds 64 bits.
    pub(super) fn hull(&self, side: Side) -> Option<Range<u64>> {
        let (start, step) = self.start(side);
        // Positions are linear in `k`, so the first and the last piece are the outermost ones.
        let last = i128::from(start) + i128::from(step) * i128::from(self.count - 1);
        let last = u64::try_from(last).ok()?;
        Some(start.min(last)..start.max(last).checked_add(self.len)?)
    }

    /// Returns where the first piece starts on one side, and the distance to the next piece.
    pub fn start(&self, side: Side) -> (u64, i64) {
        side.of(((self.src, self.src_step), (self.dst, self.dst_step)))
    }

    pub(super) fn piece(&self, k: u64) -> (u64, u64) {
        // Steps are differences of two offsets in one tensor, so they wrap back into it.
        let at = |start: u64, step: i64| start.wrapping_add_signed(step.wrapping_mul(k.cast_signed()));
        (at(self.src, self.src_step), at(self.dst, self.dst_step))
    }

    pub(super) fn pieces(self) -> impl Iterator<Item = Piece> {
        (0..self.count).map(move |k| {
            let (src, dst) = self.piece(k);
            Piece { src, dst, len: self.len }
        })
    }

    /// Returns the span without its first `k` pieces, of which it must have at least as many.
    pub(super) fn after(&self, k: u64) -> Span {
        let (src, dst) = self.piece(k);
        Span { src, dst, count: self.count - k, ..*self }
    }
}

/// One contiguous range of bytes to copy in one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte read, from the start of the tensor.
    pub src: u64,
    /// First byte written, from the start of the tensor.
    pub dst: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Piece {
    /// Returns where the piece starts on one side.
    pub fn start(&self, side: Side) -> u64 {
        side.of((self.src, self.dst))
    }
}

/// Returns the greatest common divisor; that of a number and 0 is the number.
pub(super) fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
