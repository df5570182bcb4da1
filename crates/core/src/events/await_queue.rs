//! Wakes an event loop once transfers that it awaits have ended.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, ErrorKind, Result};
use crate::sync::Mutex;

/// The numbers of transfers that have ended and that one event loop awaits, and a descriptor that is readable while
/// there are any.
#[derive(Debug)]
pub struct AwaitQueue {
    ended: Mutex<Vec<u64>>,
    readable: OwnedFd,
}

impl AwaitQueue {
    /// Creates an empty queue. Returns `Err(System)` if there is no file descriptor left.
    pub fn new() -> Result<Self> {
        let readable = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            Error::new(ErrorKind::System, "cannot create the event descriptor of an event loop").errno(errno)
        })?;
        Ok(AwaitQueue { ended: Mutex::default(), readable })
    }

    /// Returns a descriptor that is readable while a transfer is queued. The caller must not read from it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }

    /// Takes the numbers of the transfers that have ended.
    pub fn take(&self) -> Vec<u64> {
        let mut ended = self.ended.lock();
        if !ended.is_empty() {
            // The descriptor does not block, and nobody else reads it.
            let _ = rustix::io::read(&self.readable, &mut [0; 8]);
        }
        std::mem::take(&mut ended)
    }

    pub(super) fn push(&self, number: u64) {
        let mut ended = self.ended.lock();
        ended.push(number);
        if ended.len() == 1 {
            // Fails only if the counter is full, and it is at most 1.
            let _ = rustix::io::write(&self.readable, &1u64.to_ne_bytes());
        }
    }
}
