//! Statuses of NIXL.

use llm_datadist_fabric::{Error, Status};

use crate::abi::RawStatus;

pub(crate) const OK: RawStatus = 0;
pub(crate) const IN_PROGRESS: RawStatus = 1;
const DISCONNECTED: RawStatus = -13;

/// Returns a status with its meaning. Versions before 1.5 return -2 in place of those from -5 on.
fn status(number: RawStatus) -> Status {
    let text = match number {
        OK => "no error",
        IN_PROGRESS => "in progress",
        -1 => "invalid parameter",
        -2 => "the backend failed",
        -3 => "invalid state",
        -4 => "an exception",
        -6 => "not found",
        -7 => "not posted",
        -8 => "mismatch",
        -9 => "not allowed",
        -10 => "active already",
        -12 => "not supported",
        DISCONNECTED => "the peer has disconnected",
        -14 => "cancelled",
        _ => "unknown status",
    };
    Status { library: "NIXL", number, text }
}

/// Returns `Err` unless the status of `call` is good.
pub(crate) fn check(call: &'static str, number: RawStatus) -> Result<(), Error> {
    match number {
        OK => Ok(()),
        DISCONNECTED => Err(Error::Peer(status(number))),
        _ => Err(Error::Refused { call, status: status(number) }),
    }
}
