//! Steps of copies for `x86_64` with AVX2: four loads and four stores of 32 bytes.

use std::arch::x86_64::{
    __m256i, _MM_HINT_NTA, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_store_si256,
    _mm256_stream_si256,
};

use super::plain::RawCopy;

/// Bytes of one step: two cache lines, copied by four loads and four stores.
pub(super) const STEP: usize = 128;

/// Makes the streaming stores visible to other threads before later stores of this thread.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn publish() {
    _mm_sfence();
}

/// Prefetches two cache lines from `from` on, without allocating them in the outer caches. Both lie inside a
/// window.
#[target_feature(enable = "avx2")]
#[inline]
#[allow(unused_unsafe, reason = "the hint is an unsafe function in the oldest Rust this builds with")]
pub(super) fn prefetch(from: *const u8) {
    let from = from.cast::<i8>();
    // SAFETY: a prefetch is a hint and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_NTA>(from) };
    // SAFETY: a prefetch is a hint and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(64)) };
}

/// Copies step `step` of a piece: [`STEP`] bytes.
///
/// # Safety
///
/// `(step + 1) * STEP` bytes are readable at the source and writable at the destination, and the two do not overlap. The address of
/// the destination is a multiple of 64. The CPU has AVX2.
#[target_feature(enable = "avx2")]
#[inline]
#[expect(
    clippy::cast_ptr_alignment,
    reason = "the loads are unaligned ones, and the piece is aligned for the stores"
)]
#[expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "one loop body: four loads and four stores of one step"
)]
pub(super) unsafe fn copy_step<const STREAM: bool>(piece: RawCopy, step: usize) {
    // SAFETY: as promised by the caller.
    unsafe {
        let source = piece.from.add(step * STEP).cast::<__m256i>();
        let target = piece.to.add(step * STEP).cast::<__m256i>();
        let first = _mm256_loadu_si256(source);
        let second = _mm256_loadu_si256(source.add(1));
        let third = _mm256_loadu_si256(source.add(2));
        let fourth = _mm256_loadu_si256(source.add(3));
        if STREAM {
            _mm256_stream_si256(target, first);
            _mm256_stream_si256(target.add(1), second);
            _mm256_stream_si256(target.add(2), third);
            _mm256_stream_si256(target.add(3), fourth);
        } else {
            _mm256_store_si256(target, first);
            _mm256_store_si256(target.add(1), second);
            _mm256_store_si256(target.add(2), third);
            _mm256_store_si256(target.add(3), fourth);
        }
    }
}
