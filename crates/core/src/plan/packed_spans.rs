//! Spans of a peer's plan in the bytes they came in: as few as six each, where a [`Span`] takes 48.
//!
//! A frame of 60 MiB may carry ten million spans. They are kept packed and unpacked one at a time, so a plan takes about as
//! much memory as its message (`a_plan_takes_a_bounded_multiple_of_its_bytes`). Not for: short plans, which are lists of
//! [`Span`], or whether spans make sense (`parts`, `conflicts`).

use std::fmt;
use std::sync::Arc;

use serde::de::{SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::span_limits::Tally;
use super::spans::Span;
use crate::error::{Error, Result};
use crate::fallible;

/// Most bytes of one packed span: six numbers of 64 bits, seven bits to the byte.
const LONGEST: usize = 60;
/// Spans between two marks of a wave.
const STRIDE: usize = 64;

/// Packed spans, one after the other.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SpanList {
    bytes: Vec<u8>,
    count: usize,
}

impl SpanList {
    /// The list of `spans`.
    pub fn pack(spans: impl IntoIterator<Item = Span>) -> Result<SpanList> {
        let mut list = SpanList::default();
        spans.into_iter().try_for_each(|span| list.push(&span))?;
        Ok(list)
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes they take.
    pub(super) fn packed_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// One after the other.
    pub fn iter(&self) -> impl Iterator<Item = Span> + Clone + '_ {
        self.from(0).map(|(span, _)| span)
    }

    /// The spans from byte `at` on, each with the byte where the next starts.
    pub(super) fn from(&self, mut at: usize) -> impl Iterator<Item = (Span, usize)> + Clone + '_ {
        std::iter::from_fn(move || {
            let (span, next) = self.at(at)?;
            at = next;
            Some((span, next))
        })
    }

    /// The span at byte `at`, and where the next starts.
    pub(super) fn at(&self, at: usize) -> Option<(Span, usize)> {
        let rest = self.bytes.get(at..).filter(|rest| !rest.is_empty())?;
        // Only whole spans were ever packed, so this is one.
        let (span, rest) = postcard::take_from_bytes(rest).ok()?;
        Some((span, self.bytes.len() - rest.len()))
    }

    fn push(&mut self, span: &Span) -> Result<()> {
        let mut room = [0; LONGEST];
        let packed = postcard::to_slice(span, &mut room).map_err(|error| {
            Error::new(crate::error::ErrorKind::System, "a span cannot be packed").because(error)
        })?;
        let (capacity, len) = (self.bytes.capacity(), self.bytes.len());
        if capacity - len < packed.len() {
            // A quarter at a time, not twice as much: what is reserved counts as taken.
            let more = (len / 4).max(64 * LONGEST);
            self.bytes.try_reserve_exact(more).map_err(|_| fallible::short("a plan", len + more))?;
        }
        self.bytes.extend_from_slice(packed);
        self.count += 1;
        Ok(())
    }
}

impl fmt::Debug for SpanList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpanList({} spans, {} bytes)", self.count, self.bytes.len())
    }
}

impl Serialize for SpanList {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut list = to.serialize_seq(Some(self.count))?;
        self.iter().try_for_each(|span| list.serialize_element(&span))?;
        list.end()
    }
}

/// Spans as they are read from a message: packed, or the error that ends the plan. All of them are read either way, so that
/// what follows in the message is found.
pub struct Received(pub Result<SpanList>);

impl<'de> Deserialize<'de> for Received {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(Spans)
    }
}

struct Spans;

impl<'de> Visitor<'de> for Spans {
    type Value = Received;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of spans")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Received, A::Error> {
        let (mut list, mut tally) = (Ok(SpanList::default()), Tally::default());
        while let Some(span) = seq.next_element()? {
            if let Ok(spans) = &mut list
                && let Err(error) = tally.add(&span).and_then(|()| spans.push(&span))
            {
                list = Err(error);
            }
        }
        Ok(Received(list))
    }
}

/// One wave of packed spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packed {
    spans: Arc<SpanList>,
    /// Byte where the first starts, and where the last ends.
    first: usize,
    end: usize,
    pub(super) count: usize,
    /// Pieces of all of them.
    pub(super) pieces: u64,
    /// Of every `STRIDE`-th span but the first: where it starts, and the bytes of one tensor before it.
    marks: Vec<(usize, u64)>,
}

impl Packed {
    /// The wave of `count` spans of `spans` from byte `first` on, its bytes in one tensor, and where the next wave starts.
    /// `None` if there are not as many.
    pub(super) fn new(
        spans: &Arc<SpanList>,
        first: usize,
        count: usize,
    ) -> Result<Option<(Packed, u64, usize)>> {
        let mut wave =
            Packed { spans: spans.clone(), first, end: first, count, pieces: 0, marks: Vec::new() };
        let (mut bytes, mut at) = (0, first);
        for index in 0..count {
            let Some((span, next)) = spans.at(at) else { return Ok(None) };
            if index > 0 && index.is_multiple_of(STRIDE) {
                fallible::push("a plan", &mut wave.marks, (at, bytes))?;
            }
            bytes += span.bytes();
            wave.pieces += span.count;
            at = next;
        }
        wave.end = at;
        Ok(Some((wave, bytes, at)))
    }

    /// Its spans.
    pub(super) fn iter(&self) -> impl Iterator<Item = Span> + Clone + '_ {
        self.spans.from(self.first).take(self.count).map(|(span, _)| span)
    }

    /// Where the span with byte `from` of one tensor starts, and the bytes of one tensor before it.
    pub(super) fn seek(&self, from: u64) -> (usize, u64) {
        let marked = self.marks.partition_point(|&(_, before)| before <= from);
        let (mut at, mut before) = match marked.checked_sub(1) {
            Some(mark) => self.marks[mark],
            None => (self.first, 0),
        };
        while let Some((span, next)) = self.at(at).filter(|(span, _)| before + span.bytes() <= from) {
            before += span.bytes();
            at = next;
        }
        (at, before)
    }

    /// The span at byte `at`, and where the next starts.
    pub(super) fn at(&self, at: usize) -> Option<(Span, usize)> {
        if at < self.end { self.spans.at(at) } else { None }
    }
}
