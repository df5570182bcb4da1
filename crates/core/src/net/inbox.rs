//! Frames that arrive piece by piece, for a thread that serves many streams and may wait for none.
//!
//! Not for: threads that have a stream to themselves (`Stream::receive`).

use std::os::fd::OwnedFd;

use super::frame_io::Received;
use super::step::Moved;
use super::stream::Stream;
use crate::error::Result;
use crate::protocol::{HEADER, Header};

/// What there is of the next frame.
#[derive(Debug, Default)]
pub struct Inbox {
    header: [u8; HEADER],
    body: Vec<u8>,
    /// Bytes of header and body that are there.
    filled: usize,
    descriptors: Vec<OwnedFd>,
}

/// What a look at a stream came to.
#[derive(Debug)]
pub enum Arrival {
    /// A whole frame: kind, body, and the descriptors that came with it.
    Frame(Received),
    /// Not yet.
    Partial,
    /// The peer closed the stream between two frames.
    Ended,
}

impl Inbox {
    /// Whether part of a frame is there.
    #[must_use]
    pub fn begun(&self) -> bool {
        self.filled > 0
    }

    /// Takes what `stream` has, up to the end of one frame with a body of at most `limit` bytes. Descriptors that come with it
    /// are kept only if they are `expected`; the kernel closes others.
    pub fn take(&mut self, stream: &Stream, limit: usize, expected: bool) -> Result<Arrival> {
        while self.filled < HEADER {
            let rest = &mut self.header[self.filled..];
            let kept = &mut self.descriptors;
            let step =
                |stream: &Stream| if expected { stream.pull_with(rest, kept) } else { stream.pull(rest) };
            match stream.step(step)? {
                Moved::Bytes(bytes) => self.filled += bytes,
                Moved::NotYet => return Ok(Arrival::Partial),
                Moved::Ended if self.filled == 0 => return Ok(Arrival::Ended),
                Moved::Ended => return Err(stream.ended(self.filled as u64)),
            }
        }
        let header = Header::parse(&self.header, limit).map_err(|error| {
            // Where the body ends is not known, so nothing more is received; but a refusal may still be sent.
            stream.unreadable();
            error.with("peer", stream.peer())
        })?;
        // A greeting or a control message: a few KiB at most, which `limit` sees to.
        self.body.resize(header.length, 0);
        while self.filled < HEADER + header.length {
            let rest = &mut self.body[self.filled - HEADER..];
            match stream.step(|stream| stream.pull(rest))? {
                Moved::Bytes(bytes) => self.filled += bytes,
                Moved::NotYet => return Ok(Arrival::Partial),
                Moved::Ended => return Err(stream.ended(self.filled as u64)),
            }
        }
        self.filled = 0;
        let (body, descriptors) = (std::mem::take(&mut self.body), std::mem::take(&mut self.descriptors));
        Ok(Arrival::Frame((header.kind, body, descriptors)))
    }
}
