//! Wakes an event loop when transfers that it awaits have ended.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::EventfdFlags;

use crate::error::Result;
use crate::memory::EventFd;
use crate::sync::Mutex;

/// The numbers of transfers that have ended and that one event loop awaits, with a descriptor that is readable while
/// there are any.
#[derive(Debug)]
pub struct AwaitQueue {
    ended: Mutex<Vec<u64>>,
    readable: EventFd,
}

impl AwaitQueue {
    /// Creates an empty queue. Returns `Err(System)` if there is no file descriptor left.
    pub fn new() -> Result<Self> {
        let readable = EventFd::new("an event descriptor", EventfdFlags::empty())?;
        Ok(AwaitQueue { ended: Mutex::default(), readable })
    }

    /// Returns a descriptor that is readable while a transfer is queued. The caller must not read from it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }

    /// Takes the numbers of the transfers that have ended.
    pub fn take(&self) -> Vec<u64> {
        let mut ended = self.ended.lock();
        self.readable.clear();
        std::mem::take(&mut ended)
    }

    pub(super) fn push(&self, number: u64) {
        let mut ended = self.ended.lock();
        ended.push(number);
        if ended.len() == 1 {
            self.readable.signal();
        }
    }
}
