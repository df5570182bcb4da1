//! Calculates the checksums of blocks of a cache, on the copy workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::engine::CopyEngine;
use super::host_buffers::PackedWindows;
use super::limit::Limit;
use super::route::PlacedTensors;
use super::window_sum::WindowSum;
use crate::checksums::Checksums;
use crate::error::Result;
use crate::fallible;
use crate::memory::{Access, Reach, Tensors};
use crate::model::Placement;
use crate::plan::{CopyPlan, Side};

/// Name of these lists in out-of-memory errors.
const SUMS: &str = "the checksums of blocks";
/// A unit has blocks of about this many bytes. The deadline is checked before each unit, and within larger blocks.
const UNIT: u64 = 1 << 20;

impl CopyEngine {
    /// Returns the checksums of the blocks of `plan`, one for each pair, template after template. `memory` is the side `side` of
    /// the plan. Equal bytes give equal checksums on both sides. The caller must
    /// hold pins on the rows until this returns. Returns `Err(Timeout)` if `limit` covers the whole call and has passed.
    pub fn block_sums(
        &self,
        memory: PlacedTensors<'_>,
        (plan, side): (&CopyPlan, Side),
        checksums: Checksums,
        limit: impl Into<Limit>,
    ) -> Result<Vec<u64>> {
        let (mut ends, limit) = (Vec::new(), limit.into());
        for template in plan.templates().iter() {
            let before = ends.last().copied().unwrap_or(0);
            fallible::push(SUMS, &mut ends, before + template.pairs.len())?;
        }
        let (count, bytes) = (ends.last().copied().unwrap_or(0), plan.bytes());
        memory.0.check_present(Access::Read)?;
        let per_unit = (UNIT.saturating_mul(count as u64) / bytes.max(1)).max(1);
        let per_unit = usize::try_from(per_unit).unwrap_or(usize::MAX);
        let units = count.div_ceil(per_unit);
        let sums = fallible::try_collect(SUMS, (0..count).map(|_| Ok(AtomicU64::new(0))))?;
        let on_device = memory.0.reach() == Reach::Device;
        let device = on_device.then(|| self.devices.at(Placement::Device).clone());
        let buffers = self.host_buffers.clone();
        let hashing =
            Arc::new(Hashing { memory: memory.0.clone(), plan: plan.clone(), side, ends, limit, sums });
        let work = {
            let hashing = hashing.clone();
            move |unit: usize| {
                hashing.limit.check("hashing a block")?;
                let buffer = device.as_ref().map(|_| buffers.take()).transpose()?;
                let through = device.as_deref().zip(buffer.as_ref());
                let packed = through.map(|(device, buffer)| PackedWindows::new(device, buffer, Side::Source));
                let sum = WindowSum::new(checksums.clone())?;
                let mut feed = Feed { hashing: &hashing, sum, packed, unchecked: 0 };
                let first = unit * per_unit;
                (first..count.min(first + per_unit)).try_for_each(|at| feed.hash(at))
            }
        };
        self.workers().run(Arc::new(work), units, limit)?;
        fallible::collect(SUMS, hashing.sums.iter().map(|sum| sum.load(Ordering::Acquire)))
    }
}

/// The blocks that are hashed, and their checksums.
struct Hashing {
    memory: Arc<Tensors>,
    plan: CopyPlan,
    side: Side,
    /// For each template of the plan, the number of pairs up to its end.
    ends: Vec<usize>,
    limit: Limit,
    sums: Vec<AtomicU64>,
}

/// What a thread uses for one block after the other.
struct Feed<'a> {
    hashing: &'a Hashing,
    sum: WindowSum,
    /// The host buffer through which the bytes of a device are read.
    packed: Option<PackedWindows<'a>>,
    /// Bytes since the deadline was checked.
    unchecked: u64,
}

impl Feed<'_> {
    /// Hashes block `at`.
    fn hash(&mut self, at: usize) -> Result<()> {
        let Hashing { plan, side, ends, sums, .. } = self.hashing;
        let template = ends.partition_point(|&end| end <= at);
        let first = template.checked_sub(1).map_or(0, |before| ends[before]);
        let Some(template) = plan.templates().get(template) else { return Ok(()) };
        let Some(&pair) = template.pairs.get(at - first) else { return Ok(()) };
        // The order of the plan is the same on both sides, wherever the bytes lie.
        for index in 0..plan.num_tensors() {
            let tensor = plan.tensors(*side).number(index);
            template.ranges(pair, *side).try_for_each(|range| self.add(tensor, range))?;
        }
        self.flush()?;
        if let Some(sum) = sums.get(at) {
            sum.store(self.sum.end_block(), Ordering::Release);
        }
        Ok(())
    }

    /// Adds a range of a tensor: its first byte and its number of bytes.
    fn add(&mut self, tensor: u32, (start, bytes): (u64, u64)) -> Result<()> {
        let mut done = 0;
        while done < bytes {
            let room = self.packed.as_ref().map_or(UNIT, PackedWindows::room).min(bytes - done);
            let window = self.hashing.memory.window(tensor as usize, start + done, room)?;
            match &mut self.packed {
                Some(packed) => packed.add(window)?,
                None => self.sum.add(window.into())?,
            }
            (done, self.unchecked) = (done + room, self.unchecked + room);
            if self.packed.as_ref().is_some_and(|packed| packed.room() == 0) {
                self.flush()?;
            }
            if self.unchecked >= UNIT {
                self.hashing.limit.check("hashing a block")?;
                self.unchecked = 0;
            }
        }
        Ok(())
    }

    /// Adds what is in the host buffer to the checksum.
    fn flush(&mut self) -> Result<()> {
        self.packed.as_mut().map_or(Ok(()), |packed| self.sum.add(packed.flush()?.into()))
    }
}
