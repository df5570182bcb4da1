//! Wakes an event loop when transfers that it awaits have ended.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::readable::{new_eventfd, signal, silence};
use crate::error::Result;
use crate::sync::Mutex;

/// The numbers of transfers that have ended and that one event loop awaits, with a descriptor that is readable while
/// there are any.
#[derive(Debug)]
pub struct AwaitQueue {
    ended: Mutex<Vec<u64>>,
    readable: OwnedFd,
}

impl AwaitQueue {
    /// Creates an empty queue. Returns `Err(System)` if there is no file descriptor left.
    pub fn new() -> Result<Self> {
        Ok(AwaitQueue { ended: Mutex::default(), readable: new_eventfd()? })
    }

    /// Returns a descriptor that is readable while a transfer is queued. The caller must not read from it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }

    /// Takes the numbers of the transfers that have ended.
    pub fn take(&self) -> Vec<u64> {
        let mut ended = self.ended.lock();
        silence(&self.readable);
        std::mem::take(&mut ended)
    }

    pub(super) fn push(&self, number: u64) {
        let mut ended = self.ended.lock();
        ended.push(number);
        if ended.len() == 1 {
            signal(&self.readable);
        }
    }
}
