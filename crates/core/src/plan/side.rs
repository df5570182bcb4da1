//! The two sides of a copy.

use serde::{Deserialize, Serialize};

/// A side of a copy: the cache that is read, or the one that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Side {
    /// The cache that is read.
    Source,
    /// The cache that is written.
    Destination,
}

impl Side {
    /// Both sides, the source first.
    pub const BOTH: [Side; 2] = [Side::Source, Side::Destination];

    /// Returns `source` for `Source`, and `destination` for `Destination`.
    pub fn of<T>(self, (source, destination): (T, T)) -> T {
        match self {
            Side::Source => source,
            Side::Destination => destination,
        }
    }

    /// Returns this side's and the other side's value as `(source, destination)`.
    pub fn source_first<T>(self, this: T, other: T) -> (T, T) {
        match self {
            Side::Source => (this, other),
            Side::Destination => (other, this),
        }
    }

    /// Returns the other side.
    #[must_use]
    pub fn other(self) -> Side {
        self.of((Side::Destination, Side::Source))
    }

    /// Returns what a plan does with the bytes of this side: `read` or `written`.
    pub(super) fn verb(self) -> &'static str {
        self.of(("read", "written"))
    }
}
