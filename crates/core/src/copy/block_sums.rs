//! Calculates the checksums of blocks of a cache, on the copy workers.
//!
//! The bytes are copied into a small buffer before they are hashed, because no slice may be made over memory that
//! others may write. The buffer stays in the first-level cache, so the copy costs little beside reading the memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::engine::CopyEngine;
use super::limit::Limit;
use super::route::PlacedTensors;
use crate::checksums::{BlockChecksum, ByteRange, Checksums, canonical, canonical_pieces};
use crate::device::{Copy, Device};
use crate::error::Result;
use crate::fallible;
use crate::memory::kernels::Kernel;
use crate::memory::{Access, Reach, Tensors, Window, read_bytes};
use crate::model::Placement;
use crate::plan::{CopyPlan, Side, Template, TensorSteps};

/// Name of these lists in out-of-memory errors.
const SUMS: &str = "the checksums of blocks";
/// Bytes that are read and hashed at a time.
const BUFFER: usize = 16 << 10;
/// Maximum number of small pieces of a device that are read at a time.
const PIECES: usize = 256;
/// A unit has blocks of about this many bytes. The deadline is checked before each unit, and within larger blocks.
const UNIT: u64 = 1 << 20;

/// The blocks of a plan between layouts, at one end: one block for each pair of each template.
#[derive(Clone, Debug)]
pub struct PairBlocks {
    /// The tensors at this end.
    tensors: TensorSteps,
    num_tensors: u32,
    templates: Vec<Template>,
    end: Side,
}

impl PairBlocks {
    /// Returns the blocks of a plan of templates, at one end.
    pub fn of(plan: &CopyPlan, end: Side) -> Result<PairBlocks> {
        let (tensors, num_tensors) = (plan.tensors(end), plan.num_tensors());
        Ok(PairBlocks { tensors, num_tensors, templates: plan.templates()?, end })
    }
}

impl CopyEngine {
    /// Returns the checksum of each of `blocks` of the tensors `tensors` of `memory`. The caller must hold pins on the
    /// rows until this returns. Returns `Err(Timeout)` if `limit` covers the whole
    /// call and has passed.
    pub fn block_sums(
        &self,
        memory: PlacedTensors<'_>,
        tensors: Range<u32>,
        blocks: Vec<ByteRange>,
        checksums: Checksums,
        limit: impl Into<Limit>,
    ) -> Result<Vec<u64>> {
        let bytes = blocks.iter().map(|block| block.len).fold(0, u64::saturating_add);
        let total = (blocks.len(), bytes.saturating_mul(tensors.len() as u64));
        self.sums(memory, HashedBlocks::Ranges { tensors, ranges: blocks }, total, checksums, limit.into())
    }

    /// Returns the checksum of each pair of `blocks`, template after template; otherwise as
    /// [`block_sums`](Self::block_sums). It is the same at both ends of a plan if the bytes are.
    pub fn pair_sums(
        &self,
        memory: PlacedTensors<'_>,
        blocks: PairBlocks,
        checksums: Checksums,
        limit: impl Into<Limit>,
    ) -> Result<Vec<u64>> {
        let (mut ends, mut bytes) = (Vec::new(), 0u64);
        for template in &blocks.templates {
            let before = ends.last().copied().unwrap_or(0);
            fallible::push(SUMS, &mut ends, before + template.pairs.len())?;
            bytes = bytes.saturating_add(template.bytes().unwrap_or(u64::MAX));
        }
        let count = ends.last().copied().unwrap_or(0);
        let total = (count, bytes.saturating_mul(blocks.num_tensors.into()));
        self.sums(memory, HashedBlocks::Pairs { blocks, ends }, total, checksums, limit.into())
    }

    /// Returns the checksums of `count` blocks with about `bytes` bytes.
    fn sums(
        &self,
        memory: PlacedTensors<'_>,
        blocks: HashedBlocks,
        (count, bytes): (usize, u64),
        checksums: Checksums,
        limit: Limit,
    ) -> Result<Vec<u64>> {
        memory.0.check_mapped(Access::Read)?;
        let per_unit = (UNIT.saturating_mul(count as u64) / bytes.max(1)).max(1);
        let per_unit = usize::try_from(per_unit).unwrap_or(usize::MAX);
        let units = count.div_ceil(per_unit);
        let sums = fallible::try_collect(SUMS, (0..count).map(|_| Ok(AtomicU64::new(0))))?;
        let device =
            (memory.0.reach() == Reach::Device).then(|| self.devices().at(Placement::Device).clone());
        let host = self.devices().at(Placement::Host).clone();
        let hashing = Arc::new(Hashing { memory: memory.0.clone(), blocks, checksums, limit, sums });
        let work = {
            let hashing = hashing.clone();
            move |unit: usize| {
                let scratch = device.clone().map(|device| Scratch::new(device, &*host)).transpose()?;
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

/// The blocks that are hashed.
enum HashedBlocks {
    /// The same range of each tensor.
    Ranges { tensors: Range<u32>, ranges: Vec<ByteRange> },
    Pairs {
        blocks: PairBlocks,
        /// For each template, the number of pairs up to its end.
        ends: Vec<usize>,
    },
}

/// The blocks that are hashed, and their checksums.
struct Hashing {
    memory: Arc<Tensors>,
    blocks: HashedBlocks,
    checksums: Checksums,
    limit: Limit,
    sums: Vec<AtomicU64>,
}

impl Hashing {
    /// Hashes block `at`.
    fn hash(&self, at: usize, buffer: &mut [u8; BUFFER], scratch: Option<&Scratch>) -> Result<()> {
        let mut feed = Feed::new(self, buffer, scratch);
        match &self.blocks {
            HashedBlocks::Ranges { tensors, ranges } => {
                let Some(&range) = ranges.get(at) else { return Ok(()) };
                canonical(range, tensors.clone()).try_for_each(|(tensor, range)| feed.add(tensor, range))?;
            }
            HashedBlocks::Pairs { blocks, ends } => {
                let template = ends.partition_point(|&end| end <= at);
                let first = template.checked_sub(1).map_or(0, |before| ends[before]);
                let Some(template) = blocks.templates.get(template) else { return Ok(()) };
                let Some(&pair) = template.pairs.get(at - first) else { return Ok(()) };
                let ranges =
                    || template.ranges(pair, blocks.end).map(|(start, len)| ByteRange { start, len });
                let tensors = (0..blocks.num_tensors).map(|index| blocks.tensors.number(index));
                canonical_pieces(ranges, tensors).try_for_each(|(tensor, range)| feed.add(tensor, range))?;
            }
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

    /// Adds a range of a tensor.
    fn add(&mut self, tensor: u32, range: ByteRange) -> Result<()> {
        let mut done = 0;
        while done < range.len {
            let room = (BUFFER - self.filled) as u64;
            let len = (range.len - done).min(room);
            let window = self.hashing.memory.window(tensor as usize, range.start + done, len)?;
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
                let dst = scratch.memory.window(0, self.filled as u64, window.len())?;
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
            read_bytes(&scratch.memory.window(0, 0, bytes.len() as u64)?, bytes)?;
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

/// Host memory through which the bytes of a device are read.
struct Scratch {
    device: Arc<dyn Device>,
    memory: Tensors,
}

impl Scratch {
    fn new(device: Arc<dyn Device>, host: &dyn Device) -> Result<Scratch> {
        let region = Arc::new(host.allocate("llm_datadist verification", BUFFER as u64)?);
        let memory = Tensors::carved(region, [0], BUFFER as u64, Box::new(()))?;
        Ok(Scratch { device, memory })
    }
}
