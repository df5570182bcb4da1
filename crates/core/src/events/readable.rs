//! Descriptors that are readable while something is queued.

use std::os::fd::OwnedFd;

use rustix::event::EventfdFlags;

use crate::error::{Error, ErrorKind, Result};
use crate::memory;

/// Creates a descriptor that is not readable yet. It does not block, and a new program does not inherit it. Returns
/// `Err(System)` if there is no descriptor left.
pub(super) fn new_eventfd() -> Result<OwnedFd> {
    memory::new_eventfd(EventfdFlags::empty()).map_err(|errno| {
        let failed = || Error::new(ErrorKind::System, "cannot create an event descriptor").errno(errno);
        memory::shortage("an event descriptor", errno).unwrap_or_else(failed)
    })
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
