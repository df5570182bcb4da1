//! Where the rows of a tensor lie: row `r` has `bytes` bytes from `r·stride` on.

/// The size of a row, and the distance from one row to the next. The bytes between two rows are a *gap*, which is not
/// part of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSizes {
    bytes: u64,
    stride: u64,
}

impl RowSizes {
    /// Returns rows of `bytes` bytes, each of which begins `stride` bytes after the one before. A row has at least one
    /// byte, and rows do not overlap: smaller numbers are raised.
    pub fn new(bytes: u64, stride: u64) -> RowSizes {
        let bytes = bytes.max(1);
        RowSizes { bytes, stride: stride.max(bytes) }
    }

    /// Returns rows of `bytes` bytes without gaps.
    pub fn dense(bytes: u64) -> RowSizes {
        Self::new(bytes, bytes)
    }

    /// Returns the bytes of a row.
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// Returns the bytes from the start of one row to the start of the next.
    pub fn stride(self) -> u64 {
        self.stride
    }

    /// Returns whether there are bytes between the rows.
    pub fn has_gaps(self) -> bool {
        self.stride != self.bytes
    }

    /// Returns the row in which the byte `at` of a tensor lies, or after which it lies.
    pub fn row_of(self, at: u64) -> u64 {
        at / self.stride
    }

    /// Returns the offset of the byte `at` of a tensor in its row.
    pub fn offset_in_row(self, at: u64) -> u64 {
        at % self.stride
    }

    /// Returns whether `len` bytes from `start` on touch no gap. Rows without gaps may be crossed.
    pub fn hold(self, start: u64, len: u64) -> bool {
        !self.has_gaps() || self.offset_in_row(start).checked_add(len).is_some_and(|end| end <= self.bytes)
    }

    /// Returns the rows that `len` bytes from `start` on touch. There must be at least one byte.
    pub fn touched(self, start: u64, len: u64) -> std::ops::Range<u64> {
        self.row_of(start)..self.row_of(start + (len - 1)) + 1
    }

    /// Returns groups of `count` rows as if each were one row.
    #[must_use]
    pub fn grouped(self, count: u64) -> RowSizes {
        let stride = self.stride.saturating_mul(count.max(1));
        Self::new(stride - (self.stride - self.bytes), stride)
    }
}

impl From<u64> for RowSizes {
    /// Returns rows of so many bytes without gaps.
    fn from(bytes: u64) -> RowSizes {
        RowSizes::dense(bytes)
    }
}
