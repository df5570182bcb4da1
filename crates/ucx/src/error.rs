//! Errors of this crate.

use std::fmt;

use crate::abi::RawStatus;

/// Why something failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The library cannot be used: it cannot be loaded, lacks a function, has another version, or refuses a setting.
    Library(String),
    /// The library refused a call.
    Refused {
        /// The function.
        call: &'static str,
        /// What it returned.
        status: Status,
    },
    /// The read did not end before its deadline. Nothing of it touches memory any more.
    DeadlinePassed,
    /// The caller has cancelled the read. Nothing of it touches memory any more.
    Cancelled,
    /// The peer failed, or cannot be reached.
    Peer(Status),
    /// The thread of the fabric has ended.
    Closed,
    /// The system refused a descriptor or a thread.
    System(String),
}

/// A status of UCX.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status(pub(crate) RawStatus);

pub(crate) const OK: RawStatus = 0;
pub(crate) const IN_PROGRESS: RawStatus = 1;
pub(crate) const NO_MEMORY: RawStatus = -4;
pub(crate) const BUSY: RawStatus = -15;
pub(crate) const CANCELED: RawStatus = -16;

impl Status {
    /// Returns the number that the library uses.
    pub fn number(self) -> i8 {
        self.0
    }

    fn text(self) -> &'static str {
        match self.0 {
            OK => "no error",
            -2 => "no resource",
            -3 => "input or output error",
            NO_MEMORY => "out of memory",
            -5 => "invalid parameter",
            -6 => "destination unreachable",
            -7 => "invalid address",
            -8 => "not implemented",
            -12 => "no such element",
            -14 => "no such device",
            BUSY => "busy",
            CANCELED => "cancelled",
            -18 => "exists already",
            -20 => "timed out",
            -21 => "a limit is exceeded",
            -22 => "not supported",
            -23 => "rejected",
            -24 => "not connected",
            -25 => "connection reset by the peer",
            -80 => "the endpoint timed out",
            _ => "unknown status",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (UCX status {})", self.text(), self.0)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Library(reason) => write!(f, "UCX cannot be used: {reason}"),
            Error::Refused { call, status } => write!(f, "{call} failed: {status}"),
            Error::DeadlinePassed => f.write_str("the deadline of the read has passed"),
            Error::Cancelled => f.write_str("the read was cancelled"),
            Error::Peer(status) => write!(f, "the peer cannot be read: {status}"),
            Error::Closed => f.write_str("the thread of UCX has ended"),
            Error::System(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for Error {}

/// Returns `Err` unless the status of `call` is good.
pub(crate) fn check(call: &'static str, status: RawStatus) -> Result<(), Error> {
    if status == OK { Ok(()) } else { Err(Error::Refused { call, status: Status(status) }) }
}
