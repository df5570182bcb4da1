//! Lists the sockets of this process, so that a forked child can close its copies.
//!
//! A child keeps every socket of its parent open. Its peers would not notice the end of the parent, and a
//! port would stay in use. This code is in `memory` because closing a descriptor that another value owns is a
//! promise that the compiler cannot check.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

type Sockets = Mutex<BTreeSet<RawFd>>;

/// The list of this process; null until it has a socket. Never freed. A child has a list of its own, because a thread
/// that the child does not have may hold the lock of the parent's list.
static OPEN: AtomicPtr<Sockets> = AtomicPtr::new(null_mut());

fn open() -> MutexGuard<'static, BTreeSet<RawFd>> {
    let mut found = OPEN.load(Ordering::Acquire);
    if found.is_null() {
        let made = Box::into_raw(Box::<Sockets>::default());
        match OPEN.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => found = made,
            Err(other) => {
                // SAFETY: the box made above, which nothing else has seen.
                drop(unsafe { Box::from_raw(made) });
                found = other;
            }
        }
    }
    // SAFETY: a box that was leaked above. It is changed only behind its lock, and never freed.
    unsafe { &*found }.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Entry for a socket that a forked child closes. Its owner declares it before the descriptor, so that it
/// drops first.
#[derive(Debug)]
pub struct CloseOnFork(RawFd);

impl CloseOnFork {
    /// Adds `socket` to the list until this value drops.
    pub fn new(socket: &OwnedFd) -> CloseOnFork {
        let socket = socket.as_raw_fd();
        open().insert(socket);
        CloseOnFork(socket)
    }
}

impl Drop for CloseOnFork {
    fn drop(&mut self) {
        open().remove(&self.0);
    }
}

/// Closes the sockets that a forked child inherited.
///
/// Call it only in the child, and before anything else. The owners of the sockets are never used again in the
/// child (`tests/test_peer_faults.py`).
pub fn abandon() {
    let parents = OPEN.swap(null_mut(), Ordering::AcqRel);
    // SAFETY: null, or a box that `open` leaked.
    let Some(parents) = (unsafe { parents.as_ref() }) else { return };
    // Another thread of the parent may have held the lock at the time of the fork. Then the copies stay open,
    // and if the parent dies later its peers notice only because its heartbeats stop.
    let Ok(sockets) = parents.try_lock() else { return };
    for &socket in &*sockets {
        // SAFETY: this is a descriptor of this process that has been open since before the fork. Its owner in
        // this process is a copy that is never used or dropped, because the binding and the C interface
        // refuse every call on it in a child.
        unsafe { libc::close(socket) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::memory::process_id::tests::holds_in_a_child;

    #[test]
    fn child_opens_sockets_after_a_fork_under_the_lock() {
        let held = open();
        let opened = holds_in_a_child(|| {
            abandon();
            let ends = UnixStream::pair().map(|(end, _)| OwnedFd::from(end));
            ends.map(|end| CloseOnFork::new(&end)).is_ok()
        });
        drop(held);
        assert!(opened, "the child waited for a lock of its parent");
    }
}
