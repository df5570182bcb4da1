//! Which end of a plan is a cache of this engine.

use super::spans::Piece;

/// The end of a plan that is a cache of this engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalEnd {
    /// The plan reads the local cache.
    Source,
    /// The plan writes the local cache.
    Destination,
}

impl LocalEnd {
    /// Returns where the local end of a piece starts.
    pub fn of(self, piece: &Piece) -> u64 {
        match self {
            LocalEnd::Source => piece.src,
            LocalEnd::Destination => piece.dst,
        }
    }
}
