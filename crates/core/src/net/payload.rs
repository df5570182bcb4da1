//! Moves bytes of caches through a stream, directly from and to windows of memory.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use super::Stream;
use super::carrier::MAX_PADDING;
use super::step::{StepResult, Way};
use super::transmission::Transmission;
use crate::error::Result;
use crate::memory::{Window, socket_io};
use crate::model::Deadline;
use crate::protocol::MAX_AHEAD;

/// Bytes of a transmission from one padding to the next.
pub const PADDING_INTERVAL: u64 = 4 << 20;

/// Whether padding (zeros that align the bytes after them) precedes byte `into` of a transmission of which `left` bytes remain.
/// `Carrier::padding` returns their number.
pub fn padding_at(into: u64, left: u64) -> bool {
    into.is_multiple_of(PADDING_INTERVAL) && left > MAX_AHEAD
}

/// Maximum number of windows in one system call. The kernel takes no more, so others are not examined.
const MAX_WINDOWS: usize = 1024;

/// Bytes that a receiver waits for at once over a network. One wake-up for each segment that arrives would
/// cost more than copying it (benches/results/log.md).
const WAKE_BYTES: u32 = 256 << 10;

/// Bytes that are received and discarded at once.
const DISCARDED: usize = 4 << 10;

/// For at most this many bytes, a receiver on any transport polls for [`POLL_TIME`](super::POLL_TIME) first.
const MAX_POLLED: u64 = 48 << 10;

/// Within one host, a transmission polls for its next bytes until this many of its polls have failed. Pushes
/// benefit from it (benches/results/log.md).
const POLLS: u8 = 8;

impl Stream {
    /// Sends the bytes of `windows`, one window after the other, directly from their memory.
    pub fn send_windows(&self, windows: &[Window<'_>], deadline: Deadline) -> Result<()> {
        self.windows(windows, Way::Out, deadline, &mut 0)
    }

    /// Receives as many bytes as `windows` hold, one window after the other, directly into their memory.
    #[cfg(feature = "testing")]
    pub fn receive_windows(&self, windows: &[Window<'_>], deadline: Deadline) -> Result<()> {
        self.windows(windows, Way::In, deadline, &mut 0)
    }

    /// Receives as many bytes as `windows` hold, directly into their memory. Sets `done` to the number of
    /// bytes in place, also after a failure.
    pub fn receive_counted(&self, windows: &[Window<'_>], deadline: Deadline, done: &mut u64) -> Result<()> {
        self.windows(windows, Way::In, deadline, done)
    }

    /// Sends padding, which may leave together with the windows that follow.
    pub fn send_padding(&self, deadline: Deadline) -> Result<()> {
        let (carrier, mut sent) = (self.payload_carrier(), 0);
        let mut transmission = Transmission::new(self, carrier, Way::Out, deadline);
        let padding = carrier.padding(Way::Out);
        while sent < padding {
            let rest = &[0; MAX_PADDING][sent..padding];
            sent += transmission.next(sent as u64, || self.push(carrier, rest, true))?;
        }
        Ok(())
    }

    /// Receives and discards padding. Bytes other than zeros end the stream with `Err(NotLinked)`.
    pub fn receive_padding(&self, deadline: Deadline) -> Result<()> {
        let carrier = self.payload_carrier();
        let mut transmission = Transmission::new(self, carrier, Way::In, deadline);
        if self.about.same_host {
            transmission.poll_time = super::POLL_TIME;
        }
        let (mut bytes, mut done) = ([0; MAX_PADDING], 0);
        let padding = carrier.padding(Way::In);
        while done < padding {
            done += transmission.next(done as u64, || self.pull(carrier, &mut bytes[done..padding]))?;
        }
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        // A peer that counts differently has sent bytes of a cache here.
        Err(self.over("the padding from the peer is not zero").with("peer", &self.about.peer))
    }

    /// Receives `bytes` bytes and discards them.
    pub fn discard_payload(&self, bytes: u64, deadline: Deadline) -> Result<()> {
        let carrier = self.payload_carrier();
        let mut transmission = Transmission::new(self, carrier, Way::In, deadline);
        let (mut scratch, mut done) = ([0; DISCARDED], 0);
        while done < bytes {
            let most = usize::try_from(bytes - done).map_or(DISCARDED, |left| left.min(DISCARDED));
            done += transmission.next(done, || self.pull(carrier, &mut scratch[..most]))? as u64;
        }
        Ok(())
    }

    fn windows(&self, windows: &[Window<'_>], way: Way, deadline: Deadline, done: &mut u64) -> Result<()> {
        let mut wakes = Wakes { stream: self, at: 1 };
        let left: u64 = windows.iter().map(Window::len).sum();
        let mut transmission = Transmission::new(self, self.payload_carrier(), way, deadline);
        let mut polls = if way == Way::In && self.about.same_host && !self.has_rings() { POLLS } else { 0 };
        if polls > 0 || (way == Way::In && left <= MAX_POLLED) {
            transmission.poll_time = super::POLL_TIME;
        }
        // Finished windows leave the list, so that no step iterates over them again.
        let (mut windows, mut skip) = (windows, 0);
        *done = 0;
        while let Some(first) = windows.first() {
            if skip >= first.len() {
                (windows, skip) = (&windows[1..], skip - first.len());
                continue;
            }
            if way == Way::In && !self.about.carries_descriptors {
                wakes.set(if polls > 0 || left - *done < WAKE_BYTES.into() { 1 } else { WAKE_BYTES });
            }
            let bytes = transmission.next(*done, || self.step_windows(windows, skip, way))? as u64;
            if polls > 0 && transmission.slept_after_polling() {
                polls -= 1;
                transmission.poll_time = if polls > 0 { transmission.poll_time } else { Duration::ZERO };
            }
            (skip, *done) = (skip + bytes, *done + bytes);
        }
        Ok(())
    }

    fn step_windows(&self, windows: &[Window<'_>], skip: u64, way: Way) -> io::Result<StepResult> {
        let most = match &self.faults {
            None => Some(windows.len()),
            Some(faults) => {
                let lens: Vec<_> = windows.iter().map(Window::len).collect();
                faults.allow_windows(way, &lens, skip)?
            }
        };
        let Some(most) = most else { return Ok(StepResult::NotYet) };
        let (carrier, windows) = (self.payload_carrier(), &windows[..most.min(MAX_WINDOWS)]);
        let result = match way {
            Way::Out => carrier.send_windows(self.as_fd(), windows, skip),
            Way::In => carrier.receive_windows(self.as_fd(), windows, skip),
        };
        let moved = match result {
            Ok(0) if way == Way::In => StepResult::Ended,
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) => StepResult::Bytes(bytes),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => StepResult::NotYet,
            Err(error) => return Err(error),
        };
        Ok(self.passed(way, moved))
    }
}

/// The number of received bytes after which a waiting thread wakes. Drop resets it to one.
struct Wakes<'a> {
    stream: &'a Stream,
    at: u32,
}

impl Wakes<'_> {
    fn set(&mut self, bytes: u32) {
        // If this is refused, the waiting thread only wakes more often.
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
