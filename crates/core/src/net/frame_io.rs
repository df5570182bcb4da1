//! Sends and receives frames, with the descriptors that they carry, over a stream.
//!
//! Every call tries the socket first, and sleeps in `poll` only if it must. A call that expects a reply soon
//! may poll for a limited time without sleeping (`poll_time`). At most one thread sends and one receives at a
//! time; the owner of the stream ensures this.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::fcntl_get_seals;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::carrier::Carrier;
use super::discard_queue;
use super::step::{StepResult, Way};
use super::stream::Stream;
use super::transmission::Transmission;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::memory::above_standard_streams;
use crate::model::Deadline;
use crate::protocol::{HEADER, Header};

/// Maximum number of descriptors that one frame carries.
pub const MAX_DESCRIPTORS: usize = 8;
/// Maximum number of descriptors that the kernel delivers at once (`SCM_MAX_FD`).
const MAX_SENT: usize = 253;

/// Bytes allocated for a body before any of it has arrived. Later steps grow with what has arrived.
const FIRST_STEP: usize = 64 << 10;

/// Kind and body of one frame, and the memory files that it carried.
pub type ReceivedFrame = (u8, Vec<u8>, Vec<OwnedFd>);

impl Stream {
    /// Sends one frame. Returns `Err(Timeout)` at the deadline, and `Err(NotLinked)` if the connection
    /// breaks.
    pub fn send(&self, frame: &[u8], deadline: Deadline) -> Result<()> {
        self.send_from(frame, 0, false, deadline)
    }

    /// Sends one frame that windows follow immediately, so that both may leave in one packet.
    pub fn send_before(&self, frame: &[u8], deadline: Deadline) -> Result<()> {
        self.send_from(frame, 0, true, deadline)
    }

    /// Sends one frame with copies of `descriptors`. Returns `Err(System)` if there are more than
    /// [`MAX_DESCRIPTORS`], or if this stream carries none.
    pub fn send_with(&self, frame: &[u8], descriptors: &[BorrowedFd<'_>], deadline: Deadline) -> Result<()> {
        if descriptors.is_empty() {
            return self.send(frame, deadline);
        }
        let (count, peer) = (descriptors.len(), &self.about.peer);
        let carries = self.about.carries_descriptors && self.frame_carrier().carries_descriptors();
        let limit = if carries { MAX_DESCRIPTORS } else { 0 };
        if count > limit || frame.is_empty() {
            let text = format!("{count} descriptors cannot be sent with one frame to {peer}");
            return Err(Error::new(ErrorKind::System, text).with("limit", limit));
        }
        // The first bytes carry the descriptors. The rest of the frame follows without any.
        let mut transmission = Transmission::new(self, self.frame_carrier(), Way::Out, deadline);
        let first = transmission.next(0, || self.push_with(frame, descriptors))?;
        self.send_from(frame, first, false, deadline)
    }

    /// Sends one frame with copies of `descriptors`, without waiting. If the socket does not take all of it
    /// at once, this breaks the stream and returns `Err(NotLinked)`.
    pub fn send_now(&self, frame: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let mut sent = 0;
        while sent < frame.len() {
            let step = match descriptors {
                [_, ..] if sent == 0 => self.push_with(frame, descriptors),
                _ => self.push(self.frame_carrier(), &frame[sent..], false),
            };
            match step {
                Ok(StepResult::Bytes(bytes)) => sent += bytes,
                Ok(StepResult::NotYet | StepResult::Ended) => {
                    return Err(self
                        .over("the peer does not read its socket")
                        .with("peer", &self.about.peer));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error).with("peer", &self.about.peer)),
            }
        }
        Ok(())
    }

    /// Returns whether there is something to receive, or the end of the stream, within `poll_time`. Meanwhile
    /// the thread polls and yields to other threads.
    pub fn readable_within(&self, poll_time: Duration) -> bool {
        self.frame_carrier().readable_within(self.as_fd(), poll_time)
    }

    fn send_from(&self, frame: &[u8], from: usize, more: bool, deadline: Deadline) -> Result<()> {
        let mut transmission = Transmission::new(self, self.frame_carrier(), Way::Out, deadline);
        let mut sent = from;
        while sent < frame.len() {
            sent +=
                transmission.next(sent as u64, || self.push(self.frame_carrier(), &frame[sent..], more))?;
        }
        Ok(())
    }

    /// Receives the next frame, of at most `limit` body bytes: its kind and body. Returns `None` if the
    /// stream ended between two frames, or if this side closed it.
    ///
    /// The thread polls for `poll_time` and yields to other threads before it sleeps. Descriptors of the frame
    /// are closed. After a header that cannot be read, a refusal may still be sent but nothing can be
    /// received (`a_refusal_answers_another_version`).
    #[cfg(feature = "testing")]
    pub fn receive(
        &self,
        limit: usize,
        poll_time: Duration,
        deadline: Deadline,
    ) -> Result<Option<(u8, Vec<u8>)>> {
        // The kernel closes descriptors for which the call provides no room.
        self.frame(
            limit,
            poll_time,
            deadline,
            |rest| self.pull(self.frame_carrier(), rest),
            |_| Ok(((), deadline)),
        )
        .map(|frame| frame.map(|(kind, body, ())| (kind, body)))
    }

    /// Receives the next frame without descriptors. Once the length of the body is known, `admit` is called with it. `admit`
    /// returns a value to hold for as long as the body exists, and the deadline by which all of the body must have arrived.
    pub fn receive_admitted<T>(
        &self,
        limit: usize,
        poll_time: Duration,
        deadline: Deadline,
        admit: impl FnOnce(usize) -> Result<(T, Deadline)>,
    ) -> Result<Option<(u8, Vec<u8>, T)>> {
        self.frame(limit, poll_time, deadline, |rest| self.pull(self.frame_carrier(), rest), admit)
    }

    /// Receives the next frame. Also returns its memory files if this side expects them, at most [`MAX_DESCRIPTORS`]. Other
    /// descriptors are closed.
    pub fn receive_with(&self, limit: usize, deadline: Deadline) -> Result<Option<ReceivedFrame>> {
        let mut descriptors = Vec::new();
        let step = |rest: &mut [u8]| self.pull_with(rest, &mut descriptors);
        let frame = self.frame(limit, Duration::ZERO, deadline, step, |_| Ok(((), deadline)))?;
        Ok(frame.map(|(kind, body, ())| (kind, body, descriptors)))
    }

    /// Receives one frame, which is read by `step`.
    fn frame<T>(
        &self,
        limit: usize,
        poll_time: Duration,
        deadline: Deadline,
        mut step: impl FnMut(&mut [u8]) -> io::Result<StepResult>,
        admit: impl FnOnce(usize) -> Result<(T, Deadline)>,
    ) -> Result<Option<(u8, Vec<u8>, T)>> {
        if !self.usable()? {
            return Ok(None);
        }
        let mut transmission = Transmission::new(self, self.frame_carrier(), Way::In, deadline);
        transmission.poll_time = poll_time;
        let (mut header, mut filled) = ([0; HEADER], 0);
        while filled < HEADER {
            match transmission.step_until_moved(filled as u64, || step(&mut header[filled..]))? {
                Some(bytes) => filled += bytes,
                None if filled == 0 => return Ok(None),
                None => return Err(self.ended(filled as u64)),
            }
        }
        let header = Header::parse(header, limit).map_err(|error| {
            // The end of the body is unknown, so nothing more is received. But a refusal may still be sent.
            self.unreadable();
            error.with("peer", &self.about.peer)
        })?;
        // The rest of a refused body is not awaited, so nothing more is received. But a reply may still be
        // sent.
        let (held, deadline) = admit(header.length).inspect_err(|_| self.unreadable())?;
        let mut transmission = Transmission::new(self, self.frame_carrier(), Way::In, deadline);
        let (mut body, mut got) = (Vec::new(), 0);
        while got < header.length {
            if got == body.len() {
                // Memory grows with what has arrived: the length alone gets at most `FIRST_STEP` bytes.
                let next = header.length.min(got + got.max(FIRST_STEP));
                if body.try_reserve_exact(next - got).is_err() {
                    drop(body);
                    return self.discard_body(header.length, got, &mut transmission);
                }
                body.resize(next, 0);
            }
            got += transmission.next((HEADER + got) as u64, || step(&mut body[got..]))?;
        }
        Ok(Some((header.kind, body, held)))
    }

    /// Returns `Err(OutOfMemory)` for a body of which `got` bytes were read. The rest is read and discarded,
    /// so that the stream remains usable. A short body ends the stream instead, because bytes of a cache may
    /// follow it that no call would expect.
    #[cold]
    fn discard_body<T>(
        &self,
        length: usize,
        mut got: usize,
        transmission: &mut Transmission<'_>,
    ) -> Result<T> {
        let error = fallible::out_of_memory("a frame of the peer", length).with("peer", &self.about.peer);
        if length <= FIRST_STEP {
            self.break_after_half();
            return Err(error);
        }
        let mut away = [0; 4096];
        while got < length {
            let most = away.len().min(length - got);
            got += transmission
                .next((HEADER + got) as u64, || self.pull(self.frame_carrier(), &mut away[..most]))?;
        }
        Err(error)
    }
}

/// The system calls. None of them sleeps.
impl Stream {
    pub(super) fn push(&self, carrier: &dyn Carrier, bytes: &[u8], more: bool) -> io::Result<StepResult> {
        let Some(most) = self.allowed(Way::Out, bytes.len())? else { return Ok(StepResult::NotYet) };
        let moved = outcome(carrier.send(self.as_fd(), &self.garbled(&bytes[..most]), more))?;
        Ok(self.passed(Way::Out, moved))
    }

    fn push_with(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<StepResult> {
        let Some(most) = self.allowed(Way::Out, bytes.len())? else { return Ok(StepResult::NotYet) };
        let bytes = self.garbled(&bytes[..most]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::MSGSIZE.into());
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = outcome(sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags))?;
        Ok(self.passed(Way::Out, sent))
    }

    pub(super) fn pull(&self, carrier: &dyn Carrier, rest: &mut [u8]) -> io::Result<StepResult> {
        let Some(most) = self.allowed(Way::In, rest.len())? else { return Ok(StepResult::NotYet) };
        let got = carrier.receive(self.as_fd(), &mut rest[..most]);
        self.received(rest, got)
    }

    /// Receives bytes with descriptors. Adds those that are memory to `files` while this side expects them, and discards others.
    pub(super) fn pull_with(&self, rest: &mut [u8], files: &mut Vec<OwnedFd>) -> io::Result<StepResult> {
        if !self.about.carries_descriptors || !self.frame_carrier().carries_descriptors() {
            return self.pull(self.frame_carrier(), rest);
        }
        let expected = self.expects_descriptors();
        if discard_queue::is_full() {
            // Before Linux 6.16, descriptors arrive at any time.
            if expected || self.has_unreceived() == Some(true) {
                return Err(Errno::TOOMANYREFS.into());
            }
            return self.pull(self.frame_carrier(), rest);
        }
        let Some(most) = self.allowed(Way::In, rest.len())? else { return Ok(StepResult::NotYet) };
        // The kernel would close descriptors without room at once, on this thread.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SENT))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let message = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut rest[..most])], &mut control, flags);
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = part {
                for descriptor in more {
                    let descriptor = above_standard_streams(descriptor)?;
                    // Only memory files have seals.
                    match fcntl_get_seals(&descriptor) {
                        Ok(_) if expected => files.push(descriptor),
                        _ => discard_queue::discard(descriptor),
                    }
                }
            }
        }
        let cut = message.as_ref().is_ok_and(|message| message.flags.contains(ReturnFlags::CTRUNC));
        if cut || files.len() > MAX_DESCRIPTORS {
            // This process cannot open more descriptors, or the peer sent too many. Without them the frame
            // has no meaning.
            return Err(Errno::MFILE.into());
        }
        let got = message.map(|message| message.bytes);
        self.received(rest, got)
    }

    fn received(&self, rest: &mut [u8], got: rustix::io::Result<usize>) -> io::Result<StepResult> {
        if let (Some(faults), Ok(bytes)) = (&self.faults, got) {
            faults.garble(Way::In, &mut rest[..bytes]);
        }
        let moved = if got == Ok(0) { StepResult::Ended } else { outcome(got)? };
        Ok(self.passed(Way::In, moved))
    }
}

fn outcome(result: rustix::io::Result<usize>) -> io::Result<StepResult> {
    match result {
        Ok(bytes) => Ok(StepResult::Bytes(bytes)),
        Err(Errno::AGAIN) => Ok(StepResult::NotYet),
        Err(errno) => Err(errno.into()),
    }
}
