//! The blocks whose checksums a peer asks for. Every bound is checked here.

use super::request_context::check_plan;
use crate::cache::Cache;
use crate::checksums::Checksums;
use crate::error::{Error, Result, ensure};
use crate::model::{Deadline, Geometry, Name, RowSizes, TensorSpan};
use crate::plan::{CopyPlan, Side};
use crate::protocol::{MAX_CHECKSUMS, MAX_HASHED, Reply, WirePlan};
use crate::resources::Resources;

/// The pairs of a plan, of which a cache here is one side.
pub(super) struct AskedBlocks {
    plan: CopyPlan,
    side: Side,
    num_pairs: usize,
}

impl AskedBlocks {
    /// Returns the blocks, after the checks for any plan of a peer. The cache here is on `side` of the plan. Returns
    /// `Err(InvalidArgument)` also if the plan has more than [`MAX_CHECKSUMS`] pairs.
    pub(super) fn new(plan: WirePlan, side: Side) -> Result<AskedBlocks> {
        let plan = CopyPlan::try_from(plan)?;
        let num_pairs = plan.num_pairs();
        ensure(num_pairs <= MAX_CHECKSUMS, || {
            let text = "a request for checksums asks for too many pairs";
            Error::invalid(text).with("pairs", num_pairs).with("limit", MAX_CHECKSUMS)
        })?;
        Ok(AskedBlocks { plan, side, num_pairs })
    }

    /// Checks that the cache has the tensors, and that the pairs lie inside them and touch no gap between rows. All pairs
    /// together may have [`MAX_HASHED`] bytes. A single pair may have as many bytes as a tensor, in each tensor. So a request
    /// takes a bounded time, even if its caller is gone. Returns `Err(InvalidArgument)` otherwise.
    pub(super) fn check_bounds(&self, geometry: Geometry) -> Result<()> {
        check_plan(&self.plan, self.side, geometry)?;
        let one = if self.num_pairs == 1 { geometry.tensor_bytes() } else { 0 };
        // A plan has at least one tensor.
        let most = (MAX_HASHED / u64::from(self.plan.num_tensors()).max(1)).max(one);
        let bytes = self.plan.tensor_bytes();
        ensure(bytes <= most, || {
            let text = "a request for checksums asks for too many bytes";
            Error::invalid(text).with("bytes", bytes).with("limit", most)
        })
    }

    /// Returns the tensors in which the blocks lie. The cache need not have them.
    pub(super) fn tensors(&self) -> TensorSpan {
        self.plan.tensors_at(self.side)
    }

    /// Returns the rows in which the blocks lie, in ascending order, each once; `sizes` says where the rows lie. The blocks
    /// must have passed [`check_bounds`](Self::check_bounds).
    pub(super) fn rows(&self, sizes: RowSizes) -> Result<Vec<u64>> {
        self.plan.touched_rows(self.side, sizes)
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
        let found = resources.resolve(name)?;
        if found.cache.id() != cache.id() {
            return Ok(Reply::Stale);
        }
        let checksums = Checksums::bound_to(name, cache.id(), found.generation, request)?;
        let (memory, blocks) = ((cache.tensors(), cache.placement()), (&self.plan, self.side));
        let sums = resources.copy_engine.block_sums(memory, blocks, checksums, deadline)?;
        Ok(Reply::Checksums { generation: found.generation, sums })
    }
}
