//! The encoding of a copy plan in messages.
//!
//! Scattered blocks are pairs of numbers that all have the width of the largest. A width for each number
//! would cost more time than its bytes save (benches/results/log.md). `plan` checks whether a plan is valid.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result};
use crate::fallible;
#[cfg(feature = "testing")]
pub use crate::plan::Span as WireSpan;
use crate::plan::{ReceivedSpans, SpanList, TensorSteps, check_counts, read_list};

/// A plan as it is encoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WirePlan {
    pub num_tensors: u32,
    pub src: TensorSteps,
    pub dst: TensorSteps,
    pub pieces: WirePieces,
}

impl WirePlan {
    /// Returns whether the plan is a list of templates.
    pub fn has_templates(&self) -> bool {
        matches!(self.pieces, WirePieces::Templates(_))
    }
}

/// What a plan copies in each tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "ReceivedPieces")]
pub enum WirePieces {
    /// A packed list, so that the size of the message bounds the memory of the spans
    /// (`a_plan_takes_a_bounded_multiple_of_its_bytes`).
    Spans(SpanList),
    /// At most as many, with as many spans in all, as [`check_counts`] allows.
    Templates(Vec<WireTemplate>),
    /// A plan that was read to its end, but is invalid or could not be allocated. The rest of its message can
    /// be read, so the peer still gets a reply. Never sent.
    #[serde(skip)]
    Unusable(Error),
}

/// Spans that are repeated at pairs of places.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WireTemplate {
    /// Bytes from one source place to the next.
    pub src_unit: u64,
    /// Bytes from one destination place to the next.
    pub dst_unit: u64,
    /// Numbers of the source and destination places.
    pub pairs: Pairs,
    /// The spans at place 0 of source and destination.
    pub spans: SpanList,
}

/// [`WirePieces`] as they are read. Each list is checked and bounded before memory is allocated for it.
#[derive(Deserialize)]
enum ReceivedPieces {
    Spans(ReceivedSpans),
    Templates(ReceivedTemplates),
}

impl From<ReceivedPieces> for WirePieces {
    fn from(received: ReceivedPieces) -> Self {
        let pieces = match received {
            ReceivedPieces::Spans(spans) => spans.0.map(WirePieces::Spans),
            ReceivedPieces::Templates(templates) => templates.0.map(WirePieces::Templates),
        };
        pieces.unwrap_or_else(WirePieces::Unusable)
    }
}

/// [`WireTemplate`] as it is read.
#[derive(Deserialize)]
struct ReceivedTemplate {
    src_unit: u64,
    dst_unit: u64,
    pairs: ReceivedPairs,
    spans: ReceivedSpans,
}

/// Templates as they are read; an error if they, or their spans, are more than a message may have.
struct ReceivedTemplates(Result<Vec<WireTemplate>>);

impl<'de> Deserialize<'de> for ReceivedTemplates {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut num_spans = 0;
        read_list(from, Vec::new(), |templates, template: ReceivedTemplate| {
            let ReceivedTemplate { src_unit, dst_unit, pairs, spans } = template;
            let (pairs, spans) = (Pairs(Arc::new(pairs.0?)), spans.0?);
            num_spans += spans.len();
            check_counts(templates.len() + 1, num_spans)?;
            fallible::push("a plan", templates, WireTemplate { src_unit, dst_unit, pairs, spans })
        })
        .map(ReceivedTemplates)
    }
}

/// Pairs of block numbers, shared with their plan. In the message they are a byte string: the width in bytes
/// (1, 2 or 4), then the source and the destination number of each pair, in little endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairs(pub Arc<Vec<(u32, u32)>>);

impl Serialize for Pairs {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        // `no_room` takes this error for a failed allocation, and nothing else can fail in `packed`.
        to.serialize_bytes(&self.packed().map_err(serde::ser::Error::custom)?)
    }
}

/// Pairs as they are read; an error if there are more than can have different destinations.
struct ReceivedPairs(Result<Vec<(u32, u32)>>);

impl<'de> Deserialize<'de> for ReceivedPairs {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let bytes = <&[u8]>::deserialize(from)?;
        let pairs = match bytes.split_first() {
            Some((1, rest)) => unpacked::<1>(rest, |[number]| number.into()),
            Some((2, rest)) => unpacked::<2>(rest, |bytes| u16::from_le_bytes(bytes).into()),
            Some((4, rest)) => unpacked::<4>(rest, u32::from_le_bytes),
            _ => None,
        };
        let whole = "a width of 1, 2 or 4 and whole pairs of numbers of that width";
        pairs.map(ReceivedPairs).ok_or_else(|| serde::de::Error::invalid_length(bytes.len(), &whole))
    }
}

impl Pairs {
    #[expect(clippy::cast_possible_truncation, reason = "no number has a higher bit")]
    fn packed(&self) -> Result<Vec<u8>> {
        let any = self.0.iter().fold(0, |any, &(src, dst)| any | src | dst);
        if u8::try_from(any).is_ok() {
            self.wide::<1>(|number| [number as u8])
        } else if u16::try_from(any).is_ok() {
            self.wide::<2>(|number| (number as u16).to_le_bytes())
        } else {
            self.wide::<4>(u32::to_le_bytes)
        }
    }

    fn wide<const WIDTH: usize>(&self, bytes: impl Fn(u32) -> [u8; WIDTH]) -> Result<Vec<u8>> {
        let mut packed = fallible::filled("a request", 0, 1 + 2 * WIDTH * self.0.len())?;
        packed[0] = u8::try_from(WIDTH).unwrap_or(0);
        for (room, &(src, dst)) in packed[1..].chunks_exact_mut(2 * WIDTH).zip(&*self.0) {
            room[..WIDTH].copy_from_slice(&bytes(src));
            room[WIDTH..].copy_from_slice(&bytes(dst));
        }
        Ok(packed)
    }
}

/// Returns `None` unless there are only whole pairs.
///
/// More pairs than numbers of this width are refused, because two would have the same destination. So there
/// are few pairs of narrow numbers, which take up to four times as much memory as in the message.
fn unpacked<const WIDTH: usize>(
    bytes: &[u8],
    number: impl Fn([u8; WIDTH]) -> u32,
) -> Option<Result<Vec<(u32, u32)>>> {
    let (numbers, rest) = bytes.as_chunks::<WIDTH>();
    let (pairs, odd) = numbers.as_chunks::<2>();
    if !rest.is_empty() || !odd.is_empty() {
        return None;
    }
    if pairs.len() as u64 > 1 << (8 * WIDTH) {
        let text = "a plan writes one destination twice: it has more pairs than there are block numbers of this width";
        let error = Error::invalid(text);
        return Some(Err(error.with("blocks", pairs.len()).with("width", WIDTH)));
    }
    let pairs = pairs.iter().map(|&[src, dst]| (number(src), number(dst)));
    Some(fallible::collect("a plan", pairs))
}
