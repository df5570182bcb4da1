//! Lists the windows of a plan at one end, some at a time.

use crate::error::Result;
use crate::memory::{Tensors, Window, Windows};
use crate::plan::{CopyPlan, LocalEnd, PlannedSpan};

/// Maximum number of windows in a batch, which a socket takes in one call.
const WINDOWS: u64 = 1024;
/// Windows of fewer bytes than this are short.
const SHORT: u64 = 8 << 10;
/// A batch takes short windows until it has this many bytes, which fit the caches of every core.
const SHORT_BYTES: u64 = 256 << 10;
/// Batches of fewer windows do not count as short, because a buffer would save nothing.
const FEW: u64 = 64;

/// One end of a plan.
pub(super) struct Listing<'a> {
    pub(super) plan: &'a CopyPlan,
    pub(super) end: LocalEnd,
    pub(super) tensors: &'a Tensors,
    /// Most bytes of a batch.
    pub(super) most: u64,
}

/// The windows of some bytes of a plan, in order.
pub(super) struct WindowBatch<'a> {
    /// At most [`WINDOWS`], because each run has at least one window.
    pub(super) runs: Vec<Windows<'a>>,
    /// Number of windows in all runs, at most [`WINDOWS`].
    pub(super) windows: u64,
    pub(super) bytes: u64,
    /// Whether all windows belong to one wave, so that they may be written in any order.
    pub(super) is_one_wave: bool,
}

impl<'a> Listing<'a> {
    /// Lists in `batch` the windows of bytes `from..to` of the plan, as many as it may have. Neighbours become one
    /// window.
    pub(super) fn list(&self, from: u64, to: u64, batch: &mut WindowBatch<'a>) -> Result<()> {
        batch.clear();
        let mut first_wave = None;
        for PlannedSpan { wave, tensor, span } in self.plan.spans(from, to) {
            let (tensor, start, step) = match self.end {
                LocalEnd::Source => (self.plan.src_tensors().tensor(tensor), span.src, span.src_step),
                LocalEnd::Destination => (self.plan.dst_tensors().tensor(tensor), span.dst, span.dst_step),
            };
            let run = self.tensors.windows(tensor, start, span.len, (span.count, step))?;
            batch.is_one_wave &= *first_wave.get_or_insert(wave) == wave;
            if !batch.add(run.joined()) {
                break;
            }
        }
        Ok(())
    }
}

impl<'a> WindowBatch<'a> {
    pub(super) fn new() -> Self {
        WindowBatch { runs: Vec::new(), windows: 0, bytes: 0, is_one_wave: true }
    }

    fn clear(&mut self) {
        self.runs.clear();
        (self.windows, self.bytes, self.is_one_wave) = (0, 0, true);
    }

    /// Adds as many windows of `run` as fit. Returns whether more may follow.
    fn add(&mut self, run: Windows<'a>) -> bool {
        let joined = self.runs.last().and_then(|last| last.followed_by(&run));
        if let (Some(both), Some(last)) = (joined, self.runs.last_mut()) {
            *last = both;
            self.bytes += run.bytes();
            return true;
        }
        let len = run.first().len();
        let short_room =
            if len < SHORT { SHORT_BYTES.saturating_sub(self.bytes) / len.max(1) } else { WINDOWS };
        let room = short_room.min(WINDOWS - self.windows);
        if room == 0 {
            return false;
        }
        let some = run.first_of(room);
        self.runs.push(some);
        self.windows += some.count();
        self.bytes += some.bytes();
        some.count() == run.count()
    }

    /// Returns whether the windows are short and many, and may be written in any order.
    pub(super) fn is_short(&self) -> bool {
        let short = self.windows >= FEW && self.bytes < self.windows * SHORT;
        short && self.bytes <= SHORT_BYTES && self.is_one_wave
    }

    /// Lists every window in `windows`.
    pub(super) fn list_windows(&self, windows: &mut Vec<Window<'a>>) {
        windows.clear();
        windows.extend(self.runs.iter().flat_map(|run| run.iter()));
    }
}
