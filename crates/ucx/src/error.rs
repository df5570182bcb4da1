//! Why UCX, a mapping or a read failed.

use std::fmt;

/// Why something failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The library cannot be used: it cannot be loaded, lacks a function, has another version, or refuses a setting. The text
    /// names it.
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
    /// The fabric has ended.
    Closed,
    /// The system refused memory, a descriptor or a thread.
    System(String),
}

/// A status of UCX.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// The number that UCX uses.
    pub number: i32,
    /// Its meaning.
    pub text: &'static str,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (UCX status {})", self.text, self.number)
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
            Error::Library(reason) | Error::System(reason) => f.write_str(reason),
            Error::Refused { call, status } => write!(f, "{call} failed: {status}"),
            Error::DeadlinePassed => f.write_str("the deadline of the read has passed"),
            Error::Cancelled => f.write_str("the read was cancelled"),
            Error::Peer(status) => write!(f, "the peer cannot be read: {status}"),
            Error::Closed => f.write_str("the engine no longer reads peers"),
        }
    }
}

impl std::error::Error for Error {}
