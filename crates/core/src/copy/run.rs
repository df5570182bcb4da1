//! One copy in progress: its plan, its two ends, and the units into which it is cut.
//!
//! Units are equal shares of the bytes in the order "all spans of tensor 0, all spans of tensor 1, …". They
//! are found by arithmetic, so nothing is stored per unit, block or tensor.

use std::sync::Arc;

use smallvec::SmallVec;

use super::counted_bytes::CountedBytes;
use super::reader_threads::Readers;
use super::unit_job::Work;
use super::workers::Workers;
use super::{Limit, Progress};
use crate::device::{Copier, Copy};
use crate::error::Result;
use crate::memory::Tensors;
use crate::memory::kernels::Kernel;
use crate::model::Deadline;
use crate::plan::{CopyPlan, Side, Span};

/// Copies of at most this many bytes run on the calling thread. A sleeping worker needs about 50 µs to start.
/// In that time the caller copies half a MiB that is not cached, or a whole MiB that is.
const INLINE: u64 = 512 << 10;
/// Units per worker, unless the copier's limits on the size of a unit require another number.
const UNITS_PER_WORKER: u64 = 8;

/// What must stay alive as long as the bytes of a copy may be touched: the pins of its rows.
pub type HeldPins = Arc<dyn std::any::Any + Send + Sync>;

/// A copy in progress.
#[derive(Clone)]
pub(super) struct Copying {
    pub(super) plan: CopyPlan,
    pub(super) src: Arc<Tensors>,
    pub(super) dst: Arc<Tensors>,
    pub(super) copier: Arc<dyn Copier>,
    pub(super) counted: Arc<CountedBytes>,
    /// Records which bytes are in place.
    pub(super) progress: Arc<Progress>,
    /// Kept until nothing touches the memory any more.
    #[expect(dead_code, reason = "held, not read")]
    pub(super) held: HeldPins,
}

impl Copying {
    /// Copies directly from the source to the destination.
    pub(super) fn direct(self, workers: &Workers, limit: Limit) -> Result<()> {
        limit.begin()?;
        let units = CopyUnits::of(self, workers.count());
        let count = units.count();
        if units.total <= INLINE || count <= 1 {
            units.run_all()
        } else {
            workers.run(units.work(), count, limit)
        }
    }

    /// Does the same on the calling thread.
    pub(super) fn run_inline(self, limit: Limit) -> Result<()> {
        limit.begin()?;
        CopyUnits::of(self, 1).run_all()
    }

    /// Does the same from the memory of process `pid`, on reader threads. At its deadline, the caller leaves
    /// those threads.
    pub(super) fn read(self, readers: &Readers, pid: i32, workers: usize, deadline: Deadline) -> Result<()> {
        let limits = (deadline, self.progress.silence);
        let units = CopyUnits::of(self, workers);
        // One thread does a small read alone, because sharing it costs as much as copying a block.
        let most = if units.total <= INLINE { 1 } else { workers };
        let count = units.count();
        readers.run(pid, units.work(), count, most, limits)
    }
}

/// A direct copy, cut into units.
struct CopyUnits {
    copying: Copying,
    /// Bytes of the copy.
    total: u64,
    /// Bytes of a unit.
    unit: u64,
    /// Maximum number of entries that are copied together.
    batch: usize,
}

impl CopyUnits {
    fn of(copying: Copying, workers: usize) -> Self {
        let total = copying.plan.bytes();
        let (least, most) = copying.copier.unit();
        let unit = (total / (workers as u64 * UNITS_PER_WORKER)).clamp(least, most.max(least));
        let pieces = copying.plan.num_pieces().saturating_mul(copying.plan.num_tensors().into());
        let batch = copying.copier.batch().min(usize::try_from(pieces).unwrap_or(usize::MAX));
        // Whole pages, so that a cut piece stays aligned for the kernels.
        CopyUnits { total, unit: unit.next_multiple_of(4096), batch, copying }
    }

    fn count(&self) -> usize {
        usize::try_from(self.total.div_ceil(self.unit)).unwrap_or(usize::MAX)
    }

    fn work(self) -> Arc<impl Work> {
        Arc::new(move |unit| self.run(unit))
    }

    fn run_all(&self) -> Result<()> {
        (0..self.count()).try_for_each(|unit| self.run(unit))
    }

    fn run(&self, index: usize) -> Result<()> {
        let Copying { plan, src, dst, copier, counted, progress, .. } = &self.copying;
        progress.check_wanted()?;
        let from = index as u64 * self.unit;
        let to = (from + self.unit).min(self.total);
        let kernel = Kernel::for_bytes(self.total);
        // One copy needs no list of its own.
        let mut batch: SmallVec<[Copy<'_>; 1]> = SmallVec::with_capacity(self.batch);
        plan.spans(from, to).try_for_each(|(tensor, span)| {
            let Span { len, count, .. } = span;
            let [read, written] = Side::BOTH.map(|side| plan.tensors(side).tensor(tensor));
            batch.push(Copy {
                src: src.windows(read, span.src, len, (count, span.src_step))?,
                dst: dst.windows(written, span.dst, len, (count, span.dst_step))?,
            });
            if batch.len() == self.batch {
                copier.copy(&batch, kernel)?;
                batch.clear();
            }
            Ok(())
        })?;
        copier.copy(&batch, kernel)?;
        if copier.uses_kernels() {
            counted.add(kernel, to - from);
        }
        progress.done(from, to);
        Ok(())
    }
}
