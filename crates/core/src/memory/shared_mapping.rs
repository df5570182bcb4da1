//! Memory that two processes share: a mapping of a file that one of them writes and the other one only reads. It begins with
//! numbers; behind them, the file may have bytes, such as the messages and the payload of rings.

use std::os::fd::OwnedFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The first `BYTES` bytes of a file that cannot shrink; unmapped on drop. The first `WORDS` of them are numbers.
#[derive(Debug)]
pub(super) struct SharedMapping<const BYTES: usize, const WORDS: usize>(usize);

impl<const BYTES: usize, const WORDS: usize> SharedMapping<BYTES, WORDS> {
    /// Maps a file that this process created with `BYTES` bytes, or that `refuse_shrinking` has checked.
    pub(super) fn map(descriptor: &OwnedFd, rights: ProtFlags) -> rustix::io::Result<Self> {
        // SAFETY: no address is requested, so the kernel chooses an unused range.
        let at = unsafe { mmap(null_mut(), BYTES, rights, MapFlags::SHARED, descriptor, 0) }?;
        Ok(SharedMapping(at as usize))
    }

    /// Returns the number that starts at byte `offset`. Panics if there is none.
    #[inline]
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        const { assert!(WORDS <= BYTES && WORDS.is_multiple_of(8), "the mapping holds whole numbers") };
        assert!(offset < WORDS && offset.is_multiple_of(8), "no such number");
        // SAFETY: the number lies inside the mapping and is aligned (checked above). The mapping lives as long as `self`, and
        // its file cannot shrink (`map`). This process accesses the first `WORDS` bytes only as atomics (`byte`), and so does a
        // peer that follows the protocol; another peer can only store other numbers.
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

    /// Returns the address of the byte at `offset`. Panics if it is no byte behind the numbers.
    #[inline]
    pub(super) fn byte(&self, offset: usize) -> *mut u8 {
        assert!((WORDS..BYTES).contains(&offset), "no such byte");
        (self.0 + offset) as *mut u8
    }
}

impl<const BYTES: usize, const WORDS: usize> Drop for SharedMapping<BYTES, WORDS> {
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value alone, and every reference into it borrowed the value.
        let _ = unsafe { munmap(self.0 as *mut std::ffi::c_void, BYTES) };
    }
}
