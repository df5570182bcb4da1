//! Which tensors of a key's slot peers have pulled, while some are missing.

use std::ops::Range;

use crate::error::Result;
use crate::fallible;

/// Tensors that were pulled: ranges, ascending, apart from each other.
#[derive(Debug, Default)]
pub(super) struct Pulled(Vec<Range<u32>>);

impl Pulled {
    /// Adds tensors; whether all of `count` are there now.
    pub(super) fn add(&mut self, tensors: Range<u32>, count: u32) -> Result<bool> {
        fallible::push("the table of caches", &mut self.0, tensors)?;
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
