//! Copy kernels that process four pages at once, and prefetch.
//!
//! Whole steps of 128 bytes are copied through registers, by `avx2` or `neon`. The bytes before the first aligned byte of a
//! destination, and those after the last step, are copied by the C library. No address outside the windows
//! is used, not even in a prefetch.
//!
//! Streaming stores may be weakly ordered. So each entry point ends with a fence: without it, a thread that
//! learns of the end of the copy might not see the bytes.

#[cfg(target_arch = "x86_64")]
use super::avx2::{STEP, copy_step, prefetch, publish};
#[cfg(target_arch = "aarch64")]
use super::neon::{STEP, copy_step, prefetch, publish};

use super::plain::{Copy, RawCopies, RawCopy, RawRun, plain};

/// Number of stripes, which is the number of pages that are processed at once.
const STRIPES: usize = 4;
/// Prefetch distance of a single stripe in bytes. At the end of a piece it reaches into the next one.
const AHEAD: usize = 1024;
/// Prefetch distance of each of four stripes in bytes.
const STRIPE_AHEAD: usize = 256;
/// Pieces of at least this many bytes are cut into four stripes of 4 KiB or more. Of shorter pieces, four
/// become one stripe each. Hardware prefetchers stop at 4 KiB, whatever the page size.
const CUT: usize = STRIPES * 4096;

/// Maximum length of a short piece: four of them are prefetched ahead.
const SHORT: u64 = 512;

/// Returns the number of bytes before the first destination byte that starts a cache line, at most the whole
/// length.
fn head(piece: RawCopy) -> usize {
    piece.to.align_offset(64).min(piece.len)
}

/// Copies four stripes at once, which belong to one long piece or to four short ones, and other pieces one after the
/// other. Prefetches the pieces that follow. Uses streaming stores if `STREAM` is set.
///
/// # Safety
///
/// Every entry of `batch` is sound (`kernels::sound`), and an x86 CPU has AVX2.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
pub(super) unsafe fn copy<const STREAM: bool>(batch: &[Copy<'_>]) {
    if batch.first().is_some_and(|first| batch.iter().all(|entry| short(entry, first))) {
        for (index, entry) in batch.iter().enumerate() {
            let next = batch.get(index + 1).unwrap_or(entry);
            // SAFETY: both entries are sound and `short`, with pieces of the same length.
            unsafe { shorts::<STREAM>(RawRun::of(entry), RawRun::of(next)) };
        }
        publish();
        return;
    }
    let mut pieces = RawCopies::of(batch);
    // The next four pieces, and the four after these.
    let mut group = [RawCopy::NONE; 2 * STRIPES];
    let mut count = fill(&mut group, &mut pieces);
    while count > 0 {
        let (now, next) = ([0, 1, 2, 3].map(|at| group[at]), [4, 5, 6, 7].map(|at| group[at]));
        if alike(now) {
            // SAFETY: the pieces are those of sound entries. They do not overlap, and have the same length and
            // alignment, because they are `alike`.
            unsafe { together::<STREAM>(now, next) };
        } else {
            for (index, piece) in now.into_iter().enumerate().take(count) {
                let ahead = [1, STRIPES][usize::from(piece.len <= AHEAD / STRIPES)];
                // SAFETY: the piece belongs to a sound entry.
                unsafe { single::<STREAM>(piece, group[index + ahead]) };
            }
        }
        group.copy_within(STRIPES.., 0);
        count = count.saturating_sub(STRIPES);
        count += fill(&mut group[STRIPES..], &mut pieces);
    }
    publish();
}

/// Returns whether an entry has short pieces that are whole steps, as long as those of `first`. All destinations must
/// start a cache line, and no source may overlap a destination.
#[inline]
fn short(entry: &Copy<'_>, first: &Copy<'_>) -> bool {
    let (src, dst) = (entry.src, entry.dst);
    let len = src.first().len();
    let lines = dst.first().addr().is_multiple_of(64) && dst.step() % 64 == 0;
    let whole = len <= SHORT && len.is_multiple_of(STEP as u64) && len == first.src.first().len();
    whole && lines && !src.overlaps(&dst)
}

/// Copies short pieces, one after the other, and prefetches those that follow, at last those of `next`.
///
/// # Safety
///
/// Both runs belong to sound entries that are [`short`], with pieces of the same length. An x86 CPU has AVX2.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
unsafe fn shorts<const STREAM: bool>(run: RawRun, next: RawRun) {
    let steps = run.first.len / STEP;
    let inside = run.count.saturating_sub(STRIPES);
    for index in 0..run.count {
        let ahead = if index < inside {
            run.at(index + STRIPES)
        } else {
            next.at((index - inside).min(next.count.saturating_sub(1)))
        };
        for step in 0..steps {
            prefetch(ahead.from.wrapping_add(step * STEP));
            // SAFETY: `step < steps`, and each destination starts a cache line.
            unsafe { copy_step::<STREAM>(run.at(index), step) };
        }
    }
}

/// Fills `group` with the next pieces. Returns their number; the rest of the group is empty.
#[inline]
fn fill(group: &mut [RawCopy], pieces: &mut RawCopies<'_>) -> usize {
    let mut count = 0;
    for slot in group {
        let piece = pieces.next();
        count += usize::from(piece.is_some());
        *slot = piece.unwrap_or(RawCopy::NONE);
    }
    count
}

/// Returns whether four short pieces can form four stripes: their lengths are equal and not 0, their destinations have
/// the same offset from the start of a cache line, and none overlaps its own destination.
#[inline]
fn alike(four: [RawCopy; STRIPES]) -> bool {
    let first = four[0];
    let line = |piece: &RawCopy| piece.to.addr() % 64;
    let fits = |piece: &RawCopy| piece.len == first.len && line(piece) == line(&first) && !piece.overlaps();
    (1..CUT).contains(&first.len) && four.iter().all(fits)
}

/// Copies one piece, a long one as four stripes.
///
/// # Safety
///
/// `from..from + len` is readable and `to..to + len` is writable. `next` is readable. An x86 CPU has AVX2.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
unsafe fn single<const STREAM: bool>(piece: RawCopy, next: RawCopy) {
    if piece.len >= CUT && !piece.overlaps() {
        // SAFETY: as promised by the caller, and the two do not overlap.
        unsafe { cut::<STREAM>(piece, next) };
    } else if STREAM && !piece.overlaps() {
        // SAFETY: as above.
        unsafe { lone(piece, next) };
    } else {
        // SAFETY: as promised by the caller.
        unsafe { plain(piece) };
    }
}

/// Copies one piece as one stripe, with streaming stores.
///
/// # Safety
///
/// `from..from + len` is readable, `to..to + len` is writable, the two do not overlap, and an x86 CPU has AVX2.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
unsafe fn lone(piece: RawCopy, next: RawCopy) {
    let head = head(piece);
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
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
unsafe fn cut<const STREAM: bool>(piece: RawCopy, next: RawCopy) {
    let head = head(piece);
    let stripe = (piece.len - head) / (STRIPES * STEP) * STEP;
    let next_stripe = next.len / (STRIPES * STEP) * STEP;
    let next = [0, 1, 2, 3].map(|index| match next_stripe {
        0 => RawCopy::NONE,
        // Inside the next piece, because `index * next_stripe < next.len`.
        len => RawCopy { len, ..at(next, index * next_stripe) },
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
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
unsafe fn together<const STREAM: bool>(pieces: [RawCopy; STRIPES], next: [RawCopy; STRIPES]) {
    let head = head(pieces[0]);
    let steps = (pieces[0].len - head) / STEP;
    // SAFETY: `head + steps * STEP <= len` for each piece, and each destination is aligned from `head` on.
    unsafe { stripes::<STRIPES, STRIPE_AHEAD, STREAM>(pieces.map(|piece| at(piece, head)), steps, next) };
    for piece in pieces {
        // SAFETY: as promised by the caller.
        unsafe { edges(piece, head, head + steps * STEP) };
    }
}

/// Returns the part of the piece from byte `skip` on. `skip` is at most its length.
#[inline]
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
/// two do not overlap. The address of the destination is a multiple of 64. The sources of `next` are readable. An x86
/// CPU has AVX2.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
#[inline]
unsafe fn stripes<const N: usize, const AHEAD: usize, const STREAM: bool>(
    pieces: [RawCopy; N],
    steps: usize,
    next: [RawCopy; N],
) {
    let inside = steps.saturating_sub(AHEAD / STEP);
    for step in 0..inside {
        for piece in pieces {
            prefetch(piece.from.wrapping_add(step * STEP + AHEAD));
            // SAFETY: `step < steps`.
            unsafe { copy_step::<STREAM>(piece, step) };
        }
    }
    for step in inside..steps {
        let ahead = (step - inside) * STEP;
        for (piece, next) in pieces.into_iter().zip(next) {
            if ahead + STEP <= next.len {
                prefetch(next.from.wrapping_add(ahead));
            }
            // SAFETY: `step < steps`.
            unsafe { copy_step::<STREAM>(piece, step) };
        }
    }
}
