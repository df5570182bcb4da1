//! Spans of one tensor, the waves they run in, and the pieces they fall into.
//!
//! Not for: which spans a request becomes (`order`), or whether they lie inside a tensor (`parts`, `mem::Window`).

/// `count` pieces of `len` bytes in one tensor: piece `k` goes from `src + k·src_step` to `dst + k·dst_step`.
///
/// One span covers a contiguous run (`count` 1), a run written backwards (`dst_step` below 0), every n-th block
/// (steps above `len`) and one block fanned out to many (`src_step` 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte read, from the start of the tensor.
    pub src: u64,
    /// First byte written, from the start of the tensor.
    pub dst: u64,
    /// Bytes of one piece.
    pub len: u64,
    /// How many pieces.
    pub count: u64,
    /// Bytes from one piece read to the next.
    pub src_step: i64,
    /// Bytes from one piece written to the next.
    pub dst_step: i64,
}

impl Span {
    pub(super) fn single(src: u64, dst: u64, len: u64) -> Self {
        Span { src, dst, len, count: 1, src_step: 0, dst_step: 0 }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.len * self.count
    }

    /// Source and destination of piece `k`.
    pub(super) fn piece(&self, k: u64) -> (u64, u64) {
        // Steps were computed as differences of two offsets in one tensor, so they wrap back into it.
        let at = |start: u64, step: i64| start.wrapping_add_signed(step.wrapping_mul(k.cast_signed()));
        (at(self.src, self.src_step), at(self.dst, self.dst_step))
    }
}

/// One stretch of bytes to copy in one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte read, from the start of the tensor.
    pub src: u64,
    /// First byte written, from the start of the tensor.
    pub dst: u64,
    /// How many bytes.
    pub len: u64,
}

/// Spans that may run in any order and at the same time: none writes what another reads or writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wave {
    spans: Vec<Span>,
    /// Bytes of one tensor in the spans up to and including each: ascending, so a byte position finds its span.
    ends: Vec<u64>,
}

impl Wave {
    pub(super) fn new(spans: Vec<Span>) -> Self {
        let mut total = 0;
        let ends = spans
            .iter()
            .map(|span| {
                total += span.bytes();
                total
            })
            .collect();
        Wave { spans, ends }
    }

    /// The spans.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Bytes copied in one tensor.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The pieces of bytes `from..to`, counted along the spans of one tensor; the first and last may be cut.
    pub fn pieces(&self, from: u64, to: u64) -> impl Iterator<Item = Piece> + '_ {
        let mut at = from;
        let mut index = self.ends.partition_point(|&end| end <= from);
        std::iter::from_fn(move || {
            if at >= to {
                return None;
            }
            let span = self.spans.get(index)?;
            let inside = at - (self.ends[index] - span.bytes());
            let (k, skip) = (inside / span.len, inside % span.len);
            let (src, dst) = span.piece(k);
            let len = (span.len - skip).min(to - at);
            at += len;
            if at == self.ends[index] {
                index += 1;
            }
            Some(Piece { src: src + skip, dst: dst + skip, len })
        })
    }

    /// The pieces of bytes `from..to`, counted along all spans of tensor 0, then of tensor 1, and so on, each with its
    /// tensor.
    pub fn across_tensors(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
        let one = self.tensor_bytes().max(1);
        (from / one..to.div_ceil(one)).flat_map(move |tensor| {
            let start = tensor * one;
            let pieces = self.pieces(from.saturating_sub(start), (to - start).min(one));
            pieces.map(move |piece| (usize::try_from(tensor).unwrap_or(usize::MAX), piece))
        })
    }
}
