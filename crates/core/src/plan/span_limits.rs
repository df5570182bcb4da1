//! Limits on the spans of a peer's plan: the number of pieces, the number of bytes, and the fields of each
//! span.

use super::side::Side;
use super::spans::Span;
use super::template::Template;
use crate::error::{Error, Result, ensure};

/// Maximum number of pieces of a peer's plan in one tensor. A few bytes can name any number of pieces, and the check for
/// repeated destinations and the list of rows may visit each of them. A plan may have a piece for each head of each token:
/// at 256 bytes, 16 GiB of one tensor. Its check takes a fraction of a second.
const MAX_PIECES: u64 = 1 << 26;
/// Maximum number of pieces of the spans of one template, at one pair of positions.
const MAX_SPAN_PIECES: u64 = 1 << 24;

/// Running totals of the spans of a peer's plan.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pieces: u64,
    bytes: u64,
}

impl Tally {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a span. `Err(InvalidArgument)` if the span is invalid or the plan becomes too large with it.
    pub(super) fn add(&mut self, span: &Span) -> Result<()> {
        let sound = sound(span).then_some(());
        let sums = sound.and_then(|()| {
            let all = self.bytes.checked_add(span.len.checked_mul(span.count)?)?;
            Some((self.pieces.checked_add(span.count)?, all))
        });
        (self.pieces, self.bytes) = sums.ok_or_else(|| refused(&format!("{span:?}")))?;
        check_pieces(self.pieces, MAX_SPAN_PIECES)
    }

    /// Adds the spans of a template at each of its positions. `Err(InvalidArgument)` as [`add`](Self::add).
    pub(super) fn add_template(&mut self, template: &Template) -> Result<()> {
        let mut one = Tally::default();
        template.spans.iter().try_for_each(|span| one.add(span))?;
        let pairs = template.pairs.len() as u64;
        let sums = template.end_offsets().and_then(|_| {
            let pieces = self.pieces.checked_add(one.pieces.checked_mul(pairs)?)?;
            Some((pieces, self.bytes.checked_add(template.bytes()?)?))
        });
        let (spans, units) = (template.spans.len(), (template.src_unit, template.dst_unit));
        let text = || refused(&format!("{spans} spans at {pairs} pairs of places, {units:?} bytes apart"));
        (self.pieces, self.bytes) = sums.ok_or_else(text)?;
        check_pieces(self.pieces, MAX_PIECES)
    }
}

/// Returns `Err(InvalidArgument)` if a plan has more than `most` pieces in one tensor.
fn check_pieces(pieces: u64, most: u64) -> Result<()> {
    ensure(pieces <= most, || refused(&format!("more than {most} pieces in one tensor")))
}

fn sound(span: &Span) -> bool {
    let apart = span.count == 1 || span.dst_step.unsigned_abs() >= span.len;
    span.len > 0 && span.count > 0 && apart && Side::BOTH.iter().all(|&side| span.hull(side).is_some())
}

pub(super) fn refused(what: &str) -> Error {
    Error::invalid(format!("the plan is not valid: it has {what}"))
}
