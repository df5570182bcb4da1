//! Lists the sockets of this process, so that a forked child can close its copies.
//!
//! A child keeps every socket of its parent open. Its peers would not notice the end of the parent, and a
//! port would stay in use. This code is in `memory` because closing a descriptor that another value owns is a
//! promise that the compiler cannot check.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

static OPEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// Entry for a socket that a forked child closes. Its owner declares it before the descriptor, so that it
/// drops first.
#[derive(Debug)]
pub struct Kept(RawFd);

impl Kept {
    /// Adds `socket` to the list until this value drops.
    pub fn new(socket: &OwnedFd) -> Kept {
        let socket = socket.as_raw_fd();
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).insert(socket);
        Kept(socket)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Closes the sockets that a forked child inherited.
///
/// Call it only in the child, and before anything else. The owners of the sockets are never used again in the
/// child (`tests/test_peer_faults.py`).
pub fn abandon() {
    // Another thread of the parent may have held the lock at the time of the fork. Then the copies stay open,
    // and if the parent dies later its peers notice only because its heartbeats stop.
    let Ok(mut open) = OPEN.try_lock() else { return };
    for &socket in &*open {
        // SAFETY: this is a descriptor of this process that has been open since before the fork. Its owner in
        // this process is a copy that is never used or dropped, because the binding and the C interface
        // refuse every call on it in a child.
        unsafe { libc::close(socket) };
    }
    // The set is not freed, because another thread may have been allocating at the time of the fork.
    std::mem::forget(std::mem::take(&mut *open));
}
