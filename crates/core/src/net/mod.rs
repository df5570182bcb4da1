//! Ways to another engine: dial an address or listen at one, and get a [`Stream`] either way.
//!
//! ```text
//!  Transport  tcp (hosts)   unix (one host, carries descriptors)   local (one process)
//!      │ dial, accept
//!      ▼
//!   Stream    frames, descriptors, windows; one socket, whichever transport made it
//! ```
//!
//! One runner judges all transports (`tests/integration/transport.rs`). Not for: what the frames say (`wire`), or who may
//! connect (`links`).

mod acceptor;
mod faults;
#[cfg(feature = "testing")]
mod faulty;
mod frame_io;
mod in_process;
mod inbox;
mod pace;
mod payload;
mod step;
mod stream;
mod tcp;
mod transmission;
mod unix;

#[cfg(feature = "testing")]
pub use faults::{Fault, Faults};
#[cfg(feature = "testing")]
pub use faulty::Faulty;
pub use frame_io::{MAX_DESCRIPTORS, Received};
pub use in_process::Local;
pub use inbox::{Arrival, Inbox};
pub use pace::Pace;
pub use payload::{LEAD, STRETCH, leads};
pub use stream::Stream;
pub use tcp::Tcp;
pub use unix::Unix;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;

/// Where an engine listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// A port of a host.
    Tcp(SocketAddr),
    /// An abstract name, known to the processes of one network namespace.
    Unix(String),
    /// A name known to this process.
    Local(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(name) => write!(f, "unix:@{name}"),
            Address::Local(name) => write!(f, "local:{name}"),
        }
    }
}

/// One way to reach others.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Its name, for reports and messages.
    fn name(&self) -> &'static str;

    /// A stream to whoever listens at `to`. `Err(LinkFailed)` at once if nobody does, `Err(Timeout)` at the deadline.
    fn dial(&self, to: &Address, deadline: Deadline) -> Result<Stream>;

    /// Listens at `at`.
    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>>;
}

/// What a listener has for whoever asks.
#[derive(Debug)]
pub enum Accepted {
    /// A connection.
    Stream(Box<Stream>),
    /// Nobody is waiting; the descriptor becomes readable when that changes.
    Nobody,
    /// A connection waits, but this process or the system has no descriptor or memory for it.
    NoRoom(rustix::io::Errno),
    /// The listener is closed.
    Closed,
}

/// Where others arrive. Asking never waits: the control thread of an engine watches the descriptor.
pub trait Listener: fmt::Debug + Send + Sync {
    /// The next connection that is waiting, if any.
    fn accept(&self) -> Result<Accepted>;

    /// Readable while a connection may be waiting.
    fn readiness(&self) -> BorrowedFd<'_>;

    /// Where it listens, with the port it was given.
    fn address(&self) -> Address;

    /// Stops listening. More than once is fine.
    fn close(&self);
}

/// A socket call that went wrong at an address of this side.
#[cold]
fn unavailable(address: &Address, doing: &str, errno: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::System, format!("cannot {doing} {address}"))
        .with("errno", errno.raw_os_error())
        .because(std::io::Error::from(errno))
}

/// A socket call that went wrong on the way to `address`.
#[cold]
fn unreachable(address: &Address, doing: &str, errno: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::LinkFailed, format!("cannot {doing} {address}"))
        .with("errno", errno.raw_os_error())
        .because(std::io::Error::from(errno))
}

/// An address of another transport.
#[cold]
fn foreign(transport: &dyn Transport, address: &Address) -> Error {
    let text = format!("{} cannot reach {address}: an address of another transport", transport.name());
    Error::new(ErrorKind::LinkFailed, text)
}
