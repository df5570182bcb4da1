//! The part of every row that a call moves.

/// A range of bytes of every row that a call moves, the same for all its rows. The default is whole rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubRow {
    /// Bytes to skip at the start of each row that is read.
    pub src_offset: u64,
    /// Bytes to skip at the start of each row that is written.
    pub dst_offset: u64,
    /// Bytes that move of each row. `None` means the rest of the row that has fewer bytes after its offset.
    pub length: Option<u64>,
}

impl SubRow {
    /// Returns whether whole rows move.
    pub fn is_whole(&self) -> bool {
        *self == SubRow::default()
    }
}
