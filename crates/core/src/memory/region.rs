//! A contiguous range of memory with one owner: a shared mapping behind a descriptor, or addresses of a
//! device.
//!
//! The `pool` module splits regions. Memory of the caller is not a region but an [`Adopted`](super::Adopted).

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use rustix::fs::{MemfdFlags, fstat};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::memfd;
use super::memfd::seal;
use crate::error::{Error, ErrorKind, Result};

/// Bytes of a unit of shared memory: 2 MiB, a huge page if pages have 4 KiB. Huge pages that an administrator reserves may have this
/// size with pages of 16 and 64 KiB, too. Every page size divides it, so a region consists of whole pages
/// (`units_are_committed_with_pages_of_every_size`). A mapping whose start is not aligned to it never gets a huge page.
pub(super) const HUGE_PAGE: usize = 2 << 20;

const RW: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// How the memory of a region relates to huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// The mapping consists of huge pages that the administrator reserved.
    Reserved,
    /// The kernel was advised to use huge pages.
    Advised,
    /// Huge pages are not available.
    Unavailable,
}

impl HugePages {
    /// Returns the name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            HugePages::Reserved => "reserved",
            HugePages::Advised => "advised",
            HugePages::Unavailable => "unavailable",
        }
    }
}

/// A contiguous range of memory that is released when its last user drops it.
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
    /// Whether the descriptor is sealed, so that peers cannot write. An unsealed descriptor is never given to
    /// a peer.
    sealed: bool,
}

/// A shared mapping that starts at a multiple of [`HUGE_PAGE`]; unmapped on drop.
#[derive(Debug)]
pub(super) struct Aligned {
    pub(super) base: usize,
    /// Start and length in bytes of the address range to unmap.
    held: (usize, usize),
    /// Whether the kernel accepted the advice to use huge pages.
    advised: bool,
}

impl Region {
    /// Creates a region of `len` bytes, all zero, behind a descriptor that another process can map. `name`
    /// appears in errors and in the memory map of the process.
    ///
    /// A page uses memory only once it is touched, so `len` may exceed the free memory of the machine.
    /// Returns `Err` of kind [`ErrorKind::OutOfMemory`] if `len` exceeds the address space or the kernel
    /// reports that memory is short, and of kind [`ErrorKind::System`] if a limit of the process or the
    /// system prevents it.
    pub fn shared(name: &str, len: u64) -> Result<Region> {
        // Use reserved huge pages only if there are enough for the whole pool. With too few, a later touch
        // would fault.
        Region::mapped(name, len, |whole| {
            Mapping::reserved_pages(name, whole).or_else(|_| Mapping::ordinary(name, whole))
        })
    }

    /// Creates a region as [`shared`](Self::shared) does, and leaves reserved huge pages to the pools for which
    /// the administrator has counted them.
    pub fn ordinary(name: &str, len: u64) -> Result<Region> {
        Region::mapped(name, len, |whole| Mapping::ordinary(name, whole))
    }

    fn mapped(name: &str, len: u64, map: impl Fn(usize) -> rustix::io::Result<Mapping>) -> Result<Region> {
        let too_large = || Error::new(ErrorKind::OutOfMemory, "the pool is larger than the address space");
        let bytes = usize::try_from(len).map_err(|_| too_large().with("bytes", len))?;
        let whole = bytes.checked_next_multiple_of(HUGE_PAGE).ok_or_else(too_large)?;
        let mapping = map(whole).map_err(|errno| memfd::refused(name, len, errno))?;
        Ok(Region { base: mapping.range.base as u64, len, mapping: Some(mapping) })
    }

    /// Creates a region for addresses of a device, which the CPU cannot dereference. The device gives them
    /// their meaning.
    #[cfg(feature = "testing")]
    pub fn opaque(base: u64, len: u64) -> Region {
        Region { base, len, mapping: None }
    }

    /// Returns the address of the first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the CPU can dereference the addresses.
    pub fn host_addressable(&self) -> bool {
        self.mapping.is_some()
    }

    /// Returns the descriptor behind the region, for a peer to map read-only. `None` if there is no
    /// descriptor, or if the kernel cannot prevent the peer from writing.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let shared = self.mapping.as_ref().filter(|mapping| mapping.sealed);
        shared.map(|mapping| mapping.descriptor.as_fd())
    }

    /// Returns how the region relates to huge pages, as determined when it was created.
    pub fn huge_pages(&self) -> HugePages {
        self.mapping.as_ref().map_or(HugePages::Unavailable, |mapping| mapping.huge)
    }

    /// Returns the bytes that are committed, that is, that use memory because they were touched.
    pub fn committed_bytes(&self) -> u64 {
        let known = self.mapping.as_ref().and_then(|mapping| fstat(&mapping.descriptor).ok());
        known.map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
    }
}

impl Region {
    /// Returns whether the region consists of ordinary pages, which can be merged into huge pages.
    pub fn merges(&self) -> bool {
        self.mapping.as_ref().is_some_and(|mapping| mapping.huge != HugePages::Reserved)
    }

    /// Test only: treats this region as memory in reserved huge pages, which few machines have.
    #[cfg(test)]
    pub(crate) fn made_of_reserved_pages(mut self) -> Region {
        self.mapping.as_mut().unwrap().huge = HugePages::Reserved;
        self
    }

    /// Returns the descriptor even if it must not be shared. The file behind it consists of whole huge pages.
    pub(super) fn raw_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.mapping.as_ref().map(|mapping| mapping.descriptor.as_fd())
    }
}

impl Mapping {
    /// Maps huge pages that the administrator reserved. Returns `Err` if there are not enough for all of it.
    fn reserved_pages(name: &str, len: usize) -> rustix::io::Result<Self> {
        let descriptor = memfd::create(name, len as u64, memfd::HUGE_2MB)?;
        // SAFETY: no address is requested, so the kernel chooses an unused range, aligned to its huge pages.
        let at = unsafe { mmap(null_mut(), len, RW, MapFlags::SHARED, &descriptor, 0) }?;
        let range = Aligned { base: at as usize, held: (at as usize, len), advised: false };
        Ok(Mapping { range, sealed: seal(&descriptor), descriptor, huge: HugePages::Reserved })
    }

    /// Maps ordinary pages, aligned so that the kernel can merge them into huge pages.
    fn ordinary(name: &str, len: usize) -> rustix::io::Result<Self> {
        let descriptor = memfd::create(name, len as u64, MemfdFlags::empty())?;
        let range = Aligned::map(&descriptor, len, RW)?;
        let huge = if range.advised { HugePages::Advised } else { HugePages::Unavailable };
        Ok(Mapping { range, sealed: seal(&descriptor), descriptor, huge })
    }
}

impl Aligned {
    /// Maps the first `len` bytes of `descriptor`, a multiple of [`HUGE_PAGE`], with the access `rights`.
    pub(super) fn map(descriptor: &OwnedFd, len: usize, rights: ProtFlags) -> rustix::io::Result<Self> {
        // Map without alignment first: if the kernel refuses the mapping, it does so here, where nothing
        // needs to be undone.
        // SAFETY: no address is requested, so the kernel chooses an unused range.
        let anywhere = unsafe { mmap(null_mut(), len, rights, MapFlags::SHARED, descriptor, 0) }?;
        if (anywhere as usize).is_multiple_of(HUGE_PAGE) {
            return Ok(Self::advised(anywhere as usize, (anywhere as usize, len), len));
        }
        // SAFETY: the mapping was just made, and nothing else refers to it.
        let _unmapped = unsafe { munmap(anywhere, len) };
        // One huge page more than needed, so that an aligned start can be chosen inside the reservation.
        let held_len = len.checked_add(HUGE_PAGE).ok_or(rustix::io::Errno::NOMEM)?;
        let nothing = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: no address is requested, so the kernel chooses an unused range.
        let held = unsafe { mmap_anonymous(null_mut(), held_len, ProtFlags::empty(), nothing) }? as usize;
        let base = held.next_multiple_of(HUGE_PAGE);
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: `base..base + len` lies inside the reservation made above, and nothing else refers to it.
        if let Err(error) = unsafe { mmap(base as *mut c_void, len, rights, flags, descriptor, 0) } {
            // A fixed mapping that fails may have removed the reservation below it, and another thread may
            // have mapped something there since. Only the two ends, which the call did not touch, certainly
            // belong to this function. What remains of the middle stays reserved
            // (`regions_take_only_free_addresses`).
            for (from, to) in [(held, base), (base + len, held + held_len)] {
                // SAFETY: this part of the reservation lies outside the range of the failed call, and nothing
                // refers to it.
                let _ = unsafe { munmap(from as *mut c_void, to - from) };
            }
            return Err(error);
        }
        Ok(Self::advised(base, (held, held_len), len))
    }

    /// Wraps `len` bytes mapped at `base`, and advises the kernel to use huge pages for them. `held` is the
    /// range to unmap.
    fn advised(base: usize, held: (usize, usize), len: usize) -> Self {
        // SAFETY: the range is a mapping that was just made, and this advice does not change its contents.
        let advised = unsafe { madvise(base as *mut c_void, len, Advice::LinuxHugepage) }.is_ok();
        Aligned { base, held, advised }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        let (from, len) = self.held;
        // SAFETY: the range was mapped for this value alone. Everything carved from a region holds the
        // region, so nothing is left that could access the range (promise 1).
        let _ = unsafe { munmap(from as *mut c_void, len) };
    }
}
