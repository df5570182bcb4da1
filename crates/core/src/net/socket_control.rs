//! Carries messages over the socket of the connection.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::control::Control;
use super::step::Way;

/// The socket itself. Payload uses the same socket.
#[derive(Debug)]
pub(super) struct SocketControl;

impl Control for SocketControl {
    fn send(&self, socket: BorrowedFd<'_>, bytes: &[u8], more: bool) -> rustix::io::Result<usize> {
        let more = if more { SendFlags::MORE } else { SendFlags::empty() };
        send(socket, bytes, more | SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    fn receive(&self, socket: BorrowedFd<'_>, bytes: &mut [u8]) -> rustix::io::Result<usize> {
        recv(socket, bytes, RecvFlags::DONTWAIT).map(|(received, _)| received)
    }

    fn begin_payload(&self, _: BorrowedFd<'_>, _: Way) -> rustix::io::Result<()> {
        Ok(())
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
