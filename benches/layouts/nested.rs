//! Copy loops written by hand that compute the address of each piece in two nested loops over every block.
//!
//! Nothing here is used by the library.

use std::sync::atomic::{AtomicUsize, Ordering};

/// One of the two loops over a block.
#[derive(Clone, Copy)]
pub struct Dimension {
    pub count: u64,
    pub src_step: u64,
    pub dst_step: u64,
}

impl Dimension {
    pub const ONE: Dimension = Dimension { count: 1, src_step: 0, dst_step: 0 };
}

/// The pieces of all blocks. `offsets` has the addresses of the first piece of each block.
pub struct Nest {
    pub offsets: Vec<(u64, u64)>,
    pub outer: Dimension,
    pub inner: Dimension,
    pub len: usize,
}

/// Copies the pieces of one run: source, destination, steps and their number, length of a piece.
type Run = fn((u64, u64), Dimension, usize);

impl Nest {
    /// Copies all pieces with `threads` threads, each of which takes some blocks at a time.
    pub fn run(&self, copy: Run, threads: usize, swapped: bool) {
        let (outer, inner) = if swapped { (self.inner, self.outer) } else { (self.outer, self.inner) };
        let block = (outer.count * inner.count) as usize * self.len;
        let fair = self.offsets.len().div_ceil(threads).max(1);
        let chunk = fair.min((super::hand::CHUNK / block).max(1));
        let next = AtomicUsize::new(0);
        let work = || {
            let take = || self.offsets.chunks(chunk).nth(next.fetch_add(1, Ordering::Relaxed));
            while let Some(some) = take() {
                for &(src, dst) in some {
                    for at in 0..outer.count {
                        copy((src + at * outer.src_step, dst + at * outer.dst_step), inner, self.len);
                    }
                }
            }
            fence();
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
    }
}

fn plain((mut src, mut dst): (u64, u64), steps: Dimension, len: usize) {
    for _ in 0..steps.count {
        // SAFETY: a piece of live tensors of a benchmark.
        unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, len) };
        (src, dst) = (src + steps.src_step, dst + steps.dst_step);
    }
}

#[cfg(not(target_arch = "x86_64"))]
use {plain as stores, plain as streaming, plain as ahead, plain as stores_ahead};

#[cfg(not(target_arch = "x86_64"))]
fn fence() {}

#[cfg(target_arch = "x86_64")]
use avx2::{ahead, fence, stores, stores_ahead, streaming};

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_NTA, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_storeu_si256,
        _mm256_stream_si256,
    };

    use super::Dimension;

    /// Copies pieces of `len` bytes, and prefetches the same byte of the piece `DISTANCE` bytes ahead.
    #[target_feature(enable = "avx2")]
    #[inline]
    #[allow(unused_unsafe, reason = "the hint is an unsafe function in the oldest Rust this builds with")]
    unsafe fn pieces<const STREAM: bool, const DISTANCE: usize>(
        (mut src, mut dst): (u64, u64),
        steps: Dimension,
        len: usize,
    ) {
        let next = (DISTANCE.div_ceil(len)) as u64 * steps.src_step;
        for _ in 0..steps.count {
            for at in (0..len).step_by(128) {
                let (from, to) = ((src + at as u64) as *const __m256i, (dst + at as u64) as *mut __m256i);
                if DISTANCE > 0 {
                    let hint = from.cast::<i8>().wrapping_add(next as usize);
                    // SAFETY: hints never fault.
                    unsafe { _mm_prefetch::<_MM_HINT_NTA>(hint) };
                    // SAFETY: as above.
                    unsafe { _mm_prefetch::<_MM_HINT_NTA>(hint.wrapping_add(64)) };
                }
                // SAFETY: inside a piece, which is a multiple of 128 bytes long and aligned to 128 bytes.
                unsafe {
                    let four = [0, 1, 2, 3].map(|part| _mm256_loadu_si256(from.add(part)));
                    for (part, bytes) in four.into_iter().enumerate() {
                        if STREAM {
                            _mm256_stream_si256(to.add(part), bytes);
                        } else {
                            _mm256_storeu_si256(to.add(part), bytes);
                        }
                    }
                }
            }
            (src, dst) = (src + steps.src_step, dst + steps.dst_step);
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn go<const STREAM: bool, const DISTANCE: usize>(at: (u64, u64), steps: Dimension, len: usize) {
        // SAFETY: as promised by the caller. The common length is a constant, as a programmer would write it.
        unsafe {
            match len {
                256 => pieces::<STREAM, DISTANCE>(at, steps, 256),
                _ => pieces::<STREAM, DISTANCE>(at, steps, len),
            }
        }
    }

    /// Orders the streaming stores of this thread before what follows.
    pub fn fence() {
        // SAFETY: needs nothing.
        unsafe { _mm_sfence() };
    }

    pub fn stores(at: (u64, u64), steps: Dimension, len: usize) {
        // SAFETY: every machine this benchmark is read on has AVX2, and the pieces are those of live tensors.
        unsafe { go::<false, 0>(at, steps, len) };
    }

    pub fn stores_ahead(at: (u64, u64), steps: Dimension, len: usize) {
        // SAFETY: as in `stores`.
        unsafe { go::<false, 1024>(at, steps, len) };
    }

    pub fn streaming(at: (u64, u64), steps: Dimension, len: usize) {
        // SAFETY: as in `stores`.
        unsafe { go::<true, 0>(at, steps, len) };
    }

    pub fn ahead(at: (u64, u64), steps: Dimension, len: usize) {
        // SAFETY: as in `stores`.
        unsafe { go::<true, 1024>(at, steps, len) };
    }
}

/// The loops, each with its threads, and whether the heads are the outer loop.
pub const NESTED: [(&str, Run, usize, bool); 11] = [
    ("by token, memcpy x2", plain, 2, false),
    ("by token, stores x2", stores, 2, false),
    ("by token, hinted x2", stores_ahead, 2, false),
    ("by token, stream x2", streaming, 2, false),
    ("by token, ahead x2", ahead, 2, false),
    ("by head, memcpy x2", plain, 2, true),
    ("by head, stores x2", stores, 2, true),
    ("by head, hinted x2", stores_ahead, 2, true),
    ("by head, stream x2", streaming, 2, true),
    ("by head, ahead x2", ahead, 2, true),
    ("by token, ahead x1", ahead, 1, false),
];
