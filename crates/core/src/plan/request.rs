//! Checked requests: what a copy, swap, pull or push moves in each tensor, before it is planned.
//!
//! Block lists are long, and each step of a call stores them again. A pair of 32-bit block numbers takes 8
//! bytes; a [`Piece`] takes 24 (docs/performance.md).

use std::sync::Arc;

use super::blocks::Blocks;
use super::spans::Piece;
use crate::error::{Error, Result};
use crate::fallible;

/// Name of the lists of a request in out-of-memory errors.
pub(crate) const REQUEST: &str = "the lists of a request";

/// What a call moves: the same pieces, in the order given, in each of `num_tensors` tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    pub pieces: Pieces,
    pub src_tensor: u32,
    pub dst_tensor: u32,
    pub num_tensors: u32,
    /// Rows of the source cache that are read, if it is a local cache. Rows may repeat.
    pub src_rows: Vec<u64>,
    /// Rows of the destination cache that are written, if it is a local cache. Rows may repeat.
    pub dst_rows: Vec<u64>,
    /// Whether every tensor of the source is read.
    pub all_tensors: bool,
}

/// The pieces that move in one tensor, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pieces {
    /// Pieces of any size and position.
    Listed(Vec<Piece>),
    Blocks(Blocks),
}

impl Default for Pieces {
    fn default() -> Self {
        Pieces::Listed(Vec::new())
    }
}

impl Pieces {
    /// Returns blocks of `len` bytes from pairs of source and destination block numbers, each of which must
    /// lie inside its tensor. `Err(InvalidArgument)` if they have 2^63 bytes or more in all.
    pub fn blocks(len: u64, pairs: impl ExactSizeIterator<Item = (u64, u64)> + Clone) -> Result<Pieces> {
        total_bytes(pairs.len() as u64, len)?;
        let any = pairs.clone().fold(0, |any, (src, dst)| any | src | dst);
        if u32::try_from(any).is_ok() {
            #[expect(clippy::cast_possible_truncation, reason = "no number has a higher bit")]
            let pairs = fallible::collect(REQUEST, pairs.map(|(src, dst)| (src as u32, dst as u32)))?;
            return Ok(Pieces::Blocks(Blocks { len, src: 0, dst: 0, pairs: Arc::new(pairs) }));
        }
        let one = |(src, dst): (u64, u64)| Piece { src: src * len, dst: dst * len, len };
        fallible::collect(REQUEST, pairs.map(one)).map(Pieces::Listed)
    }

    pub fn count(&self) -> usize {
        match self {
            Pieces::Listed(pieces) => pieces.len(),
            Pieces::Blocks(blocks) => blocks.pairs.len(),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        (0..self.count()).map(|at| match self {
            Pieces::Listed(pieces) => pieces[at],
            Pieces::Blocks(blocks) => blocks.piece_of(blocks.pairs[at]),
        })
    }

    /// Returns the same pieces, written `by` bytes later. All of them must lie inside the tensor there.
    pub(crate) fn shifted(mut self, by: u64) -> Pieces {
        match &mut self {
            Pieces::Listed(pieces) => pieces.iter_mut().for_each(|piece| piece.dst += by),
            Pieces::Blocks(blocks) => blocks.dst += by,
        }
        self
    }
}

/// Returns `Err(InvalidArgument)` if blocks of a list have 2^63 bytes or more in all. The size of a tensor
/// does not bound this sum, because a list may repeat blocks.
pub(crate) fn total_bytes(blocks: u64, block_bytes: u64) -> Result<()> {
    match blocks.checked_mul(block_bytes) {
        Some(bytes) if i64::try_from(bytes).is_ok() => Ok(()),
        _ => Err(Error::invalid(format!("{blocks} blocks of {block_bytes} bytes are 2^63 bytes or more"))),
    }
}
