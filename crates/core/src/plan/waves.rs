//! Waves: the parts of a plan whose pieces may be copied in any order.

use super::blocks::Blocks;
use super::packed_spans::Packed;
use super::spans::{PLAN, Piece, Span};
use super::template::Template;
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
    Template {
        template: Template,
        /// For each span, the bytes at one pair of places up to its end.
        ends: Vec<u64>,
    },
    /// Spans of a long plan from a peer.
    Packed(Packed),
}

impl Wave {
    pub(super) fn new(spans: Vec<Span>) -> Result<Self> {
        let (ends, bytes) = ends_of(&spans)?;
        Ok(Wave { form: Form::Spans { spans, ends }, bytes })
    }

    /// Returns the wave of a template. The bytes at all its places must not exceed 64 bits.
    pub(super) fn of_template(template: Template) -> Result<Self> {
        let (ends, one) = ends_of(&template.spans)?;
        let bytes = one * template.pairs.len() as u64;
        Ok(Wave { form: Form::Template { template, ends }, bytes })
    }

    pub(super) fn of_packed(packed: Packed, bytes: u64) -> Self {
        Wave { form: Form::Packed(packed), bytes }
    }

    pub(super) fn of_blocks(blocks: Blocks) -> Self {
        let bytes = blocks.len * blocks.pairs.len() as u64;
        Wave { form: Form::Blocks(blocks), bytes }
    }

    /// Returns the spans. Each block counts as one span, and so does each span of a template at each pair.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        let (listed, packed) = match &self.form {
            Form::Spans { spans, .. } => (&spans[..], None),
            Form::Packed(packed) => (&[][..], Some(packed)),
            Form::Blocks(_) | Form::Template { .. } => (&[][..], None),
        };
        let blocks = self.blocks().into_iter().flat_map(Blocks::single_spans);
        let placed = self.template().into_iter().flat_map(Template::placed_spans);
        listed.iter().copied().chain(packed.into_iter().flat_map(Packed::iter)).chain(blocks).chain(placed)
    }

    pub fn num_spans(&self) -> usize {
        match &self.form {
            Form::Spans { spans, .. } => spans.len(),
            Form::Packed(packed) => packed.count,
            Form::Blocks(blocks) => blocks.pairs.len(),
            Form::Template { template, .. } => template.num_spans(),
        }
    }

    pub fn blocks(&self) -> Option<&Blocks> {
        if let Form::Blocks(blocks) = &self.form { Some(blocks) } else { None }
    }

    pub fn template(&self) -> Option<&Template> {
        if let Form::Template { template, .. } = &self.form { Some(template) } else { None }
    }

    /// Returns the number of pieces in one tensor.
    pub fn count(&self) -> u64 {
        match &self.form {
            Form::Spans { spans, .. } => spans.iter().map(|span| span.count).sum(),
            Form::Packed(packed) => packed.pieces,
            Form::Blocks(blocks) => blocks.pairs.len() as u64,
            Form::Template { template: Template { pairs, spans, .. }, .. } => {
                pairs.len() as u64 * spans.iter().map(|span| span.count).sum::<u64>()
            }
        }
    }

    /// Returns the number of bytes copied in one tensor.
    pub fn tensor_bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the pieces of bytes `from..to`, counted along one tensor. The first and the last piece may be
    /// cut.
    pub fn pieces(&self, from: u64, to: u64) -> impl Iterator<Item = Piece> + '_ {
        SpansBetween::new(&self.form, from, to).flat_map(Span::pieces)
    }

    /// Returns the same pieces as [`spans_across_tensors`](Self::spans_across_tensors), one by one.
    #[cfg(feature = "testing")]
    pub fn across_tensors(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
        let each = |(tensor, span): (usize, Span)| span.pieces().map(move |piece| (tensor, piece));
        self.spans_across_tensors(from, to).flat_map(each)
    }

    /// Returns the spans of bytes `from..to`, each with its tensor. Bytes are counted along tensor 0, then along
    /// tensor 1, and so on. The first and the last piece may be cut.
    pub fn spans_across_tensors(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, Span)> + '_ {
        let one = self.tensor_bytes().max(1);
        (from / one..to.div_ceil(one)).flat_map(move |tensor| {
            let start = tensor * one;
            let spans = SpansBetween::new(&self.form, from.saturating_sub(start), (to - start).min(one));
            spans.map(move |span| (usize::try_from(tensor).unwrap_or(usize::MAX), span))
        })
    }
}

/// Returns for each span the bytes up to its end, and the bytes of all.
fn ends_of(spans: &[Span]) -> Result<(Vec<u64>, u64)> {
    let mut bytes = 0;
    let end = |span: &Span| {
        bytes += span.bytes();
        bytes
    };
    Ok((fallible::collect(PLAN, spans.iter().map(end))?, bytes))
}

/// The pieces of a range of bytes of one tensor, as spans.
struct SpansBetween<'a> {
    form: &'a Form,
    /// Bytes still to return.
    left: u64,
    /// The pieces of the current span that were not returned yet.
    span: Span,
    /// Bytes of the next piece before the first byte to return.
    skip: u64,
    /// The span after the current one: its index or, for packed spans, the byte at which it starts.
    next: usize,
    /// Index of the pair of places of that span, for a template.
    pair: usize,
}

impl<'a> SpansBetween<'a> {
    fn new(form: &'a Form, from: u64, to: u64) -> Self {
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        // The span with the byte `at`, and the bytes of that span before it.
        let find = |ends: &[u64], at: u64| {
            let span = ends.partition_point(|&end| end <= at);
            (span, at - span.checked_sub(1).map_or(0, |before| ends[before]))
        };
        let (pair, (next, inside)) = match form {
            Form::Blocks(blocks) => (0, (index(from / blocks.len), from % blocks.len)),
            Form::Spans { ends, .. } => (0, find(ends, from)),
            Form::Template { ends, .. } => {
                let one = ends.last().copied().unwrap_or(0).max(1);
                (index(from / one), find(ends, from % one))
            }
            Form::Packed(packed) => {
                let (at, before) = packed.seek(from);
                (0, (at, from - before))
            }
        };
        let none = Span { count: 0, ..Span::single(0, 0, 1) };
        let mut spans = SpansBetween { form, left: to.saturating_sub(from), span: none, skip: 0, next, pair };
        if spans.advance() {
            spans.skip = inside % spans.span.len;
            spans.span = spans.span.after(inside / spans.span.len);
        }
        spans
    }

    /// Makes the next whole span the current one. Returns `false` if no span is left.
    #[inline]
    fn advance(&mut self) -> bool {
        let at = self.next;
        self.next += 1;
        if let Form::Blocks(blocks) = self.form {
            let Some(Piece { src, dst, len }) = blocks.piece(at) else { return false };
            self.span = Span::single(src, dst, len);
            return true;
        }
        match self.span_at(at) {
            Some(span) => self.span = span,
            None => return false,
        }
        true
    }

    /// Returns span `at` of a form other than blocks, and advances to the next one. Not inlined, so that the usual case, blocks,
    /// can be inlined.
    #[inline(never)]
    fn span_at(&mut self, at: usize) -> Option<Span> {
        match self.form {
            Form::Blocks(_) => None,
            Form::Spans { spans, .. } => spans.get(at).copied(),
            Form::Template { template, .. } => {
                let span = template.placed(*template.pairs.get(self.pair)?, template.spans.get(at)?);
                if self.next == template.spans.len() {
                    (self.pair, self.next) = (self.pair + 1, 0);
                }
                Some(span)
            }
            Form::Packed(packed) => {
                let (span, next) = packed.at(at)?;
                self.next = next;
                Some(span)
            }
        }
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
