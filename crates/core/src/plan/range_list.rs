//! A list of ranges whose memory is bounded by the numbers that it covers, however many ranges are added
//! (`a_plan_takes_a_bounded_multiple_of_its_bytes`).

use std::ops::Range;

use crate::error::Result;
use crate::fallible;

/// Ranges that are joined whenever the list has grown to twice its size after the previous join.
pub(crate) struct RangeList {
    /// Name of the list in out-of-memory errors.
    name: &'static str,
    all: Vec<Range<u64>>,
    /// Number of ranges at which they are joined.
    most: usize,
}

impl RangeList {
    /// Shorter lists are joined only at the end.
    const MIN_JOINED: usize = 1024;

    pub(crate) fn new(name: &'static str) -> Self {
        RangeList { name, all: Vec::new(), most: Self::MIN_JOINED }
    }

    pub(crate) fn add(&mut self, range: Range<u64>) -> Result<()> {
        match self.all.last_mut() {
            // Most lists are sorted, and then this branch suffices.
            Some(last) if last.start <= range.start && range.start <= last.end => {
                last.end = last.end.max(range.end);
                return Ok(());
            }
            _ => {}
        }
        if self.all.len() >= self.most {
            self.join();
            self.most = Self::MIN_JOINED.max(2 * self.all.len());
        }
        fallible::push(self.name, &mut self.all, range)
    }

    /// Returns the same numbers as ascending, disjoint ranges that do not touch.
    pub(crate) fn joined(mut self) -> Vec<Range<u64>> {
        self.join();
        self.all
    }

    fn join(&mut self) {
        // Sorted in place, because a radix sort would need as much memory again.
        self.all.sort_unstable_by_key(|range| range.start);
        self.all.dedup_by(|next, last| {
            let touches = next.start <= last.end;
            if touches {
                last.end = last.end.max(next.end);
            }
            touches
        });
    }
}
