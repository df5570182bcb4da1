//! Copies of pieces one after the other or four pages at once (`x86_64` with AVX2), each reading ahead.
//!
//! Whole steps of 128 bytes go through registers; what is before the first aligned byte of a destination, and behind the
//! last step, is copied as the C library does. Nothing outside the windows is named, not even by a hint. Streaming stores
//! are weakly ordered, so each entrance ends with a fence: without it, whoever is told of the end might not see the bytes.
//! Not for: what may be copied (`kernels`).

use std::arch::x86_64::{
    __m256i, _MM_HINT_NTA, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_store_si256,
    _mm256_stream_si256,
};

use super::plain::{Copy, plain};

/// Bytes of one step: two lines, four loads and four stores.
const STEP: usize = 128;
/// Executor of the interleaved kernel: as many pages as are under way.
const LANES: usize = 4;
/// How far ahead the lone lane reads, into the next piece where its own ends.
const AHEAD: usize = 1024;
/// How far ahead each of four lanes reads.
const LANE_AHEAD: usize = 256;
/// A piece of this many bytes is cut into lanes of a page and more; shorter ones become lanes themselves, four at once.
const CUT: usize = LANES * 4096;

/// One piece: the windows of a [`Copy`] as pointers.
#[derive(Clone, Copy)]
struct Piece {
    from: *const u8,
    to: *mut u8,
    len: usize,
}

impl Piece {
    fn of(copy: &Copy<'_>) -> Piece {
        // A window lies in an address space, so its length fits.
        let len = usize::try_from(copy.src.len()).unwrap_or(0);
        Piece { from: copy.src.addr() as *const u8, to: copy.dst.addr() as *mut u8, len }
    }

    /// Bytes before the first destination byte that starts a line, or all.
    fn head(self) -> usize {
        self.to.align_offset(64).min(self.len)
    }
}

/// What is read after a lane: its first byte and its length, to be hinted at.
#[derive(Clone, Copy)]
struct Next {
    from: *const u8,
    len: usize,
}

impl Next {
    const NONE: Next = Next { from: std::ptr::null(), len: 0 };

    fn of(copy: Option<&Copy<'_>>) -> Next {
        copy.map_or(Next::NONE, |copy| {
            let Piece { from, len, .. } = Piece::of(copy);
            Next { from, len }
        })
    }
}

/// Piece after piece with streaming stores, each reading ahead into the next.
///
/// # Safety
///
/// Every pair of `batch` is sound (`kernel::sound`), and the CPU has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn one(batch: &[Copy<'_>]) {
    for (index, copy) in batch.iter().enumerate() {
        if copy.src.overlaps(&copy.dst) {
            plain(copy);
        } else {
            // SAFETY: the windows are inside live tensors (promise 3), equally long because sound, and apart.
            unsafe { lone(Piece::of(copy), Next::of(batch.get(index + 1))) };
        }
    }
    _mm_sfence();
}

/// Four lanes at once, of one long piece or four short ones: with streaming stores, or else ordinary ones.
///
/// # Safety
///
/// As of [`one`].
#[target_feature(enable = "avx2")]
pub(super) unsafe fn four<const STREAM: bool>(batch: &[Copy<'_>]) {
    let mut rest = batch;
    while let Some((first, others)) = rest.split_first() {
        let four = rest.first_chunk::<LANES>().filter(|four| alike(four));
        if first.src.overlaps(&first.dst) {
            plain(first);
            rest = others;
        } else if first.src.len() >= CUT as u64 {
            // SAFETY: the windows are inside live tensors (promise 3), equally long because sound, and apart.
            unsafe { cut::<STREAM>(Piece::of(first), Next::of(others.first())) };
            rest = others;
        } else if let Some(four) = four {
            let next = rest.get(LANES..).unwrap_or_default();
            let next = [0, 1, 2, 3].map(|lane| Next::of(next.get(lane)));
            // SAFETY: as above for each of the four; equally long and aligned because alike.
            unsafe { together::<STREAM>(four.each_ref().map(Piece::of), next) };
            rest = rest.get(LANES..).unwrap_or_default();
        } else if STREAM {
            // SAFETY: as above.
            unsafe { lone(Piece::of(first), Next::of(others.first())) };
            rest = others;
        } else {
            plain(first);
            rest = others;
        }
    }
    _mm_sfence();
}

/// Whether four short pieces can be four lanes: equally long, and equally far from the start of a line where they are
/// written, none onto itself.
fn alike(four: &[Copy<'_>; LANES]) -> bool {
    let len = four[0].src.len();
    let line = |copy: &Copy<'_>| copy.dst.addr() % 64;
    let fits = |copy: &Copy<'_>| {
        copy.src.len() == len && line(copy) == line(&four[0]) && !copy.src.overlaps(&copy.dst)
    };
    len < CUT as u64 && four.iter().all(fits)
}

/// One piece as one lane, with streaming stores.
///
/// # Safety
///
/// `from..from + len` is readable, `to..to + len` writable, they do not overlap; the CPU has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn lone(piece: Piece, next: Next) {
    let head = piece.head();
    let steps = (piece.len - head) / STEP;
    // SAFETY: `head + steps * STEP <= len`, and the destination is aligned from `head` on.
    unsafe { lanes::<1, AHEAD, true>([at(piece, head)], steps, [next]) };
    // SAFETY: as promised by the caller.
    unsafe { edges(piece, head, head + steps * STEP) };
}

/// One piece as four lanes of equal length.
///
/// # Safety
///
/// As of [`lone`].
#[target_feature(enable = "avx2")]
unsafe fn cut<const STREAM: bool>(piece: Piece, next: Next) {
    let head = piece.head();
    let lane = (piece.len - head) / (LANES * STEP) * STEP;
    let next_lane = next.len / (LANES * STEP) * STEP;
    let next = [0, 1, 2, 3].map(|index| match next_lane {
        0 => Next::NONE,
        // Inside the next window, because `index * next_lane < next.len`.
        len => Next { from: next.from.wrapping_add(index * next_lane), len },
    });
    let pieces = [0, 1, 2, 3].map(|index| at(piece, head + index * lane));
    // SAFETY: the four lanes end at `head + 4 * lane <= len`; each starts at a multiple of 64 because the first does.
    unsafe { lanes::<LANES, LANE_AHEAD, STREAM>(pieces, lane / STEP, next) };
    // SAFETY: as promised by the caller.
    unsafe { edges(piece, head, head + LANES * lane) };
}

/// Four pieces as four lanes.
///
/// # Safety
///
/// As of [`lone`] for each; all are equally long and their destinations equally far from the start of a line.
#[target_feature(enable = "avx2")]
unsafe fn together<const STREAM: bool>(pieces: [Piece; LANES], next: [Next; LANES]) {
    let head = pieces[0].head();
    let steps = (pieces[0].len - head) / STEP;
    // SAFETY: `head + steps * STEP <= len` of each, and each destination is aligned from `head` on.
    unsafe { lanes::<LANES, LANE_AHEAD, STREAM>(pieces.map(|piece| at(piece, head)), steps, next) };
    for piece in pieces {
        // SAFETY: as promised by the caller.
        unsafe { edges(piece, head, head + steps * STEP) };
    }
}

/// The same piece from byte `skip` on. `skip` is at most its length.
fn at(piece: Piece, skip: usize) -> Piece {
    Piece {
        from: piece.from.wrapping_add(skip),
        to: piece.to.wrapping_add(skip),
        len: piece.len.saturating_sub(skip),
    }
}

/// What is before `head` and from `tail` on.
///
/// # Safety
///
/// As of [`lone`], and `head <= tail <= len`.
unsafe fn edges(piece: Piece, head: usize, tail: usize) {
    // Most blocks have neither, and a call that copies nothing costs a block of 4 KiB some percent.
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

/// `steps` steps of every lane, in turn, each hinting at what it reads `AHEAD` bytes later: in its own lane, then in
/// `next`.
///
/// # Safety
///
/// Of every lane `steps * STEP` bytes are readable and writable, sources apart from their destinations, and the
/// destination is a multiple of 64; what `next` names is readable; the CPU has AVX2.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn lanes<const N: usize, const AHEAD: usize, const STREAM: bool>(
    pieces: [Piece; N],
    steps: usize,
    next: [Next; N],
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

/// Asks for the two lines from `from` on, without a place in the outer caches; both are inside a window.
#[target_feature(enable = "avx2")]
#[inline]
#[allow(unused_unsafe, reason = "the hint is an unsafe function in the oldest Rust this builds with")]
fn hint(from: *const u8) {
    let from = from.cast::<i8>();
    // SAFETY: a hint; it never faults.
    unsafe { _mm_prefetch::<_MM_HINT_NTA>(from) };
    // SAFETY: a hint; it never faults.
    unsafe { _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(64)) };
}

/// Step `step` of a lane.
///
/// # Safety
///
/// The lane has more than `step` steps, as [`lanes`] says.
#[target_feature(enable = "avx2")]
#[inline]
#[expect(
    clippy::cast_ptr_alignment,
    reason = "the loads are unaligned ones, and the lane is aligned for the stores"
)]
#[expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "one loop body: four loads and four stores of one step"
)]
unsafe fn one_step<const STREAM: bool>(piece: Piece, step: usize) {
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
