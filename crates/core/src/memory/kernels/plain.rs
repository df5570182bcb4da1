//! The kernel of every CPU: ordinary stores, as the C library copies.

use crate::memory::Window;

/// Bytes to copy: a window to read, and one of equal length to write.
#[derive(Clone, Copy, Debug)]
pub struct Copy<'a> {
    /// Read.
    pub src: Window<'a>,
    /// Written.
    pub dst: Window<'a>,
}

/// One pair that is sound, with ordinary stores.
pub(super) fn plain(copy: &Copy<'_>) {
    // Sound pairs have a length that fits.
    let len = usize::try_from(copy.src.len()).unwrap_or(0);
    let (from, to) = (copy.src.addr() as *const u8, copy.dst.addr() as *mut u8);
    if copy.src.overlaps(&copy.dst) {
        // SAFETY: both windows are inside live tensors (promise 3) of `len` bytes; `copy_to` allows overlap.
        unsafe { from.copy_to(to, len) };
    } else {
        // SAFETY: both windows are inside live tensors (promise 3) of `len` bytes, and do not overlap.
        unsafe { from.copy_to_nonoverlapping(to, len) };
    }
}
