//! A listening socket that can be closed while someone waits at it: what `tcp` and `unix` listen with.
//!
//! Not for: names and options of sockets (`tcp`, `unix`).

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, listen, shutdown};

use super::transfer::timespec;
use super::{Address, Listener, Stream, unavailable};
use crate::error::Result;
use crate::mem::Kept;

/// Connections that wait to be accepted; the kernel cuts it to what the administrator allows.
const BACKLOG: i32 = 1024;
/// How long to wait before accepting again when this process or the system has no room for one more connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Makes a stream of a socket that was accepted; `None` if the peer is gone already.
type Welcome = fn(OwnedFd, &Address) -> Option<Stream>;

pub(super) struct Door {
    _kept: Kept,
    socket: OwnedFd,
    /// Readable from `close` on, for everybody.
    wake: OwnedFd,
    address: Address,
    closed: AtomicBool,
    welcome: Welcome,
}

impl Door {
    /// Listens with a socket that is bound to `address` and does not block.
    pub(super) fn open(socket: OwnedFd, address: Address, welcome: Welcome) -> Result<Door> {
        let failed = |errno| unavailable(&address, "listen at", errno);
        listen(&socket, BACKLOG).map_err(failed)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        Ok(Door { _kept: Kept::new(&socket), socket, wake, address, closed: AtomicBool::new(false), welcome })
    }

    /// Sleeps until someone knocks or the door closes; `limit` for sleeping without looking at the socket.
    fn wait(&self, limit: Option<Duration>) -> Result<()> {
        let look = if limit.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut sources = [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.socket, look)];
        let sources = if limit.is_some() { &mut sources[..1] } else { &mut sources[..] };
        match poll(sources, limit.map(timespec).as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(unavailable(&self.address, "wait at", errno)),
        }
    }
}

impl Listener for Door {
    fn accept(&self) -> Result<Option<Stream>> {
        while !self.closed.load(Ordering::Acquire) {
            match accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(socket) => {
                    if let Some(stream) = (self.welcome)(socket, &self.address) {
                        return Ok(Some(stream));
                    }
                }
                Err(Errno::AGAIN) => self.wait(None)?,
                // The connection knocks again at once: without a pause this would spin.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => self.wait(Some(PAUSE))?,
                // That one left before it was let in, or its network did; the next may not.
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
        Ok(None)
    }

    fn address(&self) -> Address {
        self.address.clone()
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // Whoever dials from now on is refused, even while this value lives. Neither call can fail on a descriptor of
        // ours in a way that matters: the counter is far from full.
        let _ = shutdown(&self.socket, Shutdown::Both);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Door({})", self.address)
    }
}
