//! One attempt to move bytes of a connection, and its result.

use std::time::Duration;

use rustix::event::Timespec;

/// Result of one attempt.
pub(crate) enum StepResult {
    Bytes(usize),
    /// The peer sends no more bytes.
    Ended,
    NotYet,
}

/// Direction of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    In,
    Out,
}

/// Converts a limit to the form that `poll` takes.
pub(super) fn timespec(limit: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    }
}
