//! A keeper: its memory, its socket, and the thread that serves its clients.

use std::os::fd::OwnedFd;
use std::thread::{Builder, JoinHandle};

use llm_datadist_core::bindings::keeper::{Mutex, above_standard_streams};
use llm_datadist_core::bindings::this_process;
use llm_datadist_core::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::holder::{Holder, KeeperOptions};
use crate::socket::send;

/// Name of the thread.
const THREAD: &str = "llm-keeper";

/// An open keeper: a store of values that other processes put and get. It serves them until it is closed or dropped.
#[derive(Debug)]
pub struct Keeper {
    process: u32,
    slots: u32,
    /// What is written here ends the thread.
    stop: OwnedFd,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Keeper {
    /// Opens a keeper.
    ///
    /// Returns `Err(InvalidArgument)` for a size that is out of range or a path that cannot be one of a socket, `Err(OutOfMemory)` if
    /// this process may not use that much memory, and `Err(System)` if another program listens at the path (with its process), or
    /// if the system refuses a file, a socket or a thread.
    pub fn open(options: &KeeperOptions) -> Result<Keeper> {
        let holder = Holder::open(options, false)?;
        let (stopped, stop) = pair().map_err(|errno| no_pair().errno(errno))?;
        let (slots, keeper) = (holder.slots(), holder.keeper_loop(stopped)?);
        // The thread alone has the socket and the memory now.
        drop(holder);
        let thread = Builder::new().name(THREAD.into()).spawn(move || _ = keeper.run());
        let thread = thread.map_err(|error| Error::no_thread("the thread of the keeper", error))?;
        Ok(Keeper { process: this_process(), slots, stop, thread: Mutex::new(Some(thread)) })
    }

    /// Returns the number of values that fit.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns whether it serves clients: it was not closed, no other keeper has taken over, its thread has not ended, and this is not a
    /// forked child.
    pub fn running(&self) -> bool {
        let running =
            |thread: &Option<JoinHandle<()>>| thread.as_ref().is_some_and(|thread| !thread.is_finished());
        self.process == this_process() && running(&self.thread.lock())
    }

    /// Stops to serve clients, and removes the socket. Clients see the end of their connection; what they have mapped lives on.
    /// Closing again does nothing. A forked child cannot close the keeper of its parent.
    pub fn close(&self) {
        if self.process != this_process() {
            return;
        }
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            // Fails only if the thread has ended. `write` would raise SIGPIPE then.
            let _ = send(&self.stop, &[1], &[]);
            // Fails only if it has panicked.
            let _ = thread.join();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.close();
        if self.process != this_process() {
            // A forked child does not have the thread.
            std::mem::forget(self.thread.get_mut().take());
        }
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (read, write) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok((above_standard_streams(read)?, above_standard_streams(write)?))
}

fn no_pair() -> Error {
    Error::new(ErrorKind::System, "cannot create the sockets for the end of the keeper")
}
