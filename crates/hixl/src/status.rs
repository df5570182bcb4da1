//! Status numbers, which every call returns.

use llm_datadist_core::{Error, ErrorKind};

/// How a call has ended. The numbers are those of the original.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// The call has done what it says.
    Success = 0,
    /// A wrong value, address, range or option, or an unknown request.
    ParamInvalid = 103_900,
    /// The time limit has passed.
    Timeout = 103_901,
    /// This engine is not connected to that engine.
    NotConnected = 103_902,
    /// The connection exists.
    AlreadyConnected = 103_903,
    /// Reserved. No call returns it.
    NotifyFailed = 103_904,
    /// Not available in this mode. No call returns it.
    Unsupported = 103_905,
    /// A queue is full, or there is no memory.
    ResourceExhausted = 203_900,
    /// Every other failure, and every call on an object that is not initialized.
    Failed = 503_900,
}

/// The result of a call inside this crate.
pub type Outcome<T> = std::result::Result<T, Status>;

impl Status {
    /// All of them, with their public names.
    pub const ALL: [(&'static str, Status); 9] = [
        ("SUCCESS", Status::Success),
        ("PARAM_INVALID", Status::ParamInvalid),
        ("TIMEOUT", Status::Timeout),
        ("NOT_CONNECTED", Status::NotConnected),
        ("ALREADY_CONNECTED", Status::AlreadyConnected),
        ("NOTIFY_FAILED", Status::NotifyFailed),
        ("UNSUPPORTED", Status::Unsupported),
        ("RESOURCE_EXHAUSTED", Status::ResourceExhausted),
        ("FAILED", Status::Failed),
    ];

    /// Returns the number.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Returns the status of a call that has ended this way.
    pub fn of<T>(outcome: &Outcome<T>) -> Status {
        outcome.as_ref().err().copied().unwrap_or(Status::Success)
    }

    /// Returns the status for an error of the engine, and logs the error, because a number does not say what went wrong.
    pub fn from_error(doing: &str, error: &Error) -> Status {
        let status = match error.kind() {
            ErrorKind::InvalidArgument
            | ErrorKind::CacheNotFound
            | ErrorKind::KeyTaken
            | ErrorKind::TensorCountMismatch => Status::ParamInvalid,
            ErrorKind::Timeout => Status::Timeout,
            ErrorKind::Busy | ErrorKind::OutOfMemory => Status::ResourceExhausted,
            _ => Status::Failed,
        };
        tracing::info!(target: "llm_datadist::hixl", "{doing}: {error} (status {})", status.code());
        status
    }
}
