//! The kernel that every CPU has: ordinary stores, as in the C library.

use crate::memory::Window;

/// One copy: a window to read, and a window of equal length to write.
#[derive(Clone, Copy, Debug)]
pub struct Copy<'a> {
    /// The source.
    pub src: Window<'a>,
    /// The destination.
    pub dst: Window<'a>,
}

/// Copies one sound pair (`kernels::sound`) with ordinary stores.
pub(super) fn plain(copy: &Copy<'_>) {
    // The length of a sound pair fits.
    let len = usize::try_from(copy.src.len()).unwrap_or(0);
    let (from, to) = (copy.src.addr() as *const u8, copy.dst.addr() as *mut u8);
    if copy.src.overlaps(&copy.dst) {
        // SAFETY: both windows have `len` bytes and lie inside live tensors (promise 3). `copy_to` allows
        // overlap.
        unsafe { from.copy_to(to, len) };
    } else {
        // SAFETY: both windows have `len` bytes and lie inside live tensors (promise 3), and they do not
        // overlap.
        unsafe { from.copy_to_nonoverlapping(to, len) };
    }
}
