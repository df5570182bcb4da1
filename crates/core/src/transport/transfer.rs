//! One frame, or one list of windows, on its way: tries, waits and gives up.
//!
//! Not for: what is tried (`stream`).

use std::io;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Stream;
use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;

/// What a step of a transfer came to.
pub(super) enum Moved {
    Bytes(usize),
    /// The other side sends no more.
    Ended,
    NotYet,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    In,
    Out,
}

/// One frame, or one list of windows, on its way.
pub(super) struct Transfer<'a> {
    stream: &'a Stream,
    way: Way,
    deadline: Deadline,
    /// How long its first bytes are looked for without sleeping.
    pub(super) patience: Duration,
    /// It has slept since it was last asked whether it had to.
    slept: bool,
    /// When it first found nothing.
    since: Option<Instant>,
    /// When it last asked whether to go on.
    asked: Option<Instant>,
    /// Bytes that moved since the pace of the peer was last looked at.
    unpaced: u64,
}

impl<'a> Transfer<'a> {
    /// How long a transfer that never waits in vain goes on without asking whether to.
    const ASK: Duration = Duration::from_millis(100);

    pub(super) fn new(stream: &'a Stream, way: Way, deadline: Deadline) -> Self {
        Transfer {
            stream,
            way,
            deadline,
            patience: Duration::ZERO,
            slept: false,
            since: None,
            asked: None,
            unpaced: 0,
        }
    }

    /// How many bytes the next step moves; the end of the stream is an error.
    pub(super) fn next(&mut self, done: u64, step: impl FnMut() -> io::Result<Moved>) -> Result<usize> {
        self.attempt(done, step)?.ok_or_else(|| self.stream.ended(done))
    }

    /// Repeats `step` until it moves bytes, waiting in between; `None` at the end of the stream. An error after `done`
    /// bytes ends the stream.
    pub(super) fn attempt(
        &mut self,
        done: u64,
        mut step: impl FnMut() -> io::Result<Moved>,
    ) -> Result<Option<usize>> {
        let (mut slept, mut on) = (false, if done > 0 { self.still_on() } else { Ok(()) });
        let failed = loop {
            if let Err(error) = on {
                break error;
            }
            match step() {
                Ok(Moved::Bytes(bytes)) => {
                    self.unpaced += bytes as u64;
                    return Ok(Some(bytes));
                }
                Ok(Moved::Ended) => return Ok(None),
                Ok(Moved::NotYet) => on = self.wait(slept).map(|sleeping| slept = sleeping),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if memory_refused(&error) => {
                    break Error::new(ErrorKind::System, "memory cannot be sent or received").because(error);
                }
                Err(error) => break self.stream.broken(error),
            }
        };
        if done > 0 {
            self.stream.spoilt();
        }
        Err(failed.with("peer", self.stream.peer()).with("bytes_before", done))
    }

    /// Between two steps that moved bytes: now and then whether to go on, because a peer that always has bytes, or room
    /// for them, would never let this sleep. What is there already is received even when no time is left.
    fn still_on(&mut self) -> Result<()> {
        let now = Instant::now();
        if now.duration_since(*self.asked.get_or_insert(now)) < Self::ASK {
            return Ok(());
        }
        self.asked = Some(now);
        self.deadline.waiting(self.doing())
    }

    /// Whether it slept for the last step, although it looked for it first. The next one is looked for again.
    pub(super) fn looked_in_vain(&mut self) -> bool {
        self.since = None;
        std::mem::take(&mut self.slept)
    }

    fn doing(&self) -> &'static str {
        match self.way {
            Way::In => "waiting for bytes of the peer",
            Way::Out => "waiting for the peer to take bytes",
        }
    }

    /// How long the peer may still stand still; an error if it has been too slow.
    fn paced(&mut self) -> Result<Duration> {
        let mut pace = self.stream.pace.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(pace) = pace.as_mut() else { return Ok(Duration::MAX) };
        pace.moved(std::mem::take(&mut self.unpaced));
        let left = pace.left();
        if !left.is_zero() {
            return Ok(left);
        }
        let (moved, limit) = pace.facts();
        let text = "the peer stalled: it moved less than 64 KiB within llm.LinkSilence";
        Err(Error::new(ErrorKind::NotLinked, text)
            .with("moved_bytes", moved)
            .with("limit_ms", limit.as_millis()))
    }

    /// Sleeps until the socket may be ready and says so; does not sleep while patience is left.
    fn wait(&mut self, slept: bool) -> Result<bool> {
        if !self.patience.is_zero() {
            let since = *self.since.get_or_insert_with(Instant::now);
            if since.elapsed() < self.patience {
                std::thread::yield_now();
                return Ok(false);
            }
        }
        if slept { self.deadline.waiting(self.doing()) } else { self.deadline.check(self.doing()) }?;
        let stalled = self.stream.faults().stalled(self.way);
        let events = match self.way {
            _ if stalled => PollFlags::empty(),
            Way::In => PollFlags::IN,
            // A peer that has closed its end reads nothing any more, but only a full window shows that it is gone.
            Way::Out => PollFlags::OUT | PollFlags::RDHUP,
        };
        self.slept = true;
        let mut socket = [PollFd::new(self.stream, events)];
        let nap = self.deadline.nap().min(self.paced()?);
        match poll(&mut socket, Some(&timespec(nap))) {
            // A stalled stream would find the same again and again.
            Ok(1..) if stalled => Err(self.stream.broken(Errno::CONNRESET.into())),
            Ok(1..) if socket[0].revents() == PollFlags::RDHUP => Err(self.stream.broken(Errno::PIPE.into())),
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(self.stream.broken(errno.into())),
        }
    }
}

/// Whether the fault is with the memory, not with the connection.
fn memory_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput || error.raw_os_error() == Some(Errno::FAULT.raw_os_error())
}

/// A limit as `poll` takes it.
pub(super) fn timespec(limit: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    }
}
