//! Segments: the parts of a plan, each a template.

use super::spans::{PLAN, Piece, Span};
use super::template::Template;
use crate::error::Result;
use crate::fallible;

/// Pieces that may be copied in any order and at the same time: none writes what another reads or writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    template: Template,
    /// For each span, the bytes at one pair of places up to its end. Ascending, so a byte position finds its span.
    /// Empty for a template of one span.
    ends: Vec<u64>,
    /// Bytes of all pieces in one tensor.
    bytes: u64,
}

impl Segment {
    /// Returns the segment of a template. The bytes at all its places must not exceed 64 bits.
    pub(super) fn of_template(template: Template) -> Result<Self> {
        let (mut ends, mut one) = (Vec::new(), 0);
        let spans = &template.spans;
        if let [span] = spans[..] {
            one = span.bytes();
        } else {
            let end = |span: &Span| {
                one += span.bytes();
                one
            };
            ends = fallible::collect(PLAN, spans.iter().map(end))?;
        }
        let bytes = one * template.pairs.len() as u64;
        Ok(Segment { template, ends, bytes })
    }

    /// Returns the segment of spans that are not repeated.
    pub(super) fn of_spans(spans: Vec<Span>) -> Result<Self> {
        Self::of_template(Template::of_spans(spans)?)
    }

    /// Returns the spans of the template at each of its pairs of places: those of the first pair, then those of the next.
    pub fn spans(&self) -> impl Iterator<Item = Span> + Clone + '_ {
        let Template { pairs, spans, .. } = &self.template;
        pairs.iter().flat_map(move |&pair| spans.iter().map(move |span| self.template.placed(pair, span)))
    }

    /// Returns the number of spans at all places.
    pub fn num_spans(&self) -> usize {
        self.template.pairs.len().saturating_mul(self.template.spans.len())
    }

    pub fn template(&self) -> &Template {
        &self.template
    }

    /// Returns the number of pieces in one tensor.
    pub fn count(&self) -> u64 {
        let Template { pairs, spans, .. } = &self.template;
        pairs.len() as u64 * spans.iter().map(|span| span.count).sum::<u64>()
    }

    /// Returns the number of bytes copied in one tensor.
    pub fn tensor_bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the pieces of bytes `from..to` of one tensor as spans. The first and the last piece may be cut.
    pub(super) fn spans_between(&self, from: u64, to: u64) -> impl Iterator<Item = Span> + '_ {
        SpansBetween::new(self, from, to)
    }

    /// Returns the pieces in one tensor.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        self.spans().flat_map(Span::pieces)
    }
}

/// The pieces of a range of bytes of one tensor, as spans.
struct SpansBetween<'a> {
    segment: &'a Segment,
    /// Bytes still to return.
    left: u64,
    /// The pieces of the current span that were not returned yet.
    span: Span,
    /// Bytes of the next piece before the first byte to return.
    skip: u64,
    /// Index of the span after the current one in the template.
    next: usize,
    /// Index of the pair of places of that span.
    pair: usize,
}

impl<'a> SpansBetween<'a> {
    fn new(segment: &'a Segment, from: u64, to: u64) -> Self {
        let none = Span { count: 0, ..Span::single(0, 0, 1) };
        let left = to.saturating_sub(from);
        let mut spans = SpansBetween { segment, left, span: none, skip: 0, next: 0, pair: 0 };
        if left == 0 || from == 0 {
            return spans;
        }
        let Segment { template, ends, .. } = segment;
        let one = ends.last().copied().or_else(|| template.spans.first().map(Span::bytes));
        let one = one.unwrap_or(0).max(1);
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
        let Segment { template, ends, .. } = self.segment;
        let span = if ends.is_empty() {
            let pair = template.pairs.get(self.pair);
            self.pair += 1;
            pair.zip(template.spans.first()).map(|(&pair, span)| template.placed(pair, span))
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
        let template = &self.segment.template;
        let span = template.placed(*template.pairs.get(self.pair)?, template.spans.get(self.next)?);
        self.next += 1;
        if self.next == template.spans.len() {
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
