//! Windows through a socket: one system call takes the bytes of many from where they lie, or puts them in place.
//!
//! Raw vectors of addresses, never slices: others may write the memory meanwhile (promise 4). Not for: waiting, or
//! deadlines (`transport`).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{Reach, Window};

/// Vectors of one call; the kernel takes no more.
const MOST: usize = 1024;

/// Sends what follows the first `skip` bytes of `windows`, as much as the socket takes now; how many bytes that was.
/// `WouldBlock` if it takes none. With nothing left to send: 0.
pub fn send(fd: BorrowedFd<'_>, windows: &[Window<'_>], skip: u64) -> io::Result<usize> {
    if windows.iter().any(|window| !window.host_addressable()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a window that the CPU cannot read"));
    }
    let mut vectors = vectors(windows, skip);
    if vectors.is_empty() {
        return Ok(0);
    }
    let message = message(&mut vectors);
    retried(|| {
        // SAFETY: `message` names only `vectors`, and those only windows of live tensors (promise 3) that are mapped
        // readable; the kernel reads them and reports a range that is not there as an error.
        unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
    })
}

/// Receives into what follows the first `skip` bytes of `windows`, as much as has arrived; how many bytes that was.
/// `WouldBlock` if none has; 0 if none ever will. At least one byte must be left to receive.
pub fn receive(fd: BorrowedFd<'_>, windows: &[Window<'_>], skip: u64) -> io::Result<usize> {
    if windows.iter().any(|window| window.reach() != Reach::Host) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a window that the CPU cannot write"));
    }
    let mut vectors = vectors(windows, skip);
    if vectors.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "nothing is left to receive"));
    }
    let mut message = message(&mut vectors);
    retried(|| {
        // SAFETY: as in `send`, and the windows are writable memory of this process.
        unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }
    })
}

/// Has whoever waits at `fd` be woken when so many bytes have arrived, instead of at the first. The end of the stream,
/// and a full buffer, wake all the same.
pub fn wake_at(fd: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let size = libc::socklen_t::try_from(size_of_val(&value)).unwrap_or(0);
    let at = (&raw const value).cast();
    // SAFETY: the kernel reads `size` bytes of `value`, which outlives the call.
    let set = unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, at, size) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The first [`MOST`] stretches of memory after `skip` bytes.
fn vectors(windows: &[Window<'_>], mut skip: u64) -> Vec<libc::iovec> {
    let mut vectors = Vec::with_capacity(windows.len().min(MOST));
    for window in windows {
        let passed = skip.min(window.len());
        skip -= passed;
        if passed < window.len() {
            // A window lies in the address space, so its length fits.
            let len = usize::try_from(window.len() - passed).unwrap_or(usize::MAX);
            vectors
                .push(libc::iovec { iov_base: (window.addr() + passed) as *mut libc::c_void, iov_len: len });
            if vectors.len() == MOST {
                break;
            }
        }
    }
    vectors
}

fn message(vectors: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: a header of zeros is one without address, control data and flags.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    // As wide as the C library says.
    message.msg_iovlen = vectors.len() as _;
    message
}

/// Again while a signal interrupts it.
fn retried(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
