//! What the stand-in knows: contexts with their settings, workers, endpoints, mapped memory and requests.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

pub(crate) type Handle = *mut c_void;
pub(crate) type Completed = extern "C" fn(Handle, i8, Handle);
pub(crate) type ErrorHandler = extern "C" fn(Handle, Handle, i8);

/// Everything, under one lock. Handles are numbers.
#[derive(Default)]
pub(crate) struct Model {
    pub(crate) last: usize,
    pub(crate) configs: HashMap<usize, HashMap<String, i64>>,
    pub(crate) names: HashMap<usize, String>,
    pub(crate) contexts: HashMap<usize, HashMap<String, i64>>,
    pub(crate) workers: HashMap<usize, Worker>,
    pub(crate) endpoints: HashMap<usize, Endpoint>,
    pub(crate) memory: HashMap<usize, Memory>,
    pub(crate) keys: HashMap<usize, Memory>,
    pub(crate) requests: HashMap<usize, Request>,
}

pub(crate) struct Worker {
    pub(crate) context: usize,
    pub(crate) event_fd: c_int,
    /// Requests that have not ended, oldest first.
    pub(crate) pending: VecDeque<usize>,
}

pub(crate) struct Endpoint {
    pub(crate) worker: usize,
    pub(crate) handler: Option<ErrorHandler>,
    pub(crate) argument: usize,
}

#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) pid: i32,
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) remote: bool,
}

pub(crate) struct Request {
    pub(crate) worker: usize,
    pub(crate) endpoint: usize,
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) len: usize,
    pub(crate) memory: Memory,
    pub(crate) completed: Option<Completed>,
    pub(crate) user_data: usize,
    pub(crate) status: i8,
}

static MODEL: LazyLock<Mutex<Model>> = LazyLock::new(Mutex::default);

pub(crate) fn model() -> MutexGuard<'static, Model> {
    MODEL.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Model {
    /// Returns a number that no handle has. It looks like a pointer, not like a status.
    pub(crate) fn next(&mut self) -> usize {
        self.last += 1;
        0x1000 + self.last * 16
    }

    /// Returns a setting of a context.
    pub(crate) fn setting(&self, context: usize, name: &str) -> Option<i64> {
        self.contexts.get(&context).and_then(|settings| settings.get(name)).copied()
    }

    /// Returns the status with which a function must refuse.
    pub(crate) fn refusal(&self, context: usize, function: &str) -> Option<i8> {
        let status = self.setting(context, &format!("REFUSE_{function}"))?;
        Some(i8::try_from(status).unwrap_or(-1))
    }

    /// Wakes a worker.
    pub(crate) fn signal(&self, worker: usize) {
        if let Some(worker) = self.workers.get(&worker) {
            // SAFETY: an open eventfd of the worker.
            unsafe { libc::eventfd_write(worker.event_fd, 1) };
        }
    }

    /// Returns the next request of a worker that can end now, with its status.
    pub(crate) fn ripe(&mut self, worker: usize) -> Option<(usize, i8)> {
        let context = self.workers.get(&worker)?.context;
        let pending = &self.workers.get(&worker)?.pending;
        // Those that a close has ended go first.
        let ended = pending.iter().position(|request| self.requests[request].status != 1);
        if let Some(at) = ended {
            let request = self.workers.get_mut(&worker)?.pending.remove(at)?;
            return Some((request, self.requests[&request].status));
        }
        if self.setting(context, "RESET") == Some(1) {
            let request = self.workers.get_mut(&worker)?.pending.pop_front()?;
            return Some((request, -25));
        }
        let hold = self.setting(context, "HOLD").and_then(|address| u64::try_from(address).ok()).unwrap_or(0);
        let free = |request: &usize| self.requests[request].remote >= hold;
        let reorder = self.setting(context, "REORDER") == Some(1);
        let next = if reorder { pending.iter().rposition(free) } else { pending.iter().position(free) }?;
        if let Some(left) = self.contexts.get_mut(&context).and_then(|settings| settings.get_mut("STALL")) {
            if *left <= 0 {
                return None;
            }
            *left -= 1;
        }
        let request = self.workers.get_mut(&worker)?.pending.remove(next)?;
        Some((request, 0))
    }
}

impl Request {
    /// Copies the bytes. Returns the status.
    pub(crate) fn copy(&self) -> i8 {
        let inside = self
            .remote
            .checked_sub(self.memory.start)
            .is_some_and(|skip| skip <= self.memory.len && self.len as u64 <= self.memory.len - skip);
        if !inside || !self.memory.remote {
            return -3;
        }
        let vector = |at: u64| libc::iovec { iov_base: at as Handle, iov_len: self.len };
        let (local, remote) = (vector(self.local), vector(self.remote));
        // SAFETY: the reader has promised that the destination is writable; the kernel checks both ranges.
        let mut got =
            unsafe { libc::process_vm_readv(self.memory.pid, &raw const local, 1, &raw const remote, 1, 0) };
        if got == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
            got = self.read_file().unwrap_or(-1);
        }
        if usize::try_from(got) == Ok(self.len) { 0 } else { -3 }
    }

    /// Copies the bytes without `process_vm_readv`, which emulators of other processors lack.
    fn read_file(&self) -> io::Result<isize> {
        let file = File::open(format!("/proc/{}/mem", self.memory.pid))?;
        let at = libc::off_t::try_from(self.remote).map_err(io::Error::other)?;
        // SAFETY: as in `copy`.
        Ok(unsafe { libc::pread(file.as_raw_fd(), self.local as Handle, self.len, at) })
    }
}
