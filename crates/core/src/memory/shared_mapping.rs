//! Numbers that two processes share: a mapping of a file that one of them writes and the other one only reads.

use std::os::fd::OwnedFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The first `BYTES` bytes of a file that cannot shrink; unmapped on drop.
#[derive(Debug)]
pub(super) struct SharedMapping<const BYTES: usize>(usize);

impl<const BYTES: usize> SharedMapping<BYTES> {
    /// Maps a file that this process created with `BYTES` bytes, or that `refuse_shrinking` has checked.
    pub(super) fn map(descriptor: &OwnedFd, rights: ProtFlags) -> rustix::io::Result<Self> {
        // SAFETY: no address is requested, so the kernel chooses an unused range.
        let at = unsafe { mmap(null_mut(), BYTES, rights, MapFlags::SHARED, descriptor, 0) }?;
        Ok(SharedMapping(at as usize))
    }

    /// Returns the number that starts at byte `offset`. Panics if it is not inside the mapping, or not aligned.
    #[inline]
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset < BYTES && BYTES.is_multiple_of(8) && offset.is_multiple_of(8), "no such number");
        // SAFETY: the number lies inside the mapping and is aligned (checked above). The mapping lives as long as `self`, and
        // its file cannot shrink (`map`). Every process accesses the number only as an atomic.
        unsafe { &*((self.0 + offset) as *const AtomicU64) }
    }

    /// Loads a number, with everything that its writer had written before (acquire).
    #[inline]
    pub(super) fn load(&self, offset: usize) -> u64 {
        // Only a relaxed load is permitted on read-only memory; the fence makes it an acquire load.
        let number = self.word(offset).load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        number
    }

    /// Returns the address of the byte at `offset`.
    pub(super) fn byte(&self, offset: usize) -> *mut u8 {
        (self.0 + offset) as *mut u8
    }
}

impl<const BYTES: usize> Drop for SharedMapping<BYTES> {
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value alone, and every reference into it borrowed the value.
        let _ = unsafe { munmap(self.0 as *mut std::ffi::c_void, BYTES) };
    }
}
