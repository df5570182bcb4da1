//! Assembles frames that arrive piece by piece, for a thread that serves many streams and must not wait for
//! any of them. A thread with a stream of its own uses `Stream::receive`.

use std::os::fd::OwnedFd;

use super::frame_io::ReceivedFrame;
use super::step::StepResult;
use super::stream::Stream;
use crate::error::Result;
use crate::protocol::{HEADER, Header};

/// The part of the next frame that has arrived.
#[derive(Debug, Default)]
pub struct Inbox {
    header: [u8; HEADER],
    body: Vec<u8>,
    /// Number of header and body bytes that have arrived.
    filled: usize,
    descriptors: Vec<OwnedFd>,
}

/// Result of [`Inbox::take`].
#[derive(Debug)]
pub enum Arrival {
    /// A whole frame: its kind, its body, and the memory files that it carried.
    Frame(ReceivedFrame),
    /// The frame is not complete yet.
    Partial,
    /// The peer closed the stream between two frames.
    Ended,
}

impl Inbox {
    /// Takes what `stream` has, up to the end of one frame with a body of at most `limit` bytes.
    pub fn take(&mut self, stream: &Stream, limit: usize) -> Result<Arrival> {
        while self.filled < HEADER {
            let rest = &mut self.header[self.filled..];
            match stream.step(|stream| stream.pull_with(rest, &mut self.descriptors))? {
                StepResult::Bytes(bytes) => self.filled += bytes,
                StepResult::NotYet => return Ok(Arrival::Partial),
                StepResult::Ended if self.filled == 0 => return Ok(Arrival::Ended),
                StepResult::Ended => return Err(stream.ended(self.filled as u64)),
            }
        }
        let header = Header::parse(self.header, limit).map_err(|error| {
            // The end of the body is unknown, so nothing more is received. But a refusal may still be sent.
            stream.unreadable();
            error.with("peer", &stream.about.peer)
        })?;
        // A handshake or control message: 16 KiB at most, which `limit` ensures.
        self.body.resize(header.length, 0);
        while self.filled < HEADER + header.length {
            let rest = &mut self.body[self.filled - HEADER..];
            // A peer may also attach descriptors to the body.
            match stream.step(|stream| stream.pull_with(rest, &mut self.descriptors))? {
                StepResult::Bytes(bytes) => self.filled += bytes,
                StepResult::NotYet => return Ok(Arrival::Partial),
                StepResult::Ended => return Err(stream.ended(self.filled as u64)),
            }
        }
        self.filled = 0;
        let (body, descriptors) = (std::mem::take(&mut self.body), std::mem::take(&mut self.descriptors));
        Ok(Arrival::Frame((header.kind, body, descriptors)))
    }
}
