//! Spans of a long plan from a peer, kept in their encoded form.
//!
//! An encoded span takes as few as 6 bytes, a [`Span`] 48. Decoded one at a time, a plan takes about as much
//! memory as its message (`a_plan_takes_a_bounded_multiple_of_its_bytes`).

use std::fmt;
use std::marker::PhantomData;

use serde::de::{SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::span_limits::Tally;
use super::spans::Span;
use crate::error::{Error, Result};
use crate::fallible;

/// Maximum size of a packed span in bytes: six 64-bit numbers, each in up to 10 bytes of 7 bits.
const LONGEST: usize = 60;
/// Number of spans between two marks.
const STRIDE: usize = 64;

#[derive(Clone, Default, PartialEq, Eq)]
pub struct SpanList {
    bytes: Vec<u8>,
    count: usize,
}

impl SpanList {
    /// Packs `spans`. `Err(OutOfMemory)` if the list cannot be allocated.
    pub fn pack(spans: impl IntoIterator<Item = Span>) -> Result<SpanList> {
        let mut list = SpanList::default();
        spans.into_iter().try_for_each(|span| list.push(&span))?;
        Ok(list)
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub(super) fn packed_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the spans in order, decoding each when it is reached.
    pub fn iter(&self) -> impl Iterator<Item = Span> + Clone + '_ {
        self.from(0).map(|(span, _)| span)
    }

    /// Returns the spans from byte `at` on, each with the byte at which the next one starts.
    pub(super) fn from(&self, mut at: usize) -> impl Iterator<Item = (Span, usize)> + Clone + '_ {
        std::iter::from_fn(move || {
            let (span, next) = self.at(at)?;
            at = next;
            Some((span, next))
        })
    }

    /// Returns the span at byte `at` and the byte at which the next one starts.
    pub(super) fn at(&self, at: usize) -> Option<(Span, usize)> {
        let rest = self.bytes.get(at..).filter(|rest| !rest.is_empty())?;
        // `push` only ever added whole spans, so decoding cannot fail at the start of one.
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
            // Most lists have one span. Others grow by a quarter instead of doubling, because reserved memory counts as used.
            let more = if len == 0 { LONGEST } else { (len / 4).max(64 * LONGEST) };
            fallible::grow_exact("a plan", &mut self.bytes, more)?;
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

/// Spans as they are read from a message: the packed list, or the error that makes the plan unusable.
pub struct ReceivedSpans(pub Result<SpanList>);

impl<'de> Deserialize<'de> for ReceivedSpans {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut tally = Tally::default();
        let list = read_list(from, SpanList::default(), |spans: &mut SpanList, span: Span| {
            tally.add(&span)?;
            spans.push(&span)
        });
        list.map(ReceivedSpans)
    }
}

/// Reads a list from a message, item by item. All items are read, so that the fields after them are found;
/// the result is the first error of `add`.
pub fn read_list<'de, D: Deserializer<'de>, L, T: Deserialize<'de>>(
    from: D,
    list: L,
    add: impl FnMut(&mut L, T) -> Result<()>,
) -> Result<Result<L>, D::Error> {
    from.deserialize_seq(Items { list, add, item: PhantomData })
}

struct Items<L, F, T> {
    list: L,
    add: F,
    item: PhantomData<T>,
}

impl<'de, L, F: FnMut(&mut L, T) -> Result<()>, T: Deserialize<'de>> Visitor<'de> for Items<L, F, T> {
    type Value = Result<L>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Result<L>, A::Error> {
        let mut outcome = Ok(());
        while let Some(item) = seq.next_element()? {
            outcome = outcome.and_then(|()| (self.add)(&mut self.list, item));
        }
        Ok(outcome.map(|()| self.list))
    }
}

/// Packed spans with marks, so that a position in a tensor is found without decoding all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packed {
    spans: SpanList,
    pub(super) pieces: u64,
    /// For every `STRIDE`-th span except the first: the byte at which it starts, and the bytes of one tensor
    /// before it.
    marks: Vec<(usize, u64)>,
}

impl Packed {
    /// Returns the packed spans of `spans`, and their bytes in one tensor.
    pub(super) fn new(spans: SpanList) -> Result<(Packed, u64)> {
        let (mut marks, mut pieces, mut bytes, mut at) = (Vec::new(), 0, 0, 0);
        for (index, (span, next)) in spans.from(0).enumerate() {
            if index > 0 && index.is_multiple_of(STRIDE) {
                fallible::push("a plan", &mut marks, (at, bytes))?;
            }
            bytes += span.bytes();
            pieces += span.count;
            at = next;
        }
        Ok((Packed { spans, pieces, marks }, bytes))
    }

    pub(super) fn len(&self) -> usize {
        self.spans.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Span> + Clone + '_ {
        self.spans.iter()
    }

    /// Returns the byte at which the span with byte `from` of one tensor starts, and the bytes of one tensor
    /// before that span.
    pub(super) fn seek(&self, from: u64) -> (usize, u64) {
        let marked = self.marks.partition_point(|&(_, before)| before <= from);
        let (mut at, mut before) = marked.checked_sub(1).map_or((0, 0), |mark| self.marks[mark]);
        while let Some((span, next)) = self.at(at).filter(|(span, _)| before + span.bytes() <= from) {
            before += span.bytes();
            at = next;
        }
        (at, before)
    }

    /// Returns the span at byte `at` and the byte at which the next one starts.
    pub(super) fn at(&self, at: usize) -> Option<(Span, usize)> {
        self.spans.at(at)
    }
}
