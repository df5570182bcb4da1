//! The host copy kernels: ordinary stores, and stores that bypass the caches.
//!
//! Streaming stores save reading each destination line before it is overwritten, a third of the traffic, and leave the
//! caches to the model; ordinary stores win where the copy fits the caches. Which one runs is the engine's choice
//! (`engine::tuner`). Each is tested against a byte-by-byte twin in `tests/rust/kernel.rs`.
//!
//! Not for: splitting work, or choosing a kernel.

use super::{Reach, Window};
use crate::error::{Error, ErrorKind, Result};

/// A kernel that exists on this CPU: the streaming one can only be had from [`Kernel::streaming`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Stores);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stores {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Kernel {
    /// Ordinary stores. Everywhere.
    pub const PLAIN: Kernel = Kernel(Stores::Plain);

    /// Streaming stores, if this CPU has them (`x86_64` with AVX2).
    #[must_use]
    pub fn streaming() -> Option<Kernel> {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            return Some(Kernel(Stores::Avx2));
        }
        None
    }

    /// One word for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Stores::Plain => "plain",
            #[cfg(target_arch = "x86_64")]
            Stores::Avx2 => "streaming",
        }
    }
}

/// Copies `src` to `dst`, windows of equal length over memory the CPU can address. Overlapping windows are copied as
/// if through a buffer. Bytes that another thread writes at the same time come out old, new or mixed; the pins of
/// `table` keep that from happening between calls of one engine.
pub fn copy(src: Window<'_>, dst: Window<'_>, kernel: Kernel) -> Result<()> {
    if src.len() != dst.len() || !src.host_addressable() || dst.reach() != Reach::Host {
        return Err(refused(src, dst));
    }
    let len = usize::try_from(src.len()).map_err(|_| refused(src, dst))?;
    let (from, to) = (src.addr() as *const u8, dst.addr() as *mut u8);
    if src.overlaps(&dst) {
        // SAFETY: both windows are inside live tensors (promise 3) of `len` bytes; `copy` allows overlap.
        unsafe { from.copy_to(to, len) };
        return Ok(());
    }
    match kernel.0 {
        // SAFETY: both windows are inside live tensors (promise 3) of `len` bytes, and do not overlap, see above.
        Stores::Plain => unsafe { from.copy_to_nonoverlapping(to, len) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above; the value proves that the CPU has AVX2, because only `Kernel::streaming` makes it.
        Stores::Avx2 => unsafe { stream_avx2(from, to, len) },
    }
    Ok(())
}

#[cold]
fn refused(src: Window<'_>, dst: Window<'_>) -> Error {
    Error::new(
        ErrorKind::System,
        "the host kernel needs two windows of equal length in host-addressable memory, the second writable",
    )
    .with("src_bytes", src.len())
    .with("dst_bytes", dst.len())
    .with("src", format_args!("{:?}", src.reach()))
    .with("dst", format_args!("{:?}", dst.reach()))
}

/// Copies with 32-byte stores that bypass the caches; the unaligned head and the tail with ordinary ones.
///
/// # Safety
///
/// `from..from + len` is readable, `to..to + len` writable, they do not overlap, and the CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[expect(clippy::cast_ptr_alignment, reason = "the loads are unaligned ones, and the head aligns the stores")]
#[expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "one loop body: four loads and four stores of one step"
)]
unsafe fn stream_avx2(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const STEP: usize = 128;
    let head = to.align_offset(64).min(len);
    let steps = (len - head) / STEP;
    let tail = head + steps * STEP;
    // SAFETY: `head <= len`.
    unsafe { from.copy_to_nonoverlapping(to, head) };
    for step in 0..steps {
        let at = head + step * STEP;
        // SAFETY: `at + STEP <= tail <= len`, and `to + at` is a multiple of 64 because `to + head` is.
        unsafe {
            let source = from.add(at).cast::<__m256i>();
            let target = to.add(at).cast::<__m256i>();
            let first = _mm256_loadu_si256(source);
            let second = _mm256_loadu_si256(source.add(1));
            let third = _mm256_loadu_si256(source.add(2));
            let fourth = _mm256_loadu_si256(source.add(3));
            _mm256_stream_si256(target, first);
            _mm256_stream_si256(target.add(1), second);
            _mm256_stream_si256(target.add(2), third);
            _mm256_stream_si256(target.add(3), fourth);
        }
    }
    // Streaming stores are weakly ordered: without the fence, whoever is told of the end might not see them.
    _mm_sfence();
    // SAFETY: `tail <= len`.
    unsafe { from.add(tail).copy_to_nonoverlapping(to.add(tail), len - tail) };
}
