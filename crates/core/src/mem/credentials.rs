//! Which process is at the other end of a local socket, as the kernel recorded it when the two met.
//!
//! Here because the system call fills a struct in place, and the safe wrappers assume that its process id is not zero,
//! which it is for a process of a namespace that is not visible from here. Not for: reading that process (`process`).

use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The process that made the other end of `socket`; `None` if it is none of this machine's that has an id here.
#[must_use]
pub fn peer_process(socket: BorrowedFd<'_>) -> Option<i32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).ok()?;
    // SAFETY: the kernel writes at most `len` bytes, which are those of `peer`, a struct of integers that outlives the
    // call; and `len` itself.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    (result == 0 && peer.pid > 0).then_some(peer.pid)
}
