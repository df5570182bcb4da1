//! Creates the anonymous files behind shared memory, and reports precisely why one cannot be created.
//!
//! `region` and `generations` map these files; `peer_mapping` checks the files of peers.

use std::os::fd::OwnedFd;

use rustix::fs::{FsWord, MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::descriptors::{above_standard_streams, limit_text, shortage};
use crate::error::{Error, ErrorKind};

/// Flags that request reserved huge pages by size. Without the size, a machine whose default is 1 GiB would
/// provide pages that fit no pool.
pub(super) const HUGE_2MB: MemfdFlags = MemfdFlags::HUGETLB.union(MemfdFlags::HUGE_2MB);

/// The type of a file system of reserved huge pages (`HUGETLBFS_MAGIC` of Linux).
pub(super) const HUGETLBFS: FsWord = 0x9584_58f6;

/// Creates a file of `len` zero bytes that can be sealed and can never be executed.
pub(super) fn create(name: &str, len: u64, kind: MemfdFlags) -> rustix::io::Result<OwnedFd> {
    // Beyond this limit `ftruncate` does not fail. It sends SIGXFSZ, which ends a process without a handler.
    if file_limit().is_some_and(|limit| len > limit) {
        return Err(Errno::FBIG);
    }
    let descriptor = above_standard_streams(sealable(kind, |kind| memfd_create(name, kind))?)?;
    ftruncate(&descriptor, len)?;
    Ok(descriptor)
}

/// Returns what `create` returns for `kind` and the flags that all files of this module have.
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

/// Returns the error for shared memory that could not be created or mapped. It has the kind
/// [`ErrorKind::OutOfMemory`] only if the kernel reported that memory is short. Otherwise it names the limit
/// that was reached and how to raise it, if this is known.
pub(super) fn refused(what: &str, len: u64, errno: Errno) -> Error {
    let system = |text: String| Error::new(ErrorKind::System, text);
    let error = match errno {
        Errno::MFILE | Errno::NFILE if let Some(error) = shortage(&format!("the {what}"), errno) => error,
        Errno::NOMEM | Errno::NOSPC => Error::new(ErrorKind::OutOfMemory, format!("no memory for the {what}")),
        Errno::FBIG => system(format!(
            "the {what} is larger than a file of this process may be; raise the limit of file sizes (ulimit -f, \
             RLIMIT_FSIZE)"
        ))
        .with("limit_file_bytes", limit_text(file_limit())),
        _ => system(format!("the kernel refused the {what}")),
    };
    error.with("bytes", len).errno(errno)
}

fn file_limit() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

/// Seals a file that this process has already mapped. From then on others can only read it, and its length is
/// fixed (`only_the_owner_maps_a_region_for_writing`). Returns `false` if the kernel cannot do this
/// (before 5.1); the file must then not be shared.
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
        // Any other error is passed on.
        assert_eq!(sealable(MemfdFlags::empty(), |_| Err::<(), _>(Errno::MFILE)), Err(Errno::MFILE));
    }

    #[test]
    fn reserved_huge_pages_are_asked_for_by_their_size() {
        // The binary logarithm of the size is stored above the other flags (memfd_create(2)).
        assert_eq!(HUGE_2MB.bits() >> 26, 21);
        assert!(HUGE_2MB.contains(MemfdFlags::HUGETLB));
    }
}
