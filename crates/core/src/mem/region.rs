//! One stretch of memory with an owner: a shared mapping behind a descriptor, or addresses of a device.
//!
//! Not for: splitting it (`pool`, `arena`), or for the caller's memory (`Adopted`).

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::smaps;
use crate::error::{Error, ErrorKind, Result};

/// Huge pages are 2 MiB on every machine this maps shared memory on; a base aligned to less never gets one.
const HUGE_PAGE: usize = 2 << 20;

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
    descriptor: OwnedFd,
    reserved_at: usize,
    reserved_len: usize,
    huge: HugePages,
}

impl Region {
    /// `len` bytes of zeros, committed page by page when touched, shared behind a descriptor that another process can
    /// map. A length beyond the machine's free memory is fine: only what is touched counts.
    pub fn shared(name: &str, len: u64) -> Result<Region> {
        let too_large = || Error::new(ErrorKind::OutOfMemory, "the pool is larger than the address space");
        let bytes = usize::try_from(len).map_err(|_| too_large().with("bytes", len))?;
        let whole = bytes.checked_next_multiple_of(HUGE_PAGE).ok_or_else(too_large)?;
        // Reserved huge pages are taken only if the whole pool fits: a partial grant would fault later, at a touch.
        let (descriptor, at, huge) = match Self::map(name, whole, MemfdFlags::HUGETLB) {
            Ok((descriptor, at)) => (descriptor, at, HugePages::Reserved),
            Err(_) => {
                let refused = |error| {
                    let text = format!("no memory for the {name}");
                    Error::new(ErrorKind::OutOfMemory, text)
                        .with("bytes", len)
                        .because(std::io::Error::from(error))
                };
                let (descriptor, at) = Self::map(name, whole, MemfdFlags::empty()).map_err(refused)?;
                let huge = Self::advise(at.base, whole);
                (descriptor, at, huge)
            }
        };
        let mapping = Mapping { descriptor, reserved_at: at.reserved, reserved_len: at.reserved_len, huge };
        Ok(Region { base: at.base as u64, len, mapping: Some(mapping) })
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

    /// The descriptor behind it, for another process to map.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.mapping.as_ref().map(|mapping| mapping.descriptor.as_fd())
    }

    /// What was asked of the kernel in huge pages.
    #[must_use]
    pub fn huge_pages(&self) -> HugePages {
        self.mapping.as_ref().map_or(HugePages::Unavailable, |mapping| mapping.huge)
    }

    /// Bytes committed by touching, and how many of them lie in huge pages, as the kernel reports them now. Reads the
    /// process's memory map, so it costs a millisecond: for reports, never for decisions on a hot path.
    #[must_use]
    pub fn committed(&self) -> smaps::Committed {
        if self.mapping.is_some() {
            smaps::committed(self.base, self.len)
        } else {
            smaps::Committed::default()
        }
    }

    fn advise(base: usize, len: usize) -> HugePages {
        // SAFETY: the range is the mapping just made by `map`, and this advice changes no contents.
        match unsafe { madvise(base as *mut c_void, len, Advice::LinuxHugepage) } {
            Ok(()) => HugePages::Advised,
            Err(_) => HugePages::Unavailable,
        }
    }

    fn map(name: &str, len: usize, kind: MemfdFlags) -> rustix::io::Result<(OwnedFd, MappedAt)> {
        let descriptor = memfd_create(name, MemfdFlags::CLOEXEC | kind)?;
        ftruncate(&descriptor, len as u64)?;
        // One huge page more than needed, so that an aligned start can be chosen inside the reservation.
        let reserved_len = len + HUGE_PAGE;
        // SAFETY: no address is asked for, so the kernel chooses a range nobody uses.
        let reserved = unsafe {
            mmap_anonymous(
                null_mut(),
                reserved_len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }? as usize;
        let base = reserved.next_multiple_of(HUGE_PAGE);
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let wanted = base as *mut c_void;
        // SAFETY: `base..base + len` lies inside the reservation made above, which nobody else knows of.
        match unsafe { mmap(wanted, len, ProtFlags::READ | ProtFlags::WRITE, flags, &descriptor, 0) } {
            Ok(_) => Ok((descriptor, MappedAt { base, reserved, reserved_len })),
            Err(error) => {
                // SAFETY: the reservation was made above and nothing points into it.
                let _ = unsafe { munmap(reserved as *mut c_void, reserved_len) };
                Err(error)
            }
        }
    }
}

struct MappedAt {
    base: usize,
    reserved: usize,
    reserved_len: usize,
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(mapping) = &self.mapping {
            // SAFETY: the range was reserved by `map` for this region alone, and everything carved from the region
            // holds it, so nothing is left that could touch the range (promise 1).
            let _ = unsafe { munmap(mapping.reserved_at as *mut c_void, mapping.reserved_len) };
        }
    }
}
