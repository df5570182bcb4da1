//! Calculates the checksums of blocks of a cache, on the copy workers.
//!
//! The bytes are copied into a small buffer before they are hashed, because no slice may be made over memory that
//! others may write. The buffer stays in the first-level cache, so the copy costs little beside reading the memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::engine::CopyEngine;
use super::host_buffers::{BUFFER_BYTES, HostBuffer};
use super::limit::Limit;
use super::route::PlacedTensors;
use crate::checksums::{BlockChecksum, Checksums};
use crate::device::{Copy, Device};
use crate::error::Result;
use crate::fallible;
use crate::memory::kernels::Kernel;
use crate::memory::{Access, Reach, Tensors, Window, read_bytes};
use crate::model::Placement;
use crate::plan::{CopyPlan, Side};

/// Name of these lists in out-of-memory errors.
const SUMS: &str = "the checksums of blocks";
/// Bytes that are read and hashed at a time.
const BUFFER: usize = 16 << 10;
/// Maximum number of small pieces of a device that are read at a time.
const PIECES: usize = 256;
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
        let device =
            (memory.0.reach() == Reach::Device).then(|| self.devices().at(Placement::Device).clone());
        let buffers = self.host_buffers().clone();
        let hashing = Arc::new(Hashing {
            memory: memory.0.clone(),
            plan: plan.clone(),
            side,
            ends,
            checksums,
            limit,
            sums,
        });
        let work = {
            let hashing = hashing.clone();
            move |unit: usize| {
                let scratch = |device| Ok(Scratch { device, buffer: buffers.take()? });
                let scratch = device.clone().map(scratch).transpose()?;
                let first = unit * per_unit;
                let last = count.min(first + per_unit);
                hashing.limit.check("hashing a block")?;
                let mut buffer = [0; BUFFER];
                (first..last).try_for_each(|at| hashing.hash(at, &mut buffer, scratch.as_ref()))
            }
        };
        self.spread(Arc::new(work), units, limit)?;
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
    checksums: Checksums,
    limit: Limit,
    sums: Vec<AtomicU64>,
}

impl Hashing {
    /// Hashes block `at`.
    fn hash(&self, at: usize, buffer: &mut [u8; BUFFER], scratch: Option<&Scratch>) -> Result<()> {
        let mut feed = Feed::new(self, buffer, scratch);
        let template = self.ends.partition_point(|&end| end <= at);
        let first = template.checked_sub(1).map_or(0, |before| self.ends[before]);
        let Some(template) = self.plan.templates().get(template) else {
            return Ok(());
        };
        let Some(&pair) = template.pairs.get(at - first) else { return Ok(()) };
        // The order of the plan is the same on both sides, wherever the bytes lie.
        for index in 0..self.plan.num_tensors() {
            let tensor = self.plan.tensors(self.side).number(index);
            template.ranges(pair, self.side).try_for_each(|range| feed.add(tensor, range))?;
        }
        let value = feed.finish()?;
        if let Some(sum) = self.sums.get(at) {
            sum.store(value, Ordering::Release);
        }
        Ok(())
    }
}

/// Collects the bytes of one block in a buffer, and hashes the buffer whenever it is full. So small pieces cost a copy
/// each, and no call of the hash function.
struct Feed<'a> {
    hashing: &'a Hashing,
    checksum: BlockChecksum,
    buffer: &'a mut [u8; BUFFER],
    filled: usize,
    scratch: Option<&'a Scratch>,
    /// Copies into the scratch memory that are not yet made.
    copies: Vec<Copy<'a>>,
    /// Bytes since the deadline was checked.
    unchecked: u64,
}

impl<'a> Feed<'a> {
    fn new(hashing: &'a Hashing, buffer: &'a mut [u8; BUFFER], scratch: Option<&'a Scratch>) -> Self {
        let (checksum, copies) = (hashing.checksums.block(), Vec::new());
        Feed { hashing, checksum, buffer, filled: 0, scratch, copies, unchecked: 0 }
    }

    /// Adds a range of a tensor: its first byte and its number of bytes.
    fn add(&mut self, tensor: u32, (start, bytes): (u64, u64)) -> Result<()> {
        let mut done = 0;
        while done < bytes {
            let room = (BUFFER - self.filled) as u64;
            let len = (bytes - done).min(room);
            let window = self.hashing.memory.window(tensor as usize, start + done, len)?;
            self.take(&window)?;
            done += len;
        }
        Ok(())
    }

    /// Takes a window for which the buffer has room.
    fn take(&mut self, window: &Window<'a>) -> Result<()> {
        let end = self.filled + usize::try_from(window.len()).unwrap_or(BUFFER);
        match self.scratch {
            Some(scratch) => {
                let dst = scratch.buffer.window(self.filled as u64, window.len())?;
                fallible::push(SUMS, &mut self.copies, Copy::one(*window, dst))?;
            }
            None => self.buffer.get_mut(self.filled..end).map_or(Ok(()), |room| read_bytes(window, room))?,
        }
        self.filled = end;
        if self.filled >= BUFFER || self.copies.len() >= PIECES { self.flush() } else { Ok(()) }
    }

    /// Hashes what is in the buffer.
    fn flush(&mut self) -> Result<()> {
        let bytes = self.buffer.get_mut(..self.filled).unwrap_or_default();
        if let Some(scratch) = self.scratch.filter(|_| !bytes.is_empty()) {
            scratch.device.copy(&self.copies, Kernel::PLAIN)?;
            self.copies.clear();
            read_bytes(&scratch.buffer.window(0, bytes.len() as u64)?, bytes)?;
        }
        self.checksum.add(bytes);
        self.unchecked += bytes.len() as u64;
        self.filled = 0;
        if self.unchecked >= UNIT {
            self.hashing.limit.check("hashing a block")?;
            self.unchecked = 0;
        }
        Ok(())
    }

    /// Returns the checksum of all bytes that were added.
    fn finish(mut self) -> Result<u64> {
        self.flush()?;
        Ok(self.checksum.value())
    }
}

/// A buffer of host memory, through which the bytes of a device are read.
struct Scratch {
    device: Arc<dyn Device>,
    buffer: HostBuffer,
}

const _: () = assert!(BUFFER as u64 <= BUFFER_BYTES, "what is hashed at a time fits a host buffer");
