//! Read-only mappings of a peer's memory, and the checks that make them safe to read.
//!
//! The owner seals the memory that it shares: nobody can map it for writing after the owner has, and it
//! cannot shrink, so a read cannot fault. Whether the contents are still current is decided by `generations`.
//! Memory without a descriptor is read by `peer_process`.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{FsWord, SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::mm::ProtFlags;

use super::memfd::HUGETLBFS;
use super::region::{Aligned, HUGE_PAGE};
use super::{MapBudget, Reservation};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;

/// Returns `Err` unless `descriptor` has at least `len` bytes and is sealed so that it can never have fewer.
/// A read beyond its end would kill the reader (`descriptors_that_could_kill_the_reader_are_refused`).
pub(super) fn refuse_shrinking(descriptor: &OwnedFd, len: u64) -> Result<()> {
    let refused = |text: &str| Error::new(ErrorKind::System, text).with("bytes", len);
    let because = |text, error| refused(text).because(std::io::Error::from(error));
    let seals = fcntl_get_seals(descriptor)
        .map_err(|error| because("the peer's descriptor is not memory that can be sealed", error))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(refused("the peer's memory could shrink while it is read: it is not sealed"));
    }
    // Without this seal the peer could punch holes. In memory of reserved huge pages such holes may be
    // impossible to fill again.
    if !seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(refused("the peer's memory could lose pages while it is read: it is not sealed"));
    }
    let stat = fstat(descriptor).map_err(|error| because("the peer's memory has no length", error))?;
    let has = u64::try_from(stat.st_size).unwrap_or(0);
    if has < len || len == 0 {
        return Err(refused("the peer's memory is shorter than announced").with("has_bytes", has));
    }
    let system =
        fstatfs(descriptor).map_err(|error| because("the peer's memory has no file system", error))?;
    let page = u64::try_from(stat.st_blksize).unwrap_or(u64::MAX);
    if pages_are_too_large(system.f_type, page) {
        return Err(refused("the peer's memory is made of pages that are too large")
            .with("page_bytes", stat.st_blksize));
    }
    Ok(())
}

/// Returns whether a file consists of reserved huge pages that do not fit a mapping of whole [`HUGE_PAGE`]s. `page` is what the file
/// reports as its preferred size. For other memory, this may be the size of the kernel's huge pages, such as 512 MiB with pages of
/// 64 KiB; its pages fit nevertheless.
fn pages_are_too_large(file_system: FsWord, page: u64) -> bool {
    file_system == HUGETLBFS && page > HUGE_PAGE as u64
}

/// A range of a peer's memory, mapped read-only into this process.
#[derive(Debug)]
pub struct PeerMapping {
    len: u64,
    mapped: Aligned,
    /// Returned to the budget after the memory is unmapped, because fields drop in order.
    reserved: Reservation,
}

impl PeerMapping {
    /// Maps the first `len` bytes of `fd` read-only.
    ///
    /// Returns `Err` of kind [`ErrorKind::System`] if the descriptor is too short, is not sealed against
    /// shrinking, cannot be mapped, or if `budget` does not have `len` bytes (in whole huge pages) left at
    /// `deadline`.
    pub fn map(
        fd: OwnedFd,
        len: u64,
        budget: &Arc<MapBudget>,
        deadline: Deadline,
    ) -> Result<Arc<PeerMapping>> {
        refuse_shrinking(&fd, len)?;
        let refused = |error: rustix::io::Errno| {
            Error::new(ErrorKind::System, "the peer's memory could not be mapped")
                .with("bytes", len)
                .because(std::io::Error::from(error))
        };
        let whole = usize::try_from(len).ok().and_then(|bytes| bytes.checked_next_multiple_of(HUGE_PAGE));
        let whole = whole.ok_or_else(|| refused(rustix::io::Errno::NOMEM))?;
        let reserved = budget.reserve(whole as u64, deadline)?;
        // MAP_NORESERVE is not used. It changes nothing for ordinary pages. For reserved huge pages the
        // kernel would kill this process at the first missing page instead of refusing the mapping.
        let mapped = Aligned::map(&fd, whole, ProtFlags::READ).map_err(refused)?;
        // From here on the mapping keeps the memory alive.
        drop(fd);
        Ok(Arc::new(PeerMapping { len, mapped, reserved }))
    }

    /// Announces that this mapping will be removed soon, because its link has ended.
    pub fn release_soon(&self) {
        self.reserved.release_soon();
    }

    /// Returns the address of the first byte in this process.
    pub fn base(&self) -> u64 {
        self.mapped.base as u64
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reserved_huge_pages_may_be_too_large() {
        let (tmpfs, mib) = (0x0102_1994, 1 << 20);
        for (file_system, page, too_large) in [
            (HUGETLBFS, 1024 * mib, true),
            (HUGETLBFS, 32 * mib, true),
            (HUGETLBFS, 2 * mib, false),
            // The value of tmpfs with pages of 64 KiB, if huge pages are enabled for it.
            (tmpfs, 512 * mib, false),
        ] {
            assert_eq!(pages_are_too_large(file_system, page), too_large, "{page} bytes");
        }
    }
}
