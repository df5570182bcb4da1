//! A plan as it travels.
//!
//! Scattered blocks are pairs of numbers, all equally wide, as wide as the largest needs: coding number by number costs
//! more than the bytes it saves (docs/performance.md). Not for: whether a plan makes sense (`plan`).

use std::fmt;
use std::sync::Arc;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WirePlan {
    /// Tensors.
    pub num_tensors: u32,
    /// First tensor read.
    pub src_tensor: u32,
    /// First tensor written.
    pub dst_tensor: u32,
    /// What of each tensor.
    pub steps: WireSteps,
}

/// What a plan moves of each tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WireSteps {
    /// Any waves. Their spans stand in one list, so that what it takes in memory is bounded by its bytes
    /// (`a_plan_takes_a_bounded_multiple_of_its_bytes`).
    Spans {
        /// Spans of each wave.
        waves: Vec<u32>,
        /// The spans of all waves, one wave after the other.
        spans: Vec<WireSpan>,
    },
    /// One wave of equal blocks.
    Blocks {
        /// Bytes of a block.
        len: u64,
        /// Where block 0 is read.
        src: u64,
        /// Where block 0 is written.
        dst: u64,
        /// Number read and number written.
        pairs: Pairs,
    },
}

/// A span of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireSpan {
    /// First byte read.
    pub src: u64,
    /// First byte written.
    pub dst: u64,
    /// Bytes of one piece.
    pub len: u64,
    /// Pieces.
    pub count: u64,
    /// From one piece read to the next.
    pub src_step: i64,
    /// From one piece written to the next.
    pub dst_step: i64,
}

/// Pairs of numbers, shared with the plan they are of. In the message they are a byte string: the width in bytes (1, 2
/// or 4), then for each pair the number read and the number written, in little endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairs(pub Arc<Vec<(u32, u32)>>);

impl Serialize for Pairs {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.packed())
    }
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_bytes(Bytes)
    }
}

impl Pairs {
    #[expect(clippy::cast_possible_truncation, reason = "no number has a higher bit")]
    fn packed(&self) -> Vec<u8> {
        let any = self.0.iter().fold(0, |any, &(src, dst)| any | src | dst);
        if u8::try_from(any).is_ok() {
            self.wide::<1>(|number| [number as u8])
        } else if u16::try_from(any).is_ok() {
            self.wide::<2>(|number| (number as u16).to_le_bytes())
        } else {
            self.wide::<4>(u32::to_le_bytes)
        }
    }

    fn wide<const WIDTH: usize>(&self, bytes: impl Fn(u32) -> [u8; WIDTH]) -> Vec<u8> {
        let mut packed = vec![0; 1 + 2 * WIDTH * self.0.len()];
        packed[0] = u8::try_from(WIDTH).unwrap_or(0);
        for (room, &(src, dst)) in packed[1..].chunks_exact_mut(2 * WIDTH).zip(&*self.0) {
            room[..WIDTH].copy_from_slice(&bytes(src));
            room[WIDTH..].copy_from_slice(&bytes(dst));
        }
        packed
    }
}

struct Bytes;

impl Visitor<'_> for Bytes {
    type Value = Pairs;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a width of 1, 2 or 4 and whole pairs of numbers of that width")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Pairs, E> {
        let pairs = match bytes.split_first() {
            Some((1, rest)) => unpacked::<1>(rest, |[number]| number.into()),
            Some((2, rest)) => unpacked::<2>(rest, |bytes| u16::from_le_bytes(bytes).into()),
            Some((4, rest)) => unpacked::<4>(rest, u32::from_le_bytes),
            _ => None,
        };
        pairs.map(|pairs| Pairs(Arc::new(pairs))).ok_or_else(|| E::invalid_length(bytes.len(), &self))
    }
}

fn unpacked<const WIDTH: usize>(
    bytes: &[u8],
    number: impl Fn([u8; WIDTH]) -> u32,
) -> Option<Vec<(u32, u32)>> {
    let (numbers, rest) = bytes.as_chunks::<WIDTH>();
    let (pairs, odd) = numbers.as_chunks::<2>();
    let whole = rest.is_empty() && odd.is_empty();
    whole.then(|| pairs.iter().map(|&[src, dst]| (number(src), number(dst))).collect())
}
