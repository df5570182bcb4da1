//! One copy under way: its plan, its two ends, and the units it is cut into.
//!
//! Units are equal stretches of bytes along "all spans of tensor 0, all spans of tensor 1, …", found by arithmetic, so
//! nothing is stored per unit, block or tensor. Not for: choosing the way (`route`) or the workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::tuner::Tuner;
use super::workers::{Work, Workers};
use crate::device::{Copy, Device};
use crate::error::Result;
use crate::id::Deadline;
use crate::mem::Tensors;
use crate::plan::{CopyPlan, Piece};

/// Copies of at most this many bytes run on the calling thread: waking a worker costs more.
const INLINE: u64 = 256 << 10;
/// A unit is neither so small that taking it costs, nor so large that the last worker to finish keeps the rest waiting.
const UNIT: std::ops::RangeInclusive<u64> = (256 << 10)..=(512 << 10);
/// Units per worker when the copy is small enough that this decides.
const UNITS_PER_WORKER: u64 = 8;
/// Pieces handed to the device at once.
const BATCH: usize = 64;

/// A copy under way.
#[derive(Clone)]
pub(super) struct Copying {
    pub(super) plan: Arc<CopyPlan>,
    pub(super) src: Arc<Tensors>,
    pub(super) dst: Arc<Tensors>,
    pub(super) device: Arc<dyn Device>,
    pub(super) tuner: Arc<Tuner>,
    /// Bytes in place.
    pub(super) done: Arc<AtomicU64>,
}

impl Copying {
    /// Straight from source to destination, wave after wave.
    pub(super) fn direct(&self, workers: &Workers, deadline: Deadline) -> Result<()> {
        for index in 0..self.plan.waves().len() {
            let wave = DirectWave::new(self.clone(), index, workers.count());
            let units = wave.units();
            if wave.total <= INLINE || units == 1 {
                (0..units).try_for_each(|unit| wave.unit(unit))?;
            } else {
                workers.run(Arc::new(wave), units, deadline)?;
            }
            if index + 1 < self.plan.waves().len() {
                deadline.check("copying")?;
            }
        }
        Ok(())
    }
}

/// One wave of a direct copy, cut into units.
struct DirectWave {
    copying: Copying,
    wave: usize,
    total: u64,
    unit: u64,
    /// Typical bytes of one piece, for the choice of kernel.
    piece: u64,
}

impl DirectWave {
    fn new(copying: Copying, wave: usize, workers: usize) -> Self {
        let this = &copying.plan.waves()[wave];
        let total = this.tensor_bytes().saturating_mul(u64::from(copying.plan.num_tensors()));
        let unit = (total / (workers as u64 * UNITS_PER_WORKER)).clamp(*UNIT.start(), *UNIT.end());
        let pieces: u64 = this.spans().iter().map(|span| span.count).sum();
        let piece = this.tensor_bytes().checked_div(pieces).unwrap_or(0);
        // Whole pages, so that a cut piece stays aligned for the kernels.
        DirectWave { wave, total, unit: unit.next_multiple_of(4096), piece, copying }
    }

    fn units(&self) -> usize {
        usize::try_from(self.total.div_ceil(self.unit)).unwrap_or(usize::MAX)
    }
}

impl Work for DirectWave {
    fn unit(&self, index: usize) -> Result<()> {
        let Copying { plan, src, dst, device, tuner, done } = &self.copying;
        let from = index as u64 * self.unit;
        let to = (from + self.unit).min(self.total);
        let kernel = tuner.choose(self.total, self.piece);
        let started = Instant::now();
        let mut batch = Vec::with_capacity(BATCH.min(plan.num_tensors() as usize * 2).max(4));
        for (tensor, piece) in plan.waves()[self.wave].across_tensors(from, to) {
            let Piece { src: from, dst: to, len } = piece;
            batch.push(Copy { src: src.window(tensor, from, len)?, dst: dst.window(tensor, to, len)? });
            if batch.len() == BATCH {
                device.copy(&batch, kernel)?;
                batch.clear();
            }
        }
        device.copy(&batch, kernel)?;
        tuner.learn(self.total, self.piece, kernel, to - from, started.elapsed());
        done.fetch_add(to - from, Ordering::Relaxed);
        Ok(())
    }
}
