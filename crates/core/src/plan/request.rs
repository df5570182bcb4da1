//! Checked requests: what a copy, swap, pull or push moves in each tensor, before it is planned.
//!
//! Block lists are long, and each step of a call stores them again. So the plan and the message of a call share one list
//! of pairs of 32-bit block numbers, which takes 8 bytes for each block (benches/results/log.md).

use super::side::Side;
use super::spans::{Piece, Span};
use super::template::{Pairs, Template};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::RowList;

/// Name of the lists of a request in out-of-memory errors.
pub(crate) const REQUEST: &str = "the lists of a request";

/// What a call moves: the same pieces, in the order given, in each of `num_tensors` tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    pub pieces: Pieces,
    pub src_tensor: u32,
    pub dst_tensor: u32,
    pub num_tensors: u32,
    /// Rows of the source cache that are read, if it is local. Rows may repeat. Empty for pushes, whose callers have them.
    pub src_rows: RowList,
    /// Rows of the destination cache that are written, if it is local. Rows may repeat. Empty for pulls, whose callers have them.
    pub dst_rows: RowList,
}

/// The pieces that move in one tensor, in the order given: the same part of many rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pieces {
    /// One span of one piece at each pair. Nothing by default.
    pub(super) template: Template,
    /// The last piece, if it is shorter than the others. It starts where a row of the destination starts.
    pub(super) short: Option<Piece>,
    /// The first row that a pair cannot name, and the index of its pair. There are no pairs then.
    beyond: Option<(Side, u64, usize)>,
}

impl Pieces {
    #[cfg(feature = "testing")]
    /// Returns blocks of `len` bytes from pairs of source and destination block numbers, each of which must
    /// lie inside its tensor. `Err(InvalidArgument)` if they have 2^63 bytes or more in all.
    pub fn blocks(len: u64, pairs: impl ExactSizeIterator<Item = (u64, u64)> + Clone) -> Result<Pieces> {
        Self::rows(Piece { src: 0, dst: 0, len }, (len, len), pairs)
    }

    /// Returns the same part of many rows: `first` says which part of row 0 of the source goes to which part of row 0 of
    /// the destination, and `strides` how far apart the rows of both are. Each row must lie inside its tensor.
    /// `Err(InvalidArgument)` if the parts have 2^63 bytes or more in all.
    pub fn rows(
        first: Piece,
        strides: (u64, u64),
        pairs: impl ExactSizeIterator<Item = (u64, u64)> + Clone,
    ) -> Result<Pieces> {
        let Piece { src, dst, len } = first;
        total_bytes(pairs.len() as u64, len)?;
        let any = pairs.clone().fold(0, |any, (src, dst)| any | src | dst);
        if u32::try_from(any).is_err() {
            let mut rows = pairs
                .enumerate()
                .flat_map(|(at, (src, dst))| [(Side::Source, src, at), (Side::Destination, dst, at)]);
            let beyond = rows.find(|&(_, row, _)| u32::try_from(row).is_err());
            return Ok(Pieces { beyond, ..Pieces::default() });
        }
        #[expect(clippy::cast_possible_truncation, reason = "no number has a higher bit")]
        let pairs: Pairs =
            fallible::collect_inline(REQUEST, pairs.map(|(src, dst)| (src as u32, dst as u32)))?;
        let template = Template::new(strides, pairs, [Span::single(src, dst, len)]);
        Ok(Pieces { template, ..Pieces::default() })
    }

    /// Returns the number of bytes in one tensor. 2^64 - 1 stands for more.
    pub(crate) fn bytes(&self) -> u64 {
        let last = self.short.map_or(0, |piece| piece.len);
        self.template.bytes().unwrap_or(u64::MAX).saturating_add(last)
    }

    /// Returns `Err(InvalidArgument)` if a row has a number of 2^32 or above. This error comes after all others of the
    /// arguments.
    pub(crate) fn check_numbers(&self) -> Result<()> {
        let Some((side, row, pair)) = self.beyond else { return Ok(()) };
        let name = side.of(("source block", "destination block"));
        Err(Error::out_of_range(name, row, format_args!("0 to {}", u32::MAX)).with("position", pair))
    }

    /// Returns the same pieces with a `last` one, which is shorter. It must start where one of the rows of the destination starts.
    #[must_use]
    pub fn with_last(self, last: Option<Piece>) -> Pieces {
        Pieces { short: last, ..self }
    }

    /// Returns the same pieces, written `by` bytes later. All of them must lie inside the tensor there.
    pub(crate) fn shifted(mut self, by: u64) -> Pieces {
        self.template.spans.iter_mut().for_each(|span| span.dst += by);
        self.short.iter_mut().for_each(|piece| piece.dst += by);
        self
    }

    #[cfg(feature = "testing")]
    pub fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        self.template.first_pieces().chain(self.short)
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
