//! The blocks whose checksums a peer asks for. Every bound is checked here.

use crate::cache::Cache;
use crate::checksums::{ByteRange, Checksums};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::{Deadline, Geometry, Name, RowSizes};
use crate::protocol::{MAX_HASHED, Reply};
use crate::resources::Resources;

/// Name of these lists in out-of-memory errors.
const BLOCKS: &str = "the blocks of a request";

/// Ranges of bytes in some tensors of a cache.
pub(super) struct AskedBlocks {
    first_tensor: u32,
    num_tensors: u32,
    ranges: Vec<ByteRange>,
}

impl AskedBlocks {
    /// Returns ranges, each of a first byte and a number of bytes, in the tensors `first` to `first + count`.
    pub(super) fn new((first, count): (u32, u32), ranges: Vec<(u64, u64)>) -> Result<AskedBlocks> {
        let ranges = ranges.into_iter().map(|(start, len)| ByteRange { start, len });
        let ranges = fallible::collect(BLOCKS, ranges)?;
        Ok(AskedBlocks { first_tensor: first, num_tensors: count, ranges })
    }

    /// Checks that the ranges lie inside the tensors, which the cache must have, and touch no gap between rows, and that they have together at most
    /// [`MAX_HASHED`] bytes, or those of one row. So a request takes a bounded time, even if its caller is gone. Returns
    /// `Err(InvalidArgument)` otherwise.
    pub(super) fn check_bounds(&self, geometry: Geometry) -> Result<()> {
        let (first, count) = (self.first_tensor, self.num_tensors);
        if count == 0 || u64::from(first) + u64::from(count) > u64::from(geometry.num_tensors()) {
            let text = format!("{count} tensors from tensor {first} are not in a cache");
            return Err(Error::invalid(text).with("num_tensors", geometry.num_tensors()));
        }
        let (tensor_bytes, rows) = (geometry.tensor_bytes(), geometry.row_sizes());
        let mut total = 0u64;
        for &ByteRange { start, len } in &self.ranges {
            let inside = start.checked_add(len).is_some_and(|end| end <= tensor_bytes);
            if len == 0 || !inside {
                let text = format!("the range of {len} bytes at {start} is empty or outside the tensor");
                return Err(Error::invalid(text).with("tensor_bytes", tensor_bytes));
            }
            if !rows.hold(start, len) {
                let text = format!("the range of {len} bytes at {start} is not inside one row");
                return Err(Error::invalid(text).with("row_stride", rows.stride()));
            }
            total = total.saturating_add(len);
        }
        let most = (MAX_HASHED / u64::from(count)).max(geometry.row_bytes()).min(tensor_bytes);
        if total <= most {
            return Ok(());
        }
        let text = "a request for checksums asks for too many bytes";
        Err(Error::invalid(text).with("bytes", total).with("limit", most))
    }

    /// Returns the rows in which the ranges lie, in ascending order, each once; `sizes` says where the rows lie. The ranges
    /// must have passed [`check_bounds`](Self::check_bounds).
    pub(super) fn rows(&self, sizes: RowSizes) -> Result<Vec<u64>> {
        let mut rows = Vec::new();
        for &ByteRange { start, len } in &self.ranges {
            for row in sizes.touched(start, len) {
                if rows.last() != Some(&row) {
                    fallible::push(BLOCKS, &mut rows, row)?;
                }
            }
        }
        rows.sort_unstable();
        rows.dedup();
        Ok(rows)
    }

    /// Hashes the ranges of `cache`, to which `name` must resolve. The caller holds pins on the rows.
    pub(super) fn reply(
        self,
        resources: &Resources,
        name: Name,
        cache: &Cache,
        deadline: Deadline,
    ) -> Result<Reply> {
        let found = resources.table.describe(name)?;
        if found.cache.id() != cache.id() {
            return Ok(Reply::Stale);
        }
        let checksums = Checksums::bound_to(name, cache.id(), found.generation)?;
        let tensors = self.first_tensor..self.first_tensor + self.num_tensors;
        let memory = (cache.tensors(), cache.placement());
        let sums = resources.copy_engine.block_sums(memory, tensors, self.ranges, checksums, deadline)?;
        Ok(Reply::Checksums { generation: found.generation, sums })
    }
}
