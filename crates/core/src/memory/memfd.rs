//! Anonymous files for memory that is shared: creates them, and says precisely why one cannot be had.
//!
//! Not for: mapping them (`region`, `generations`), or files that peers made (`foreign`).

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::error::{Error, ErrorKind};

/// Reserved huge pages are asked for by their size: a machine whose default is 1 GiB would give pages that fit no pool.
pub(super) const HUGE_2MB: MemfdFlags = MemfdFlags::HUGETLB.union(MemfdFlags::HUGE_2MB);

/// Creates a file of `len` zeros that can be sealed and never executed.
pub(super) fn create(name: &str, len: u64, kind: MemfdFlags) -> rustix::io::Result<OwnedFd> {
    // Beyond this limit `ftruncate` does not fail: it sends SIGXFSZ, which ends a process that has no handler.
    if file_limit().is_some_and(|limit| len > limit) {
        return Err(Errno::FBIG);
    }
    let descriptor = sealable(kind, |kind| memfd_create(name, kind))?;
    ftruncate(&descriptor, len)?;
    Ok(descriptor)
}

/// What `create` gives for `kind` and the flags of all files of this module.
fn sealable<T>(
    kind: MemfdFlags,
    create: impl Fn(MemfdFlags) -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    let kind = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind;
    match create(kind | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag.
        Err(Errno::INVAL) => create(kind),
        created => created,
    }
}

/// The error of shared memory that could not be created or mapped: out of memory only if that is what the kernel said,
/// otherwise with the limit that was met and what to do about it.
#[cold]
pub(super) fn refused(what: &str, len: u64, errno: Errno) -> Error {
    let system = |text: String| Error::new(ErrorKind::System, text);
    let error = match errno {
        Errno::NOMEM | Errno::NOSPC => Error::new(ErrorKind::OutOfMemory, format!("no memory for the {what}")),
        Errno::MFILE => system(format!(
            "no file descriptor is free for the {what}; raise the limit of open files (ulimit -n, RLIMIT_NOFILE)"
        ))
        .with("limit_open_files", text(getrlimit(Resource::Nofile).current)),
        Errno::NFILE => system(format!(
            "no file descriptor of the whole system is free for the {what}; raise fs.file-max"
        )),
        Errno::FBIG => system(format!(
            "the {what} is larger than a file of this process may be; raise the limit of file sizes (ulimit -f, \
             RLIMIT_FSIZE)"
        ))
        .with("limit_file_bytes", text(file_limit())),
        _ => system(format!("the kernel refused the {what}")),
    };
    error.with("bytes", len).with("errno", errno.raw_os_error()).because(std::io::Error::from(errno))
}

fn file_limit() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

fn text(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".into(), |limit| limit.to_string())
}

/// Seals what this process has mapped already: for others it is there to read, at its length, for ever. `false` if the
/// kernel cannot (before 5.1): then it must not be shared. (`nobody_maps_a_region_for_writing_after_its_owner`)
pub(super) fn seal(descriptor: &OwnedFd) -> bool {
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW;
    fcntl_add_seals(descriptor, seals).is_ok()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn kernels_without_noexec_seal_are_asked_again() {
        let asked = RefCell::new(Vec::new());
        let old = |kind: MemfdFlags| {
            asked.borrow_mut().push(kind);
            if kind.contains(MemfdFlags::NOEXEC_SEAL) { Err(Errno::INVAL) } else { Ok(kind) }
        };
        let plain = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        assert_eq!(sealable(HUGE_2MB, old), Ok(plain | HUGE_2MB));
        assert_eq!(*asked.borrow(), [plain | HUGE_2MB | MemfdFlags::NOEXEC_SEAL, plain | HUGE_2MB]);
        // Anything else is the answer.
        assert_eq!(sealable(MemfdFlags::empty(), |_| Err::<(), _>(Errno::MFILE)), Err(Errno::MFILE));
    }

    #[test]
    fn reserved_huge_pages_are_asked_for_by_their_size() {
        // The binary logarithm of the size lies above the other flags (memfd_create(2)).
        assert_eq!(HUGE_2MB.bits() >> 26, 21);
        assert!(HUGE_2MB.contains(MemfdFlags::HUGETLB));
    }
}
