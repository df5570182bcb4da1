//! Identifies the process and user at the other end of a local socket, as the kernel recorded them when the
//! connection was made.
//!
//! This uses the system call directly because the safe wrappers assume that the process id is not zero. It is
//! zero for a process in a namespace that is not visible from here.

use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::above_standard_streams;

/// Process and user at the other end of a local socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id; `None` if the process has no id in the namespace of this process.
    pub pid: Option<i32>,
    /// Effective user id at the time it connected or listened, as shown in the user namespace of this
    /// process.
    pub uid: u32,
}

/// Returns the credentials of the process that made the other end of `socket`; `None` if the kernel does not
/// report them.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> Option<Credentials> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).ok()?;
    // SAFETY: the kernel writes at most `len` bytes, the size of `peer`, which is a struct of integers, and
    // it writes `len` itself. Both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    (result == 0).then_some(Credentials { pid: Some(peer.pid).filter(|&pid| pid > 0), uid: peer.uid })
}

/// Returns a descriptor of the process that made the other end of `socket`, which is readable once that process has ended. `None` if
/// it has ended, or if the kernel does not tell (`a_descriptor_of_the_other_end_says_when_its_process_has_ended`).
///
/// Before Linux 6.5, the process is found by its id. Then this may be a later process with the same id.
pub fn peer_process_descriptor(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    /// `SO_PEERPIDFD`, which `libc` does not define yet.
    const PEER_PIDFD: libc::c_int = 77;
    let mut number: libc::c_int = -1;
    let mut len = libc::socklen_t::try_from(size_of::<libc::c_int>()).ok()?;
    // SAFETY: the kernel writes at most `len` bytes, the size of the integer, and `len` itself. Both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            PEER_PIDFD,
            (&raw mut number).cast(),
            &raw mut len,
        )
    };
    let found = if result == 0 && number >= 0 {
        // SAFETY: the kernel has just opened this descriptor for the call above, and nothing else has its number.
        unsafe { OwnedFd::from_raw_fd(number) }
    } else if std::io::Error::last_os_error().raw_os_error() != Some(libc::ENOPROTOOPT) {
        // The kernel knows the option, and the process has ended. Another one may have its id by now.
        return None;
    } else {
        let process = Pid::from_raw(peer_credentials(socket)?.pid?)?;
        pidfd_open(process, PidfdFlags::empty()).ok()?
    };
    above_standard_streams(found).ok()
}

/// Sets whether `socket` accepts file descriptors from the peer. This has an effect from Linux 6.16 on; on
/// older kernels a local socket always accepts them.
///
/// The process that receives a descriptor, or the bytes that carry it, must close it. Closing may take as
/// long as the peer chose (a socket that lingers), so descriptors are accepted only while they are expected.
pub fn take_descriptors(socket: BorrowedFd<'_>, take: bool) {
    /// `SO_PASSRIGHTS`, which `libc` does not define yet.
    const PASS_RIGHTS: libc::c_int = 83;
    let enabled = libc::c_int::from(take);
    let Ok(len) = libc::socklen_t::try_from(size_of_val(&enabled)) else { return };
    // SAFETY: the kernel reads an integer of length `len`, which outlives the call. An error means that the
    // kernel is older or that this is no local socket; nothing changes then.
    let _ = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, PASS_RIGHTS, (&raw const enabled).cast(), len)
    };
}

/// Returns whether the user of `peer` is provably the effective user of this process.
pub fn same_user(peer: Credentials) -> bool {
    is_user(peer, rustix::process::geteuid().as_raw())
}

/// Returns whether the user of `peer` is provably the one with the number `user`.
///
/// The kernel shows every user without a number in this namespace as the overflow user. So that number proves
/// nothing unless every user has a number here.
pub fn is_user(peer: Credentials, user: u32) -> bool {
    let read = |path| std::fs::read_to_string(path).ok();
    let overflow = read("/proc/sys/kernel/overflowuid").and_then(|text| text.trim().parse().ok());
    proves(peer.uid, user, overflow.unwrap_or(65534), read("/proc/self/uid_map").as_deref())
}

/// The rule of [`is_user`], over the values that the kernel reports.
fn proves(peer: u32, user: u32, overflow: u32, uid_map: Option<&str>) -> bool {
    let whole = || {
        let numbers = |line: &str| line.split_whitespace().map(|word| word.parse().ok()).collect::<Vec<_>>();
        uid_map.is_some_and(|map| map.lines().any(|line| numbers(line) == [Some(0), Some(0), Some(u32::MAX)]))
    };
    peer == user && (peer != overflow || whole())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn a_descriptor_of_the_other_end_says_when_its_process_has_ended() {
        let (end, other) = UnixStream::pair().unwrap();
        let own = peer_process_descriptor(end.as_fd()).unwrap();
        let ended = |process: &OwnedFd, seconds| {
            let limit = Timespec { tv_sec: seconds, tv_nsec: 0 };
            poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)) == Ok(1)
        };
        assert!(!ended(&own, 0), "this process lives");
        let path = std::env::temp_dir().join(format!("peer-process-{}", std::process::id()));
        let listening = std::os::unix::net::UnixListener::bind(&path).unwrap();
        // SAFETY: the child makes system calls only, waits to be killed, and ends after a minute.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let kept = UnixStream::connect(&path);
            // SAFETY: the calls take numbers only, and nothing of the parent needs to be unwound.
            unsafe { libc::alarm(60) };
            // SAFETY: as above.
            unsafe { libc::pause() };
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(kept.is_err())) };
        }
        let (connection, _) = listening.accept().unwrap();
        std::fs::remove_file(&path).unwrap();
        let process = peer_process_descriptor(connection.as_fd()).unwrap();
        assert!(!ended(&process, 0), "the child lives");
        // SAFETY: the child belongs to this test, which has not waited for it yet.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        assert!(ended(&process, 30), "the child was killed");
        // SAFETY: the child belongs to this test, and the status may be a null pointer.
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
        drop(other);
    }

    #[test]
    fn overflow_user_proves_nothing_unless_every_user_is_mapped() {
        let whole = Some("         0          0 4294967295\n");
        let part = Some("         0       1000          1\n");
        for map in [whole, part, None] {
            assert!(proves(1000, 1000, 65534, map));
            assert!(!proves(1001, 1000, 65534, map));
            assert!(!proves(65534, 1000, 65534, map));
        }
        assert!(proves(65534, 65534, 65534, whole));
        assert!(!proves(65534, 65534, 65534, part));
        assert!(!proves(65534, 65534, 65534, None));
        assert!(!proves(99, 99, 99, part), "the number of the overflow user is a setting of the kernel");
    }
}
