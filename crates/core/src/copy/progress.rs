//! Records which bytes of a transfer are in place, and so which destination rows a caller may use after a
//! failure.
//!
//! A position is the number of a byte in the plan: first all pieces of the first tensor, then those of the next. A successful
//! transfer adds one entry per unit, and most entries are merged with an earlier one (`what_arrived_is_what_the_twin_says`).

use std::fmt::{self, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smallvec::SmallVec;

use crate::error::{ArrivedRows, Error, Result};
use crate::fallible;
use crate::model::RowSizes;
use crate::plan::{CopyPlan, RangeList, Side, Template};
use crate::sync::Mutex;

/// Maximum number of tensors, and of row ranges per tensor, that the text of an error lists.
const SHOWN: usize = 8;
/// Number of recent entries that are searched for one that the new entry extends: about as many as there are
/// workers.
const LOOK_BACK: usize = 16;

/// Maximum number of row ranges that are reported.
const MAX_ROW_RANGES: usize = 1 << 20;
/// Name of these lists in out-of-memory errors.
const ARRIVED: &str = "the progress of a transfer";

/// Returns `Err` once the caller of a transfer no longer waits for its bytes.
type Wanted = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// Bytes of one transfer that are in place. Each position is reported once.
#[derive(Default)]
pub struct Progress {
    /// How long a read of another process may make no progress.
    pub(super) silence: Option<Duration>,
    /// Asked before each unit, if there is one.
    wanted: Option<Wanted>,
    bytes: AtomicU64,
    done: Mutex<SmallVec<[Range<u64>; 1]>>,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("bytes", &self.bytes)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl Progress {
    /// Creates the progress of a transfer. A read of another process's memory fails if nothing moves for
    /// `silence`.
    pub fn within(silence: Duration) -> Progress {
        Progress { silence: Some(silence), ..Progress::default() }
    }

    /// Starts no further unit once `wanted` returns `Err`.
    #[must_use]
    pub fn while_wanted(self, wanted: impl Fn() -> Result<()> + Send + Sync + 'static) -> Progress {
        Progress { wanted: Some(Box::new(wanted)), ..self }
    }

    /// Returns `Err` if the transfer must stop, because its caller no longer waits for its bytes.
    pub(super) fn check_wanted(&self) -> Result<()> {
        self.wanted.as_ref().map_or(Ok(()), |wanted| wanted())
    }

    /// Records that the bytes at positions `from..to` are in place.
    pub fn done(&self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        let mut done = self.done.lock();
        let recent = done.len().saturating_sub(LOOK_BACK);
        match done[recent..].iter_mut().rev().find(|range| range.end == from) {
            Some(range) => range.end = to,
            None => done.push(from..to),
        }
        // Under the lock, so that no thread sees more bytes than ranges.
        self.bytes.fetch_add(to - from, Ordering::Relaxed);
    }

    /// Number of bytes in place.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the destination rows whose bytes in `plan` are all in place; `sizes` says where the rows lie.
    ///
    /// Tensors without such a row are left out, and so is everything after 2^20 ranges of rows. Returns `Err(OutOfMemory)` if
    /// there is no memory for the lists.
    pub fn arrived(&self, plan: &CopyPlan, sizes: impl Into<RowSizes>) -> Result<Vec<ArrivedRows>> {
        let mut arrived = Vec::new();
        if self.bytes() == 0 {
            return Ok(arrived);
        }
        let gaps = self.gaps(plan.bytes())?;
        let sizes = sizes.into();
        let mut planned = RangeList::new(ARRIVED);
        let pieces = plan.templates().iter().flat_map(Template::pieces);
        pieces.map(|piece| sizes.touched(piece.dst, piece.len)).try_for_each(|rows| planned.add(rows))?;
        let (planned, mut count) = (planned.joined(), 0);
        let tensors = plan.tensors(Side::Destination);
        for index in 0..plan.num_tensors() {
            let tensor = u32::try_from(tensors.tensor(index as usize)).unwrap_or(u32::MAX);
            let rows = without(&planned, &missing(plan, index, &gaps, sizes)?)?;
            count += rows.len();
            if count > MAX_ROW_RANGES {
                break;
            }
            if !rows.is_empty() {
                fallible::push(ARRIVED, &mut arrived, ArrivedRows { tensor, rows })?;
            }
        }
        Ok(arrived)
    }

    /// Returns the positions below `total` that are not in place.
    fn gaps(&self, total: u64) -> Result<Vec<Range<u64>>> {
        let done = self.done.lock();
        let mut all = RangeList::new(ARRIVED);
        done.iter().try_for_each(|range| all.add(range.clone()))?;
        drop(done);
        without(std::slice::from_ref(&(0..total)), &all.joined())
    }
}

/// Returns the rows of the `index`-th tensor of `plan` with a planned byte in `gaps`, which are positions of
/// the plan.
fn missing(plan: &CopyPlan, index: u32, gaps: &[Range<u64>], sizes: RowSizes) -> Result<Vec<Range<u64>>> {
    let mut missing = RangeList::new(ARRIVED);
    let one = plan.tensor_bytes();
    let from = one * u64::from(index);
    let first = gaps.partition_point(|gap| gap.end <= from);
    for gap in gaps[first..].iter().take_while(|gap| gap.start < from + one) {
        let (first, last) = (gap.start.max(from) - from, gap.end.min(from + one) - from);
        plan.tensor_pieces(first, last)
            .try_for_each(|piece| missing.add(sizes.touched(piece.dst, piece.len)))?;
    }
    Ok(missing.joined())
}

/// Adds to the error of a transfer which destination rows are in place nevertheless: all of them in
/// [`Error::arrived`], the first ones in the text.
pub fn with_arrived_rows(error: Error, progress: &Progress, plan: &CopyPlan, sizes: RowSizes) -> Error {
    let Ok(whole) = progress.arrived(plan, sizes) else {
        return error.with("arrived", "unknown (out of memory)");
    };
    let mut text = String::new();
    for tensor in whole.iter().take(SHOWN) {
        // Writing to a `String` cannot fail.
        let _ = write!(text, "tensor {}:", tensor.tensor);
        for rows in tensor.rows.iter().take(SHOWN) {
            let _ = write!(text, " {}-{}", rows.start, rows.end - 1);
        }
        text += if tensor.rows.len() > SHOWN { " …; " } else { "; " };
    }
    let rest = match whole.len() {
        0 => "nothing",
        1..=SHOWN => "nothing else",
        _ => "…",
    };
    error.with("arrived", format_args!("{text}{rest}")).with_arrived(whole)
}

/// Returns the parts of `ranges` outside `holes`. Both are ascending and disjoint.
fn without(ranges: &[Range<u64>], holes: &[Range<u64>]) -> Result<Vec<Range<u64>>> {
    let mut left = Vec::new();
    let mut first = 0;
    for range in ranges {
        let mut at = range.start;
        while holes.get(first).is_some_and(|hole| hole.end <= at) {
            first += 1;
        }
        for hole in holes[first..].iter().take_while(|hole| hole.start < range.end) {
            if at < hole.start {
                fallible::push(ARRIVED, &mut left, at..hole.start)?;
            }
            at = at.max(hole.end);
        }
        if at < range.end {
            fallible::push(ARRIVED, &mut left, at..range.end)?;
        }
    }
    Ok(left)
}

/// Adds to the error of a transfer the bytes copied before it ended, and the bytes of the whole transfer.
pub(crate) fn with_copied_bytes(error: Error, progress: &Progress, of_bytes: u64) -> Error {
    error.with("copied_bytes", progress.bytes()).with("of_bytes", of_bytes)
}
