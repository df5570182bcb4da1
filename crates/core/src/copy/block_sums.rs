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
use crate::checksums::{BlockChecksum, ByteRange, Checksums, canonical};
use crate::device::{Copy, Device};
use crate::error::Result;
use crate::fallible;
use crate::memory::kernels::Kernel;
use crate::memory::{Access, Reach, Tensors, Window, read_bytes};
use crate::model::Placement;

/// Name of these lists in out-of-memory errors.
const SUMS: &str = "the checksums of blocks";
/// Bytes that are read and hashed at a time.
const BUFFER: usize = 16 << 10;
/// A unit has blocks of about this many bytes. The deadline is checked before each unit, and within larger blocks.
const UNIT: u64 = 1 << 20;

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
        let limit = limit.into();
        memory.0.check_mapped(Access::Read)?;
        let bytes = blocks.iter().map(|block| block.len).fold(0, u64::saturating_add);
        let bytes = bytes.saturating_mul(tensors.len() as u64);
        let per_unit = (UNIT.saturating_mul(blocks.len() as u64) / bytes.max(1)).max(1);
        let per_unit = usize::try_from(per_unit).unwrap_or(usize::MAX);
        let units = blocks.len().div_ceil(per_unit);
        let sums = fallible::try_collect(SUMS, blocks.iter().map(|_| Ok(AtomicU64::new(0))))?;
        let device =
            (memory.0.reach() == Reach::Device).then(|| self.devices().at(Placement::Device).clone());
        let host = self.devices().at(Placement::Host).clone();
        let hashing = Arc::new(Hashing { memory: memory.0.clone(), tensors, blocks, checksums, limit, sums });
        let work = {
            let hashing = hashing.clone();
            move |unit: usize| {
                let scratch = device.clone().map(|device| Scratch::new(device, &*host)).transpose()?;
                let first = unit * per_unit;
                let last = hashing.blocks.len().min(first + per_unit);
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
    tensors: Range<u32>,
    blocks: Vec<ByteRange>,
    checksums: Checksums,
    limit: Limit,
    sums: Vec<AtomicU64>,
}

impl Hashing {
    /// Hashes block `at`.
    fn hash(&self, at: usize, buffer: &mut [u8; BUFFER], scratch: Option<&Scratch>) -> Result<()> {
        let (Some(&block), Some(sum)) = (self.blocks.get(at), self.sums.get(at)) else { return Ok(()) };
        let (mut checksum, mut unchecked) = (self.checksums.block(), 0);
        for (tensor, range) in canonical(block, self.tensors.clone()) {
            for from in (0..range.len).step_by(BUFFER) {
                let len = (range.len - from).min(BUFFER as u64);
                let window = self.memory.window(tensor as usize, range.start + from, len)?;
                add(&mut checksum, &window, buffer, scratch)?;
                unchecked += len;
                if unchecked >= UNIT {
                    self.limit.check("hashing a block")?;
                    unchecked = 0;
                }
            }
        }
        sum.store(checksum.value(), Ordering::Release);
        Ok(())
    }
}

/// Adds the bytes of a window of at most [`BUFFER`] bytes.
fn add(
    checksum: &mut BlockChecksum,
    window: &Window<'_>,
    buffer: &mut [u8; BUFFER],
    scratch: Option<&Scratch>,
) -> Result<()> {
    let len = usize::try_from(window.len()).unwrap_or(BUFFER);
    let Some(bytes) = buffer.get_mut(..len) else { return Ok(()) };
    match scratch {
        Some(scratch) => scratch.read(window, bytes)?,
        None => read_bytes(window, bytes)?,
    }
    checksum.add(bytes);
    Ok(())
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

    fn read(&self, window: &Window<'_>, bytes: &mut [u8]) -> Result<()> {
        let through = self.memory.window(0, 0, window.len())?;
        self.device.copy(&[Copy::one(*window, through)], Kernel::PLAIN)?;
        read_bytes(&through, bytes)
    }
}
