//! Which bytes of a transfer are in place, and so which rows of the destination a caller may use after a failure.
//!
//! A position is a byte along the whole plan: wave after wave, in each all spans of the first tensor, then of the next.
//! Success costs one entry per unit, mostly merged with one before (`what_arrived_is_what_the_twin_says`). Not for: retrying.

use std::fmt::Write;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::error::Error;
use crate::plan::{CopyPlan, Piece};

/// Tensors, and stretches of rows in each, that the text of an error names.
const SHOWN: usize = 8;
/// Entries looked at, from the last, for one that a new entry continues: about as many as workers.
const LOOK_BACK: usize = 16;

/// What is in place of one transfer. Each position is reported once.
#[derive(Debug, Default)]
pub struct Progress {
    /// How long a read of another process may stand still.
    pub(super) silence: Option<Duration>,
    bytes: AtomicU64,
    done: Mutex<Vec<Range<u64>>>,
}

/// Rows of one tensor of the destination of which everything that was planned is in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Which tensor of the destination.
    pub tensor: u32,
    /// Its rows, ascending, apart.
    pub rows: Vec<Range<u64>>,
}

impl Progress {
    /// Of a transfer that ends early if nothing of it moves for `silence`, where it reads another process.
    #[must_use]
    pub fn within(silence: Duration) -> Progress {
        Progress { silence: Some(silence), ..Progress::default() }
    }

    /// The bytes at positions `from..to` are in place.
    pub fn done(&self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = done.len().saturating_sub(LOOK_BACK);
        match done[recent..].iter_mut().rev().find(|range| range.end == from) {
            Some(range) => range.end = to,
            None => done.push(from..to),
        }
        // Under the lock, so that nobody sees more bytes than ranges.
        self.bytes.fetch_add(to - from, Ordering::Relaxed);
    }

    /// Bytes in place.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The rows, of `row_bytes` in the destination of `plan`, all of whose planned bytes are in place. Tensors without
    /// one are left out. A row that the plan writes twice counts once both have happened.
    #[must_use]
    pub fn arrived(&self, plan: &CopyPlan, row_bytes: u64) -> Vec<Arrived> {
        let rows = |piece: Piece| rows_of(piece, row_bytes.max(1));
        let one =
            |wave: &crate::plan::Wave| wave.pieces(0, wave.tensor_bytes()).map(rows).collect::<Vec<_>>();
        let planned = merged(plan.waves().iter().flat_map(one).collect());
        let mut missing = vec![Vec::new(); plan.num_tensors() as usize];
        for gap in self.gaps(plan.bytes()) {
            for (index, piece) in plan.pieces(gap.start, gap.end) {
                if let Some(missing) = missing.get_mut(index) {
                    missing.push(rows(piece));
                }
            }
        }
        (plan.dst_tensor()..)
            .zip(missing)
            .map(|(tensor, missing)| Arrived { tensor, rows: without(&planned, &merged(missing)) })
            .filter(|arrived| !arrived.rows.is_empty())
            .collect()
    }

    /// The positions below `total` that are not done.
    fn gaps(&self, total: u64) -> Vec<Range<u64>> {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner).clone();
        without(std::slice::from_ref(&(0..total)), &merged(done))
    }
}

/// The error of a transfer with what of its destination is in place nevertheless: all of it in [`Error::arrived`], some
/// of it in the text.
#[cold]
#[must_use]
pub fn arrived(error: Error, progress: &Progress, plan: &CopyPlan, row_bytes: u64) -> Error {
    let whole = progress.arrived(plan, row_bytes);
    let mut text = String::new();
    for tensor in whole.iter().take(SHOWN) {
        // Writing to a text cannot fail.
        let _ = write!(text, "tensor {}:", tensor.tensor);
        for rows in tensor.rows.iter().take(SHOWN) {
            let _ = write!(text, " {}-{}", rows.start, rows.end - 1);
        }
        text += if tensor.rows.len() > SHOWN { " …; " } else { "; " };
    }
    let rest = if whole.len() > SHOWN { "…" } else { "nothing else" };
    let error = error.with("arrived", format_args!("{text}{rest}"));
    error.with_arrived(whole.into_iter().map(|tensor| (tensor.tensor, tensor.rows)).collect())
}

/// The rows a piece writes to, some perhaps in part.
fn rows_of(piece: Piece, row_bytes: u64) -> Range<u64> {
    piece.dst / row_bytes..(piece.dst + piece.len).div_ceil(row_bytes)
}

/// The same numbers as ranges that are ascending and apart.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut apart: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match apart.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => apart.push(range),
        }
    }
    apart
}

/// What of `ranges` is not in `holes`; both ascending and apart.
fn without(ranges: &[Range<u64>], holes: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    let mut first = 0;
    for range in ranges {
        let mut at = range.start;
        while holes.get(first).is_some_and(|hole| hole.end <= at) {
            first += 1;
        }
        for hole in holes[first..].iter().take_while(|hole| hole.start < range.end) {
            if at < hole.start {
                left.push(at..hole.start);
            }
            at = at.max(hole.end);
        }
        if at < range.end {
            left.push(at..range.end);
        }
    }
    left
}
