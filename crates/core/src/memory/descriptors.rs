//! Descriptors of this process: their numbers, and what to do if there are none.
//!
//! A program that starts without standard streams may open them later, with a call that closes whatever has the numbers 0 to
//! 2. So no descriptor of the engine keeps such a number: every descriptor that is created or received passes through
//! [`above_standard_streams`] (`test_engines_keep_the_numbers_of_the_standard_streams_free`).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, getrlimit};

use crate::error::{Error, ErrorKind, Result};

/// The lowest number that is not that of a standard stream.
const FIRST: i32 = 3;

/// Returns `descriptor`, or a copy of it with a higher number if it has the number of a standard stream.
pub fn above_standard_streams(descriptor: OwnedFd) -> rustix::io::Result<OwnedFd> {
    if descriptor.as_raw_fd() < FIRST { fcntl_dupfd_cloexec(&descriptor, FIRST) } else { Ok(descriptor) }
}

/// A descriptor that is readable while something is queued. Threads and event loops wait for it. Only this crate changes it.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Creates a descriptor that is not readable yet. It does not block, and a new program does not inherit it. Returns
    /// `Err(System)` that says `what` could not be created if there is no descriptor left.
    pub(crate) fn new(what: &str, flags: EventfdFlags) -> Result<EventFd> {
        let made = eventfd(0, flags | EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        made.and_then(above_standard_streams).map(EventFd).map_err(|errno| uncreated(what, errno))
    }

    /// Makes it readable.
    pub(crate) fn signal(&self) {
        // Fails only if the counter is full, and then the descriptor is readable.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes back one signal of a semaphore, or all signals of another descriptor.
    pub(crate) fn clear(&self) {
        // Fails only if it is unreadable already.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the error of kind [`ErrorKind::System`] for a descriptor that could not be created.
pub fn uncreated(what: &str, errno: Errno) -> Error {
    let failed = || Error::new(ErrorKind::System, format!("cannot create {what}")).errno(errno);
    shortage(what, errno).unwrap_or_else(failed)
}

/// Returns the error of kind [`ErrorKind::System`] for `what` if the system has no descriptor or memory for it: the limit that
/// was reached, and how to raise it. `None` for another cause.
pub fn shortage(what: &str, errno: Errno) -> Option<Error> {
    let system = |text: String| Error::new(ErrorKind::System, text);
    let error = match errno {
        Errno::MFILE => system(format!(
            "no file descriptor is free for {what}; close files or raise the limit of open files (ulimit -n, \
             RLIMIT_NOFILE), and try again"
        ))
        .with("limit_open_files", limit_text(getrlimit(Resource::Nofile).current)),
        Errno::NFILE => system(format!(
            "no file descriptor of the whole system is free for {what}; raise fs.file-max, and try again"
        )),
        Errno::TOOMANYREFS => system(format!(
            "too many file descriptors that were sent over local sockets are not received or closed yet, so none can be sent or \
             received for {what}; try again later"
        )),
        Errno::NOBUFS | Errno::NOMEM => {
            system(format!("the kernel has no memory for {what}; free memory, and try again"))
        }
        _ => return None,
    };
    Some(error.errno(errno))
}

/// Returns a limit as shown in an error.
pub(super) fn limit_text(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".into(), |limit| limit.to_string())
}
