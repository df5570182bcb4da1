//! Carries messages and payload over the socket of the connection.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::carrier::Carrier;
use super::step::Way;
use crate::memory::{Window, socket_io};

/// Number of zeros before payload. It is fixed by the protocol [`VERSION`](crate::protocol::VERSION).
///
/// The kernel copies the bytes into its own pages. Some processors do this at a fifth of their speed if the
/// copy lies a few bytes further into its page than the original (benches/results/log.md). One cache line of
/// zeros avoids this for page-aligned blocks, and realigns blocks that have drifted into this case.
pub const PADDING: usize = 64;

/// The socket itself.
#[derive(Debug)]
pub(super) struct SocketCarrier;

impl Carrier for SocketCarrier {
    fn send(&self, socket: BorrowedFd<'_>, bytes: &[u8], more: bool) -> rustix::io::Result<usize> {
        let more = if more { SendFlags::MORE } else { SendFlags::empty() };
        send(socket, bytes, more | SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    fn receive(&self, socket: BorrowedFd<'_>, bytes: &mut [u8]) -> rustix::io::Result<usize> {
        recv(socket, bytes, RecvFlags::DONTWAIT).map(|(received, _)| received)
    }

    fn send_windows(&self, socket: BorrowedFd<'_>, windows: &[Window<'_>], skip: u64) -> io::Result<usize> {
        socket_io::send(socket, windows, skip)
    }

    fn receive_windows(
        &self,
        socket: BorrowedFd<'_>,
        windows: &[Window<'_>],
        skip: u64,
    ) -> io::Result<usize> {
        socket_io::receive(socket, windows, skip)
    }

    fn padding(&self, _: Way) -> usize {
        PADDING
    }

    fn carries_descriptors(&self) -> bool {
        true
    }

    fn poll_time(&self) -> Duration {
        Duration::ZERO
    }

    fn ready_soon(&self, _: Way) -> bool {
        false
    }

    fn readable_within(&self, socket: BorrowedFd<'_>, limit: Duration) -> bool {
        let since = Instant::now();
        loop {
            let peeked = recv(socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
            if !matches!(peeked, Err(Errno::AGAIN | Errno::INTR)) {
                return true;
            }
            if since.elapsed() >= limit {
                return false;
            }
            std::thread::yield_now();
        }
    }

    fn fall_asleep(&self, way: Way) -> Option<PollFlags> {
        Some(match way {
            Way::In => PollFlags::IN,
            // A peer that has closed its end reads nothing. Only RDHUP shows this before the window is full.
            Way::Out => PollFlags::OUT | PollFlags::RDHUP,
        })
    }

    fn wake_up(&self, _: BorrowedFd<'_>, _: Way, events: PollFlags) -> bool {
        events != PollFlags::RDHUP
    }

    fn may_receive(&self) -> bool {
        true
    }
}
