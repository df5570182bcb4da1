//! The same few spans at each of many pairs of positions, stored once.
//!
//! Equal blocks are a template of one span. Blocks of two layouts differ in the order or the number of their heads, so
//! one block takes several spans, and all blocks take the same ones. A pair takes 8 bytes, a span 48: 4,096 blocks of 64
//! spans would take 12 MiB as spans, and take 35 KiB as a template.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::side::Side;
use super::spans::{PLAN, Piece, Span};
use crate::error::Result;
use crate::fallible;

/// Numbers of source and destination positions. One pair takes no memory of its own.
pub type Pairs = SmallVec<[(u32, u32); 1]>;
/// The templates of a plan, which the plans of all layers of a transfer and the messages that carry them share.
pub type Templates = Arc<SmallVec<[Template; 1]>>;

/// Spans that are repeated at pairs of positions. For the pair `(s, d)`, each span is read `s·src_unit` bytes and
/// written `d·dst_unit` bytes later than it says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template {
    /// Bytes from one source position to the next.
    pub src_unit: u64,
    /// Bytes from one destination position to the next.
    pub dst_unit: u64,
    pub pairs: Pairs,
    /// The spans at position 0 of source and destination.
    pub spans: SmallVec<[Span; 1]>,
    /// For each span, the bytes at one pair of positions up to its end. Ascending, so a byte position finds its span. Empty for
    /// one span, and outside a plan.
    ends: Vec<u64>,
}

impl Template {
    /// Returns the template of `spans` at `pairs` of positions, which are `units` bytes apart in source and destination.
    pub fn new(units: (u64, u64), pairs: impl Into<Pairs>, spans: impl Into<SmallVec<[Span; 1]>>) -> Self {
        let (pairs, spans) = (pairs.into(), spans.into());
        Template { src_unit: units.0, dst_unit: units.1, pairs, spans, ends: Vec::new() }
    }

    /// Prepares the template for a plan. The bytes at all its positions must not exceed 64 bits.
    pub(super) fn set_ends(&mut self) -> Result<()> {
        if self.spans.len() != 1 {
            let mut one = 0;
            let end = |span: &Span| {
                one += span.bytes();
                one
            };
            self.ends = fallible::collect(PLAN, self.spans.iter().map(end))?;
        }
        Ok(())
    }

    /// Returns a span of the template at a pair of positions.
    pub(super) fn placed(&self, (src, dst): (u32, u32), span: &Span) -> Span {
        Span {
            src: span.src + u64::from(src) * self.src_unit,
            dst: span.dst + u64::from(dst) * self.dst_unit,
            ..*span
        }
    }

    /// Returns the template of spans that are not repeated. It has one pair, (0, 0).
    pub(super) fn of_spans(spans: Vec<Span>) -> Template {
        Template::new((0, 0), [(0, 0)], spans)
    }

    /// Returns the same spans at other pairs of positions.
    pub(super) fn at_pairs(&self, pairs: Vec<(u32, u32)>) -> Result<Template> {
        let spans = fallible::collect_inline(PLAN, self.spans.iter().copied())?;
        Ok(Template::new((self.src_unit, self.dst_unit), pairs, spans))
    }

    /// Returns the spans at each of the pairs of positions: those of the first pair, then those of the next.
    pub fn placed_spans(&self) -> impl Iterator<Item = Span> + Clone + '_ {
        self.pairs.iter().flat_map(move |&pair| self.spans.iter().map(move |span| self.placed(pair, span)))
    }

    /// Returns the number of spans at all positions.
    pub fn num_spans(&self) -> usize {
        self.pairs.len().saturating_mul(self.spans.len())
    }

    /// Returns the number of pieces in one tensor.
    pub fn num_pieces(&self) -> u64 {
        self.pairs.len() as u64 * self.spans.iter().map(|span| span.count).sum::<u64>()
    }

    /// Returns the pieces in one tensor.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        self.placed_spans().flat_map(Span::pieces)
    }

    /// Returns the bytes at one pair of positions of a template of a plan.
    fn bytes_at_pair(&self) -> u64 {
        self.ends.last().copied().or_else(|| self.spans.first().map(Span::bytes)).unwrap_or(0)
    }

    /// Returns the number of bytes that a template of a plan copies in one tensor.
    pub fn tensor_bytes(&self) -> u64 {
        self.bytes_at_pair() * self.pairs.len() as u64
    }

    /// Returns the pieces of bytes `from..to` of one tensor as spans, of a template of a plan. The first and the last piece
    /// may be cut.
    pub(super) fn spans_between(&self, from: u64, to: u64) -> impl Iterator<Item = Span> + '_ {
        SpansBetween::new(self, from, to)
    }

    /// Returns the ranges that the template reads (`Source`) or writes at a pair of positions, in the order of its spans:
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

    /// Returns the first piece of the template at a pair of positions. A template of a request has only this one.
    pub(super) fn first_piece_at(&self, pair: (u32, u32)) -> Piece {
        let first = self.spans.first().copied().unwrap_or(Span::single(0, 0, 0));
        let Span { src, dst, len, .. } = self.placed(pair, &first);
        Piece { src, dst, len }
    }

    /// Returns the first piece at every pair of positions.
    pub(super) fn first_pieces(&self) -> impl ExactSizeIterator<Item = Piece> + '_ {
        self.pairs.iter().map(|&pair| self.first_piece_at(pair))
    }

    /// Returns the bytes that one pair of positions copies in one tensor; `None` if they exceed 64 bits.
    pub(super) fn pair_bytes(&self) -> Option<u64> {
        let bytes = |span: &Span| span.len.checked_mul(span.count);
        self.spans.iter().try_fold(0u64, |sum, span| sum.checked_add(bytes(span)?))
    }

    /// Returns the bytes that all positions together copy in one tensor; `None` if they exceed 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        self.pair_bytes()?.checked_mul(self.pairs.len() as u64)
    }

    /// Returns the smallest ranges that contain all bytes read and all bytes written at the positions 0. `None` if
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

/// The pieces of a range of bytes of one tensor, as spans.
struct SpansBetween<'a> {
    template: &'a Template,
    /// Those of the template, as slices, because each access to a short list asks where it is.
    pairs: &'a [(u32, u32)],
    spans: &'a [Span],
    /// Bytes still to return.
    left: u64,
    /// The pieces of the current span that were not returned yet.
    span: Span,
    /// Bytes of the next piece before the first byte to return.
    skip: u64,
    /// Index of the span after the current one in the template.
    next: usize,
    /// Index of the pair of positions of that span.
    pair: usize,
}

impl<'a> SpansBetween<'a> {
    fn new(template: &'a Template, from: u64, to: u64) -> Self {
        let none = Span { count: 0, ..Span::single(0, 0, 1) };
        let left = to.saturating_sub(from);
        let (pairs, spans) = (&template.pairs[..], &template.spans[..]);
        let mut spans = SpansBetween { template, pairs, spans, left, span: none, skip: 0, next: 0, pair: 0 };
        if left == 0 || from == 0 {
            return spans;
        }
        let (ends, one) = (&template.ends, template.bytes_at_pair().max(1));
        spans.pair = usize::try_from(from / one).unwrap_or(usize::MAX);
        let at = from % one;
        spans.next = ends.partition_point(|&end| end <= at);
        let inside = at - spans.next.checked_sub(1).map_or(0, |before| ends[before]);
        if inside > 0 && spans.advance() {
            spans.skip = inside % spans.span.len;
            spans.span = spans.span.after(inside / spans.span.len);
        }
        spans
    }

    /// Makes the next whole span the current one. Returns `false` if no span is left.
    #[inline]
    fn advance(&mut self) -> bool {
        // The usual case, equal blocks, is inlined.
        let span = if self.template.ends.is_empty() {
            let pair = self.pairs.get(self.pair);
            self.pair += 1;
            pair.zip(self.spans.first()).map(|(&pair, span)| self.template.placed(pair, span))
        } else {
            self.next_span()
        };
        match span {
            Some(span) => self.span = span,
            None => return false,
        }
        true
    }

    /// Returns the next span of a template of several spans.
    #[inline(never)]
    fn next_span(&mut self) -> Option<Span> {
        let span = self.template.placed(*self.pairs.get(self.pair)?, self.spans.get(self.next)?);
        self.next += 1;
        if self.next == self.spans.len() {
            (self.pair, self.next) = (self.pair + 1, 0);
        }
        Some(span)
    }
}

impl Iterator for SpansBetween<'_> {
    type Item = Span;

    #[inline]
    fn next(&mut self) -> Option<Span> {
        if self.left == 0 {
            return None;
        }
        if self.span.count == 0 && !self.advance() {
            return None;
        }
        let (Span { src, dst, len, .. }, skip) = (self.span, self.skip);
        let count = if self.left < self.span.bytes() { self.left / len } else { self.span.count };
        let span = if skip > 0 || count == 0 {
            self.skip = 0;
            Span::single(src + skip, dst + skip, (len - skip).min(self.left))
        } else {
            Span { count, ..self.span }
        };
        self.span = self.span.after(span.count);
        self.left -= span.bytes();
        Some(span)
    }
}
