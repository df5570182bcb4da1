//! Descriptors that are readable while something is queued.

use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, ErrorKind, Result};

/// Creates a descriptor that is not readable yet. It does not block, and a new program does not inherit it. Returns
/// `Err(System)` if there is no descriptor left.
pub(super) fn new_eventfd() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|errno| Error::new(ErrorKind::System, "cannot create an event descriptor").errno(errno))
}

/// Makes a descriptor readable.
pub(super) fn signal(readable: &OwnedFd) {
    // Fails only if the counter is full, and then the descriptor is readable.
    let _ = rustix::io::write(readable, &1u64.to_ne_bytes());
}

/// Makes a descriptor unreadable.
pub(super) fn silence(readable: &OwnedFd) {
    // Fails only if it is unreadable already.
    let _ = rustix::io::read(readable, &mut [0; 8]);
}
