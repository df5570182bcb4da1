//! The blocks whose checksums a peer asks for. Every bound is checked here.

use super::request_context::check_plan;
use crate::cache::Cache;
use crate::checksums::{ByteRange, Checksums};
use crate::copy::PairBlocks;
use crate::error::{Error, Result, ensure};
use crate::fallible;
use crate::model::{Deadline, Geometry, Name, RowSizes, TensorSpan};
use crate::plan::{CopyPlan, Side};
use crate::protocol::{MAX_CHECKSUMS, MAX_HASHED, Reply, WirePlan};
use crate::resources::Resources;

/// Name of these lists in out-of-memory errors.
const BLOCKS: &str = "the blocks of a request";

/// What a request for checksums asks for.
pub(super) enum AskedBlocks {
    /// Ranges of bytes.
    Ranges(AskedRanges),
    /// Pairs of a plan between layouts.
    Pairs(AskedPairs),
}

impl AskedBlocks {
    /// Returns ranges, each of a first byte and a number of bytes, in the tensors `first` to `first + count`.
    pub(super) fn ranges((first, count): (u32, u32), ranges: Vec<(u64, u64)>) -> Result<AskedBlocks> {
        let ranges = ranges.into_iter().map(|(start, len)| ByteRange { start, len });
        let ranges = fallible::collect(BLOCKS, ranges)?;
        Ok(AskedBlocks::Ranges(AskedRanges { first_tensor: first, num_tensors: count, ranges }))
    }

    /// Checks the plan as any plan of a peer. The cache here is on `side` of it. Returns
    /// `Err(InvalidArgument)` also if the plan has more than [`MAX_CHECKSUMS`] pairs, or if it is not a plan of templates:
    /// a list of spans would take several times as much memory here as in the message.
    pub(super) fn pairs(plan: WirePlan, side: Side) -> Result<AskedBlocks> {
        ensure(plan.has_templates(), || {
            Error::invalid("a request for checksums of pairs needs a plan of templates")
        })?;
        let plan = CopyPlan::try_from(plan)?;
        let num_pairs = plan.num_pairs();
        ensure(num_pairs <= MAX_CHECKSUMS, || {
            let text = "a request for checksums asks for too many pairs";
            Error::invalid(text).with("pairs", num_pairs).with("limit", MAX_CHECKSUMS)
        })?;
        Ok(AskedBlocks::Pairs(AskedPairs { plan, side, num_pairs }))
    }

    /// Checks that the blocks lie inside the rows of a cache, and that they have few enough bytes together. So a
    /// request takes a bounded time, even if its caller is gone. Returns `Err(InvalidArgument)` otherwise.
    pub(super) fn check_bounds(&self, geometry: Geometry) -> Result<()> {
        match self {
            AskedBlocks::Ranges(ranges) => ranges.check_bounds(geometry),
            AskedBlocks::Pairs(pairs) => pairs.check_bounds(geometry),
        }
    }

    /// Returns the tensors in which the blocks lie. The cache need not have them.
    pub(super) fn tensors(&self) -> TensorSpan {
        match self {
            AskedBlocks::Ranges(AskedRanges { first_tensor, num_tensors, .. }) => {
                TensorSpan { first: *first_tensor, step: 1, count: *num_tensors }
            }
            AskedBlocks::Pairs(AskedPairs { plan, side, .. }) => plan.tensors_at(*side),
        }
    }

    /// Returns the rows in which the blocks lie, in ascending order, each once; `sizes` says where the rows lie. The blocks
    /// must have passed [`check_bounds`](Self::check_bounds).
    pub(super) fn rows(&self, sizes: RowSizes) -> Result<Vec<u64>> {
        match self {
            AskedBlocks::Ranges(ranges) => ranges.rows(sizes),
            AskedBlocks::Pairs(pairs) => pairs.rows(sizes),
        }
    }

    /// Hashes the blocks of `cache`, to which `name` must resolve, for the request with the digest `request`. The caller holds
    /// pins on the rows.
    pub(super) fn reply(
        self,
        resources: &Resources,
        (name, cache): (Name, &Cache),
        request: u64,
        deadline: Deadline,
    ) -> Result<Reply> {
        let found = resources.table.describe(name)?;
        if found.cache.id() != cache.id() {
            return Ok(Reply::Stale);
        }
        let checksums = Checksums::bound_to(name, cache.id(), found.generation, request)?;
        let (engine, memory) = (&resources.copy_engine, (cache.tensors(), cache.placement()));
        let sums = match self {
            AskedBlocks::Ranges(AskedRanges { first_tensor, num_tensors, ranges }) => {
                let tensors = first_tensor..first_tensor + num_tensors;
                engine.block_sums(memory, tensors, ranges, checksums, deadline)?
            }
            AskedBlocks::Pairs(AskedPairs { plan, side, .. }) => {
                engine.pair_sums(memory, PairBlocks::of(&plan, side)?, checksums, deadline)?
            }
        };
        Ok(Reply::Checksums { generation: found.generation, sums })
    }
}

/// Ranges of bytes in some tensors of a cache.
pub(super) struct AskedRanges {
    first_tensor: u32,
    num_tensors: u32,
    ranges: Vec<ByteRange>,
}

impl AskedRanges {
    /// Checks that the ranges lie inside the tensors, which the cache must have, touch no gap between rows, and have
    /// together at most [`MAX_HASHED`] bytes, or those of one row.
    fn check_bounds(&self, geometry: Geometry) -> Result<()> {
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
        check_hashed(total, most)
    }

    fn rows(&self, sizes: RowSizes) -> Result<Vec<u64>> {
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
}

/// The pairs of a plan between layouts, of which a cache here is one side.
pub(super) struct AskedPairs {
    plan: CopyPlan,
    side: Side,
    num_pairs: usize,
}

impl AskedPairs {
    /// Checks that the pairs lie inside the tensors, which the cache must have, touch no gap between rows, and have
    /// together at most [`MAX_HASHED`] bytes; or, if it is a single pair, those of a tensor, in each tensor.
    fn check_bounds(&self, geometry: Geometry) -> Result<()> {
        check_plan(&self.plan, self.side, geometry)?;
        let tensors = u64::from(self.plan.num_tensors());
        // A plan has at least one tensor.
        let asked = self.plan.bytes() / tensors.max(1);
        let one = if self.num_pairs == 1 { geometry.tensor_bytes() } else { 0 };
        check_hashed(asked, (MAX_HASHED / tensors.max(1)).max(one))
    }

    fn rows(&self, sizes: RowSizes) -> Result<Vec<u64>> {
        self.plan.touched_rows(self.side, sizes)
    }
}

/// Returns `Err(InvalidArgument)` if a request asks to hash more than `most` bytes of each tensor.
fn check_hashed(bytes: u64, most: u64) -> Result<()> {
    ensure(bytes <= most, || {
        let text = "a request for checksums asks for too many bytes";
        Error::invalid(text).with("bytes", bytes).with("limit", most)
    })
}
