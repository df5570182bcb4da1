//! Lists the windows of a plan at one end, in batches.

use super::host_buffers::BUFFER_BYTES;
use crate::error::Result;
use crate::memory::{Tensors, Window, Windows};
use crate::plan::{CopyPlan, Side};

/// Maximum number of windows in a batch, which a stream takes in one call.
const MAX_WINDOWS: u64 = 1024;
/// Windows of fewer bytes than this are short.
const SHORT: u64 = 8 << 10;
/// Maximum number of bytes in a batch of short windows, which fits the caches of every core.
const SHORT_BYTES: u64 = 256 << 10;
/// Minimum number of windows in a batch of short windows. With fewer, a buffer saves no time.
const MIN_WINDOWS: u64 = 16;

const _: () =
    assert!(MIN_WINDOWS * SHORT <= SHORT_BYTES, "a batch of windows just below the limit can be short");
const _: () = assert!(SHORT_BYTES <= BUFFER_BYTES, "a batch of short windows fits a host buffer");

/// One end of a plan.
pub(super) struct PlanEnd<'a> {
    pub(super) plan: &'a CopyPlan,
    pub(super) end: Side,
    pub(super) tensors: &'a Tensors,
    /// Maximum number of bytes in a batch.
    pub(super) most: u64,
}

/// The windows of some bytes of a plan, in order.
pub(super) struct WindowBatch<'a> {
    /// At most [`MAX_WINDOWS`], because each run has at least one window.
    pub(super) runs: Vec<Windows<'a>>,
    /// Number of windows in all runs, at most [`MAX_WINDOWS`].
    pub(super) windows: u64,
    pub(super) bytes: u64,
    /// Tensor of the last run.
    last: Option<usize>,
}

impl<'a> PlanEnd<'a> {
    /// Lists in `batch` the windows of bytes `from..to` of the plan, up to the limits of a batch. Adjacent windows of a
    /// tensor are joined.
    pub(super) fn list(&self, from: u64, to: u64, batch: &mut WindowBatch<'a>) -> Result<()> {
        batch.clear();
        for (tensor, span) in self.plan.spans(from, to.min(from.saturating_add(self.most))) {
            let (number, (start, step)) = (self.plan.tensors(self.end).tensor(tensor), span.start(self.end));
            let run = self.tensors.windows(number, start, span.len, (span.count, step))?;
            if !batch.add(run.joined(), tensor) {
                break;
            }
        }
        Ok(())
    }
}

impl<'a> WindowBatch<'a> {
    pub(super) fn new() -> Self {
        WindowBatch { runs: Vec::new(), windows: 0, bytes: 0, last: None }
    }

    fn clear(&mut self) {
        self.runs.clear();
        (self.windows, self.bytes, self.last) = (0, 0, None);
    }

    /// Adds as many windows of `run` as fit. Returns whether more may follow. Once a batch has
    /// enough short windows, a long window is not added to it.
    fn add(&mut self, run: Windows<'a>, tensor: usize) -> bool {
        if self.is_short() && run.first().len() >= SHORT {
            return false;
        }
        let room = self.short_room(&run).unwrap_or(u64::MAX);
        let before = self.runs.last().filter(|_| self.last == Some(tensor));
        let joined = before.and_then(|before| before.followed_by(&run));
        if let (Some(both), Some(last), 1..) = (joined, self.runs.last_mut(), room) {
            *last = both;
            self.bytes += run.bytes();
            return true;
        }
        let room = room.min(MAX_WINDOWS - self.windows);
        if room == 0 {
            return false;
        }
        let some = run.first_of(room);
        self.runs.push(some);
        self.windows += some.count();
        self.bytes += some.bytes();
        self.last = Some(tensor);
        some.count() == run.count()
    }

    /// Returns the number of windows of `run` for which a batch of short windows has room; `None` if they are not short, or
    /// do not make the batch short on average.
    fn short_room(&self, run: &Windows<'_>) -> Option<u64> {
        let len = run.first().len();
        let room = SHORT_BYTES.saturating_sub(self.bytes) / len.max(1);
        let more = room.min(run.count());
        let (windows, bytes) = (self.windows + more, self.bytes + more * len);
        let averages_short = |bytes: u64, windows: u64| bytes <= windows * SHORT;
        (len < SHORT && (averages_short(self.bytes, self.windows) || averages_short(bytes, windows)))
            .then_some(room)
    }

    /// Returns whether the windows are short and many.
    pub(super) fn is_short(&self) -> bool {
        let short = self.windows >= MIN_WINDOWS && self.bytes < self.windows * SHORT;
        short && self.bytes <= SHORT_BYTES
    }

    /// Lists every window in `windows`.
    pub(super) fn list_windows(&self, windows: &mut Vec<Window<'a>>) {
        windows.clear();
        windows.extend(self.runs.iter().flat_map(|run| run.iter()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::memory::Region;
    use crate::plan::{Moves, Pieces};

    #[test]
    fn windows_of_two_tensors_are_not_joined() {
        let region = Arc::new(Region::ordinary("a test", 1600).unwrap());
        let tensors = Tensors::contiguous(region, 0, 16, 100, ()).unwrap();
        let pieces = Pieces::blocks(100, [(0, 0)].into_iter()).unwrap();
        let plan = CopyPlan::moves(&mut Moves { pieces, num_tensors: 16, ..Moves::default() }).unwrap();
        let end = PlanEnd { plan: &plan, end: Side::Source, tensors: &tensors, most: 1 << 20 };
        let mut batch = WindowBatch::new();
        end.list(0, plan.bytes(), &mut batch).unwrap();
        assert_eq!((batch.windows, batch.bytes), (16, 1600));
    }
}
