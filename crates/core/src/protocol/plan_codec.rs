//! The encoding of a copy plan in messages.
//!
//! Scattered blocks are pairs of numbers that all have the width of the largest. A width for each number
//! would cost more time than its bytes save (benches/results/log.md). `plan` checks whether a plan is valid.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::fallible;
use crate::plan::{CopyPlan, Pairs, Side, Span, Template, Templates, TensorSteps, check_counts};

/// Name of the lists of a plan in out-of-memory errors.
const PLAN: &str = "a plan";

/// A plan as it is encoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WirePlan {
    pub num_tensors: u32,
    pub src: TensorSteps,
    pub dst: TensorSteps,
    pub templates: WireTemplates,
}

/// The templates of a plan: at most as many, with as many spans in all, as [`check_counts`] allows. An error if they were read to
/// their end, but are invalid or could not be allocated. The rest of the message can be read, so the peer still gets a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireTemplates(pub Result<Templates>);

impl TryFrom<&CopyPlan> for WirePlan {
    type Error = Error;

    fn try_from(plan: &CopyPlan) -> Result<WirePlan> {
        plan.check_sendable()?;
        let (src, dst) = (plan.tensors(Side::Source), plan.tensors(Side::Destination));
        let templates = WireTemplates(Ok(plan.templates().clone()));
        Ok(WirePlan { num_tensors: plan.num_tensors(), src, dst, templates })
    }
}

impl TryFrom<WirePlan> for CopyPlan {
    type Error = Error;

    fn try_from(WirePlan { num_tensors, src, dst, templates }: WirePlan) -> Result<CopyPlan> {
        CopyPlan::from_templates(num_tensors, src, dst, templates.0?)
    }
}

impl Serialize for WireTemplates {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        /// A [`Template`] in the order of its fields in the message.
        #[derive(Serialize)]
        struct SentTemplate<'a>(u64, u64, SentPairs<'a>, &'a [Span]);
        let templates = self.0.as_deref().map_err(serde::ser::Error::custom)?;
        to.collect_seq(templates.iter().map(|Template { src_unit, dst_unit, pairs, spans, .. }| {
            SentTemplate(*src_unit, *dst_unit, SentPairs(pairs), spans)
        }))
    }
}

impl<'de> Deserialize<'de> for WireTemplates {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut num_spans = 0;
        let templates = read_list(from, |templates, template: (u64, u64, ReceivedPairs, ReceivedSpans)| {
            let (src_unit, dst_unit, pairs, spans) = template;
            let (pairs, spans) = (pairs.0?, spans.0?);
            num_spans += spans.len();
            check_counts(templates.len() + 1, num_spans)?;
            fallible::push(PLAN, templates, Template::new((src_unit, dst_unit), pairs, spans))
        })?;
        Ok(WireTemplates(templates.map(|list| SmallVec::from_vec(list).into())))
    }
}

/// Spans as they are read; an error if they are more than a message may have.
struct ReceivedSpans(Result<Vec<Span>>);

impl<'de> Deserialize<'de> for ReceivedSpans {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let spans = read_list(from, |spans: &mut Vec<Span>, span| {
            check_counts(1, spans.len() + 1)?;
            if spans.len() == spans.capacity() {
                // Most lists have one span. Others grow by a quarter instead of doubling, because reserved memory counts as used.
                let more = if spans.is_empty() { 1 } else { (spans.len() / 4).max(4) };
                fallible::grow_exact(PLAN, spans, more)?;
            }
            spans.push(span);
            Ok(())
        });
        spans.map(ReceivedSpans)
    }
}

/// Reads a list, item by item. The result is the first error of `add`. The items after it are read, so that the fields after the
/// list are found, but neither kept nor charged.
fn read_list<'de, D: Deserializer<'de>, L, T: Deserialize<'de>>(
    from: D,
    add: impl FnMut(&mut Vec<L>, T) -> Result<()>,
) -> Result<Result<Vec<L>>, D::Error> {
    from.deserialize_seq(Items { add, types: PhantomData })
}

struct Items<L, F, T> {
    add: F,
    types: PhantomData<(L, T)>,
}

impl<'de, L, F: FnMut(&mut Vec<L>, T) -> Result<()>, T: Deserialize<'de>> Visitor<'de> for Items<L, F, T> {
    type Value = Result<Vec<L>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut list = Ok(Vec::new());
        while let Ok(items) = &mut list
            && let Some(item) = seq.next_element()?
        {
            if let Err(error) = (self.add)(items, item) {
                list = Err(error);
            }
        }
        while list.is_err() && fallible::temporary(|| seq.next_element::<T>().map(|item| item.is_some()))? {}
        Ok(list)
    }
}

/// Pairs of block numbers. In the message they are a byte string: the width in bytes
/// (1, 2 or 4), then the source and the destination number of each pair, in little endian.
struct SentPairs<'a>(&'a [(u32, u32)]);

impl Serialize for SentPairs<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        // `frame::no_room` takes this error for a failed allocation.
        to.serialize_bytes(&self.packed().map_err(serde::ser::Error::custom)?)
    }
}

impl SentPairs<'_> {
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
        for (room, &(src, dst)) in packed[1..].chunks_exact_mut(2 * WIDTH).zip(self.0) {
            room[..WIDTH].copy_from_slice(&bytes(src));
            room[WIDTH..].copy_from_slice(&bytes(dst));
        }
        Ok(packed)
    }
}

/// Pairs as they are read; an error if there are more than can have different destinations.
struct ReceivedPairs(Result<Pairs>);

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

/// Returns `None` unless there are only whole pairs.
///
/// More pairs than numbers of this width are refused, because two would have the same destination. So there
/// are few pairs of narrow numbers, which take up to four times as much memory as in the message.
fn unpacked<const WIDTH: usize>(bytes: &[u8], number: impl Fn([u8; WIDTH]) -> u32) -> Option<Result<Pairs>> {
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
    Some(fallible::collect_inline(PLAN, pairs))
}
