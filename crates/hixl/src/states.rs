//! The states of asynchronous transfers and connections.

/// The state of an asynchronous transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum TransferState {
    /// It runs.
    Waiting = 0,
    /// All bytes are in place.
    Completed = 1,
    /// Never reported.
    Timeout = 2,
    /// It has failed.
    Failed = 3,
}

/// The state of an asynchronous connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "the variants are the states of the public enumeration")]
pub enum ConnectState {
    NotConnect = 0,
    ConnectPending = 1,
    Connecting = 2,
    Connected = 3,
    ConnectFailed = 4,
    DisconnectPending = 5,
    Disconnecting = 6,
}
