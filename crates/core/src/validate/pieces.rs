//! What a pull or push moves of one tensor: any pieces, or equal blocks by their numbers.
//!
//! Lists of blocks are long, and each of them is written down several times on its way: eight bytes a block instead of
//! twenty-four (docs/performance.md). Not for: which rows a request names (`transfer`, `landing`).

use crate::error::{Error, Result};
use crate::fallible;

/// What the lists of a request are for, should there be no memory for one.
pub(super) const REQUEST: &str = "the lists of a request";

/// Bytes of one tensor that go from one place to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// First byte read, from the start of the tensor.
    pub src: u64,
    /// First byte written, from the start of the tensor.
    pub dst: u64,
    /// How many, above zero.
    pub len: u64,
}

/// What moves of one tensor, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pieces {
    /// Any bytes.
    Listed(Vec<Move>),
    /// Equal blocks.
    Blocks {
        /// Bytes of one.
        len: u64,
        /// Where block 0 is read, and where it is written.
        first: (u64, u64),
        /// Number read and number written, counted in blocks from there.
        pairs: Vec<(u32, u32)>,
    },
}

impl Default for Pieces {
    fn default() -> Self {
        Pieces::Listed(Vec::new())
    }
}

impl From<Vec<Move>> for Pieces {
    fn from(pieces: Vec<Move>) -> Self {
        Pieces::Listed(pieces)
    }
}

impl Pieces {
    /// Blocks of `len` bytes by the numbers read and written, each of which lies in a tensor.
    pub(super) fn blocks(
        len: u64,
        pairs: impl ExactSizeIterator<Item = (u64, u64)> + Clone,
    ) -> Result<Pieces> {
        total(pairs.len(), len)?;
        let any = pairs.clone().fold(0, |any, (src, dst)| any | src | dst);
        if u32::try_from(any).is_ok() {
            #[expect(clippy::cast_possible_truncation, reason = "no number has a higher bit")]
            let pairs = fallible::collect(REQUEST, pairs.map(|(src, dst)| (src as u32, dst as u32)))?;
            return Ok(Pieces::Blocks { len, first: (0, 0), pairs });
        }
        let one = |(src, dst): (u64, u64)| Move { src: src * len, dst: dst * len, len };
        fallible::collect(REQUEST, pairs.map(one)).map(Pieces::Listed)
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> usize {
        match self {
            Pieces::Listed(pieces) => pieces.len(),
            Pieces::Blocks { pairs, .. } => pairs.len(),
        }
    }

    /// One after the other.
    pub fn iter(&self) -> impl Iterator<Item = Move> + '_ {
        (0..self.count()).map(|at| match self {
            Pieces::Listed(pieces) => pieces[at],
            Pieces::Blocks { len, first, pairs } => {
                let (src, dst) = pairs[at];
                Move { src: first.0 + u64::from(src) * len, dst: first.1 + u64::from(dst) * len, len: *len }
            }
        })
    }

    /// The same, written `by` bytes further on. All of it lies in a tensor there.
    pub(super) fn shifted(mut self, by: u64) -> Pieces {
        match &mut self {
            Pieces::Listed(pieces) => pieces.iter_mut().for_each(|piece| piece.dst += by),
            Pieces::Blocks { first, .. } => first.1 += by,
        }
        self
    }
}

/// Lists may repeat blocks, so their bytes are not bounded by a tensor.
pub(super) fn total(blocks: usize, block_bytes: u64) -> Result<()> {
    match (blocks as u64).checked_mul(block_bytes) {
        Some(bytes) if i64::try_from(bytes).is_ok() => Ok(()),
        _ => {
            let allowed = format!("below 2^63 bytes in all, in blocks of {block_bytes} bytes");
            Err(Error::argument("the number of blocks", blocks, allowed))
        }
    }
}
