//! Waves: the parts of a plan whose pieces may be copied in any order.

use super::blocks::Blocks;
use super::packed_spans::Packed;
use super::spans::{PLAN, Piece, Span};
use crate::error::Result;
use crate::fallible;

/// Pieces that may run in any order and at the same time: none writes what another reads or writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wave {
    form: Form,
    bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Form {
    Spans {
        spans: Vec<Span>,
        /// For each span, the bytes of one tensor up to its end. Ascending, so a byte position finds its
        /// span.
        ends: Vec<u64>,
    },
    Blocks(Blocks),
    /// Spans of a long plan from a peer.
    Packed(Packed),
}

impl Wave {
    pub(super) fn new(spans: Vec<Span>) -> Result<Self> {
        let mut bytes = 0;
        let end = |span: &Span| {
            bytes += span.bytes();
            bytes
        };
        let ends = fallible::collect(PLAN, spans.iter().map(end))?;
        Ok(Wave { form: Form::Spans { spans, ends }, bytes })
    }

    pub(super) fn of_packed(packed: Packed, bytes: u64) -> Self {
        Wave { form: Form::Packed(packed), bytes }
    }

    pub(super) fn of_blocks(blocks: Blocks) -> Self {
        let bytes = blocks.len * blocks.pairs.len() as u64;
        Wave { form: Form::Blocks(blocks), bytes }
    }

    /// Returns the spans. Each block counts as one span.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        let (listed, packed) = match &self.form {
            Form::Spans { spans, .. } => (&spans[..], None),
            Form::Packed(packed) => (&[][..], Some(packed)),
            Form::Blocks(_) => (&[][..], None),
        };
        let blocks = self.blocks().into_iter().flat_map(Blocks::single_spans);
        listed.iter().copied().chain(packed.into_iter().flat_map(Packed::iter)).chain(blocks)
    }

    pub fn num_spans(&self) -> usize {
        match &self.form {
            Form::Spans { spans, .. } => spans.len(),
            Form::Packed(packed) => packed.count,
            Form::Blocks(blocks) => blocks.pairs.len(),
        }
    }

    pub fn blocks(&self) -> Option<&Blocks> {
        if let Form::Blocks(blocks) = &self.form { Some(blocks) } else { None }
    }

    /// Returns the number of pieces in one tensor.
    pub fn count(&self) -> u64 {
        match &self.form {
            Form::Spans { spans, .. } => spans.iter().map(|span| span.count).sum(),
            Form::Packed(packed) => packed.pieces,
            Form::Blocks(blocks) => blocks.pairs.len() as u64,
        }
    }

    /// Returns the number of bytes copied in one tensor.
    pub fn tensor_bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the pieces of bytes `from..to`, counted along one tensor. The first and the last piece may be
    /// cut.
    pub fn pieces(&self, from: u64, to: u64) -> impl Iterator<Item = Piece> + '_ {
        let (index, skip) = match &self.form {
            Form::Spans { ends, .. } => (ends.partition_point(|&end| end <= from), 0),
            Form::Packed(packed) => packed.seek(from),
            Form::Blocks(blocks) => {
                (usize::try_from(from / blocks.len).unwrap_or(usize::MAX), from % blocks.len)
            }
        };
        WavePieces { form: &self.form, at: from, to, index, skip }
    }

    /// Returns the pieces of bytes `from..to`, each with its tensor. Bytes are counted along tensor 0, then
    /// along tensor 1, and so on.
    pub fn across_tensors(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
        let one = self.tensor_bytes().max(1);
        (from / one..to.div_ceil(one)).flat_map(move |tensor| {
            let start = tensor * one;
            let pieces = self.pieces(from.saturating_sub(start), (to - start).min(one));
            pieces.map(move |piece| (usize::try_from(tensor).unwrap_or(usize::MAX), piece))
        })
    }
}

struct WavePieces<'a> {
    form: &'a Form,
    at: u64,
    to: u64,
    /// Index of the span or block; for packed spans, the byte at which the current span starts.
    index: usize,
    /// For blocks, the bytes of the current block before the first piece; for packed spans, the bytes of one
    /// tensor in the spans before the current one.
    skip: u64,
}

impl WavePieces<'_> {
    /// Returns the current piece of `span`, which ends at byte `end` of one tensor, the bytes of the piece that are
    /// already done, and whether it is the last one.
    fn inside(&self, span: &Span, end: u64) -> (Piece, u64, bool) {
        let inside = self.at - (end - span.bytes());
        let (k, skip) = (inside / span.len, inside % span.len);
        let (src, dst) = span.piece(k);
        (Piece { src, dst, len: span.len }, skip, self.at + (span.len - skip) == end)
    }
}

impl Iterator for WavePieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.at >= self.to {
            return None;
        }
        let (whole, skip) = match self.form {
            Form::Blocks(blocks) => {
                let piece = blocks.piece(self.index)?;
                self.index += 1;
                (piece, std::mem::take(&mut self.skip))
            }
            Form::Packed(packed) => {
                let (span, next) = packed.at(self.index)?;
                let end = self.skip + span.bytes();
                let (piece, skip, last) = self.inside(&span, end);
                if last {
                    (self.index, self.skip) = (next, end);
                }
                (piece, skip)
            }
            Form::Spans { spans, ends } => {
                let (span, end) = (spans.get(self.index)?, *ends.get(self.index)?);
                let (piece, skip, last) = self.inside(span, end);
                self.index += usize::from(last);
                (piece, skip)
            }
        };
        let len = (whole.len - skip).min(self.to - self.at);
        self.at += len;
        Some(Piece { src: whole.src + skip, dst: whole.dst + skip, len })
    }
}
