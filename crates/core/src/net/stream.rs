//! One connected socket: the peer at the other end, whether the connection still works, and how it ends.
//!
//! A call that fails in the middle of a frame ends the stream, because what follows would be read as
//! something else (`half_a_frame_ends_the_stream`).

use std::borrow::Cow;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::sockopt::set_socket_oobinline;
use rustix::net::{Shutdown, shutdown};

use super::carrier::Carrier;
use super::discard_queue;
use super::interference::Interference;
use super::pace::Pace;
use super::rings::StreamRings;
use super::socket_carrier::SocketCarrier;
use super::step::{StepResult, Way, timespec};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{CloseOnFork, Credentials, SharedRings, shortage, take_descriptors};
use crate::sync::Mutex;

const OPEN: u8 = 0;
const BROKEN: u8 = 1;
const CLOSED: u8 = 2;

/// A connection to a peer.
#[derive(Debug)]
pub struct Stream {
    _close_on_fork: CloseOnFork,
    pub(super) socket: Arc<OwnedFd>,
    /// What carries frames and payload, unless the socket does.
    rings: OnceLock<Box<StreamRings>>,
    pub about: About,
    /// [`OPEN`], [`BROKEN`] or [`CLOSED`].
    state: AtomicU8,
    expects_descriptors: AtomicBool,
    /// `None` outside tests.
    pub faults: Option<Box<dyn Interference>>,
    /// The minimum pace of the peer, if there is one.
    pub(super) pace: Mutex<Option<Pace>>,
    /// Dropped after the socket, because fields drop in order.
    unreceived: Unreceived,
}

/// A socket with descriptors that were not received. The kernel closes them with the socket, on another thread
/// (`descriptors_behind_a_frame_hold_nobody_up`).
#[derive(Debug, Default)]
struct Unreceived(Option<Arc<OwnedFd>>);

impl Drop for Unreceived {
    fn drop(&mut self) {
        if let Some(socket) = self.0.take().and_then(Arc::into_inner) {
            discard_queue::discard(socket);
        }
    }
}

/// What a transport knows about a connection that it made.
#[derive(Clone, Debug)]
pub struct About {
    /// Name of the transport, for logs and `stats()`: `tcp`, or `shm` for a local socket, beside which memory is shared.
    pub transport: &'static str,
    /// Describes the peer, for messages.
    pub peer: String,
    /// The IP address of the end that listened, if there is one.
    pub listened_at: Option<IpAddr>,
    /// Whether the peer is on this host, as far as the addresses show.
    pub same_host: bool,
    /// Whether this stream can carry descriptors.
    pub carries_descriptors: bool,
    /// The process and the user of the peer, if the kernel reports them.
    pub credentials: Option<Credentials>,
}

impl Stream {
    pub fn new(socket: OwnedFd, about: About) -> Stream {
        Stream {
            _close_on_fork: CloseOnFork::new(&socket),
            socket: Arc::new(socket),
            rings: OnceLock::new(),
            about,
            state: AtomicU8::new(OPEN),
            expects_descriptors: AtomicBool::new(false),
            faults: None,
            pace: Mutex::default(),
            unreceived: Unreceived::default(),
        }
    }

    /// Permits the peer to send descriptors. Kernels without this setting always permit it. Returns `Err(System)` while too many
    /// that peers sent are not closed yet.
    pub fn expect_descriptors(&self) -> Result<()> {
        if self.about.carries_descriptors {
            if discard_queue::is_full()
                && let Some(full) = shortage("the memory of the peer", Errno::TOOMANYREFS)
            {
                return Err(full.with("peer", &self.about.peer));
            }
            self.expects_descriptors.store(true, Ordering::Relaxed);
            take_descriptors(self.socket.as_fd(), true);
        }
        Ok(())
    }

    /// Whether this side has permitted the peer to send descriptors.
    pub(super) fn expects_descriptors(&self) -> bool {
        self.expects_descriptors.load(Ordering::Relaxed)
    }

    /// Forbids the peer to send more descriptors. Ends the stream with `Err(NotLinked)` if it has sent some behind the frame for
    /// which they were permitted.
    pub fn refuse_descriptors(&self) -> Result<()> {
        if self.about.carries_descriptors {
            self.expects_descriptors.store(false, Ordering::Relaxed);
            take_descriptors(self.socket.as_fd(), false);
            if self.has_unreceived() == Some(true) {
                let text = "the peer sent descriptors that this side has not asked for";
                return Err(self.over(text).with("peer", &self.about.peer));
            }
        }
        Ok(())
    }

    /// Whether descriptors lie in the socket that were not received. `None` if the kernel does not tell.
    pub(super) fn has_unreceived(&self) -> Option<bool> {
        if ioctl_fionread(&self.socket) == Ok(0) {
            return Some(false);
        }
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.socket.as_raw_fd())).ok()?;
        Some(info.split_once("scm_fds:")?.1.split_whitespace().next()? != "0")
    }

    /// Has all further frames and payload go through `memory`. Both sides must do this at the same place of the stream.
    pub fn use_rings(&self, memory: SharedRings) {
        // An urgent byte counts as any other byte. Otherwise it would keep the socket readable, and nobody would see it. Sockets
        // without urgent bytes refuse this.
        let _ = set_socket_oobinline(&self.socket, true);
        // A stream gets rings at most once: after its handshake.
        let _ = self.rings.set(Box::new(StreamRings::new(memory)));
    }

    /// Whether its frames and payload go through shared memory.
    pub fn has_rings(&self) -> bool {
        self.rings.get().is_some()
    }

    /// Returns what carries the frames.
    pub(super) fn frame_carrier(&self) -> &dyn Carrier {
        self.rings.get().map_or(&SocketCarrier, |rings| &rings.messages)
    }

    /// Returns what carries the payload.
    pub(super) fn payload_carrier(&self) -> &dyn Carrier {
        self.rings.get().map_or(&SocketCarrier, |rings| &rings.payload)
    }

    /// Prepares for a wait until the descriptor is readable. Returns `false` if it may not become readable, because
    /// something has arrived already.
    pub fn fall_asleep(&self) -> bool {
        self.frame_carrier().fall_asleep(Way::In).is_some()
    }

    /// Ends a wait, after the descriptor became readable. Returns whether there is something to receive, or the end of
    /// the stream. A peer may have woken this side more often than necessary.
    pub fn wake_up(&self) -> bool {
        let carrier = self.frame_carrier();
        carrier.wake_up(self.as_fd(), Way::In, PollFlags::IN);
        carrier.may_receive()
    }

    /// Makes the stream end if the peer moves less than [`Pace::MIN_BYTES`] bytes, or less than all that remain,
    /// within `limit`.
    pub fn demand_pace(&self, limit: Duration) {
        *self.pace.lock() = Some(Pace::new(limit));
    }

    /// Gives the peer its full time again, because it did not cause the delay before.
    pub fn restart_pace(&self) {
        if let Some(pace) = self.pace.lock().as_mut() {
            pace.begin();
        }
    }

    /// Ends the stream in both directions, and wakes all threads that wait on it. Further calls have no
    /// effect.
    pub fn close(&self) {
        self.end(CLOSED);
    }

    /// Whether the stream is unusable: this side closed it, or a call found it broken or left half a frame.
    pub fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) != OPEN
    }

    /// Whether this side has closed a stream with rings. Closing the socket does not stop bytes in shared memory, so each step
    /// checks this.
    pub(super) fn closed_here(&self) -> bool {
        self.has_rings() && self.state.load(Ordering::Acquire) == CLOSED
    }

    /// Whether the peer has closed its end. It then no longer waits for an answer, even if some of its bytes
    /// are still unread (`a_peer_that_has_gone_is_seen_behind_what_it_left`).
    pub fn abandoned(&self) -> bool {
        if self.peer_closed_rings() {
            return true;
        }
        let mut socket = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        loop {
            match poll(&mut socket, Some(&timespec(Duration::ZERO))) {
                Ok(0) => return self.is_closed(),
                Err(Errno::INTR) => {}
                _ => return true,
            }
        }
    }

    /// Whether the peer has set the word for a closed stream in shared memory. Makes no system call. Returns `false` for a peer
    /// that was killed.
    pub fn peer_closed_rings(&self) -> bool {
        self.rings.get().is_some_and(|rings| rings.messages.peer_closed())
    }

    /// Ends the stream after half a frame, because what follows would be read as something else.
    pub(super) fn break_after_half(&self) {
        self.end(BROKEN);
    }

    fn end(&self, state: u8) {
        self.mark(state);
        // Set before the call returns, so that the peer sees the word before a request that repeats the call.
        if let Some(rings) = self.rings.get() {
            rings.messages.close();
        }
        // Fails only if the peer is gone, which ends the stream as well.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    fn mark(&self, state: u8) {
        // Only the first reason is kept, because it is the one to report.
        let _ = self.state.compare_exchange(OPEN, state, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Returns `Ok(true)` if the stream is open, `Ok(false)` if this side closed it, and `Err(NotLinked)` if
    /// it broke.
    pub(super) fn usable(&self) -> Result<bool> {
        match self.state.load(Ordering::Acquire) {
            OPEN => Ok(true),
            CLOSED => Ok(false),
            _ => Err(self.over("the connection is broken already").with("peer", &self.about.peer)),
        }
    }

    /// Runs one step that does not sleep. An error of the socket breaks the stream.
    pub(super) fn step(&self, mut step: impl FnMut(&Stream) -> io::Result<StepResult>) -> Result<StepResult> {
        if !self.usable()? {
            return Ok(StepResult::Ended);
        }
        loop {
            match step(self) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error).with("peer", &self.about.peer)),
                Ok(moved) => return Ok(moved),
            }
        }
    }

    /// Prevents further receives, because what follows cannot be read. A refusal may still be sent.
    pub(super) fn unreadable(&self) {
        self.mark(BROKEN);
    }

    /// Error for a stream that ended before all bytes had arrived.
    pub(super) fn ended(&self, done: u64) -> Error {
        self.over("the peer closed the connection").with("peer", &self.about.peer).with("bytes_before", done)
    }

    /// Error that the socket reported.
    pub(super) fn broken(&self, error: io::Error) -> Error {
        let broken = self.over("the connection broke");
        match error
            .raw_os_error()
            .and_then(|errno| shortage("the next message", Errno::from_raw_os_error(errno)))
        {
            Some(shortage) => shortage.of_kind(broken.kind()),
            None => broken.with("errno", error.raw_os_error().unwrap_or(0)).because(error),
        }
    }

    /// Ends the stream, and returns the error for that: `how`, unless this side closed the stream before.
    pub(super) fn over(&self, how: &str) -> Error {
        self.end(BROKEN);
        let ours = self.state.load(Ordering::Acquire) == CLOSED;
        Error::new(ErrorKind::NotLinked, if ours { "this side closed the connection" } else { how })
    }
}

/// The points at which a test can interfere (`net::interference`).
impl Stream {
    pub(super) fn allowed(&self, way: Way, len: usize) -> io::Result<Option<usize>> {
        self.faults.as_ref().map_or(Ok(Some(len)), |faults| faults.allow(way, len))
    }

    /// Returns `bytes` as they are sent.
    pub(super) fn garbled<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        let mut bytes = Cow::Borrowed(bytes);
        if let Some(faults) = &self.faults {
            faults.garble(Way::Out, bytes.to_mut());
        }
        bytes
    }

    /// Counts what has passed.
    pub(super) fn passed(&self, way: Way, moved: StepResult) -> StepResult {
        if let (Some(faults), &StepResult::Bytes(bytes)) = (&self.faults, &moved) {
            faults.passed(way, bytes);
        }
        moved
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.about.carries_descriptors {
            // Nothing more can arrive afterwards.
            let _ = shutdown(&self.socket, Shutdown::Both);
            if self.has_unreceived() != Some(false) {
                self.unreceived = Unreceived(Some(self.socket.clone()));
            }
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
