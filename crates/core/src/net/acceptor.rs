//! A listening socket, which `tcp` and `unix` use as their [`Listener`]. The control thread of `session`
//! waits for its connections.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, listen, shutdown};

use super::step::timespec;
use super::{Accepted, Address, BACKLOG, Listener, Stream, unavailable};
use crate::error::Result;
use crate::memory::{CloseOnFork, above_standard_streams};

/// Makes a stream of an accepted socket; `None` if the peer is already gone.
type MakeStream = fn(OwnedFd, &Address) -> Option<Stream>;

/// A listening socket and what it needs to accept connections.
pub(super) struct ListeningSocket {
    _close_on_fork: CloseOnFork,
    socket: OwnedFd,
    address: Address,
    closed: AtomicBool,
    welcome: MakeStream,
}

impl ListeningSocket {
    /// Starts to listen with a non-blocking socket that is bound to `address`.
    pub(super) fn open(socket: OwnedFd, address: Address, welcome: MakeStream) -> Result<ListeningSocket> {
        listen(&socket, BACKLOG.into()).map_err(|errno| unavailable(&address, "listen at", errno))?;
        Ok(ListeningSocket {
            _close_on_fork: CloseOnFork::new(&socket),
            socket,
            address,
            closed: AtomicBool::new(false),
            welcome,
        })
    }

    /// Whether a connection waits to be accepted.
    fn is_waiting(&self) -> bool {
        loop {
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timespec(Duration::ZERO))) {
                Err(Errno::INTR) => {}
                polled => return polled != Ok(0),
            }
        }
    }
}

impl Listener for ListeningSocket {
    fn accept(&self) -> Result<Accepted> {
        while !self.closed.load(Ordering::Acquire) {
            match accept_with(&self.socket, SocketFlags::CLOEXEC).and_then(above_standard_streams) {
                Ok(socket) => {
                    if let Some(stream) = (self.welcome)(socket, &self.address) {
                        return Ok(Accepted::Stream(Box::new(stream)));
                    }
                }
                Err(Errno::AGAIN) => return Ok(Accepted::Nobody),
                Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    // The kernel looks for a descriptor first, even if no connection waits
                    // (`test_calls_do_without_rings_while_resources_are_short`).
                    let waits = self.is_waiting();
                    return Ok(if waits { Accepted::NoRoom(errno) } else { Accepted::Nobody });
                }
                // This peer left before it was accepted, or its network failed. The next one may be fine.
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::PROTO
                    | Errno::PERM
                    | Errno::NETDOWN
                    | Errno::NETUNREACH
                    | Errno::HOSTDOWN
                    | Errno::HOSTUNREACH
                    | Errno::NOPROTOOPT
                    | Errno::OPNOTSUPP
                    | Errno::NONET,
                ) => {}
                Err(_) if self.closed.load(Ordering::Acquire) => {}
                Err(errno) => return Err(unavailable(&self.address, "accept at", errno)),
            }
        }
        Ok(Accepted::Closed)
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn address(&self) -> Address {
        self.address.clone()
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // Refuses further connections, even while this value lives. On a descriptor of this process, the call
        // cannot fail in a way that matters.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl fmt::Debug for ListeningSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ListeningSocket({})", self.address)
    }
}
