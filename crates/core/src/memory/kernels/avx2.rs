//! Copy kernels for `x86_64` with AVX2, which process one piece at a time or four pages at once, and
//! prefetch.
//!
//! Whole steps of 128 bytes are copied through registers. The bytes before the first aligned byte of a
//! destination, and those after the last step, are copied as in the C library. No address outside the windows
//! is used, not even in a prefetch.
//!
//! Streaming stores are weakly ordered. So each entry point ends with a fence: without it, a thread that
//! learns of the end of the copy might not see the bytes.

use std::arch::x86_64::{
    __m256i, _MM_HINT_NTA, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_store_si256,
    _mm256_stream_si256,
};

use super::plain::{Copy, plain};

/// Bytes of one step: two cache lines, copied by four loads and four stores.
const STEP: usize = 128;
/// Number of stripes of the interleaved kernel, which is the number of pages that it processes at once.
const STRIPES: usize = 4;
/// Prefetch distance of a single stripe in bytes. At the end of a piece it reaches into the next one.
const AHEAD: usize = 1024;
/// Prefetch distance of each of four stripes in bytes.
const STRIPE_AHEAD: usize = 256;
/// Pieces of at least this many bytes are cut into four stripes of a page or more. Of shorter pieces, four
/// become one stripe each.
const CUT: usize = STRIPES * 4096;

/// The windows of a [`Copy`] as pointers.
#[derive(Clone, Copy)]
struct RawCopy {
    from: *const u8,
    to: *mut u8,
    len: usize,
}

impl RawCopy {
    fn of(copy: &Copy<'_>) -> RawCopy {
        // A window lies in an address space, so its length fits.
        let len = usize::try_from(copy.src.len()).unwrap_or(0);
        RawCopy { from: copy.src.addr() as *const u8, to: copy.dst.addr() as *mut u8, len }
    }

    /// Returns the number of bytes before the first destination byte that starts a cache line, at most the
    /// whole length.
    fn head(self) -> usize {
        self.to.align_offset(64).min(self.len)
    }
}

/// Address and length of what is read after a stripe, for the prefetch.
#[derive(Clone, Copy)]
struct Following {
    from: *const u8,
    len: usize,
}

impl Following {
    const NONE: Following = Following { from: std::ptr::null(), len: 0 };

    fn of(copy: Option<&Copy<'_>>) -> Following {
        copy.map_or(Following::NONE, |copy| {
            let RawCopy { from, len, .. } = RawCopy::of(copy);
            Following { from, len }
        })
    }
}

/// Copies one piece after the other with streaming stores, and prefetches the next piece.
///
/// # Safety
///
/// Every pair of `batch` is sound (`kernels::sound`), and the CPU has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn one(batch: &[Copy<'_>]) {
    for (index, copy) in batch.iter().enumerate() {
        if copy.src.overlaps(&copy.dst) {
            plain(copy);
        } else {
            // SAFETY: the windows lie inside live tensors (promise 3), have equal lengths because the pair is
            // sound, and do not overlap.
            unsafe { lone(RawCopy::of(copy), Following::of(batch.get(index + 1))) };
        }
    }
    _mm_sfence();
}

/// Copies four stripes at once, which belong to one long piece or to four short ones, with streaming stores if
/// `STREAM` is set and ordinary stores otherwise.
///
/// # Safety
///
/// As for [`one`].
#[target_feature(enable = "avx2")]
pub(super) unsafe fn four<const STREAM: bool>(batch: &[Copy<'_>]) {
    let mut rest = batch;
    while let Some((first, others)) = rest.split_first() {
        let four = rest.first_chunk::<STRIPES>().filter(|four| alike(four));
        if first.src.overlaps(&first.dst) {
            plain(first);
            rest = others;
        } else if first.src.len() >= CUT as u64 {
            // SAFETY: the windows lie inside live tensors (promise 3), have equal lengths because the pair is
            // sound, and do not overlap.
            unsafe { cut::<STREAM>(RawCopy::of(first), Following::of(others.first())) };
            rest = others;
        } else if let Some(four) = four {
            let next = rest.get(STRIPES..).unwrap_or_default();
            let next = [0, 1, 2, 3].map(|stripe| Following::of(next.get(stripe)));
            // SAFETY: as above for each of the four pieces. They have the same length and alignment because
            // they are `alike`.
            unsafe { together::<STREAM>(four.each_ref().map(RawCopy::of), next) };
            rest = rest.get(STRIPES..).unwrap_or_default();
        } else if STREAM {
            // SAFETY: as above.
            unsafe { lone(RawCopy::of(first), Following::of(others.first())) };
            rest = others;
        } else {
            plain(first);
            rest = others;
        }
    }
    _mm_sfence();
}

/// Returns whether four short pieces can form four stripes: their lengths are equal, their destinations have
/// the same offset from the start of a cache line, and none overlaps its own destination.
fn alike(four: &[Copy<'_>; STRIPES]) -> bool {
    let len = four[0].src.len();
    let line = |copy: &Copy<'_>| copy.dst.addr() % 64;
    let fits = |copy: &Copy<'_>| {
        copy.src.len() == len && line(copy) == line(&four[0]) && !copy.src.overlaps(&copy.dst)
    };
    len < CUT as u64 && four.iter().all(fits)
}

/// Copies one piece as one stripe, with streaming stores.
///
/// # Safety
///
/// `from..from + len` is readable, `to..to + len` is writable, the two do not overlap, and the CPU has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn lone(piece: RawCopy, next: Following) {
    let head = piece.head();
    let steps = (piece.len - head) / STEP;
    // SAFETY: `head + steps * STEP <= len`, and the destination is aligned from `head` on.
    unsafe { stripes::<1, AHEAD, true>([at(piece, head)], steps, [next]) };
    // SAFETY: as promised by the caller.
    unsafe { edges(piece, head, head + steps * STEP) };
}

/// Copies one piece as four stripes of equal length.
///
/// # Safety
///
/// As for [`lone`].
#[target_feature(enable = "avx2")]
unsafe fn cut<const STREAM: bool>(piece: RawCopy, next: Following) {
    let head = piece.head();
    let stripe = (piece.len - head) / (STRIPES * STEP) * STEP;
    let next_lane = next.len / (STRIPES * STEP) * STEP;
    let next = [0, 1, 2, 3].map(|index| match next_lane {
        0 => Following::NONE,
        // Inside the next window, because `index * next_lane < next.len`.
        len => Following { from: next.from.wrapping_add(index * next_lane), len },
    });
    let pieces = [0, 1, 2, 3].map(|index| at(piece, head + index * stripe));
    // SAFETY: the four stripes end at `head + 4 * stripe <= len`. Each destination starts at a multiple of 64
    // because the first one does and a stripe is a multiple of `STEP`.
    unsafe { stripes::<STRIPES, STRIPE_AHEAD, STREAM>(pieces, stripe / STEP, next) };
    // SAFETY: as promised by the caller.
    unsafe { edges(piece, head, head + STRIPES * stripe) };
}

/// Copies four pieces as four stripes.
///
/// # Safety
///
/// As for [`lone`], for each piece. All pieces have the same length, and their destinations have the same
/// offset from the start of a cache line.
#[target_feature(enable = "avx2")]
unsafe fn together<const STREAM: bool>(pieces: [RawCopy; STRIPES], next: [Following; STRIPES]) {
    let head = pieces[0].head();
    let steps = (pieces[0].len - head) / STEP;
    // SAFETY: `head + steps * STEP <= len` for each piece, and each destination is aligned from `head` on.
    unsafe { stripes::<STRIPES, STRIPE_AHEAD, STREAM>(pieces.map(|piece| at(piece, head)), steps, next) };
    for piece in pieces {
        // SAFETY: as promised by the caller.
        unsafe { edges(piece, head, head + steps * STEP) };
    }
}

/// Returns the part of the piece from byte `skip` on. `skip` is at most its length.
fn at(piece: RawCopy, skip: usize) -> RawCopy {
    RawCopy {
        from: piece.from.wrapping_add(skip),
        to: piece.to.wrapping_add(skip),
        len: piece.len.saturating_sub(skip),
    }
}

/// Copies the bytes before `head`, and those from `tail` on.
///
/// # Safety
///
/// As for [`lone`], and `head <= tail <= len`.
unsafe fn edges(piece: RawCopy, head: usize, tail: usize) {
    // Most blocks have neither part, and a call that copies nothing would cost a block of 4 KiB a few
    // percent.
    if head > 0 {
        // SAFETY: `head <= len`.
        unsafe { piece.from.copy_to_nonoverlapping(piece.to, head) };
    }
    let rest = at(piece, tail);
    if rest.len > 0 {
        // SAFETY: `tail <= len`.
        unsafe { rest.from.copy_to_nonoverlapping(rest.to, rest.len) };
    }
}

/// Copies `steps` steps of every stripe, in turn. Each step prefetches what the stripe reads `AHEAD` bytes later,
/// first in the stripe itself and then in `next`.
///
/// # Safety
///
/// In every stripe, `steps * STEP` bytes are readable at the source and writable at the destination, and the
/// two do not overlap. The address of the destination is a multiple of 64. The range that `next` describes is
/// readable. The CPU has AVX2.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn stripes<const N: usize, const AHEAD: usize, const STREAM: bool>(
    pieces: [RawCopy; N],
    steps: usize,
    next: [Following; N],
) {
    let inside = steps.saturating_sub(AHEAD / STEP);
    for step in 0..inside {
        for piece in pieces {
            hint(piece.from.wrapping_add(step * STEP + AHEAD));
            // SAFETY: `step < steps`.
            unsafe { one_step::<STREAM>(piece, step) };
        }
    }
    for step in inside..steps {
        let ahead = (step - inside) * STEP;
        for (piece, next) in pieces.into_iter().zip(next) {
            if ahead + STEP <= next.len {
                hint(next.from.wrapping_add(ahead));
            }
            // SAFETY: `step < steps`.
            unsafe { one_step::<STREAM>(piece, step) };
        }
    }
}

/// Prefetches two cache lines from `from` on, without allocating them in the outer caches. Both lie inside a
/// window.
#[target_feature(enable = "avx2")]
#[inline]
#[allow(unused_unsafe, reason = "the hint is an unsafe function in the oldest Rust this builds with")]
fn hint(from: *const u8) {
    let from = from.cast::<i8>();
    // SAFETY: a prefetch is a hint and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_NTA>(from) };
    // SAFETY: a prefetch is a hint and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(64)) };
}

/// Copies step `step` of a stripe.
///
/// # Safety
///
/// As for [`stripes`], and `step` is less than its `steps`.
#[target_feature(enable = "avx2")]
#[inline]
#[expect(
    clippy::cast_ptr_alignment,
    reason = "the loads are unaligned ones, and the stripe is aligned for the stores"
)]
#[expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "one loop body: four loads and four stores of one step"
)]
unsafe fn one_step<const STREAM: bool>(piece: RawCopy, step: usize) {
    // SAFETY: `(step + 1) * STEP` bytes are readable and writable, and `to` is a multiple of 64.
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
