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
        let (index, skip) = match &self.form {
            Form::Spans { ends, .. } => (ends.partition_point(|&end| end <= from), 0),
            Form::Packed(packed) => packed.seek(from),
            Form::Blocks(blocks) => {
                (usize::try_from(from / blocks.len).unwrap_or(usize::MAX), from % blocks.len)
            }
            Form::Template { ends, .. } => {
                let one = ends.last().copied().unwrap_or(0).max(1);
                let span = ends.partition_point(|&end| end <= from % one);
                (usize::try_from(from / one).unwrap_or(usize::MAX), span as u64)
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

/// Returns for each span the bytes up to its end, and the bytes of all.
fn ends_of(spans: &[Span]) -> Result<(Vec<u64>, u64)> {
    let mut bytes = 0;
    let end = |span: &Span| {
        bytes += span.bytes();
        bytes
    };
    Ok((fallible::collect(PLAN, spans.iter().map(end))?, bytes))
}

struct WavePieces<'a> {
    form: &'a Form,
    at: u64,
    to: u64,
    /// Index of the span, of the block, or of the pair of a template; for packed spans, the byte at which the
    /// current span starts.
    index: usize,
    /// For blocks, the bytes of the current block before the first piece; for packed spans, the bytes of one
    /// tensor in the spans before the current one; for a template, the index of the span.
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

    /// Returns the current piece of `template` and the bytes of it that are already done. Goes on to the next
    /// span, and after the last one to the next pair, once a span ends.
    fn of_template(&mut self, template: &Template, ends: &[u64]) -> Option<(Piece, u64)> {
        let at = usize::try_from(self.skip).ok()?;
        let span = template.placed(*template.pairs.get(self.index)?, template.spans.get(at)?);
        let end = self.index as u64 * ends.last()? + ends.get(at)?;
        let (piece, skip, last) = self.inside(&span, end);
        if last && at + 1 == ends.len() {
            (self.index, self.skip) = (self.index + 1, 0);
        } else if last {
            self.skip += 1;
        }
        Some((piece, skip))
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
            Form::Template { template, ends } => self.of_template(template, ends)?,
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
