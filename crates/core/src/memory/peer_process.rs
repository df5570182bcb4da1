//! Reads the memory of another process of this machine through the kernel, and proves that it is the right
//! process.
//!
//! A process id can be reused, and a process can replace its program. So every read also fetches the secret
//! that the peer sent over its link, and the bytes are accepted only if the secret is still in place
//! (`only_the_process_with_the_secret_is_read`). Memory that can be mapped is read by `peer_mapping` instead.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PTracer, Pid, PidfdFlags, pidfd_open, set_ptracer};

use super::descriptors::above_standard_streams;
use super::random::random;
use super::window::{Reach, Window};
use crate::error::{Error, ErrorKind, Result};

/// Called with the addresses of each read of another process.
#[cfg(feature = "testing")]
pub static BEFORE_READ: std::sync::OnceLock<fn(&[u64])> = std::sync::OnceLock::new();

/// A secret of a process, 16 random bytes, and its address there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// Address in that process.
    pub address: u64,
    /// The bytes at this address.
    pub secret: [u8; 16],
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Probe({:#x}, …)", self.address)
    }
}

/// Returns the probe of this process, which is the same in every call and never moves. Returns `Err` of kind
/// [`ErrorKind::System`] if the kernel has no random bytes.
pub fn own_probe() -> Result<Probe> {
    static SECRET: OnceLock<[u8; 16]> = OnceLock::new();
    if SECRET.get().is_none() {
        let _ = SECRET.set(random()?);
    }
    let secret = SECRET.get_or_init(|| [0; 16]);
    Ok(Probe { address: secret.as_ptr() as u64, secret: *secret })
}

/// Permits other processes of this user to read the memory of this one. Yama requires this permission;
/// without Yama it has no effect.
pub fn allow_readers() {
    let _ = set_ptracer(PTracer::Any);
}

/// Another process, which was alive when it was opened.
#[derive(Debug)]
pub struct PeerProcess {
    pid: i32,
    probe: Probe,
    descriptor: OwnedFd,
}

impl PeerProcess {
    /// Maximum number of pairs in one system call. The kernel accepts 1,024 vectors on each side, and the
    /// first one is for the secret.
    pub const PAIRS: usize = 1023;

    /// Opens the process `pid`, and checks that it holds the secret of `probe` and may be read.
    ///
    /// Returns `Err` of kind [`ErrorKind::NotEnabled`] if the kernel denies permission or does not support
    /// these calls; a link may then use another transport (`a_refused_permission_is_distinguished`). Other
    /// causes are of kind [`ErrorKind::System`], or [`ErrorKind::NotLinked`] if the process ends before its
    /// secret is read.
    pub fn open(pid: i32, probe: Probe) -> Result<Arc<PeerProcess>> {
        let text = "the peer's process has no id in this pid namespace";
        let no_such = || Error::new(ErrorKind::System, text).with("pid", pid);
        let named = Some(pid).filter(|&pid| pid > 0).and_then(Pid::from_raw).ok_or_else(no_such)?;
        let descriptor = pidfd_open(named, PidfdFlags::empty())
            .and_then(above_standard_streams)
            .map_err(io::Error::from)
            .map_err(|error| {
                refused(refusal(&error), "pidfd_open failed for the peer's process", pid, error)
            })?;
        let process = PeerProcess { pid, probe, descriptor };
        process.read(&[])?;
        Ok(Arc::new(process))
    }

    /// Returns the process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns whether the process is still running.
    pub fn alive(&self) -> bool {
        let mut watched = [PollFd::new(&self.descriptor, PollFlags::IN)];
        // The descriptor becomes readable when the process ends.
        loop {
            match poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
                Err(rustix::io::Errno::INTR) => {}
                other => return other == Ok(0),
            }
        }
    }

    /// Reads the first window of each pair, which belongs to this peer process, into the second one.
    ///
    /// The windows of a pair must have equal lengths, and the second must be writable host memory; otherwise
    /// it returns `Err` of kind [`ErrorKind::System`]. On success all bytes are in place and came from the
    /// process that was opened.
    ///
    /// If the peer's memory does not respond, this does not return before that process ends. So the thread of
    /// a caller must not call it; `copy::reader_threads` provides threads for it.
    pub fn read(&self, pairs: &[(Window<'_>, Window<'_>)]) -> Result<()> {
        let wrong = |(src, dst): &(Window<'_>, Window<'_>)| {
            src.len() != dst.len() || src.reach() != Reach::Process || dst.reach() != Reach::Host
        };
        if let Some((src, dst)) = pairs.iter().find(|pair| wrong(pair)) {
            let text = "a read of another process needs two windows of equal length, the first of a process, the second \
                        writable host memory";
            return Err(Error::new(ErrorKind::System, text)
                .with("src_bytes", src.len())
                .with("dst_bytes", dst.len())
                .with("src", format_args!("{:?}", src.reach()))
                .with("dst", format_args!("{:?}", dst.reach())));
        }
        // Without pairs, only the secret is read.
        let mut first = true;
        let (mut next, mut skip) = (0, 0);
        while first || next < pairs.len() {
            first = false;
            (next, skip) = self.read_part(pairs, next, skip)?;
        }
        Ok(())
    }

    /// Makes one system call that reads as much as possible from byte `skip` of pair `next` on. Returns the
    /// pair and byte at which the next call continues.
    fn read_part(&self, pairs: &[(Window<'_>, Window<'_>)], next: usize, skip: u64) -> Result<(usize, u64)> {
        let mut secret = [0_u8; 16];
        let batch = &pairs[next..pairs.len().min(next + Self::PAIRS)];
        let mut remote = Vec::with_capacity(batch.len() + 1);
        let mut local = Vec::with_capacity(batch.len() + 1);
        // The secret is first, so that a call that ends early also proves which process its bytes came from.
        remote.push(vector(self.probe.address, secret.len() as u64));
        local.push(vector((&raw mut secret) as u64, secret.len() as u64));
        for (index, (src, dst)) in batch.iter().enumerate() {
            let skip = if index == 0 { skip } else { 0 };
            append(&mut remote, src.addr() + skip, src.len() - skip);
            append(&mut local, dst.addr() + skip, dst.len() - skip);
        }
        let got = self.call(&local, &remote).map_err(|error| self.failed(error))?;
        if got < secret.len() as u64 || secret != self.probe.secret {
            return Err(Error::new(ErrorKind::System, "the process with that id is not the peer")
                .with("pid", self.pid)
                .with("alive", self.alive()));
        }
        self.position_after(pairs, next, skip, got - secret.len() as u64)
    }

    /// Reads the process's `remote` ranges into the `local` ranges, and returns the number of bytes read.
    /// Repeats the call if a signal interrupts it.
    fn call(&self, local: &[libc::iovec], remote: &[libc::iovec]) -> io::Result<u64> {
        #[cfg(feature = "testing")]
        if let Some(before) = BEFORE_READ.get() {
            before(&remote.iter().map(|range| range.iov_base as u64).collect::<Vec<_>>());
        }
        loop {
            let (many, wanted) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
            // SAFETY: `local` refers to the caller's secret buffer and to windows of live, writable tensors
            // of this process (promise 3, checked by `read`). The kernel reads `remote` in the other process,
            // and reports addresses that are not mapped there as an error.
            let got =
                unsafe { libc::process_vm_readv(self.pid, local.as_ptr(), many, remote.as_ptr(), wanted, 0) };
            if let Ok(got) = u64::try_from(got) {
                return Ok(got);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Returns the position at which a call that read `got` bytes ended. Returns `Err` if it made no progress
    /// although bytes were left.
    fn position_after(
        &self,
        pairs: &[(Window<'_>, Window<'_>)],
        mut next: usize,
        mut skip: u64,
        mut got: u64,
    ) -> Result<(usize, u64)> {
        let progress = got > 0 || next == pairs.len();
        while next < pairs.len() {
            let left = pairs[next].0.len() - skip;
            if got < left {
                skip += got;
                break;
            }
            got -= left;
            (next, skip) = (next + 1, 0);
        }
        // A call that read the secret and nothing else found an unmapped address where it had to continue.
        if !progress && let Some((src, _)) = pairs.get(next).filter(|(src, _)| !src.is_empty()) {
            let error = io::Error::from_raw_os_error(libc::EFAULT);
            return Err(self.failed(error).with("address", format_args!("{:#x}", src.addr() + skip)));
        }
        Ok((next, skip))
    }

    fn failed(&self, error: io::Error) -> Error {
        // A process loses its memory a moment before it is reported as ended.
        let alive = error.raw_os_error() != Some(libc::ESRCH) && self.alive();
        let text = if alive {
            "the peer's memory cannot be read"
        } else {
            "the peer's process has ended, its memory cannot be read"
        };
        let kind = if alive { refusal(&error) } else { ErrorKind::NotLinked };
        refused(kind, text, self.pid, error).with("alive", alive)
    }
}

/// Adds a range, or extends the last one if the range follows it. The kernel looks up and pins pages for each range of
/// the other process anew, so one long range is read several times as fast as its parts.
fn append(ranges: &mut Vec<libc::iovec>, addr: u64, len: u64) {
    let next = vector(addr, len);
    match ranges.last_mut() {
        Some(last) if last.iov_base as u64 + last.iov_len as u64 == addr => last.iov_len += next.iov_len,
        _ => ranges.push(next),
    }
}

fn vector(addr: u64, len: u64) -> libc::iovec {
    // A window lies in an address space, so its length fits.
    libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: usize::try_from(len).unwrap_or(usize::MAX) }
}

/// Maps an error of the kernel, for a process that is alive, to an error kind: missing permission or support,
/// or anything else.
fn refusal(error: &io::Error) -> ErrorKind {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => ErrorKind::NotEnabled,
        _ => ErrorKind::System,
    }
}

fn refused(kind: ErrorKind, text: &str, pid: i32, error: io::Error) -> Error {
    let errno = error.raw_os_error().unwrap_or(0);
    Error::new(kind, text).with("pid", pid).with("errno", errno).because(error)
}
