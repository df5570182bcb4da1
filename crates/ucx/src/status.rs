//! Statuses of UCX.

use crate::abi::RawStatus;
use crate::error::{Error, Status};

pub(crate) const OK: RawStatus = 0;
pub(crate) const IN_PROGRESS: RawStatus = 1;
pub(crate) const NO_MEMORY: RawStatus = -4;
pub(crate) const BUSY: RawStatus = -15;
pub(crate) const CANCELED: RawStatus = -16;

/// Returns a status with its meaning.
pub(crate) fn status(number: RawStatus) -> Status {
    let text = match number {
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
    };
    Status { number: number.into(), text }
}

/// Returns the error of a peer that has failed with this status.
pub(crate) fn peer_failed(number: RawStatus) -> Error {
    Error::Peer(status(number))
}

/// Returns `Err` unless the status of `call` is good.
pub(crate) fn check(call: &'static str, number: RawStatus) -> Result<(), Error> {
    if number == OK { Ok(()) } else { Err(Error::Refused { call, status: status(number) }) }
}
