//! Measures the cost of a request to the pool, compared with a public crate that does the same.
//! Run it with `cargo bench --bench pool`.
//!
//! Every contender runs the same requests on the same fragmented pool: 100,000 live ranges of typical sizes
//! of KV caches, which are left after half of 200,000 ranges, chosen at random, were freed. A refused request
//! ends the run, so that no figure results from doing nothing. `crates/core/tests/integration/pool.rs` tests
//! correctness.
#![allow(clippy::panic, reason = "a bench that measures nothing must stop")]

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use llm_datadist_core::testing::pool::{Extent, Pool};

const SHIFT: u32 = 16;
const LIVE: usize = 100_000;
/// Number of recorded sizes and victims; a power of two.
const PLAY: usize = 1 << 16;
const TENSORS: u32 = 80;
const TENSOR_PAGES: u32 = 16;

trait Contender {
    const NAME: &'static str;
    type Range;
    fn new(pages: u32) -> Self;
    fn allocate(&mut self, pages: u32) -> Option<Self::Range>;
    fn free(&mut self, range: Self::Range);
    fn free_pages(&self) -> u32;
}

impl Contender for Pool {
    const NAME: &'static str = "ours";
    type Range = Extent;
    fn new(pages: u32) -> Self {
        Pool::new(u64::from(pages) << SHIFT, SHIFT).unwrap_or_else(|error| panic!("{error}"))
    }
    fn allocate(&mut self, pages: u32) -> Option<Extent> {
        Pool::allocate(self, u64::from(pages) << SHIFT)
    }
    fn free(&mut self, range: Extent) {
        Pool::free(self, range);
    }
    fn free_pages(&self) -> u32 {
        u32::try_from(self.state().free_bytes >> SHIFT).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl Contender for offset_allocator::Allocator {
    const NAME: &'static str = "offset-allocator";
    type Range = offset_allocator::Allocation;
    fn new(pages: u32) -> Self {
        Self::with_max_allocs(pages, 1 << 20)
    }
    fn allocate(&mut self, pages: u32) -> Option<Self::Range> {
        self.allocate(pages)
    }
    fn free(&mut self, range: Self::Range) {
        self.free(range);
    }
    fn free_pages(&self) -> u32 {
        self.storage_report().total_free_space
    }
}

/// A small xorshift: the same numbers in every run and for every contender.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap_or(0) % limit
    }

    /// Pages of one tensor: 64 KiB to 8 MiB, mostly small, half of them no power of two.
    fn pages(&mut self) -> u32 {
        const SIZES: [u32; 16] = [1, 1, 2, 2, 3, 4, 5, 8, 10, 16, 20, 32, 33, 64, 80, 128];
        SIZES[self.below(SIZES.len())]
    }
}

fn must<R>(range: Option<R>) -> R {
    range.unwrap_or_else(|| panic!("the pool refused: nothing was measured"))
}

/// A pool with `LIVE` live ranges between as many freed ones.
fn fragmented<C: Contender>() -> (C, Vec<C::Range>) {
    let mut dice = Dice(0x9E37_79B9_7F4A_7C15);
    let sizes: Vec<u32> = (0..2 * LIVE).map(|_| dice.pages()).collect();
    // Slightly more than the sum: `offset-allocator` rounds a request up and cannot allocate the last piece
    // exactly.
    let total = sizes.iter().sum::<u32>() + 64;
    let mut pool = C::new(total);
    let mut live: Vec<C::Range> = sizes.iter().map(|pages| must(pool.allocate(*pages))).collect();
    for _ in 0..LIVE {
        let victim = dice.below(live.len());
        pool.free(live.swap_remove(victim));
    }
    assert_eq!(live.len(), LIVE);
    assert!(pool.free_pages() > total / 3, "half of the pool came back");
    (pool, live)
}

/// `pair_mixed`: allocate and free, with mixed sizes. `pair_same`: one size, last in first out.
/// `churn_mixed`: free a range chosen at random and allocate another size, including the cache misses.
fn single<C: Contender>(group: &mut BenchmarkGroup<'_, WallTime>) {
    let mut dice = Dice(42);
    let sizes: Vec<u32> = (0..PLAY).map(|_| dice.pages()).collect();
    let victims: Vec<usize> = (0..PLAY).map(|_| dice.below(LIVE)).collect();
    let (mut pool, mut live) = fragmented::<C>();

    let mut step = 0;
    group.bench_function(format!("pair_mixed/{}", C::NAME), |bencher| {
        bencher.iter(|| {
            step = (step + 1) % PLAY;
            let range = must(pool.allocate(black_box(sizes[step])));
            pool.free(black_box(range));
        });
    });
    group.bench_function(format!("pair_same/{}", C::NAME), |bencher| {
        bencher.iter(|| {
            let range = must(pool.allocate(black_box(TENSOR_PAGES)));
            pool.free(black_box(range));
        });
    });
    group.bench_function(format!("churn_mixed/{}", C::NAME), |bencher| {
        bencher.iter(|| {
            step = (step + 1) % PLAY;
            pool.free(live.swap_remove(victims[step]));
            live.push(must(pool.allocate(black_box(sizes[step]))));
        });
    });
    assert!(step > 0 && live.len() == LIVE);
}

/// Allocates and frees a cache of 80 tensors of 1 MiB, on the fragmented pool (no run holds all) and on an
/// empty one.
fn tensors<C: Contender>(group: &mut BenchmarkGroup<'_, WallTime>) {
    for (state, mut pool) in [("fragmented", fragmented::<C>().0), ("empty", C::new(1 << 20))] {
        let mut taken = Vec::with_capacity(TENSORS as usize);
        group.bench_function(format!("80_tensors_one_by_one/{state}/{}", C::NAME), |bencher| {
            bencher.iter(|| {
                taken.extend((0..TENSORS).map(|_| must(pool.allocate(black_box(TENSOR_PAGES)))));
                taken.drain(..).for_each(|range| pool.free(range));
            });
        });
    }
}

fn tensors_at_once(group: &mut BenchmarkGroup<'_, WallTime>) {
    let empty = <Pool as Contender>::new(1 << 20);
    for (state, mut pool) in [("fragmented", fragmented::<Pool>().0), ("empty", empty)] {
        let bytes = u64::from(TENSOR_PAGES) << SHIFT;
        let once = pool.allocate_tensors(bytes, TENSORS).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(once.len() > 1, state == "fragmented", "no run holds all in a fragmented pool");
        for extent in once {
            Contender::free(&mut pool, extent);
        }
        group.bench_function(format!("80_tensors_at_once/{state}/ours"), |bencher| {
            bencher.iter(|| {
                let extents = pool
                    .allocate_tensors(black_box(bytes), TENSORS)
                    .unwrap_or_else(|error| panic!("nothing was measured: {error}"));
                assert_eq!(
                    extents.iter().map(|extent| extent.bytes).sum::<u64>(),
                    bytes * u64::from(TENSORS)
                );
                for extent in extents {
                    Contender::free(&mut pool, extent);
                }
            });
        });
    }
}

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3))
        .configure_from_args();
    let mut group = criterion.benchmark_group("pool");
    single::<Pool>(&mut group);
    single::<offset_allocator::Allocator>(&mut group);
    tensors_at_once(&mut group);
    tensors::<Pool>(&mut group);
    tensors::<offset_allocator::Allocator>(&mut group);
    group.finish();
    criterion.final_summary();
}
