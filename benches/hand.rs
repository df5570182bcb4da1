//! What the benchmarks compare with: copy loops as a careful person would write them by hand, and the order of rounds.
//!
//! Not for: anything the library uses.

#![allow(dead_code, reason = "each benchmark uses what it needs")]

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

type Loop = fn(u64, u64, usize);

fn plain(src: u64, dst: u64, len: usize) {
    // SAFETY: the addresses are blocks of two live caches of a benchmark, `len` bytes each.
    unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, len) };
}

#[cfg(target_arch = "x86_64")]
fn streaming(src: u64, dst: u64, len: usize) {
    #[target_feature(enable = "avx2")]
    unsafe fn go(src: *const u8, dst: *mut u8, len: usize) {
        use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
        for at in (0..len).step_by(128) {
            // SAFETY: whole blocks, aligned to a page, a multiple of 128 bytes.
            unsafe {
                let (from, to) = (src.add(at).cast::<__m256i>(), dst.add(at).cast::<__m256i>());
                let four = [0, 1, 2, 3].map(|part| _mm256_loadu_si256(from.add(part)));
                for (part, bytes) in four.into_iter().enumerate() {
                    _mm256_stream_si256(to.add(part), bytes);
                }
            }
        }
        _mm_sfence();
    }
    // SAFETY: as above; every machine this benchmark is read on has AVX2.
    unsafe { go(src as *const u8, dst as *mut u8, len) };
}

#[cfg(not(target_arch = "x86_64"))]
fn streaming(src: u64, dst: u64, len: usize) {
    plain(src, dst, len);
}

/// Copies everything of `flat` with `threads` threads.
pub fn loop_over(flat: &Flat, threads: usize, copy: Loop) {
    std::thread::scope(|scope| {
        let share = flat.moves.len().div_ceil(threads);
        let mut parts = flat.moves.chunks(share);
        let mine = parts.next().unwrap_or_default();
        for part in parts {
            scope.spawn(move || part.iter().for_each(|&(src, dst)| copy(src, dst, flat.len)));
        }
        for &(src, dst) in mine {
            copy(src, dst, flat.len);
        }
    });
}

/// The hand-written loops, each with its threads: over the list as it is, and over the list sorted by source.
pub const LOOPS: [(&str, Loop, usize, bool); 6] = [
    ("memcpy x1", plain, 1, false),
    ("memcpy x2", plain, 2, false),
    ("stream x1", streaming, 1, false),
    ("stream x2", streaming, 2, false),
    ("sorted stream x1", streaming, 1, true),
    ("sorted stream x2", streaming, 2, true),
];

/// Seconds of `call`.
pub fn timed(call: impl FnOnce()) -> f64 {
    let started = Instant::now();
    call();
    started.elapsed().as_secs_f64()
}

pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Waits until nobody else uses much of the machine, or until `patience` is used up; whether it is quiet.
pub fn quiet(patience: &mut Duration) -> bool {
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
        if patience.is_zero() {
            return false;
        }
        *patience = patience.saturating_sub(QUIET);
    }
}

/// How long the machine is watched: a few of the ticks the kernel counts in.
const QUIET: Duration = Duration::from_millis(60);
