//! A stream within one host whose frames go through shared memory.
//!
//! The socket carries the rest: the payload, because the kernel copies it faster than two processes do through a ring, and
//! zeros that wake the other side. A one precedes each payload, so the receiver can tell the two apart:
//!
//! ```text
//!  rings   | request |            | reply |
//!  socket            0 1 payload…         0
//! ```
//!
//! The sender writes the frame that announces a payload, then the one, then the payload, then the next frame. One thread at a
//! time uses a call stream (`session::call_streams`), so no zero of this side gets between the bytes of its payload.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::control::{Control, POLL_TIME};
use super::step::Way;
use crate::memory::{RingWait, SharedRings};
use crate::sync;

/// Wakes the other side.
const WAKE: u8 = 0;
/// Precedes a payload.
const PAYLOAD: u8 = 1;
/// Zeros that are taken off the socket at once.
const WAKES: usize = 64;

/// What follows the zeros on a socket.
enum OnSocket {
    /// Nothing so far.
    Nothing,
    /// A payload.
    Payload,
    /// The end of the stream.
    End,
    /// A byte that the protocol does not allow.
    Other,
}

/// The shared memory of one stream.
#[derive(Debug)]
pub(super) struct Rings {
    memory: SharedRings,
    /// Whether the peer has closed its end, or has broken the protocol.
    ended: AtomicBool,
    /// Whether the one before the current payload was received, and whether it was sent.
    payload: [AtomicBool; 2],
}

impl Way {
    fn awaited(self) -> RingWait {
        match self {
            Way::In => RingWait::Bytes,
            Way::Out => RingWait::Room,
        }
    }
}

impl Control for Rings {
    fn send(&self, socket: BorrowedFd<'_>, bytes: &[u8], _: bool) -> rustix::io::Result<usize> {
        if self.has_ended() {
            return Err(Errno::PIPE);
        }
        let sent = self.memory.write(bytes)?;
        self.moves_payload(Way::Out).store(false, Ordering::Relaxed);
        self.wake_peer(socket, RingWait::Bytes);
        Ok(sent)
    }

    fn receive(&self, socket: BorrowedFd<'_>, bytes: &mut [u8]) -> rustix::io::Result<usize> {
        let received = match self.memory.read(bytes) {
            // The last bytes may have arrived after `read`.
            Err(Errno::AGAIN) if self.has_ended() && !self.memory.ready(RingWait::Bytes) => return Ok(0),
            received => received?,
        };
        self.moves_payload(Way::In).store(false, Ordering::Relaxed);
        self.wake_peer(socket, RingWait::Room);
        Ok(received)
    }

    fn begin_payload(&self, socket: BorrowedFd<'_>, way: Way) -> rustix::io::Result<()> {
        if self.moves_payload(way).load(Ordering::Relaxed) {
            return Ok(());
        }
        match way {
            Way::Out => send(socket, &[PAYLOAD], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(|_| ()),
            Way::In => take_wakes(socket, true).and_then(|next| match next {
                OnSocket::Payload => Ok(()),
                // At most as many zeros as fit one call, so that a peer that sends more cannot keep this thread.
                OnSocket::Nothing => Err(Errno::AGAIN),
                OnSocket::End => Err(Errno::CONNRESET),
                OnSocket::Other => Err(Errno::PROTO),
            }),
        }?;
        self.moves_payload(way).store(true, Ordering::Relaxed);
        Ok(())
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
        let goes_on = match take_wakes(socket, false) {
            Ok(OnSocket::Nothing) | Err(Errno::AGAIN | Errno::INTR) => true,
            // The frame before a payload is still in the ring. While this side waits for room, no payload is due.
            Ok(OnSocket::Payload) => way == Way::In && self.memory.ready(RingWait::Bytes),
            Ok(OnSocket::End | OnSocket::Other) | Err(_) => false,
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
    pub(super) fn new(memory: SharedRings) -> Rings {
        let payload = [AtomicBool::new(false), AtomicBool::new(false)];
        Rings { memory, ended: AtomicBool::new(false), payload }
    }

    fn moves_payload(&self, way: Way) -> &AtomicBool {
        &self.payload[usize::from(way == Way::Out)]
    }

    fn wake_peer(&self, socket: BorrowedFd<'_>, awaited: RingWait) {
        if self.memory.wakes(awaited) {
            // Fails if the peer is gone, or if its socket buffer is full; then the peer is awake anyway.
            let _ = send(socket, &[WAKE], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// Removes zeros from the socket, at most [`WAKES`] of them, and returns what follows. With `begin`, also removes the one that
/// precedes a payload.
fn take_wakes(socket: BorrowedFd<'_>, begin: bool) -> rustix::io::Result<OnSocket> {
    let mut bytes = [0; WAKES];
    let (len, _) = recv(socket, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    let zeros = bytes[..len].iter().take_while(|byte| **byte == WAKE).count();
    let next = match bytes[..len].get(zeros) {
        _ if len == 0 => OnSocket::End,
        None => OnSocket::Nothing,
        Some(&PAYLOAD) => OnSocket::Payload,
        Some(_) => OnSocket::Other,
    };
    let taken = zeros + usize::from(begin && matches!(next, OnSocket::Payload));
    if taken > 0 {
        recv(socket, &mut bytes[..taken], RecvFlags::DONTWAIT)?;
    }
    Ok(next)
}
