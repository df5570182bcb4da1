//! The tensors of a key's slot that peers have pulled, kept until all of them have been pulled.

use std::ops::Range;

use crate::cache::shards::TABLE;
use crate::error::Result;
use crate::fallible;

/// The tensors that were pulled, as ascending, disjoint ranges.
#[derive(Debug, Default)]
pub(super) struct Pulled(Vec<Range<u32>>);

impl Pulled {
    /// Adds a range of tensors. Returns whether all of the `count` tensors have been pulled.
    pub(super) fn add(&mut self, tensors: Range<u32>, count: u32) -> Result<bool> {
        fallible::push(TABLE, &mut self.0, tensors)?;
        self.0.sort_unstable_by_key(|range| range.start);
        self.0.dedup_by(|next, last| {
            let joined = next.start <= last.end;
            if joined {
                last.end = last.end.max(next.end);
            }
            joined
        });
        Ok(matches!(self.0.as_slice(), [all] if all.start == 0 && all.end >= count))
    }
}
