//! The same few spans at each of many pairs of places, stored once.
//!
//! Equal blocks are a template of one span. Blocks of two layouts differ in the order or the number of their heads, so
//! one block takes several spans, and all blocks take the same ones. A pair takes 8 bytes, a span 48: 4,096 blocks of 64
//! spans would take 12 MiB as spans, and take 35 KiB as a template.

use std::ops::Range;
use std::sync::Arc;

use super::side::Side;
use super::spans::{PLAN, Piece, Span};
use crate::error::Result;
use crate::fallible;

/// Spans that are repeated at pairs of places. For the pair `(s, d)`, each span is read `s·src_unit` bytes and
/// written `d·dst_unit` bytes later than it says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template {
    /// Bytes from one source place to the next.
    pub src_unit: u64,
    /// Bytes from one destination place to the next.
    pub dst_unit: u64,
    /// Numbers of the source and destination places. Shared with the message that carries the plan.
    pub pairs: Arc<Vec<(u32, u32)>>,
    /// The spans at place 0 of source and destination.
    pub spans: Vec<Span>,
}

impl Template {
    /// Returns a span of the template at a pair of places.
    pub(super) fn placed(&self, (src, dst): (u32, u32), span: &Span) -> Span {
        Span {
            src: span.src + u64::from(src) * self.src_unit,
            dst: span.dst + u64::from(dst) * self.dst_unit,
            ..*span
        }
    }

    /// Returns the template of spans that are not repeated. It has one pair, (0, 0).
    pub(super) fn of_spans(spans: Vec<Span>) -> Result<Template> {
        let pairs = Arc::new(fallible::collect(PLAN, std::iter::once((0, 0)))?);
        Ok(Template { src_unit: 0, dst_unit: 0, pairs, spans })
    }

    /// Returns the same spans at other pairs of places.
    pub(crate) fn at_pairs(&self, pairs: Arc<Vec<(u32, u32)>>) -> Result<Template> {
        Ok(Template { pairs, spans: fallible::copied(PLAN, &self.spans)?, ..*self })
    }

    /// Returns the ranges that the template reads (`Source`) or writes at a pair of places, in the order of its spans:
    /// the first byte of each and its number of bytes. Together they are the bytes that the pair copies, in order.
    pub fn ranges(&self, pair: (u32, u32), side: Side) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.spans.iter().flat_map(move |span| {
            let span = self.placed(pair, span);
            let (_, step) = span.start(side);
            // Pieces without gaps are one range, which is read faster.
            let whole = i64::try_from(span.len).is_ok_and(|len| len == step);
            let (count, len) = if whole { (1, span.bytes()) } else { (span.count, span.len) };
            (0..count).map(move |k| (side.of(span.piece(k)), len))
        })
    }

    /// Returns the first piece of the template at a pair of places. A template of a request has only this one.
    pub(super) fn first_piece_at(&self, pair: (u32, u32)) -> Piece {
        let first = self.spans.first().copied().unwrap_or(Span::single(0, 0, 0));
        let Span { src, dst, len, .. } = self.placed(pair, &first);
        Piece { src, dst, len }
    }

    /// Returns the first piece at every pair of places.
    pub(super) fn first_pieces(&self) -> impl ExactSizeIterator<Item = Piece> + '_ {
        self.pairs.iter().map(|&pair| self.first_piece_at(pair))
    }

    /// Returns the bytes that one pair of places copies in one tensor; `None` if they exceed 64 bits.
    pub(super) fn pair_bytes(&self) -> Option<u64> {
        let bytes = |span: &Span| span.len.checked_mul(span.count);
        self.spans.iter().try_fold(0u64, |sum, span| sum.checked_add(bytes(span)?))
    }

    /// Returns the bytes that all places together copy in one tensor; `None` if they exceed 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        self.pair_bytes()?.checked_mul(self.pairs.len() as u64)
    }

    /// Returns the smallest ranges that contain all bytes read and all bytes written at the places 0. `None` if
    /// there are no spans or a range exceeds 64 bits.
    pub(super) fn hulls(&self) -> Option<(Range<u64>, Range<u64>)> {
        let join = |a: Range<u64>, b: Range<u64>| a.start.min(b.start)..a.end.max(b.end);
        let mut spans =
            self.spans.iter().map(|span| Some((span.hull(Side::Source)?, span.hull(Side::Destination)?)));
        let first = spans.next()??;
        spans.try_fold(first, |(reads, writes), span| {
            let (read, written) = span?;
            Some((join(reads, read), join(writes, written)))
        })
    }

    /// Returns the ends of the highest byte read and of the highest byte written, from the start of the tensor.
    /// `None` if there are no pieces or an end exceeds 64 bits.
    pub(super) fn end_offsets(&self) -> Option<(u64, u64)> {
        let (reads, writes) = self.hulls()?;
        let most = |(src, dst): (u32, u32), &(s, d): &(u32, u32)| (src.max(s), dst.max(d));
        let (src, dst) = self.pairs.first().map(|&first| self.pairs.iter().fold(first, most))?;
        let end = |unit: u64, number: u32, end: u64| unit.checked_mul(number.into())?.checked_add(end);
        Some((end(self.src_unit, src, reads.end)?, end(self.dst_unit, dst, writes.end)?))
    }
}
