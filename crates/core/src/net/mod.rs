//! Transports to another engine. Each can dial an address and listen at one, and both give a [`Stream`].
//!
//! ```text
//!  Transport  tcp (hosts)   unix (one host, carries descriptors)
//!      │ dial, accept
//!      ▼
//!   Stream    frames with deadlines, descriptors, windows; one socket, whichever transport made it
//!      │ bytes of frames and payload
//!   Carrier   the socket, or rings in shared memory beside it
//! ```
//!
//! The same tests check all transports (`tests/integration/transport.rs`). `protocol` defines the frames, and
//! `session` decides which peers may connect.

mod acceptor;
mod carrier;
mod discard_queue;
mod frame_io;
mod inbox;
mod interference;
mod pace;
mod payload;
mod rings;
mod socket_carrier;
mod step;
mod stream;
mod tcp;
mod transmission;
mod unix;

pub use carrier::POLL_TIME;
pub use discard_queue::{discard, is_crowded};
#[cfg(feature = "testing")]
pub use frame_io::MAX_DESCRIPTORS;
pub use frame_io::ReceivedFrame;
pub use inbox::{Arrival, Inbox};
#[cfg(feature = "testing")]
pub use interference::Interference;
pub use payload::{PADDING_INTERVAL, padding_at};
#[cfg(feature = "testing")]
pub use socket_carrier::PADDING;
#[cfg(feature = "testing")]
pub use step::Way;
#[cfg(feature = "testing")]
pub use stream::About;
pub use stream::Stream;
pub use tcp::Tcp;
pub use unix::Unix;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::shortage;
use crate::model::Deadline;

/// Connections that may wait to be accepted. The kernel reduces this to the administrator's limit.
pub const BACKLOG: u16 = 1024;

/// Address at which an engine listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// An IP address and a port.
    Tcp(SocketAddr),
    /// An abstract socket name, visible in one network namespace.
    Unix(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(name) => write!(f, "unix:@{name}"),
        }
    }
}

/// A way to connect to other engines.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Name of the transport, for reports and messages.
    fn name(&self) -> &'static str;

    /// Connects to the listener at `to`. Returns `Err(LinkFailed)` at once if there is no listener, and
    /// `Err(Timeout)` at the deadline.
    fn dial(&self, to: &Address, deadline: Deadline) -> Result<Stream>;

    /// Listens at `at`. Returns `Err(System)` if the system refuses, and `Err(LinkFailed)` for an address of
    /// another transport.
    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>>;
}

/// Result of [`Listener::accept`].
#[derive(Debug)]
pub enum Accepted {
    /// A connection.
    Stream(Box<Stream>),
    /// No connection is waiting. The descriptor of [`Listener::readiness`] becomes readable when one is.
    Nobody,
    /// A connection is waiting, but this process or the system has no descriptor or memory for it.
    NoRoom(rustix::io::Errno),
    /// The listener is closed.
    Closed,
}

/// Accepts connections. No call waits: the control thread of an engine polls the descriptor.
pub trait Listener: fmt::Debug + Send + Sync {
    /// Accepts the next waiting connection, if there is one.
    fn accept(&self) -> Result<Accepted>;

    /// Returns a descriptor that is readable while a connection may be waiting.
    fn readiness(&self) -> BorrowedFd<'_>;

    /// Returns the address at which it listens, with the actual port.
    fn address(&self) -> Address;

    /// Stops listening. Further calls have no effect.
    fn close(&self);
}

/// Error of a socket call at a local address.
pub fn unavailable(address: &Address, doing: &str, errno: rustix::io::Errno) -> Error {
    failed(ErrorKind::System, address, doing, errno)
}

/// Error of a socket call on the way to `address`.
pub fn unreachable(address: &Address, doing: &str, errno: rustix::io::Errno) -> Error {
    failed(ErrorKind::LinkFailed, address, doing, errno)
}

fn failed(kind: ErrorKind, address: &Address, doing: &str, errno: rustix::io::Errno) -> Error {
    let failed = || Error::new(kind, format!("cannot {doing} {address}")).errno(errno);
    match shortage("a socket", errno) {
        Some(error) => error.of_kind(kind).with("address", address),
        None => failed(),
    }
}

/// Error for an address of another transport.
pub fn unsupported_address(transport: &dyn Transport, address: &Address) -> Error {
    let text = format!("{} cannot reach {address}, which belongs to another transport", transport.name());
    Error::new(ErrorKind::LinkFailed, text)
}
