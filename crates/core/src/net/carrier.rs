//! The carrier of the messages or the payload of a connection.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::PollFlags;

use super::step::Way;
use crate::memory::Window;

/// How long a thread polls before it sleeps: about the time of one switch between two processes.
pub const POLL_TIME: Duration = Duration::from_micros(60);

/// Maximum number of zeros before payload.
pub(super) const MAX_PADDING: usize = 4096;

/// Carries bytes in both directions, in order. There is one file for each implementation. `socket_carrier` is the socket of the
/// connection, for messages and payload. `rings` is a pair of rings in shared memory beside it: a stream has one pair for messages
/// and one for payload.
///
/// [`Stream`](super::Stream) adds what is the same for all of them: frames, deadlines, the pace of the peer, and the end of the
/// connection. No function sleeps; only `readable_within` and `ready_soon` poll. At most one thread sends and one receives at a
/// time; with rings, they are the same thread.
///
/// `socket` is the socket of the connection. When it ends, the connection has ended.
pub(super) trait Carrier: fmt::Debug + Send + Sync {
    /// Sends as many of `bytes` as there is room for, and returns the number. `more` says that payload follows at once. Returns
    /// `Err(AGAIN)` if there is no room yet.
    fn send(&self, socket: BorrowedFd<'_>, bytes: &[u8], more: bool) -> rustix::io::Result<usize>;

    /// Receives at most `bytes.len()` bytes, and returns their number: 0 at the end of the connection. Returns `Err(AGAIN)` if
    /// there is nothing to receive yet.
    fn receive(&self, socket: BorrowedFd<'_>, bytes: &mut [u8]) -> rustix::io::Result<usize>;

    /// Sends some of the bytes of `windows` that follow the first `skip` bytes, and returns the number. Fails with `WouldBlock` if
    /// there is no room yet.
    fn send_windows(&self, socket: BorrowedFd<'_>, windows: &[Window<'_>], skip: u64) -> io::Result<usize>;

    /// Receives into some of the bytes of `windows` that follow the first `skip` bytes, and returns the number: 0 at the end of the
    /// connection. Fails with `WouldBlock` if there is nothing to receive yet.
    fn receive_windows(&self, socket: BorrowedFd<'_>, windows: &[Window<'_>], skip: u64)
    -> io::Result<usize>;

    /// Returns the number of zeros, at most [`MAX_PADDING`], that are to precede the payload that moves next (see
    /// [`padding_at`](super::padding_at)). It is the same at both ends.
    fn padding(&self, way: Way) -> usize;

    /// Whether descriptors can accompany messages.
    fn carries_descriptors(&self) -> bool;

    /// How long a thread polls for each part of a message before it sleeps, unless the caller of a receive says otherwise.
    fn poll_time(&self) -> Duration;

    /// Polls for a few microseconds at most. Returns whether bytes can move.
    fn ready_soon(&self, way: Way) -> bool;

    /// Returns whether there is something to receive, or the end, within `limit`. Meanwhile the thread polls and yields to others.
    fn readable_within(&self, socket: BorrowedFd<'_>, limit: Duration) -> bool;

    /// Announces a sleep, and returns the events of the socket that end it. Returns `None` if the thread must not sleep, because
    /// bytes can move already.
    fn fall_asleep(&self, way: Way) -> Option<PollFlags>;

    /// Ends a sleep in which the socket reported `events`. Returns `false` if the peer has left, so that nothing more can move this
    /// way.
    fn wake_up(&self, socket: BorrowedFd<'_>, way: Way, events: PollFlags) -> bool;

    /// Whether there may be something to receive after a sleep, or the end. A peer may have woken this side without reason.
    fn may_receive(&self) -> bool;
}
