//! A set of rows as ranges.

use std::ops::Range;

use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::CacheId;

/// A set of rows: ascending ranges that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowRanges(Vec<Range<u64>>);

impl RowRanges {
    /// Name of these lists in out-of-memory errors.
    pub const LIST: &'static str = "the rows of a grant";

    /// Returns the set of the rows in `rows`, which may be in any order and repeat.
    pub fn of(mut rows: Vec<u64>) -> Result<RowRanges> {
        rows.sort_unstable();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for row in rows {
            match ranges.last_mut() {
                Some(last) if row < last.end => {}
                Some(last) if row == last.end => last.end += 1,
                _ => fallible::push(Self::LIST, &mut ranges, row..row + 1)?,
            }
        }
        Ok(RowRanges(ranges))
    }

    /// Returns the set with these ranges, or `None` if they are not as the type describes.
    pub fn from_ranges(ranges: Vec<Range<u64>>) -> Option<RowRanges> {
        let each = ranges.iter().all(|range| range.start < range.end);
        let apart = ranges.windows(2).all(|pair| pair[0].end < pair[1].start);
        (each && apart).then_some(RowRanges(ranges))
    }

    /// Returns the ranges.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Checks that a grant of these rows of `cache` lends `rows`.
    pub fn check(&self, cache: CacheId, rows: &[u64]) -> Result<()> {
        let Some(row) = self.first_missing(rows) else { return Ok(()) };
        let text = format!("block {row} is not among the blocks of the grant");
        Err(Error::new(ErrorKind::InvalidArgument, text).with("cache_id", cache))
    }

    /// Returns the first of `rows` that is not in the set.
    pub fn first_missing(&self, rows: &[u64]) -> Option<u64> {
        rows.iter().copied().find(|&row| {
            let next = self.0.partition_point(|range| range.end <= row);
            self.0.get(next).is_none_or(|range| row < range.start)
        })
    }
}
