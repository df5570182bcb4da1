//! Whether a call that makes a link waits for a listener.

/// What a call that makes a link does while no process listens at the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhileRefused {
    /// It tries again until its limit has passed.
    Retry,
    /// It ends with [`LinkFailed`](crate::ErrorKind::LinkFailed).
    Fail,
}
