//! Another process's memory, mapped here without the right to write, and the seals that make this safe for both sides.
//!
//! The owner seals what it shares: nobody maps it for writing after the owner did, and it never gets shorter, so a read
//! here cannot fault. Not for: memory that is not behind a descriptor (`process`), or whether it is still current
//! (`generations`).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::ProtFlags;

use super::region::{Aligned, HUGE_PAGE};
use super::{MapBudget, Reserved};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;

/// `Err` unless `descriptor` has `len` bytes and can never have fewer: a read beyond its end would kill the reader
/// (`descriptors_that_could_kill_the_reader_are_refused`).
pub(super) fn refuse_shrinking(descriptor: &OwnedFd, len: u64) -> Result<()> {
    let refused = |text: &str| Error::new(ErrorKind::System, text).with("bytes", len);
    let because = |text, error| refused(text).because(std::io::Error::from(error));
    let seals = fcntl_get_seals(descriptor)
        .map_err(|error| because("the peer's descriptor is not memory that can be sealed", error))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(refused("the peer's memory could shrink while it is read: it is not sealed"));
    }
    // Without this seal the peer could punch holes: of memory in reserved huge pages they cannot be filled again.
    if !seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(refused("the peer's memory could lose pages while it is read: it is not sealed"));
    }
    let stat = fstat(descriptor).map_err(|error| because("the peer's memory has no length", error))?;
    let has = u64::try_from(stat.st_size).unwrap_or(0);
    if has < len || len == 0 {
        return Err(refused("the peer's memory is shorter than it said").with("has_bytes", has));
    }
    if u64::try_from(stat.st_blksize).is_ok_and(|page| page > HUGE_PAGE as u64) {
        return Err(refused("the peer's memory is made of pages that are too large")
            .with("page_bytes", stat.st_blksize));
    }
    Ok(())
}

/// A stretch of another process's memory, readable here.
#[derive(Debug)]
pub struct PeerMapping {
    len: u64,
    mapped: Aligned,
    /// Returned after the mapping has gone: fields drop in order.
    reserved: Reserved,
}

impl PeerMapping {
    /// Maps the first `len` bytes behind `fd` for reading. `Err` if they are not there, could go away, or are more than is
    /// left of `budget` at `deadline`.
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
        // Not with MAP_NORESERVE: it changes nothing for ordinary pages, and where pages are reserved huge ones the kernel
        // would end this process at a page that it has not, instead of refusing the mapping.
        let mapped = Aligned::map(&fd, whole, ProtFlags::READ).map_err(refused)?;
        // The mapping holds the memory from here on.
        drop(fd);
        Ok(Arc::new(PeerMapping { len, mapped, reserved }))
    }

    /// Notes that its link has ended, so that it will be unmapped soon.
    pub fn leave(&self) {
        self.reserved.leave();
    }

    /// Address of its first byte in this process.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.mapped.base as u64
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never: an empty one is refused.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
