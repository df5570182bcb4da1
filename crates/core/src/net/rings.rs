//! A stream within one host whose bytes go through shared memory. Its socket then carries only single bytes that wake the
//! other side, and shows the end of the stream.
//!
//! The bytes of a stream keep their order, so frames, payloads and their deadlines do not depend on the way that they
//! take.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::step::Way;
use super::stream::Stream;
use crate::memory::{Awaited, SharedRings, Window};
use crate::sync;

/// Bytes that are taken off the socket at once.
const WAKE_BYTES: usize = 64;

/// The shared memory of one stream.
#[derive(Debug)]
pub(super) struct Rings {
    memory: SharedRings,
    /// Whether the peer has closed its end.
    ended: AtomicBool,
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
    /// Has all further bytes go through `memory`. Both sides must do this at the same place of the stream, and nothing may
    /// have been sent behind it.
    pub fn use_rings(&self, memory: SharedRings) {
        // A stream gets rings at most once: after its handshake.
        let _ = self.rings.set(Rings { memory, ended: AtomicBool::new(false) });
    }

    /// Whether its bytes go through shared memory.
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
}

impl Rings {
    pub(super) fn send(&self, stream: &Stream, bytes: &[u8]) -> rustix::io::Result<usize> {
        self.sent(stream, self.memory.write(bytes))
    }

    pub(super) fn receive(&self, stream: &Stream, bytes: &mut [u8]) -> rustix::io::Result<usize> {
        self.received(stream, self.memory.read(bytes))
    }

    pub(super) fn send_windows(
        &self,
        stream: &Stream,
        windows: &[Window<'_>],
        skip: u64,
    ) -> rustix::io::Result<usize> {
        self.sent(stream, self.memory.write_windows(windows, skip))
    }

    pub(super) fn receive_windows(
        &self,
        stream: &Stream,
        windows: &[Window<'_>],
        skip: u64,
    ) -> rustix::io::Result<usize> {
        self.received(stream, self.memory.read_windows(windows, skip))
    }

    fn sent(&self, stream: &Stream, sent: rustix::io::Result<usize>) -> rustix::io::Result<usize> {
        if self.has_ended() {
            return Err(Errno::PIPE);
        }
        sent.inspect(|_| self.wake_peer(stream, Awaited::Bytes))
    }

    fn received(&self, stream: &Stream, received: rustix::io::Result<usize>) -> rustix::io::Result<usize> {
        match received {
            // Read once more: the last bytes may have come between the two looks.
            Err(Errno::AGAIN) if self.has_ended() && !self.memory.ready(Awaited::Bytes) => Ok(0),
            received => received.inspect(|_| self.wake_peer(stream, Awaited::Room)),
        }
    }

    fn wake_peer(&self, stream: &Stream, awaited: Awaited) {
        if self.memory.wakes(awaited) {
            // Fails if the peer is gone, or if it has many of these bytes to read already.
            let _ = send(&stream.socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Looks for less than a microsecond whether the stream can move bytes.
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

    /// Ends a sleep: takes the bytes that woke this side, and sees whether the peer has closed its end.
    pub(super) fn wake_up(&self, stream: &Stream) {
        self.memory.awake();
        let woken = recv(&stream.socket, &mut [0; WAKE_BYTES], RecvFlags::DONTWAIT).map(|(bytes, _)| bytes);
        if !matches!(woken, Ok(1..) | Err(Errno::AGAIN | Errno::INTR)) {
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
