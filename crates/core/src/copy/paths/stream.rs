//! Moves a range of a plan through a stream: the sender reads its windows in the order of the plan, and the
//! receiver writes its own.
//!
//! Both sides count along the same plan, so only the bytes travel, and zeros at positions that follow from the byte count alone
//! ([`padding_at`](crate::net::padding_at)). The bytes are copied directly between the windows and the socket, or the rings in
//! shared memory of a stream that has them (`a_plan_through_a_stream_ends_like_a_plan_in_memory`). Runs of short windows may go
//! through a buffer (`short_windows`). `protocol` and `session` agree on the plan.

use std::ops::Range;
use std::sync::Arc;

use super::data_path::{DataPath, Hops, PathJob, before_batch};
use super::path_kind::PathKind;
use super::staged_stream::StagedRange;
use crate::copy::progress::{Progress, with_copied_bytes};
use crate::copy::route::PlacedTensors;
use crate::copy::run::HeldPins;
use crate::copy::short_windows::ShortWindowBuffer;
use crate::copy::window_batch::{PlanEnd, WindowBatch};
use crate::copy::window_sum::WindowSum;
use crate::device::HostReach;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::kernels::Kernel;
use crate::memory::{Access, Reach, Tensors};
use crate::model::Deadline;
use crate::net::{PADDING_INTERVAL, Stream};
use crate::plan::{CopyPlan, Side};

/// The bytes `range` of a plan, through one stream.
pub struct StreamPath<'a> {
    pub stream: &'a Stream,
    /// Positions in the plan. Other streams may carry other ranges at the same time.
    pub range: Range<u64>,
    /// The checksum of the bytes, to which the end adds them in the order of the plan.
    pub sum: Option<&'a mut WindowSum>,
}

impl StreamPath<'_> {
    /// Checks that a stream can carry the bytes of `memory` at `end` of a plan, before this side tells the peer to expect them.
    /// Returns `Err(System)` for memory of another process that the CPU cannot read, and for any memory of another process as a
    /// destination. Returns `Err(InvalidArgument)` for memory that has no pages.
    pub fn check(end: Side, memory: &Tensors) -> Result<Hops> {
        memory.check_present(if end == Side::Source { Access::Read } else { Access::Write })?;
        hops(end, memory.reach()).ok_or_else(|| {
            let done = if end == Side::Source { "sent" } else { "received" };
            let text = format!("memory of another process cannot be {done} through a stream");
            Error::new(ErrorKind::System, text).with("memory", format_args!("{:?}", memory.reach()))
        })
    }
}

fn hops(end: Side, memory: Reach) -> Option<Hops> {
    match (end, memory) {
        (_, Reach::Host) | (Side::Source, Reach::HostRead) => Some(Hops::One),
        (_, Reach::Device) => Some(Hops::Two),
        (Side::Destination, Reach::HostRead) | (_, Reach::Process | Reach::Fabric) => None,
    }
}

impl DataPath for StreamPath<'_> {
    fn kind(&self) -> PathKind {
        if self.stream.has_rings() { PathKind::Rings } else { PathKind::Sockets }
    }

    fn hops(&self, end: Side, memory: Reach, _: HostReach) -> Option<Hops> {
        hops(end, memory)
    }

    /// Receives the bytes. An error carries how many are in place.
    fn read(
        &mut self,
        job: PathJob<'_>,
        (dst, _): PlacedTensors<'_>,
        arrived: &Arc<Progress>,
        _held: HeldPins,
    ) -> Result<Hops> {
        let hops = Self::check(Side::Destination, dst)?;
        inside(job.plan, &self.range)?;
        match (hops, &self.sum) {
            (Hops::One, _) => self.receive_batches(job, dst, arrived),
            (Hops::Two, None) => {
                StagedRange { job, range: self.range.clone(), stream: self.stream }.receive(dst, arrived)
            }
            (Hops::Two, Some(_)) => {
                Err(Error::new(ErrorKind::System, "the CPU cannot hash what a device has received"))
            }
        }?;
        Ok(hops)
    }
}

impl StreamPath<'_> {
    /// Sends the bytes and adds them to `sent`, which all ranges of a plan may share. An error reports `sent`.
    pub fn send(&mut self, job: PathJob<'_>, src: &Arc<Tensors>, sent: &Progress) -> Result<()> {
        let hops = Self::check(Side::Source, src)?;
        inside(job.plan, &self.range)?;
        match hops {
            Hops::One => self.send_batches(job, src, sent),
            Hops::Two => {
                let range = StagedRange { job, range: self.range.clone(), stream: self.stream };
                range.send(src, self.sum.as_deref_mut(), sent)
            }
        }
    }

    fn send_batches(&mut self, job: PathJob<'_>, src: &Arc<Tensors>, sent: &Progress) -> Result<()> {
        let (stream, range, PathJob { copy_engine, plan, deadline }) = (self.stream, self.range.clone(), job);
        let total = range.end - range.start;
        let most = max_bytes(self.sum.is_some());
        let end = PlanEnd { plan, end: Side::Source, tensors: src, most };
        let (mut windows, mut short) = (Vec::new(), ShortWindowBuffer::new(copy_engine, stream, total));
        let padding = || stream.send_padding(deadline);
        in_batches(&end, range, sent, deadline, padding, |batch, _| {
            if let Some(sum) = &mut self.sum {
                batch.runs.iter().try_for_each(|&run| sum.add(run))?;
            }
            if short.prepare(batch) {
                short.copy(batch, Side::Source, batch.bytes, Kernel::cached())?;
                return stream.send_windows(&[short.window(batch)?], deadline);
            }
            batch.list_windows(&mut windows);
            stream.send_windows(&windows, deadline)
        })
    }

    fn receive_batches(&mut self, job: PathJob<'_>, dst: &Arc<Tensors>, arrived: &Progress) -> Result<()> {
        let (stream, range, PathJob { copy_engine, plan, deadline }) = (self.stream, self.range.clone(), job);
        let most = max_bytes(self.sum.is_some());
        let end = PlanEnd { plan, end: Side::Destination, tensors: dst, most };
        let total = range.end - range.start;
        let (mut windows, mut short) = (Vec::new(), ShortWindowBuffer::new(copy_engine, stream, total));
        // What is hashed is read again at once.
        let kernel = Kernel::for_bytes(if self.sum.is_some() { 0 } else { total });
        let padding = || stream.receive_padding(deadline);
        in_batches(&end, range, arrived, deadline, padding, |batch, done| {
            if short.prepare(batch) {
                let mut bytes = 0;
                let received = stream.receive_counted(&[short.window(batch)?], deadline, &mut bytes);
                *done = short.copy(batch, Side::Destination, bytes, kernel)?;
                received?;
            } else {
                batch.list_windows(&mut windows);
                stream.receive_counted(&windows, deadline, done)?;
            }
            // The bytes as they are in place, not as they came.
            self.sum.as_mut().map_or(Ok(()), |sum| batch.runs.iter().try_for_each(|&run| sum.add(run)))
        })
    }
}

/// Bytes that move between two times of hashing, so that they are still in the CPU caches.
const SUMMED_BYTES: u64 = 256 << 10;

fn max_bytes(summed: bool) -> u64 {
    if summed { SUMMED_BYTES } else { PADDING_INTERVAL }
}

/// Cuts `range` into batches of windows, moves them in order, and reports each, so that a failure leaves the
/// state of at most one batch unknown. No batch crosses a multiple of [`PADDING_INTERVAL`] bytes from the start
/// of `range`. `padding` is called at each such multiple that has padding.
fn in_batches<'a>(
    plan_end: &PlanEnd<'a>,
    range: Range<u64>,
    progress: &Progress,
    deadline: Deadline,
    padding: impl Fn() -> Result<()>,
    mut moved: impl FnMut(&WindowBatch<'a>, &mut u64) -> Result<()>,
) -> Result<()> {
    let mut batch = WindowBatch::new();
    let mut at = range.start;
    while at < range.end {
        let into = at - range.start;
        let interval = PADDING_INTERVAL - into % PADDING_INTERVAL;
        plan_end.list(at, range.end.min(at.saturating_add(interval)), &mut batch)?;
        if batch.bytes == 0 {
            let text = "the plan has no piece at this position";
            return Err(Error::new(ErrorKind::System, text).with("at", at));
        }
        let mut done = 0;
        let begun = before_batch(&range, at, deadline, &padding);
        if let Err(error) = begun.and_then(|()| moved(&batch, &mut done)) {
            progress.done(at, at + done);
            return Err(with_copied_bytes(error, progress, plan_end.plan.bytes()));
        }
        let end = at + batch.bytes;
        progress.done(at, end);
        at = end;
    }
    Ok(())
}

fn inside(plan: &CopyPlan, range: &Range<u64>) -> Result<()> {
    if range.start <= range.end && range.end <= plan.bytes() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::System, "a range ends beyond its plan")
        .with("start", range.start)
        .with("end", range.end)
        .with("plan_bytes", plan.bytes()))
}
