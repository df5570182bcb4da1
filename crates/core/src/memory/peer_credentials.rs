//! Which process, of which user, is at the other end of a local socket, as the kernel recorded it when the two met.
//!
//! Here because the system call fills a struct in place, and the safe wrappers assume that its process id is not zero,
//! which it is for a process of a namespace that is not visible from here. Not for: reading that process (`process`).

use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Who is at the other end of a local socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Its process; `None` if it has no id in this process's namespace.
    pub pid: Option<i32>,
    /// Its effective user when it connected or listened, as this process's user namespace shows it.
    pub uid: u32,
}

/// Who made the other end of `socket`; `None` if the kernel does not say.
#[must_use]
pub fn peer_credentials(socket: BorrowedFd<'_>) -> Option<Credentials> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
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
    (result == 0).then_some(Credentials { pid: Some(peer.pid).filter(|&pid| pid > 0), uid: peer.uid })
}

/// Whether `socket` takes descriptors. Linux knows this from 6.16 on; before, a local socket takes them always.
///
/// A descriptor that a peer sends is closed by whoever receives it, or receives the bytes it came with, and closing may wait
/// for as long as the peer chose (a socket that lingers). So descriptors are taken only while they are expected.
pub fn take_descriptors(socket: BorrowedFd<'_>, take: bool) {
    /// `SO_PASSRIGHTS`, which `libc` does not name yet.
    const PASS_RIGHTS: libc::c_int = 83;
    let on = libc::c_int::from(take);
    let Ok(len) = libc::socklen_t::try_from(size_of_val(&on)) else { return };
    // SAFETY: the kernel reads an integer of the length it is told, which outlives the call. An error says that the kernel
    // is older or the socket no local one; then nothing changes.
    let _ = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, PASS_RIGHTS, (&raw const on).cast(), len)
    };
}

/// Whether the user of `peer` is provably this process's own effective user. The kernel shows every user that has no
/// number in this namespace as the overflow user, so that number proves nothing unless all users have one here.
#[must_use]
pub fn same_user(peer: Credentials) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let read = |path| std::fs::read_to_string(path).ok();
    let overflow = read("/proc/sys/kernel/overflowuid").and_then(|text| text.trim().parse().ok());
    proves(peer.uid, own, overflow.unwrap_or(65534), read("/proc/self/uid_map").as_deref())
}

/// The rule of [`same_user`], over what the kernel says.
fn proves(peer: u32, own: u32, overflow: u32, uid_map: Option<&str>) -> bool {
    let whole = || {
        let numbers = |line: &str| line.split_whitespace().map(|word| word.parse().ok()).collect::<Vec<_>>();
        uid_map.is_some_and(|map| map.lines().any(|line| numbers(line) == [Some(0), Some(0), Some(u32::MAX)]))
    };
    peer == own && (peer != overflow || whole())
}

#[cfg(test)]
mod tests {
    use super::proves;

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
