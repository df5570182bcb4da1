//! Checked requests: what a copy, swap, pull or push moves of each tensor, before it is planned.
//!
//! Lists of blocks are long and are stored several times on their way. Pairs of 32-bit block numbers take eight bytes per
//! block instead of twenty-four (docs/performance.md).

use super::spans::Piece;
use crate::error::{Error, Result};
use crate::fallible;

/// What the lists of a request are for, should there be no memory for one.
pub(crate) const REQUEST: &str = "the lists of a request";

/// One range per tensor, the same in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// Row read.
    pub src_row: u64,
    /// Row written.
    pub dst_row: u64,
    /// First byte read, from the start of the tensor.
    pub src_offset: u64,
    /// First byte written, from the start of the tensor.
    pub dst_offset: u64,
    /// How many bytes, above zero.
    pub bytes: u64,
    /// In how many tensors.
    pub num_tensors: u32,
}

/// Whole blocks to copy, every index in range, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPairs {
    /// Source block and destination block.
    pub pairs: Vec<(u64, u64)>,
    /// Bytes of one block in one tensor.
    pub block_bytes: u64,
    /// In how many tensors.
    pub num_tensors: u32,
}

/// What a pull or push moves: the pieces, in the order given, in each of `num_tensors` tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// In one tensor.
    pub pieces: Pieces,
    /// The first tensor read.
    pub src_tensor: u32,
    /// The first tensor written.
    pub dst_tensor: u32,
    /// How many of each.
    pub num_tensors: u32,
    /// The rows of the local cache that are used; rows may repeat.
    pub local_rows: Vec<u64>,
    /// Whether every tensor of the source is read.
    pub whole: bool,
}

/// What moves of one tensor, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pieces {
    /// Any bytes.
    Listed(Vec<Piece>),
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

impl From<Vec<Piece>> for Pieces {
    fn from(pieces: Vec<Piece>) -> Self {
        Pieces::Listed(pieces)
    }
}

impl Pieces {
    /// Blocks of `len` bytes by the numbers read and written, each of which lies in a tensor.
    pub(crate) fn blocks(
        len: u64,
        pairs: impl ExactSizeIterator<Item = (u64, u64)> + Clone,
    ) -> Result<Pieces> {
        total_bytes(pairs.len(), len)?;
        let any = pairs.clone().fold(0, |any, (src, dst)| any | src | dst);
        if u32::try_from(any).is_ok() {
            #[expect(clippy::cast_possible_truncation, reason = "no number has a higher bit")]
            let pairs = fallible::collect(REQUEST, pairs.map(|(src, dst)| (src as u32, dst as u32)))?;
            return Ok(Pieces::Blocks { len, first: (0, 0), pairs });
        }
        let one = |(src, dst): (u64, u64)| Piece { src: src * len, dst: dst * len, len };
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
    pub fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        (0..self.count()).map(|at| match self {
            Pieces::Listed(pieces) => pieces[at],
            Pieces::Blocks { len, first, pairs } => {
                let (src, dst) = pairs[at];
                Piece { src: first.0 + u64::from(src) * len, dst: first.1 + u64::from(dst) * len, len: *len }
            }
        })
    }

    /// The same, written `by` bytes further on. All of it lies in a tensor there.
    pub(crate) fn shifted(mut self, by: u64) -> Pieces {
        match &mut self {
            Pieces::Listed(pieces) => pieces.iter_mut().for_each(|piece| piece.dst += by),
            Pieces::Blocks { first, .. } => first.1 += by,
        }
        self
    }
}

/// Lists may repeat blocks, so their bytes are not bounded by a tensor.
pub(crate) fn total_bytes(blocks: usize, block_bytes: u64) -> Result<()> {
    match (blocks as u64).checked_mul(block_bytes) {
        Some(bytes) if i64::try_from(bytes).is_ok() => Ok(()),
        _ => {
            let allowed = format!("below 2^63 bytes in all, in blocks of {block_bytes} bytes");
            Err(Error::argument("the number of blocks", blocks, allowed))
        }
    }
}
