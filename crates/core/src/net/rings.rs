//! A stream within one host whose frames go through shared memory.
//!
//! Its socket carries what frames do not: bytes of caches, because the kernel copies them faster than two processes do through
//! a ring, and zeros that wake the other side. A one precedes each run of bytes of caches, so the two cannot be confused:
//!
//! ```text
//!  rings   | request |            | reply |
//!  socket            0 1 bytes …          0
//! ```
//!
//! A side sends a one behind the frame that announces the bytes, and further frames behind the bytes. It is one thread that
//! does both.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::step::Way;
use super::stream::Stream;
use crate::memory::{Awaited, SharedRings};
use crate::sync;

/// Wakes the other side.
const WAKE: u8 = 0;
/// Precedes bytes of caches.
const PAYLOAD: u8 = 1;
/// Zeros that are taken off the socket at once.
const WAKES: usize = 64;

/// The shared memory of one stream.
#[derive(Debug)]
pub(super) struct Rings {
    memory: SharedRings,
    /// Whether the peer has closed its end, or has broken the protocol.
    ended: AtomicBool,
    /// Whether bytes of caches are received, and whether they are sent.
    payload: [AtomicBool; 2],
}

impl Way {
    fn awaited(self) -> Awaited {
        match self {
            Way::In => Awaited::Bytes,
            Way::Out => Awaited::Room,
        }
    }
}

impl Stream {
    /// Has all further frames go through `memory`. Both sides must do this at the same place of the stream.
    pub fn use_rings(&self, memory: SharedRings) {
        let payload = [AtomicBool::new(false), AtomicBool::new(false)];
        // A stream gets rings at most once: after its handshake.
        let _ = self.rings.set(Rings { memory, ended: AtomicBool::new(false), payload });
    }

    /// Whether its frames go through shared memory.
    pub fn has_rings(&self) -> bool {
        self.rings.get().is_some()
    }

    /// Prepares for a wait until the descriptor is readable. Returns `false` if it may not become readable, because
    /// something has arrived already.
    pub fn fall_asleep(&self) -> bool {
        self.rings.get().is_none_or(|rings| rings.fall_asleep(Way::In))
    }

    /// Ends a wait, after the descriptor became readable. Returns whether there is something to receive, or the end of
    /// the stream. A peer may have woken this side more often than necessary.
    pub fn wake_up(&self) -> bool {
        let Some(rings) = self.rings.get() else { return true };
        rings.wake_up(self);
        rings.ready()
    }

    /// Prepares to move bytes of caches through the socket. Returns `false` if the socket is not ready for it.
    pub(super) fn begin_payload(&self, way: Way) -> io::Result<bool> {
        let begun = self.rings.get().map_or(Ok(()), |rings| rings.begin_payload(self, way));
        match begun {
            Ok(()) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Rings {
    pub(super) fn send(&self, stream: &Stream, bytes: &[u8]) -> rustix::io::Result<usize> {
        if self.has_ended() {
            return Err(Errno::PIPE);
        }
        let sent = self.memory.write(bytes)?;
        self.moves_payload(Way::Out).store(false, Ordering::Relaxed);
        self.wake_peer(stream, Awaited::Bytes);
        Ok(sent)
    }

    pub(super) fn receive(&self, stream: &Stream, bytes: &mut [u8]) -> rustix::io::Result<usize> {
        let received = match self.memory.read(bytes) {
            // The last bytes may have come between the two looks.
            Err(Errno::AGAIN) if self.has_ended() && !self.memory.ready(Awaited::Bytes) => return Ok(0),
            received => received?,
        };
        self.moves_payload(Way::In).store(false, Ordering::Relaxed);
        self.wake_peer(stream, Awaited::Room);
        Ok(received)
    }

    fn begin_payload(&self, stream: &Stream, way: Way) -> rustix::io::Result<()> {
        let begun = self.moves_payload(way);
        while !begun.load(Ordering::Relaxed) {
            let mut byte = [PAYLOAD];
            let moved = match way {
                Way::Out => send(&stream.socket, &byte, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
                Way::In => recv(&stream.socket, &mut byte, RecvFlags::DONTWAIT).map(|(bytes, _)| bytes),
            }?;
            match (moved, byte) {
                (1, [PAYLOAD]) => begun.store(true, Ordering::Relaxed),
                (1, [WAKE]) => {}
                (0, _) => return Err(Errno::CONNRESET),
                _ => return Err(Errno::PROTO),
            }
        }
        Ok(())
    }

    fn moves_payload(&self, way: Way) -> &AtomicBool {
        &self.payload[usize::from(way == Way::Out)]
    }

    fn wake_peer(&self, stream: &Stream, awaited: Awaited) {
        if self.memory.wakes(awaited) {
            // Fails if the peer is gone, or if it has much to read on its socket already.
            let _ = send(&stream.socket, &[WAKE], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Looks for less than a microsecond whether frames can move.
    pub(super) fn ready_soon(&self, way: Way) -> bool {
        self.has_ended() || self.memory.ready_soon(way.awaited())
    }

    pub(super) fn ready_within(&self, limit: Duration) -> bool {
        sync::poll(limit, || self.ready())
    }

    /// Announces a sleep until the socket is readable. Returns `false` if this side must not sleep.
    pub(super) fn fall_asleep(&self, way: Way) -> bool {
        !self.has_ended() && self.memory.fall_asleep(way.awaited())
    }

    /// Ends a sleep: takes the zeros that woke this side, and sees whether the peer has closed its end.
    pub(super) fn wake_up(&self, stream: &Stream) {
        self.memory.awake();
        let mut bytes = [0; WAKES];
        let seen = recv(&stream.socket, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        let zeros = |len: usize| bytes[..len].iter().take_while(|byte| **byte == WAKE).count();
        let goes_on = match seen.map(|(len, _)| zeros(len)) {
            // The end, or bytes of caches. Those arrive behind a frame, which is still in the ring.
            Ok(0) => self.memory.ready(Awaited::Bytes),
            Ok(zeros) => recv(&stream.socket, &mut [0; WAKES][..zeros], RecvFlags::DONTWAIT).is_ok(),
            Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
        };
        if !goes_on {
            self.ended.store(true, Ordering::Release);
        }
    }

    /// Whether there is something to receive, or the end of the stream.
    fn ready(&self) -> bool {
        self.has_ended() || self.memory.ready(Awaited::Bytes)
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}
