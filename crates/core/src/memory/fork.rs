//! The sockets of this process, so that a forked child can close its copies.
//!
//! A child holds every socket of its parent open: a peer would not notice that the parent has gone, and a port would
//! stay taken. Here because closing a descriptor that somebody else owns is a promise the compiler cannot check. Not for:
//! using sockets (`transport`).

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

static OPEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// A socket that a forked child will close. Stands before the descriptor in its owner, so that it goes first.
#[derive(Debug)]
pub struct Kept(RawFd);

impl Kept {
    /// Notes `socket`, until this drops.
    #[must_use]
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

/// Closes the sockets that a forked child inherited. To be called in the child, before anything else, and nowhere else:
/// whatever owned them is left alone for ever there (`tests/test_peer_faults.py`).
pub fn abandon() {
    // Another thread of the parent may have held the lock at the fork; then the copies stay, and peers of a parent that
    // dies later find out by its silence.
    let Ok(mut open) = OPEN.try_lock() else { return };
    for &socket in &*open {
        // SAFETY: a descriptor of this process, open since before the fork; its owner in this process is a copy that is
        // never used nor dropped, because the binding and the C interface refuse every call on it in a child.
        unsafe { libc::close(socket) };
    }
    // Not freed: another thread may have been allocating at the fork.
    std::mem::forget(std::mem::take(&mut *open));
}
