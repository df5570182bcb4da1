//! Bytes of caches through a socket: windows of memory, one after the other, from and to where they lie.
//!
//! Not for: frames (`stream`), or which windows (`engine::stream`).

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::SendFlags;

use super::Stream;
use super::step::{Moved, Way};
use super::transmission::Transfer;
use crate::error::Result;
use crate::memory::{Window, socket_io};
use crate::model::Deadline;
use crate::protocol::MOST_AHEAD;

/// Zeros before each [`STRETCH`] of a transfer ([`leads`]), part of what [`VERSION`](crate::protocol::VERSION) stands for. The
/// kernel copies into pages of its own, and some processors do that at a fifth of their speed where the copy lies a few
/// bytes further into its page than the original (benches/results/log.md): a line of the cache keeps page-aligned blocks
/// out of that, and brings what has drifted into it out of it again.
pub const LEAD: usize = 64;
/// Bytes of a transfer from one [`LEAD`] to the next.
pub const STRETCH: u64 = 4 << 20;

/// Whether a [`LEAD`] stands before byte `into` of a transfer of which `left` bytes are still to come.
#[must_use]
pub fn leads(into: u64, left: u64) -> bool {
    into.is_multiple_of(STRETCH) && left > MOST_AHEAD
}

/// Windows handed to one system call; the kernel takes no more, and the rest need not be looked at.
const MOST_WINDOWS: usize = 1024;

/// Bytes of windows that are waited for together over a network: one wake-up for each segment that arrives would cost more
/// than copying it (docs/performance.md).
const TOGETHER: u32 = 256 << 10;

/// Bytes that nobody wants, received at once.
const FORGOTTEN: usize = 4 << 10;

/// So few bytes of windows are looked for as long as [`PATIENCE`] before the thread sleeps, wherever they come from.
const FEW: u64 = 48 << 10;

/// About one hand-over between two processes.
const PATIENCE: Duration = Duration::from_micros(60);
/// Inside one host the next bytes are always looked for, until so many looks of one transfer were in vain: pushes gain
/// by it (benches/results/log.md).
const LOOKS: u8 = 8;

impl Stream {
    /// Sends the bytes of `windows`, one after the other, from where they are.
    pub fn send_windows(&self, windows: &[Window<'_>], deadline: Deadline) -> Result<()> {
        self.windows(windows, Way::Out, deadline, &mut 0)
    }

    /// Receives as many bytes as `windows` hold, one after the other, to where they belong.
    pub fn receive_windows(&self, windows: &[Window<'_>], deadline: Deadline) -> Result<()> {
        self.windows(windows, Way::In, deadline, &mut 0)
    }

    /// As [`receive_windows`](Self::receive_windows); `done` says how many bytes are in place, also after a failure.
    pub fn receive_counted(&self, windows: &[Window<'_>], deadline: Deadline, done: &mut u64) -> Result<()> {
        self.windows(windows, Way::In, deadline, done)
    }

    /// Sends a [`LEAD`], together with the windows that follow.
    pub fn send_lead(&self, deadline: Deadline) -> Result<()> {
        self.send_from(&[0; LEAD], 0, SendFlags::MORE, deadline)
    }

    /// Takes a [`LEAD`] away; what is none ends the stream.
    pub fn receive_lead(&self, deadline: Deadline) -> Result<()> {
        let mut transfer = Transfer::new(self, Way::In, deadline);
        if self.about.same_host {
            transfer.patience = PATIENCE.min(deadline.left());
        }
        let (mut lead, mut done) = ([0; LEAD], 0);
        while done < LEAD {
            done += transfer.next(done as u64, || self.pull(&mut lead[done..]))?;
        }
        if lead == [0; LEAD] {
            return Ok(());
        }
        // Whoever counts otherwise has sent bytes of a cache here.
        Err(self.over("the peer sent other bytes where zeros belong").with("peer", self.peer()))
    }

    /// Receives `bytes` and forgets them.
    pub fn pass_over(&self, bytes: u64, deadline: Deadline) -> Result<()> {
        let mut transfer = Transfer::new(self, Way::In, deadline);
        let (mut scratch, mut done) = ([0; FORGOTTEN], 0);
        while done < bytes {
            let most = usize::try_from(bytes - done).map_or(FORGOTTEN, |left| left.min(FORGOTTEN));
            done += transfer.next(done, || self.pull(&mut scratch[..most]))? as u64;
        }
        Ok(())
    }

    fn windows(&self, windows: &[Window<'_>], way: Way, deadline: Deadline, done: &mut u64) -> Result<()> {
        let mut wakes = Wakes { stream: self, at: 1 };
        let left: u64 = windows.iter().map(Window::len).sum();
        let mut transfer = Transfer::new(self, way, deadline);
        let mut looks = if way == Way::In && self.about.same_host { LOOKS } else { 0 };
        if looks > 0 || (way == Way::In && left <= FEW) {
            transfer.patience = PATIENCE.min(deadline.left());
        }
        // Windows that are done leave the list, so that no step walks over them again.
        let (mut windows, mut skip) = (windows, 0);
        *done = 0;
        while let Some(first) = windows.first() {
            if skip >= first.len() {
                (windows, skip) = (&windows[1..], skip - first.len());
                continue;
            }
            if way == Way::In && !self.about.carries_descriptors {
                wakes.set(if looks > 0 || left - *done < TOGETHER.into() { 1 } else { TOGETHER });
            }
            let bytes = transfer.next(*done, || self.step_windows(windows, skip, way))? as u64;
            if looks > 0 && transfer.looked_in_vain() {
                looks -= 1;
                transfer.patience = if looks > 0 { transfer.patience } else { Duration::ZERO };
            }
            (skip, *done) = (skip + bytes, *done + bytes);
        }
        Ok(())
    }

    fn step_windows(&self, windows: &[Window<'_>], skip: u64, way: Way) -> io::Result<Moved> {
        let lens = windows.iter().map(Window::len);
        let Some(most) = self.faults.allow_windows(way, lens, skip)? else { return Ok(Moved::NotYet) };
        let (socket, windows) = (self.socket.as_fd(), &windows[..most.min(MOST_WINDOWS)]);
        let result = match way {
            Way::Out => socket_io::send(socket, windows, skip),
            Way::In => socket_io::receive(socket, windows, skip),
        };
        let moved = match result {
            Ok(0) if way == Way::In => Moved::Ended,
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) => Moved::Bytes(bytes),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Moved::NotYet,
            Err(error) => return Err(error),
        };
        Ok(self.faults.passed(way, moved))
    }
}

/// After how many bytes a thread that waits to receive is woken; after the first again when this drops.
struct Wakes<'a> {
    stream: &'a Stream,
    at: u32,
}

impl Wakes<'_> {
    fn set(&mut self, bytes: u32) {
        // Refused, whoever waits is woken more often.
        if bytes != self.at && socket_io::wake_at(self.stream.socket.as_fd(), bytes).is_ok() {
            self.at = bytes;
        }
    }
}

impl Drop for Wakes<'_> {
    fn drop(&mut self) {
        self.set(1);
    }
}
