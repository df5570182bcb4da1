//! One stretch of memory with an owner: a shared mapping behind a descriptor, or addresses of a device.
//!
//! Not for: splitting it (`pool`, `arena`), or for the caller's memory (`Adopted`).

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use rustix::fs::{MemfdFlags, fstat};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::memfd::seal;
use super::{memfd, smaps};
use crate::error::{Error, ErrorKind, Result};

/// Huge pages are 2 MiB on every machine this maps shared memory on; a base aligned to less never gets one.
pub(super) const HUGE_PAGE: usize = 2 << 20;

const RW: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// What the kernel was asked for, and granted, in huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// The mapping is made of reserved huge pages.
    Reserved,
    /// The kernel was told that huge pages are welcome; how many it gave is measured by [`Region::huge_bytes`].
    Advised,
    /// Not available here.
    Unavailable,
}

impl HugePages {
    /// One word for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HugePages::Reserved => "reserved",
            HugePages::Advised => "advised",
            HugePages::Unavailable => "unavailable",
        }
    }
}

/// A stretch of memory that is given back when the last user drops it.
#[derive(Debug)]
pub struct Region {
    base: u64,
    len: u64,
    mapping: Option<Mapping>,
}

#[derive(Debug)]
struct Mapping {
    range: Aligned,
    descriptor: OwnedFd,
    huge: HugePages,
    /// Whether peers are kept from writing; without, nobody is given the descriptor.
    sealed: bool,
}

/// A shared mapping that starts where a huge page may, given back on drop.
#[derive(Debug)]
pub(super) struct Aligned {
    pub(super) base: usize,
    /// Start and length of the address range to give back.
    held: (usize, usize),
    /// Whether the kernel was told, and heard, that huge pages are welcome.
    advised: bool,
}

impl Region {
    /// `len` bytes of zeros, committed page by page when touched, shared behind a descriptor that another process can
    /// map. A length beyond the machine's free memory is fine: only what is touched counts.
    pub fn shared(name: &str, len: u64) -> Result<Region> {
        let too_large = || Error::new(ErrorKind::OutOfMemory, "the pool is larger than the address space");
        let bytes = usize::try_from(len).map_err(|_| too_large().with("bytes", len))?;
        let whole = bytes.checked_next_multiple_of(HUGE_PAGE).ok_or_else(too_large)?;
        // Reserved huge pages are taken only if the whole pool fits: a partial grant would fault later, at a touch.
        let mapping = match Mapping::reserved_pages(name, whole) {
            Ok(mapping) => mapping,
            Err(_) => Mapping::ordinary(name, whole).map_err(|errno| memfd::refused(name, len, errno))?,
        };
        Ok(Region { base: mapping.range.base as u64, len, mapping: Some(mapping) })
    }

    /// Addresses of a device that the CPU cannot touch; the device gives them meaning.
    #[must_use]
    pub fn opaque(base: u64, len: u64) -> Region {
        Region { base, len, mapping: None }
    }

    /// Address of its first byte.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the CPU can dereference its addresses.
    #[must_use]
    pub fn host_addressable(&self) -> bool {
        self.mapping.is_some()
    }

    /// The descriptor behind it, for another process to map for reading. None where there is none, and where the kernel
    /// cannot keep that process from writing.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let shared = self.mapping.as_ref().filter(|mapping| mapping.sealed);
        shared.map(|mapping| mapping.descriptor.as_fd())
    }

    /// What was asked of the kernel in huge pages.
    #[must_use]
    pub fn huge_pages(&self) -> HugePages {
        self.mapping.as_ref().map_or(HugePages::Unavailable, |mapping| mapping.huge)
    }

    /// Bytes committed by touching.
    #[must_use]
    pub fn committed_bytes(&self) -> u64 {
        let known = self.mapping.as_ref().and_then(|mapping| fstat(&mapping.descriptor).ok());
        known.map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
    }

    /// Bytes that lie in huge pages, as the kernel reports them now. Reads the memory map of the whole process, which
    /// takes longer the more it has resident: for a report on request, never on the way of a call.
    #[must_use]
    pub fn huge_bytes(&self) -> u64 {
        if self.mapping.is_some() { smaps::huge_bytes(self.base, self.len) } else { 0 }
    }
}

impl Region {
    /// The descriptor, if the memory is made of ordinary pages, which can be put into huge ones.
    pub(super) fn ordinary(&self) -> Option<BorrowedFd<'_>> {
        let mapping = self.mapping.as_ref().filter(|mapping| mapping.huge != HugePages::Reserved);
        mapping.map(|mapping| mapping.descriptor.as_fd())
    }

    /// The same, told apart no more from memory that the administrator reserved: few machines have any.
    #[cfg(test)]
    pub(crate) fn made_of_reserved_pages(mut self) -> Region {
        self.mapping.as_mut().unwrap().huge = HugePages::Reserved;
        self
    }

    /// The descriptor, also where it must not be shared. Of whole huge pages.
    pub(super) fn behind(&self) -> Option<BorrowedFd<'_>> {
        self.mapping.as_ref().map(|mapping| mapping.descriptor.as_fd())
    }
}

impl Mapping {
    /// Made of huge pages that the administrator reserved; `Err` if there are not enough for all of it.
    fn reserved_pages(name: &str, len: usize) -> rustix::io::Result<Self> {
        let descriptor = memfd::create(name, len as u64, memfd::HUGE_2MB)?;
        // SAFETY: no address is asked for, so the kernel chooses a range nobody uses, aligned to its huge pages.
        let at = unsafe { mmap(null_mut(), len, RW, MapFlags::SHARED, &descriptor, 0) }?;
        let range = Aligned { base: at as usize, held: (at as usize, len), advised: false };
        Ok(Mapping { range, sealed: seal(&descriptor), descriptor, huge: HugePages::Reserved })
    }

    /// Made of ordinary pages, aligned so that the kernel may merge them into huge ones.
    fn ordinary(name: &str, len: usize) -> rustix::io::Result<Self> {
        let descriptor = memfd::create(name, len as u64, MemfdFlags::empty())?;
        let range = Aligned::map(&descriptor, len, RW)?;
        let huge = if range.advised { HugePages::Advised } else { HugePages::Unavailable };
        Ok(Mapping { range, sealed: seal(&descriptor), descriptor, huge })
    }
}

impl Aligned {
    /// The first `len` bytes of `descriptor`, a multiple of [`HUGE_PAGE`].
    pub(super) fn map(descriptor: &OwnedFd, len: usize, rights: ProtFlags) -> rustix::io::Result<Self> {
        // First anywhere: what the kernel refuses is refused here, where nothing is left behind.
        // SAFETY: no address is asked for, so the kernel chooses a range nobody uses.
        let anywhere = unsafe { mmap(null_mut(), len, rights, MapFlags::SHARED, descriptor, 0) }?;
        if (anywhere as usize).is_multiple_of(HUGE_PAGE) {
            return Ok(Self::advised(anywhere as usize, (anywhere as usize, len), len));
        }
        // SAFETY: the mapping just made, which nobody knows of.
        let _unmapped = unsafe { munmap(anywhere, len) };
        // One huge page more than needed, so that an aligned start can be chosen inside the reservation.
        let held_len = len.checked_add(HUGE_PAGE).ok_or(rustix::io::Errno::NOMEM)?;
        let nothing = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: no address is asked for, so the kernel chooses a range nobody uses.
        let held = unsafe { mmap_anonymous(null_mut(), held_len, ProtFlags::empty(), nothing) }? as usize;
        let base = held.next_multiple_of(HUGE_PAGE);
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: `base..base + len` lies inside the reservation made above, which nobody else knows of.
        if let Err(error) = unsafe { mmap(base as *mut c_void, len, rights, flags, descriptor, 0) } {
            // A fixed mapping that fails may have removed the reservation under it, and another thread may have mapped
            // something there since: only the two ends, which it did not touch, are certainly ours. What is left of
            // the middle stays reserved (`a_region_in_the_making_takes_nobodys_addresses`).
            for (from, to) in [(held, base), (base + len, held + held_len)] {
                // SAFETY: part of the reservation outside the range of the failed call; nothing points into it.
                let _ = unsafe { munmap(from as *mut c_void, to - from) };
            }
            return Err(error);
        }
        Ok(Self::advised(base, (held, held_len), len))
    }

    /// `len` bytes mapped at `base`, for which huge pages are welcome.
    fn advised(base: usize, held: (usize, usize), len: usize) -> Self {
        // SAFETY: the range is a mapping that was just made, and this advice changes no contents.
        let advised = unsafe { madvise(base as *mut c_void, len, Advice::LinuxHugepage) }.is_ok();
        Aligned { base, held, advised }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        let (from, len) = self.held;
        // SAFETY: the range was mapped for this region alone, and everything carved from the region holds it, so nothing
        // is left that could touch the range (promise 1).
        let _ = unsafe { munmap(from as *mut c_void, len) };
    }
}
