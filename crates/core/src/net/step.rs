//! One attempt to move bytes through a socket, and what came of it.

use std::time::Duration;

use rustix::event::Timespec;

/// What a step of a transfer came to.
pub(super) enum Moved {
    Bytes(usize),
    /// The other side sends no more.
    Ended,
    NotYet,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    In,
    Out,
}

/// A limit as `poll` takes it.
pub(super) fn timespec(limit: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    }
}
