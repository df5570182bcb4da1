//! The rows that a pull or push reads and writes.

use std::ops::Range;

use super::cache_rules::numbers;
use crate::error::{Error, Result, ensure};
use crate::model::{RowList, SubRow};
use crate::plan::Piece;

/// The rows that a pull or push moves between the `local` cache and the `remote` one. A pull writes the local rows, and a push
/// reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum Rows {
    /// `size` bytes of every tensor of a batch slot, from an offset in each of the two slots (contract §9.1); a size of −1
    /// stands for the rest of the local slot. A push moves whole slots only.
    Slot { local: u32, remote_offset: u64, local_offset: u64, size: i64 },
    /// Blocks, pair by pair.
    Blocks { remote: Vec<i64>, local: Vec<i64> },
    /// Like `Blocks`, for caches of either kind, because the C++ class does not distinguish them.
    AnyKind { remote: Vec<i64>, local: Vec<i64> },
    /// Like `Blocks`, but only a part of every block.
    SubRows { remote: Vec<i64>, local: Vec<i64>, part: SubRow },
    /// A remote batch slot, cut into local blocks from its start. For pulls only.
    SlotToBlocks { local: Vec<i64> },
    /// Bytes of every tensor of caches of one block, by their offsets there. Bytes that a later piece writes again count as its
    /// bytes only.
    Bytes { pieces: Vec<Piece> },
    /// Some tokens of a sequence whose remote and local blocks are given in the order of its tokens. Both caches must
    /// have KV layouts. Without a range, as many tokens move as the other side's range has, or both lists can hold.
    Sequence {
        remote: Vec<i64>,
        local: Vec<i64>,
        remote_tokens: Option<Range<u64>>,
        local_tokens: Option<Range<u64>>,
    },
}

impl Rows {
    /// Returns the first `size` bytes of every tensor of a batch slot; −1 for the size of the local slot.
    pub const fn slot(local: u32, size: i64) -> Rows {
        Rows::Slot { local, remote_offset: 0, local_offset: 0, size }
    }

    /// Returns how many blocks, or pieces of bytes, the caller named.
    pub fn num_blocks(&self) -> usize {
        match self {
            Rows::Bytes { pieces } => pieces.len(),
            _ => self.local_blocks().map_or(0, <[i64]>::len),
        }
    }

    /// Returns the rows of the local cache that are read or written, once they were checked.
    pub fn local_rows(&self) -> Result<RowList> {
        match (self.local_slot(), self.local_blocks()) {
            (Some(slot), _) => Ok([u64::from(slot)].into()),
            (None, None) if matches!(self, Rows::Bytes { .. }) => Ok([0].into()),
            (None, blocks) => numbers(blocks.unwrap_or_default()),
        }
    }

    /// Returns the local slot, if it is one.
    pub(crate) fn local_slot(&self) -> Option<u32> {
        if let Rows::Slot { local, .. } = self { Some(*local) } else { None }
    }

    /// Returns the list of local blocks, if there is one.
    pub(super) fn local_blocks(&self) -> Option<&[i64]> {
        match self {
            Rows::Slot { .. } | Rows::Bytes { .. } => None,
            Rows::Blocks { local, .. }
            | Rows::AnyKind { local, .. }
            | Rows::SubRows { local, .. }
            | Rows::Sequence { local, .. }
            | Rows::SlotToBlocks { local } => Some(local),
        }
    }

    /// Returns the list of remote blocks, if there is one.
    pub(super) fn remote_blocks(&self) -> Option<&[i64]> {
        match self {
            Rows::Slot { .. } | Rows::SlotToBlocks { .. } | Rows::Bytes { .. } => None,
            Rows::Blocks { remote, .. }
            | Rows::AnyKind { remote, .. }
            | Rows::SubRows { remote, .. }
            | Rows::Sequence { remote, .. } => Some(remote),
        }
    }

    /// Returns the part of every block that moves.
    pub(super) fn part(&self) -> SubRow {
        if let Rows::SubRows { part, .. } = self { *part } else { SubRow::default() }
    }

    /// Returns whether this is a slot without an offset and a size.
    pub(super) fn is_whole_slot(&self) -> bool {
        matches!(self, Rows::Slot { remote_offset: 0, local_offset: 0, size: -1, .. })
    }

    /// Returns `Err(InvalidArgument)` for a part of a slot, because it is not known which tokens that is.
    pub(super) fn no_part_of_slot(&self) -> Result<()> {
        let Rows::Slot { remote_offset, local_offset, size, .. } = self else { return Ok(()) };
        ensure(self.is_whole_slot(), || {
            Error::invalid(
                "a pull between different KV layouts moves whole slots: size must be -1 and both offsets 0",
            )
            .with("size", size)
            .with("src_cache_offset", remote_offset)
            .with("dst_cache_offset", local_offset)
        })
    }

    /// Returns `Err(InvalidArgument)` for what only a pull moves.
    pub(super) fn check_push(&self) -> Result<()> {
        let pushed = match self {
            Rows::Slot { .. } => self.is_whole_slot(),
            Rows::SlotToBlocks { .. } => false,
            _ => true,
        };
        let text = "a push moves whole slots into slots, and blocks into blocks";
        ensure(pushed, || Error::invalid(text))
    }
}
