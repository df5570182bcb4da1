//! Reference copy loops, written by hand, and the order of rounds.
//!
//! Nothing here is used by the library.

#![allow(dead_code, reason = "each benchmark uses what it needs")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A small generator, so that the list of blocks is the same in every run.
pub struct Shuffle(pub u64);

impl Shuffle {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn order(&mut self, count: u64) -> Vec<i64> {
        let mut list: Vec<i64> = (0..count as i64).collect();
        for at in (1..list.len()).rev() {
            list.swap(at, (self.next() % (at as u64 + 1)) as usize);
        }
        list
    }
}

/// What one hand-written loop copies: addresses and one length.
pub struct Flat {
    pub moves: Vec<(u64, u64)>,
    pub len: usize,
}

impl Flat {
    /// The same list in order of the source.
    pub fn sorted(&self) -> Flat {
        let mut moves = self.moves.clone();
        moves.sort_unstable();
        Flat { moves, len: self.len }
    }
}

/// Copies blocks of one length, a multiple of 512, each from and to a whole page.
type Loop = fn(&[(u64, u64)], usize);

fn plain(moves: &[(u64, u64)], len: usize) {
    for &(src, dst) in moves {
        // SAFETY: the addresses are blocks of two live caches of a benchmark, `len` bytes each.
        unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, len) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
use {plain as streaming, plain as ahead, plain as interleaved};

#[cfg(target_arch = "x86_64")]
use stores::{ahead, interleaved, streaming};

/// Streaming stores: in plain order; with prefetch, also into the next block; four pages in turn.
#[cfg(target_arch = "x86_64")]
mod stores {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_NTA, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256,
    };

    const STEP: usize = 128;

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn step(src: u64, dst: u64, at: usize) {
        // SAFETY: inside a block, see `Loop`.
        unsafe {
            let (from, to) = ((src + at as u64) as *const __m256i, (dst + at as u64) as *mut __m256i);
            let four = [0, 1, 2, 3].map(|part| _mm256_loadu_si256(from.add(part)));
            for (part, bytes) in four.into_iter().enumerate() {
                _mm256_stream_si256(to.add(part), bytes);
            }
        }
    }

    #[inline]
    #[allow(unused_unsafe, reason = "the hint is an unsafe function in the oldest Rust this builds with")]
    fn hint(src: u64, at: usize) {
        let from = (src + at as u64) as *const i8;
        // SAFETY: hints never fault.
        unsafe { (_mm_prefetch::<_MM_HINT_NTA>(from), _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(64))) };
    }

    pub fn streaming(moves: &[(u64, u64)], len: usize) {
        #[target_feature(enable = "avx2")]
        unsafe fn go(moves: &[(u64, u64)], len: usize) {
            for &(src, dst) in moves {
                for at in (0..len).step_by(STEP) {
                    // SAFETY: inside a block.
                    unsafe { step(src, dst, at) };
                }
            }
            _mm_sfence();
        }
        // SAFETY: every machine this benchmark is read on has AVX2.
        unsafe { go(moves, len) };
    }

    pub fn ahead(moves: &[(u64, u64)], len: usize) {
        #[target_feature(enable = "avx2")]
        unsafe fn go(moves: &[(u64, u64)], len: usize) {
            let inside = len - 1024.min(len);
            for (index, &(src, dst)) in moves.iter().enumerate() {
                let next = moves.get(index + 1).map_or(src, |next| next.0);
                for at in (0..inside).step_by(STEP) {
                    hint(src, at + 1024);
                    // SAFETY: inside a block.
                    unsafe { step(src, dst, at) };
                }
                for at in (inside..len).step_by(STEP) {
                    hint(next, at - inside);
                    // SAFETY: inside a block.
                    unsafe { step(src, dst, at) };
                }
            }
            _mm_sfence();
        }
        // SAFETY: as in `streaming`.
        unsafe { go(moves, len) };
    }

    pub fn interleaved(moves: &[(u64, u64)], len: usize) {
        #[target_feature(enable = "avx2")]
        unsafe fn go(streams: [(u64, u64); 4], len: usize, next: [(u64, u64); 4]) {
            let inside = len - 256.min(len);
            for at in (0..len).step_by(STEP) {
                for (stream, next) in streams.iter().zip(next) {
                    let (from, skip) = if at < inside { (stream.0, at + 256) } else { (next.0, at - inside) };
                    hint(from, skip);
                    // SAFETY: inside a block.
                    unsafe { step(stream.0, stream.1, at) };
                }
            }
        }
        // SAFETY: as in `streaming`.
        let four = |streams, len, next: Option<_>| unsafe { go(streams, len, next.unwrap_or(streams)) };
        if len >= 16 << 10 {
            let stream = (len / 4) as u64;
            let streams =
                |&(src, dst): &(u64, u64)| [0, 1, 2, 3].map(|at| (src + at * stream, dst + at * stream));
            for (index, block) in moves.iter().enumerate() {
                four(streams(block), len / 4, moves.get(index + 1).map(streams));
            }
        } else {
            let (fours, rest) = moves.as_chunks::<4>();
            for (index, &streams) in fours.iter().enumerate() {
                four(streams, len, fours.get(index + 1).copied());
            }
            streaming(rest, len);
        }
        // SAFETY: as in `streaming`.
        unsafe { _mm_sfence() };
    }
}

/// Bytes that a thread takes at a time. A thread that is done takes the next chunk, so none waits for a
/// slower one.
pub const CHUNK: usize = 512 << 10;

/// Copies everything of `flat` with `threads` threads.
pub fn loop_over(flat: &Flat, threads: usize, copy: Loop) {
    let fair = flat.moves.len().div_ceil(threads).max(1);
    let chunk = if threads == 1 { fair } else { fair.min((CHUNK / flat.len).max(1)) };
    let next = AtomicUsize::new(0);
    let work = || {
        let take = || flat.moves.chunks(chunk).nth(next.fetch_add(1, Ordering::Relaxed));
        while let Some(some) = take() {
            copy(some, flat.len);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
}

/// The hand-written loops, each with its threads: over the list as it is, and over the list sorted by source.
pub const LOOPS: [(&str, Loop, usize, bool); 16] = [
    ("memcpy x1", plain, 1, false),
    ("memcpy x2", plain, 2, false),
    ("stream x1", streaming, 1, false),
    ("stream x2", streaming, 2, false),
    ("ahead x1", ahead, 1, false),
    ("ahead x2", ahead, 2, false),
    ("four x1", interleaved, 1, false),
    ("four x2", interleaved, 2, false),
    ("sorted memcpy x1", plain, 1, true),
    ("sorted memcpy x2", plain, 2, true),
    ("sorted stream x1", streaming, 1, true),
    ("sorted stream x2", streaming, 2, true),
    ("sorted ahead x1", ahead, 1, true),
    ("sorted ahead x2", ahead, 2, true),
    ("sorted four x1", interleaved, 1, true),
    ("sorted four x2", interleaved, 2, true),
];

/// Returns the duration of `call` in seconds.
pub fn timed(call: impl FnOnce()) -> f64 {
    let started = Instant::now();
    call();
    started.elapsed().as_secs_f64()
}

pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Waits until other processes use little of the machine, or until `time_left` is used up. Returns whether it
/// is quiet.
pub fn quiet(time_left: &mut Duration) -> bool {
    let ticks = || -> (u64, u64) {
        let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let all: Vec<u64> = text
            .lines()
            .next()
            .unwrap_or("")
            .split_whitespace()
            .skip(1)
            .map_while(|word| word.parse().ok())
            .collect();
        (all.iter().sum(), all.get(3..5).map_or(0, |idle| idle.iter().sum()))
    };
    loop {
        let (all, idle) = ticks();
        std::thread::sleep(QUIET);
        let (all, idle) = (ticks().0 - all, ticks().1 - idle);
        if idle * 10 >= all * 8 {
            return true;
        }
        if time_left.is_zero() {
            return false;
        }
        *time_left = time_left.saturating_sub(QUIET);
    }
}

/// How long the machine is observed: a few ticks of the kernel's CPU accounting.
const QUIET: Duration = Duration::from_millis(60);
