//! Moves a range of a plan through a socket: the sender reads its windows in the order of the plan, and the
//! receiver writes its own.
//!
//! Both sides count along the same plan, so only the bytes travel, and zeros at positions that follow from
//! the byte count alone ([`LEAD`](crate::net::LEAD)). The bytes are not copied in between
//! (`a_plan_through_a_stream_ends_like_a_plan_in_memory`). `protocol` and `session` agree on the plan.

use std::ops::Range;
use std::sync::Arc;

use super::engine::CopyEngine;
use super::progress::{Progress, with_copied_bytes};
use super::run;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Access, Reach, Tensors, Window};
use crate::model::Deadline;
use crate::net::{LEAD_INTERVAL, Stream, leads};
use crate::plan::{CopyPlan, Piece};

/// Maximum number of windows in one call of the stream.
const WINDOWS: usize = 1024;

impl CopyEngine {
    /// Checks that `src` can be sent through a socket, before the peer is told to expect it. Returns
    /// `Err(NotEnabled)` if the CPU cannot address the memory.
    pub fn can_send(src: &Tensors) -> Result<()> {
        src.check_mapped(Access::Read)?;
        if src.host_addressable() { Ok(()) } else { Err(unreachable(src.reach(), "read")) }
    }

    /// Checks that `dst` can be received through a socket, before the peer is told to expect it. Returns
    /// `Err(NotEnabled)` if the CPU cannot write the memory.
    pub fn can_receive(dst: &Tensors) -> Result<()> {
        dst.check_mapped(Access::Write)?;
        if dst.reach() == Reach::Host { Ok(()) } else { Err(unreachable(dst.reach(), "written")) }
    }

    /// Sends the bytes at positions `range` of `plan`, read from `src`. An error carries how many bytes were
    /// sent.
    pub fn send(
        plan: &CopyPlan,
        range: Range<u64>,
        src: &Arc<Tensors>,
        stream: &Stream,
        deadline: Deadline,
    ) -> Result<()> {
        Self::can_send(src)?;
        let sent = Progress::default();
        let window = |index, piece| run::read_window(plan, src, index, piece);
        let lead = || stream.send_lead(deadline);
        let moved = |windows: &[Window<'_>], _: &mut u64| stream.send_windows(windows, deadline);
        in_batches(plan, range, &sent, deadline, window, lead, moved)
    }

    /// Receives the bytes at positions `range` of `plan` into `dst`, and records in `progress` what is in
    /// place.
    pub fn receive(
        plan: &CopyPlan,
        range: Range<u64>,
        dst: &Arc<Tensors>,
        stream: &Stream,
        deadline: Deadline,
        progress: &Progress,
    ) -> Result<()> {
        Self::can_receive(dst)?;
        let window = |index, piece| run::write_window(plan, dst, index, piece);
        let lead = || stream.receive_lead(deadline);
        let moved = |windows: &[Window<'_>], done: &mut u64| stream.receive_counted(windows, deadline, done);
        in_batches(plan, range, progress, deadline, window, lead, moved)
    }
}

/// Cuts `range` into batches of windows, moves them in order, and reports each, so that a failure leaves the
/// state of at most one batch unknown. No batch crosses a multiple of [`LEAD_INTERVAL`] bytes from the start
/// of `range`. `lead` is called at each such multiple that has a lead.
fn in_batches<'a>(
    plan: &CopyPlan,
    range: Range<u64>,
    progress: &Progress,
    deadline: Deadline,
    window: impl Fn(usize, Piece) -> Result<Window<'a>>,
    lead: impl Fn() -> Result<()>,
    moved: impl Fn(&[Window<'a>], &mut u64) -> Result<()>,
) -> Result<()> {
    let of_bytes = range.end.saturating_sub(range.start);
    if range.end > plan.bytes() {
        return Err(Error::new(ErrorKind::System, "a range ends beyond its plan")
            .with("end", range.end)
            .with("plan_bytes", plan.bytes()));
    }
    let mut batch = Vec::with_capacity(WINDOWS);
    let mut at = range.start;
    while at < range.end {
        batch.clear();
        let mut end = at;
        let into = at - range.start;
        let interval = LEAD_INTERVAL - into % LEAD_INTERVAL;
        for (index, piece) in plan.pieces(at, range.end.min(at.saturating_add(interval))).take(WINDOWS) {
            batch.push(window(index, piece)?);
            end += piece.len;
        }
        if end == at {
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
        progress.done(at, end);
        at = end;
    }
    Ok(())
}

fn unreachable(reach: Reach, done: &str) -> Error {
    let text = format!("memory that the CPU cannot address cannot be {done} through a socket");
    Error::new(ErrorKind::NotEnabled, text).with("memory", format_args!("{reach:?}"))
}
