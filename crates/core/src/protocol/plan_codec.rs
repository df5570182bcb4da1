//! The encoding of a copy plan in messages.
//!
//! Scattered blocks are pairs of numbers that all have the width of the largest. A width for each number
//! would cost more time than its bytes save (docs/performance.md). `plan` checks whether a plan is valid.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result, ensure};
use crate::fallible;
#[cfg(feature = "testing")]
pub use crate::plan::Span as WireSpan;
use crate::plan::{MOST_WAVES, ReceivedSpans, SpanList, check_counts, read_list};

/// A plan as it is encoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WirePlan {
    pub num_tensors: u32,
    pub src_tensor: u32,
    pub dst_tensor: u32,
    pub steps: WireSteps,
}

impl WirePlan {
    /// Returns whether the plan is a list of templates.
    pub fn has_templates(&self) -> bool {
        matches!(self.steps, WireSteps::Templates { .. })
    }
}

/// What a plan moves in each tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "ReceivedSteps")]
pub enum WireSteps {
    /// Any waves. Their spans are one packed list, so that the size of the message bounds their memory
    /// (`a_plan_takes_a_bounded_multiple_of_its_bytes`).
    Spans {
        waves: Vec<u32>,
        /// The spans of all waves, wave after wave.
        spans: SpanList,
    },
    /// One wave of equal blocks.
    Blocks {
        len: u64,
        /// Offset in bytes at which source block 0 starts.
        src: u64,
        /// Offset in bytes at which destination block 0 starts.
        dst: u64,
        pairs: Pairs,
    },
    /// A plan between layouts: waves that are templates, and tensors that may be skipped.
    Templates {
        /// Distance of two tensors that are read.
        src_step: u32,
        /// Distance of two tensors that are written.
        dst_step: u32,
        /// At most as many, with as many spans in all, as [`check_counts`] allows.
        templates: Vec<WireTemplate>,
    },
    /// A plan that was read to its end, but is invalid or could not be allocated. The rest of its message can
    /// be read, so the peer still gets a reply. Never sent.
    #[serde(skip)]
    Unusable(Error),
}

/// One wave: spans that are repeated at pairs of places.
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

/// [`WireSteps`] as they are read. Each list is checked and bounded before memory is allocated for it.
#[derive(Deserialize)]
enum ReceivedSteps {
    Spans { waves: ReceivedCounts, spans: ReceivedSpans },
    Blocks { len: u64, src: u64, dst: u64, pairs: ReceivedPairs },
    Templates { src_step: u32, dst_step: u32, templates: ReceivedTemplates },
}

impl From<ReceivedSteps> for WireSteps {
    fn from(received: ReceivedSteps) -> Self {
        let steps = match received {
            ReceivedSteps::Spans { waves, spans } => {
                waves.0.and_then(|waves| Ok(WireSteps::Spans { waves, spans: spans.0? }))
            }
            ReceivedSteps::Blocks { len, src, dst, pairs } => {
                pairs.0.map(|pairs| WireSteps::Blocks { len, src, dst, pairs: Pairs(Arc::new(pairs)) })
            }
            ReceivedSteps::Templates { src_step, dst_step, templates } => {
                templates.0.map(|templates| WireSteps::Templates { src_step, dst_step, templates })
            }
        };
        steps.unwrap_or_else(WireSteps::Unusable)
    }
}

/// The number of spans in each wave; an error if there are more waves than [`MOST_WAVES`].
struct ReceivedCounts(Result<Vec<u32>>);

impl<'de> Deserialize<'de> for ReceivedCounts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        read_list(from, Vec::new(), |counts, count: u32| {
            let fits = counts.len() < MOST_WAVES;
            ensure(fits, || {
                Error::invalid(format!("the plan is not valid: it has more than {MOST_WAVES} waves"))
            })?;
            fallible::push("a plan", counts, count)
        })
        .map(ReceivedCounts)
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
        let text = "a plan writes one destination twice in one wave: it has more blocks than numbers";
        let error = Error::invalid(text);
        return Some(Err(error.with("blocks", pairs.len()).with("width", WIDTH)));
    }
    let pairs = pairs.iter().map(|&[src, dst]| (number(src), number(dst)));
    Some(fallible::collect("a plan", pairs))
}
