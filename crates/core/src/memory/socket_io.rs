//! Sends and receives windows through a socket, many in one system call and without an intermediate buffer.
//!
//! The vectors hold raw addresses and never slices, because others may write the memory meanwhile (promise
//! 4). Neither function waits; the `net` module waits and keeps deadlines.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{Reach, Window};

/// Maximum number of vectors in one call; a limit of the kernel.
const MAX_VECTORS: usize = 1024;

/// Sends the bytes of `windows` that follow the first `skip` bytes, as many as the socket accepts now.
///
/// Returns the number of bytes sent, or 0 if nothing is left to send. Fails with `WouldBlock` if the socket
/// accepts nothing now, and with `InvalidInput` if the CPU cannot read one of the windows.
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
        // SAFETY: `message` refers only to `vectors`, and these refer only to windows of live tensors
        // (promise 3) that the CPU can read (checked above). The kernel only reads them, and reports an
        // address that is not mapped as an error.
        unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
    })
}

/// Receives into the bytes of `windows` that follow the first `skip` bytes, as many as have arrived.
///
/// Returns the number of bytes received, or 0 if the peer has closed the stream. Fails with `WouldBlock` if
/// nothing has arrived, and with `InvalidInput` if the CPU cannot write one of the windows or if no byte is
/// left to receive.
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
        // SAFETY: as in `send`; in addition, all windows are writable memory of this process (checked above).
        unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }
    })
}

/// Makes a thread that waits to read from `fd` wake when `bytes` bytes have arrived, instead of at the first
/// byte. The end of the stream and a full receive buffer still wake it.
pub fn wake_at(fd: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let size = libc::socklen_t::try_from(size_of_val(&value)).unwrap_or(0);
    let at = (&raw const value).cast();
    // SAFETY: the kernel reads `size` bytes of `value`, which outlives the call.
    let set = unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, at, size) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns vectors for the bytes after the first `skip`, at most [`MAX_VECTORS`].
fn vectors(windows: &[Window<'_>], mut skip: u64) -> Vec<libc::iovec> {
    let mut vectors = Vec::with_capacity(windows.len().min(MAX_VECTORS));
    for window in windows {
        let passed = skip.min(window.len());
        skip -= passed;
        if passed < window.len() {
            // A window lies in the address space, so its length fits.
            let len = usize::try_from(window.len() - passed).unwrap_or(usize::MAX);
            vectors
                .push(libc::iovec { iov_base: (window.addr() + passed) as *mut libc::c_void, iov_len: len });
            if vectors.len() == MAX_VECTORS {
                break;
            }
        }
    }
    vectors
}

fn message(vectors: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: a header of zeros is valid: no address, no vectors, no control data and no flags.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    // The type of this field differs between C libraries.
    message.msg_iovlen = vectors.len() as _;
    message
}

/// Repeats `call` as long as a signal interrupts it.
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
