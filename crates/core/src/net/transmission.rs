//! Moves one frame or one list of windows through a stream: tries, waits and gives up.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::carrier::Carrier;
use super::pace::Pace;
use super::step::{StepResult, Way, timespec};
use super::stream::Stream;
use crate::error::{Error, ErrorKind, OptionName, Result};
use crate::model::Deadline;

/// One frame or one list of windows in transit.
pub(super) struct Transmission<'a> {
    stream: &'a Stream,
    /// What carries the bytes.
    carrier: &'a dyn Carrier,
    way: Way,
    deadline: Deadline,
    /// How long to poll without sleeping.
    pub(super) poll_time: Duration,
    /// Whether it has slept since [`Transmission::slept_after_polling`] was last called.
    slept: bool,
    /// When it stops polling. `None` until it finds nothing to move.
    polls_until: Option<Instant>,
    /// When it last checked the deadline between two steps.
    asked: Option<Instant>,
    /// Bytes that moved since the peer's pace was last updated.
    unpaced: u64,
}

impl<'a> Transmission<'a> {
    /// Interval at which a transmission checks its deadline and for an interruption while bytes move.
    const ASK: Duration = Duration::from_millis(100);

    /// Begins to move a frame or payload, which `carrier` carries.
    pub(super) fn new(stream: &'a Stream, carrier: &'a dyn Carrier, way: Way, deadline: Deadline) -> Self {
        Transmission {
            stream,
            carrier,
            way,
            deadline,
            poll_time: carrier.poll_time(),
            slept: false,
            polls_until: None,
            asked: None,
            unpaced: 0,
        }
    }

    /// Returns how many bytes the next step moves. The end of the stream is an error.
    pub(super) fn next(&mut self, done: u64, step: impl FnMut() -> io::Result<StepResult>) -> Result<usize> {
        self.step_until_moved(done, step)?.ok_or_else(|| self.stream.ended(done))
    }

    /// Repeats `step` until it moves bytes, and waits in between. Returns `None` at the end of the stream. An
    /// error after at least one byte (`done`) ends the stream.
    pub(super) fn step_until_moved(
        &mut self,
        done: u64,
        mut step: impl FnMut() -> io::Result<StepResult>,
    ) -> Result<Option<usize>> {
        let (mut slept, mut waited) = (false, if done > 0 { self.check_deadline() } else { Ok(()) });
        let failed = loop {
            if let Err(error) = waited {
                break error;
            }
            if self.stream.closed_here() {
                match self.way {
                    Way::In => return Ok(None),
                    Way::Out => break self.stream.broken(Errno::PIPE.into()),
                }
            }
            match step() {
                Ok(StepResult::Bytes(bytes)) => {
                    self.unpaced += bytes as u64;
                    if self.unpaced >= Pace::MIN_BYTES {
                        self.count_for_pace();
                    }
                    // Polling starts again for each part of a message.
                    if !self.carrier.poll_time().is_zero() {
                        self.polls_until = None;
                    }
                    return Ok(Some(bytes));
                }
                Ok(StepResult::Ended) => return Ok(None),
                Ok(StepResult::NotYet) => waited = self.wait(slept).map(|sleeping| slept = sleeping),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if memory_refused(&error) => {
                    break Error::new(ErrorKind::System, "memory cannot be sent or received").because(error);
                }
                Err(error) => break self.stream.broken(error),
            }
        };
        if done > 0 {
            self.stream.break_after_half();
        }
        Err(failed.with("peer", &self.stream.about.peer).with("bytes_before", done))
    }

    /// Checks the deadline at intervals between two steps that moved bytes. A peer that always has bytes, or
    /// room for them, would never let this thread sleep. Bytes that have already arrived are received even if
    /// no time is left.
    fn check_deadline(&mut self) -> Result<()> {
        let now = Instant::now();
        if now.duration_since(*self.asked.get_or_insert(now)) < Self::ASK {
            return Ok(());
        }
        self.asked = Some(now);
        self.deadline.waiting(self.doing())
    }

    /// Returns whether it slept for the last step, although it polled first. Polling starts again for the
    /// next step.
    pub(super) fn slept_after_polling(&mut self) -> bool {
        self.polls_until = None;
        std::mem::take(&mut self.slept)
    }

    fn doing(&self) -> &'static str {
        match self.way {
            Way::In => "waiting for data from the peer",
            Way::Out => "waiting for the peer to read data",
        }
    }

    /// Counts the bytes that have moved for the pace of the peer.
    fn count_for_pace(&mut self) {
        if let Some(pace) = self.stream.pace.lock().as_mut() {
            pace.add(self.unpaced);
        }
        self.unpaced = 0;
    }

    /// Returns how long the peer may still pause. Returns `Err(NotLinked)` if the peer has been too slow.
    fn paced(&mut self) -> Result<Duration> {
        self.count_for_pace();
        let mut pace = self.stream.pace.lock();
        let Some(pace) = pace.as_mut() else { return Ok(Duration::MAX) };
        let left = pace.left();
        if !left.is_zero() {
            return Ok(left);
        }
        let (moved, limit) = pace.facts();
        let text = "the peer stalled: it moved less than 64 KiB within the limit of silence";
        Err(Error::new(ErrorKind::NotLinked, text)
            .with("moved_bytes", moved)
            .with("limit_ms", limit.as_millis())
            .of_option(OptionName::SILENCE))
    }

    /// Sleeps until the socket may be ready, and returns `true`. Returns `false` without sleeping while
    /// polling time is left.
    fn wait(&mut self, slept: bool) -> Result<bool> {
        let stalled = self.stream.faults.as_ref().is_some_and(|faults| faults.stalled(self.way));
        if !self.poll_time.is_zero() {
            let now = Instant::now();
            if now < *self.polls_until.get_or_insert(self.deadline.at().min(now + self.poll_time)) {
                if stalled || !self.carrier.ready_soon(self.way) {
                    std::thread::yield_now();
                }
                return Ok(false);
            }
        }
        if slept { self.deadline.waiting(self.doing()) } else { self.deadline.check(self.doing()) }?;
        let events = if stalled { Some(PollFlags::empty()) } else { self.carrier.fall_asleep(self.way) };
        let Some(events) = events else { return Ok(true) };
        self.slept = true;
        let mut socket = [PollFd::new(self.stream, events)];
        let wait_limit = self.deadline.wait_limit().min(self.paced()?);
        let polled = poll(&mut socket, Some(&timespec(wait_limit)));
        let goes_on = stalled || self.carrier.wake_up(self.stream.as_fd(), self.way, socket[0].revents());
        match polled {
            // A stalled stream would return here again and again.
            Ok(1..) if stalled => Err(self.stream.broken(Errno::CONNRESET.into())),
            Ok(1..) if !goes_on => Err(self.stream.broken(Errno::PIPE.into())),
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(self.stream.broken(errno.into())),
        }
    }
}

/// Counts the remaining bytes for the pace. Otherwise a transmission that never waits would not count, and the next one could fail
/// as too slow.
impl Drop for Transmission<'_> {
    fn drop(&mut self) {
        if self.unpaced > 0 {
            self.count_for_pace();
        }
    }
}

/// Whether the cause is the memory, not the connection.
fn memory_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput || error.raw_os_error() == Some(Errno::FAULT.raw_os_error())
}
