//! Frames, with the descriptors they carry, over a stream.
//!
//! Every call tries the socket first and sleeps in `poll` only when it must. A reply that is due soon may be awaited for a
//! bounded time without sleeping (`patience`). One thread sends and one receives at a time; the owner of the stream
//! ensures it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, send, sendmsg,
};

use super::step::{Moved, Way};
use super::stream::Stream;
use super::transmission::Transfer;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::Deadline;
use crate::protocol::{HEADER, Header};

/// Most descriptors that travel with one frame.
pub const MAX_DESCRIPTORS: usize = 8;

/// What a body is given before any of it has arrived; later steps grow with what has.
const FIRST_STEP: usize = 64 << 10;

/// Kind, body and descriptors of one frame.
pub type Received = (u8, Vec<u8>, Vec<OwnedFd>);

impl Stream {
    /// Sends one frame.
    pub fn send(&self, frame: &[u8], deadline: Deadline) -> Result<()> {
        self.send_from(frame, 0, SendFlags::empty(), deadline)
    }

    /// Sends one frame behind which windows follow at once: both may leave together.
    pub fn send_before(&self, frame: &[u8], deadline: Deadline) -> Result<()> {
        self.send_from(frame, 0, SendFlags::MORE, deadline)
    }

    /// Sends one frame with copies of `descriptors`.
    pub fn send_with(&self, frame: &[u8], descriptors: &[BorrowedFd<'_>], deadline: Deadline) -> Result<()> {
        if descriptors.is_empty() {
            return self.send(frame, deadline);
        }
        let (count, peer) = (descriptors.len(), &self.about.peer);
        let limit = if self.about.carries_descriptors { MAX_DESCRIPTORS } else { 0 };
        if count > limit || frame.is_empty() {
            let text = format!("{count} descriptors cannot travel with one frame to {peer}");
            return Err(Error::new(ErrorKind::System, text).with("limit", limit));
        }
        // The first bytes that leave take them along; what is left of the frame follows on its own.
        let mut transfer = Transfer::new(self, Way::Out, deadline);
        let first = transfer.next(0, || self.push_with(frame, descriptors))?;
        self.send_from(frame, first, SendFlags::empty(), deadline)
    }

    /// Sends one frame at once, with copies of `descriptors`; what the socket does not take at once breaks the stream.
    pub fn send_now(&self, frame: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let mut sent = 0;
        while sent < frame.len() {
            let step = match descriptors {
                [_, ..] if sent == 0 => self.push_with(frame, descriptors),
                _ => self.push(&frame[sent..], SendFlags::empty()),
            };
            match step {
                Ok(Moved::Bytes(bytes)) => sent += bytes,
                Ok(Moved::NotYet | Moved::Ended) => {
                    return Err(self.over("the peer does not read its socket").with("peer", self.peer()));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error).with("peer", self.peer())),
            }
        }
        Ok(())
    }

    /// Whether there is something to receive, or the end of the stream, within `patience`, which is spent looking again
    /// and again and giving way to other threads.
    #[must_use]
    pub fn readable_within(&self, patience: Duration) -> bool {
        let since = Instant::now();
        loop {
            let peeked = recv(&self.socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
            if !matches!(peeked, Err(Errno::AGAIN | Errno::INTR)) {
                return true;
            }
            if since.elapsed() >= patience {
                return false;
            }
            std::thread::yield_now();
        }
    }

    pub(super) fn send_from(
        &self,
        frame: &[u8],
        from: usize,
        flags: SendFlags,
        deadline: Deadline,
    ) -> Result<()> {
        let mut transfer = Transfer::new(self, Way::Out, deadline);
        let mut sent = from;
        while sent < frame.len() {
            sent += transfer.next(sent as u64, || self.push(&frame[sent..], flags))?;
        }
        Ok(())
    }

    /// The next frame: its kind and body. `None` if the stream ended between two frames, or this side closed it.
    /// `patience` is how long to look for it again and again, giving way to other threads, before sleeping. Descriptors
    /// that come along are closed. After a header that cannot be read, a refusal may be sent and nothing received
    /// (`a_refusal_answers_another_version`).
    pub fn receive(
        &self,
        limit: usize,
        patience: Duration,
        deadline: Deadline,
    ) -> Result<Option<(u8, Vec<u8>)>> {
        // The kernel closes what comes along where no room is given for it.
        self.frame(limit, patience, deadline, |rest| self.pull(rest), |_| Ok(((), deadline)))
            .map(|frame| frame.map(|(kind, body, ())| (kind, body)))
    }

    /// As [`receive`](Self::receive), for requests of a peer: `admit` is asked once the length of the body is known, and
    /// gives what is held while the body is, and the moment at which all of it must have arrived.
    pub fn receive_admitted<T>(
        &self,
        limit: usize,
        deadline: Deadline,
        admit: impl FnOnce(usize) -> Result<(T, Deadline)>,
    ) -> Result<Option<(u8, Vec<u8>, T)>> {
        self.frame(limit, Duration::ZERO, deadline, |rest| self.pull(rest), admit)
    }

    /// The next frame with the descriptors that came along, at most [`MAX_DESCRIPTORS`].
    pub fn receive_with(&self, limit: usize, deadline: Deadline) -> Result<Option<Received>> {
        let mut descriptors = Vec::new();
        // They are attached to the first byte of a frame, so none can come with the body.
        let step = |rest: &mut [u8]| self.pull_with(rest, &mut descriptors);
        let frame = self.frame(limit, Duration::ZERO, deadline, step, |_| Ok(((), deadline)))?;
        Ok(frame.map(|(kind, body, ())| (kind, body, descriptors)))
    }

    /// One frame whose header is read by `step`.
    fn frame<T>(
        &self,
        limit: usize,
        patience: Duration,
        deadline: Deadline,
        mut step: impl FnMut(&mut [u8]) -> io::Result<Moved>,
        admit: impl FnOnce(usize) -> Result<(T, Deadline)>,
    ) -> Result<Option<(u8, Vec<u8>, T)>> {
        if !self.usable()? {
            return Ok(None);
        }
        let mut transfer = Transfer::new(self, Way::In, deadline);
        transfer.patience = patience.min(deadline.left());
        let (mut header, mut filled) = ([0; HEADER], 0);
        while filled < HEADER {
            match transfer.attempt(filled as u64, || step(&mut header[filled..]))? {
                Some(bytes) => filled += bytes,
                None if filled == 0 => return Ok(None),
                None => return Err(self.ended(filled as u64)),
            }
        }
        let header = Header::parse(&header, limit).map_err(|error| {
            // Where its body ends is not known, so nothing more is received; but a refusal may still be sent.
            self.unreadable();
            error.with("peer", &self.about.peer)
        })?;
        // Where the body ends is not worth waiting for; a reply may still be sent.
        let (held, deadline) = admit(header.length).inspect_err(|_| self.unreadable())?;
        let mut transfer = Transfer::new(self, Way::In, deadline);
        let (mut body, mut got) = (Vec::new(), 0);
        while got < header.length {
            if got == body.len() {
                // Memory grows with what has arrived: a length alone is given `FIRST_STEP` at most.
                let next = header.length.min(got + got.max(FIRST_STEP));
                if body.try_reserve_exact(next - got).is_err() {
                    drop(body);
                    return self.passed_by(header.length, got, &mut transfer);
                }
                body.resize(next, 0);
            }
            got += transfer.next((HEADER + got) as u64, || self.pull(&mut body[got..]))?;
        }
        Ok(Some((header.kind, body, held)))
    }

    /// `Err(OutOfMemory)` in place of a body of which `got` bytes were read. The rest is read away, so that the stream can go
    /// on; but for a short body, behind which bytes of a cache may follow that nobody would know of.
    #[cold]
    fn passed_by<T>(&self, length: usize, mut got: usize, transfer: &mut Transfer<'_>) -> Result<T> {
        let error = fallible::short("a frame of the peer", length).with("peer", &self.about.peer);
        if length <= FIRST_STEP {
            self.spoilt();
            return Err(error);
        }
        let mut away = [0; 4096];
        while got < length {
            let most = away.len().min(length - got);
            got += transfer.next((HEADER + got) as u64, || self.pull(&mut away[..most]))?;
        }
        Err(error)
    }
}

/// The system calls, none of which sleeps.
impl Stream {
    fn push(&self, bytes: &[u8], flags: SendFlags) -> io::Result<Moved> {
        let Some(most) = self.faults.allow(Way::Out, bytes.len())? else { return Ok(Moved::NotYet) };
        let bytes = self.faults.garbled(&bytes[..most]);
        let sent = outcome(send(&self.socket, &bytes, flags | SendFlags::DONTWAIT | SendFlags::NOSIGNAL))?;
        Ok(self.faults.passed(Way::Out, sent))
    }

    fn push_with(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<Moved> {
        let Some(most) = self.faults.allow(Way::Out, bytes.len())? else { return Ok(Moved::NotYet) };
        let bytes = self.faults.garbled(&bytes[..most]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::MSGSIZE.into());
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = outcome(sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags))?;
        Ok(self.faults.passed(Way::Out, sent))
    }

    pub(super) fn pull(&self, rest: &mut [u8]) -> io::Result<Moved> {
        let Some(most) = self.faults.allow(Way::In, rest.len())? else { return Ok(Moved::NotYet) };
        let got = recv(&self.socket, &mut rest[..most], RecvFlags::DONTWAIT).map(|(bytes, _)| bytes);
        self.faults.garble(rest, &got);
        Ok(self.faults.passed(Way::In, received(got)?))
    }

    pub(super) fn pull_with(&self, rest: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<Moved> {
        let Some(most) = self.faults.allow(Way::In, rest.len())? else { return Ok(Moved::NotYet) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let message = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut rest[..most])], &mut control, flags);
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = part {
                descriptors.extend(more);
            }
        }
        let cut = message.as_ref().is_ok_and(|message| message.flags.contains(ReturnFlags::CTRUNC));
        if cut || descriptors.len() > MAX_DESCRIPTORS {
            // This process may open no more, or the peer sent more than agreed: the frame means nothing without them.
            return Err(Errno::MFILE.into());
        }
        let got = message.map(|message| message.bytes);
        self.faults.garble(rest, &got);
        Ok(self.faults.passed(Way::In, received(got)?))
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn outcome(result: rustix::io::Result<usize>) -> io::Result<Moved> {
    match result {
        Ok(bytes) => Ok(Moved::Bytes(bytes)),
        Err(Errno::AGAIN) => Ok(Moved::NotYet),
        Err(errno) => Err(errno.into()),
    }
}

fn received(result: rustix::io::Result<usize>) -> io::Result<Moved> {
    if result == Ok(0) { Ok(Moved::Ended) } else { outcome(result) }
}
