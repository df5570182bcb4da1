//! A stream within one host whose bytes go through shared memory.
//!
//! One pair of rings carries frames, and one carries payload. The socket carries only zeros that wake the other side.
//!
//! One thread at a time uses such a stream (`session::call_streams`). A second one that sleeps might never wake, because the first
//! one could take the zero that was sent for it.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::carrier::{Carrier, POLL_TIME};
use super::step::Way;
use crate::memory::{RingPair, RingWait, SharedRings, Window};
use crate::sync;

/// Wakes the other side.
const WAKE: u8 = 0;
/// Zeros that are taken off the socket at once.
const WAKES: usize = 64;

/// The shared memory of one stream.
#[derive(Debug)]
pub(super) struct StreamRings {
    pub(super) messages: Rings,
    pub(super) payload: Rings,
}

impl StreamRings {
    pub(super) fn new(memory: SharedRings) -> StreamRings {
        let ended = Arc::new(AtomicBool::new(false));
        let messages = Rings { memory: memory.messages, ended: ended.clone() };
        StreamRings { messages, payload: Rings { memory: memory.payload, ended } }
    }
}

/// The rings for messages, or those for payload.
#[derive(Debug)]
pub(super) struct Rings {
    memory: RingPair,
    /// Whether the peer has closed its end, or has broken the protocol. Shared by all rings of the stream.
    ended: Arc<AtomicBool>,
}

impl Way {
    fn awaited(self) -> RingWait {
        match self {
            Way::In => RingWait::Bytes,
            Way::Out => RingWait::Room,
        }
    }
}

impl Carrier for Rings {
    fn send(&self, socket: BorrowedFd<'_>, bytes: &[u8], _: bool) -> rustix::io::Result<usize> {
        if self.has_ended() {
            return Err(Errno::PIPE);
        }
        let sent = self.memory.write(bytes)?;
        self.wake_peer(socket, RingWait::Bytes);
        Ok(sent)
    }

    fn receive(&self, socket: BorrowedFd<'_>, bytes: &mut [u8]) -> rustix::io::Result<usize> {
        let received = match self.memory.read(bytes) {
            Err(Errno::AGAIN) if self.is_drained() => return Ok(0),
            received => received?,
        };
        self.wake_peer(socket, RingWait::Room);
        Ok(received)
    }

    fn send_windows(&self, socket: BorrowedFd<'_>, windows: &[Window<'_>], skip: u64) -> io::Result<usize> {
        if self.has_ended() {
            return Err(Errno::PIPE.into());
        }
        let sent = self.memory.write_windows(windows, skip)?;
        self.wake_peer(socket, RingWait::Bytes);
        Ok(sent)
    }

    fn receive_windows(
        &self,
        socket: BorrowedFd<'_>,
        windows: &[Window<'_>],
        skip: u64,
    ) -> io::Result<usize> {
        let received = match self.memory.read_windows(windows, skip) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && self.is_drained() => return Ok(0),
            received => received?,
        };
        self.wake_peer(socket, RingWait::Room);
        Ok(received)
    }

    /// Lets payload start on a page boundary of the ring, because blocks usually start on a page boundary. Some processors copy
    /// at half their speed if the destination lies a few bytes further into its page than the source (benches/results/log.md).
    fn padding(&self, way: Way) -> usize {
        match way {
            Way::In => self.memory.unread_of_page(),
            Way::Out => self.memory.unwritten_of_page(),
        }
    }

    fn carries_descriptors(&self) -> bool {
        false
    }

    /// The peer copies at the same time and usually continues within microseconds, so polling avoids a sleep.
    fn poll_time(&self) -> Duration {
        POLL_TIME
    }

    fn ready_soon(&self, way: Way) -> bool {
        self.has_ended() || self.memory.ready_soon(way.awaited())
    }

    fn readable_within(&self, _: BorrowedFd<'_>, limit: Duration) -> bool {
        sync::poll(limit, || self.may_receive())
    }

    fn fall_asleep(&self, way: Way) -> Option<PollFlags> {
        let sleeps = !self.has_ended() && self.memory.fall_asleep(way.awaited());
        sleeps.then_some(match way {
            Way::In => PollFlags::IN,
            // The peer also sends a zero after it has read, so wait for input.
            Way::Out => PollFlags::IN | PollFlags::RDHUP,
        })
    }

    /// Removes the zeros from the socket, and notes whether the peer has closed its end or broken the protocol.
    fn wake_up(&self, socket: BorrowedFd<'_>, way: Way, events: PollFlags) -> bool {
        self.memory.awake();
        let goes_on = match take_wakes(socket) {
            Err(Errno::AGAIN | Errno::INTR) => true,
            taken => taken == Ok(true),
        };
        if !goes_on {
            self.ended.store(true, Ordering::Release);
        }
        // The peer reads no more frames once it has closed its end, though some of its own may be unread.
        way == Way::In || !events.contains(PollFlags::RDHUP)
    }

    fn may_receive(&self) -> bool {
        self.has_ended() || self.memory.ready(RingWait::Bytes)
    }
}

impl Rings {
    fn wake_peer(&self, socket: BorrowedFd<'_>, awaited: RingWait) {
        if self.memory.wakes(awaited) {
            // Fails if the peer is gone, or if its socket buffer is full; then the peer is awake anyway.
            let _ = send(socket, &[WAKE], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Tells the peer that this side has closed the stream.
    pub(super) fn close(&self) {
        self.memory.close();
    }

    /// Whether the peer has set its word for a closed stream.
    pub(super) fn peer_closed(&self) -> bool {
        self.memory.peer_closed()
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether the peer has ended and nothing is left to receive. The last bytes may have arrived after this side's last read.
    fn is_drained(&self) -> bool {
        self.has_ended() && !self.memory.ready(RingWait::Bytes)
    }
}

/// Removes zeros from the socket, at most [`WAKES`] of them. Returns `false` at the end of the stream, and if anything else has
/// arrived.
fn take_wakes(socket: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let mut bytes = [0; WAKES];
    // Only zeros are removed, so that what follows them is found again by the next call.
    let (len, _) = recv(socket, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    let zeros = bytes[..len].iter().take_while(|byte| **byte == WAKE).count();
    if zeros > 0 {
        recv(socket, &mut bytes[..zeros], RecvFlags::DONTWAIT)?;
    }
    Ok(zeros == len && len > 0)
}
