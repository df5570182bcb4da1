//! Moves a range of a plan through a socket: the sender reads its windows in the order of the plan, and the
//! receiver writes its own.
//!
//! Both sides count along the same plan, so only the bytes travel, and zeros at positions that follow from
//! the byte count alone ([`LEAD`](crate::net::LEAD)). The operating system copies the bytes directly between the socket
//! and the windows (`a_plan_through_a_stream_ends_like_a_plan_in_memory`). Many short windows go through a buffer
//! (`short_windows`). `protocol` and `session` agree on the plan.

use std::ops::Range;
use std::sync::Arc;

use super::engine::CopyEngine;
use super::progress::{Progress, with_copied_bytes};
use super::short_windows::ShortWindowBuffer;
use super::stream_sum::{SUMMED_BYTES, StreamSum};
use super::window_batch::{PlanEnd, WindowBatch};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Access, Reach, Tensors};
use crate::model::Deadline;
use crate::net::{LEAD_INTERVAL, Stream, leads};
use crate::plan::{CopyPlan, LocalEnd};

impl CopyEngine {
    /// Checks that `src` can be sent through a socket, before the peer is told to expect it. Returns `Err(System)` for
    /// memory that only the kernel can read.
    pub fn can_send(src: &Tensors) -> Result<()> {
        src.check_mapped(Access::Read)?;
        match src.reach() {
            Reach::Host | Reach::HostRead | Reach::Device => Ok(()),
            reach @ (Reach::Process | Reach::Fabric) => Err(unreachable(reach, "sent")),
        }
    }

    /// Checks that `dst` can be received through a socket, before the peer is told to expect it. Returns `Err(System)`
    /// for memory of another process.
    pub fn can_receive(dst: &Tensors) -> Result<()> {
        dst.check_mapped(Access::Write)?;
        if dst.reach().writable() { Ok(()) } else { Err(unreachable(dst.reach(), "received")) }
    }

    /// Sends the bytes at positions `range` of `plan`, read from `src`, and adds them to `sum`. An error carries how
    /// many bytes were sent.
    pub fn send(
        &self,
        plan: &CopyPlan,
        range: Range<u64>,
        src: &Arc<Tensors>,
        stream: &Stream,
        deadline: Deadline,
        mut sum: Option<&mut StreamSum>,
    ) -> Result<()> {
        Self::can_send(src)?;
        inside(plan, &range)?;
        if src.reach() == Reach::Device {
            return self.send_staged(plan, range, src, stream, deadline, sum);
        }
        let sent = Progress::default();
        let end = PlanEnd { plan, end: LocalEnd::Source, tensors: src, most: most_bytes(sum.is_some()) };
        let (mut windows, mut short) = (Vec::new(), ShortWindowBuffer::new(self.tuner(), &range));
        let lead = || stream.send_lead(deadline);
        in_batches(&end, range, &sent, deadline, lead, |batch, _| {
            if let Some(sum) = &mut sum {
                sum.add(&batch.runs)?;
            }
            if short.prepare(batch) {
                return stream.send_windows(&[short.gather(batch)?], deadline);
            }
            batch.list_windows(&mut windows);
            stream.send_windows(&windows, deadline)
        })
    }

    /// Receives the bytes at positions `range` of `plan` into `dst`, and records in `arrived` what is in place.
    pub fn receive<'a>(
        &self,
        plan: &CopyPlan,
        range: Range<u64>,
        dst: &Arc<Tensors>,
        stream: &Stream,
        deadline: Deadline,
        arrived: impl Into<Arrived<'a>>,
    ) -> Result<()> {
        Self::can_receive(dst)?;
        inside(plan, &range)?;
        let Arrived { progress, mut sum } = arrived.into();
        if dst.reach() == Reach::Device {
            return match sum {
                None => self.receive_staged(plan, range, dst, stream, deadline, progress),
                Some(_) => {
                    Err(Error::new(ErrorKind::System, "the CPU cannot hash what a device has received"))
                }
            };
        }
        let most = most_bytes(sum.is_some());
        let end = PlanEnd { plan, end: LocalEnd::Destination, tensors: dst, most };
        let (mut windows, mut short) = (Vec::new(), ShortWindowBuffer::new(self.tuner(), &range));
        let lead = || stream.receive_lead(deadline);
        in_batches(&end, range, progress, deadline, lead, |batch, done| {
            if short.prepare(batch) {
                let mut arrived = 0;
                let received = stream.receive_counted(&[short.window(batch)?], deadline, &mut arrived);
                *done = short.scatter(batch, arrived, sum.is_some())?;
                received?;
            } else {
                batch.list_windows(&mut windows);
                stream.receive_counted(&windows, deadline, done)?;
            }
            // The bytes as they are in place, not as they came.
            sum.as_mut().map_or(Ok(()), |sum| sum.add(&batch.runs))
        })
    }
}

/// Where a receiver records what is in place.
pub struct Arrived<'a> {
    pub progress: &'a Progress,
    /// The checksum of the bytes in place.
    pub sum: Option<&'a mut StreamSum>,
}

impl<'a> From<&'a Progress> for Arrived<'a> {
    fn from(progress: &'a Progress) -> Self {
        Arrived { progress, sum: None }
    }
}

fn most_bytes(summed: bool) -> u64 {
    if summed { SUMMED_BYTES } else { LEAD_INTERVAL }
}

/// Cuts `range` into batches of windows, moves them in order, and reports each, so that a failure leaves the
/// state of at most one batch unknown. No batch crosses a multiple of [`LEAD_INTERVAL`] bytes from the start
/// of `range`. `lead` is called at each such multiple that has a lead.
fn in_batches<'a>(
    plan_end: &PlanEnd<'a>,
    range: Range<u64>,
    progress: &Progress,
    deadline: Deadline,
    lead: impl Fn() -> Result<()>,
    mut moved: impl FnMut(&WindowBatch<'a>, &mut u64) -> Result<()>,
) -> Result<()> {
    let of_bytes = range.end.saturating_sub(range.start);
    let mut batch = WindowBatch::new();
    let mut at = range.start;
    while at < range.end {
        let into = at - range.start;
        let interval = LEAD_INTERVAL - into % LEAD_INTERVAL;
        plan_end.list(at, range.end.min(at.saturating_add(interval)), &mut batch)?;
        if batch.bytes == 0 {
            let text = "the plan has no piece at this position";
            return Err(Error::new(ErrorKind::System, text).with("at", at));
        }
        // A socket that always has bytes, or room for them, never waits. So the deadline is checked here.
        let in_time =
            if at == range.start { Ok(()) } else { deadline.waiting("moving bytes through a socket") };
        let begun = in_time.and_then(|()| if leads(into, range.end - at) { lead() } else { Ok(()) });
        let mut done = 0;
        if let Err(error) = begun.and_then(|()| moved(&batch, &mut done)) {
            progress.done(at, at + done);
            return Err(with_copied_bytes(error, progress, of_bytes));
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

fn unreachable(reach: Reach, done: &str) -> Error {
    let text = format!("memory of another process cannot be {done} through a socket");
    Error::new(ErrorKind::System, text).with("memory", format_args!("{reach:?}"))
}
