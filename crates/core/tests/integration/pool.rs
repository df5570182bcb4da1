//! The pool of ranges: single facts, and random requests compared with a naive twin.

use std::ops::Range;

use llm_datadist_core::ErrorKind;
use llm_datadist_core::testing::pool::{Extent, Pool, PoolState};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};

use crate::fixtures::{Tally, proptest_cases};

const SHIFT: u32 = 10;
const PAGE: u64 = 1 << SHIFT;

fn pool_of(pages: u64) -> Pool {
    Pool::new(pages * PAGE, SHIFT).unwrap()
}

#[test]
fn capacity_and_page_shift_are_checked() {
    let limit = u64::from(u32::MAX) << 10;
    let below = format!("below {limit}");
    for (capacity, page_shift, text) in [
        (1 << 40, 9, "page_shift=9"),
        (1 << 40, 31, "page_shift=31"),
        (1 << 40, u32::MAX, "page_shift"),
        (0, 10, "capacity=0"),
        ((1 << 16) - 1, 16, "at least 65536"),
        (limit, 10, &below),
        (u64::MAX, 30, "below"),
    ] {
        let error = Pool::new(capacity, page_shift).map(drop).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains(text), "{error}");
    }
    for (capacity, page_shift, whole_pages) in [(limit - 1, 10, limit - PAGE), (1 << 30, 30, 1 << 30)] {
        let pool = Pool::new(capacity, page_shift).unwrap();
        assert_eq!((pool.state().capacity_bytes, pool.page_bytes()), (whole_pages, 1 << page_shift));
    }
}

/// Only builds with assertions notice it.
#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "an extent of another pool")]
fn extents_are_freed_into_their_own_pool() {
    let (mut own, mut other) = (pool_of(8), pool_of(8));
    let extent = own.allocate(2 * PAGE).unwrap();
    let _same_node = other.allocate(PAGE).unwrap();
    other.free(extent);
}

#[test]
fn sizes_are_rounded_up_to_pages() {
    let mut pool = pool_of(8);
    let last = u64::MAX - PAGE + 1;
    for (bytes, rounded) in [
        (0, Some(PAGE)),
        (1, Some(PAGE)),
        (PAGE, Some(PAGE)),
        (PAGE + 1, Some(2 * PAGE)),
        (last, Some(last)),
        (last + 1, None),
        (u64::MAX, None),
    ] {
        assert_eq!(pool.rounded(bytes), rounded, "{bytes} bytes");
    }
    let before = pool.state();
    for bytes in [8 * PAGE + 1, u64::from(u32::MAX) * PAGE, (1 << 42) + 1, u64::MAX - 1, u64::MAX] {
        assert_eq!(pool.allocate(bytes), None, "{bytes} bytes");
    }
    assert_eq!(pool.state(), PoolState { failures: 5, ..before });
}

#[test]
fn a_fit_behind_the_head_of_its_own_class_is_found() {
    // 64 and 65 pages share a class. The shorter run is freed last, so it is the head of the list.
    let mut pool = pool_of(64 + 1 + 65 + 1);
    let long = pool.allocate(65 * PAGE).unwrap();
    let _between = pool.allocate(PAGE).unwrap();
    let short = pool.allocate(64 * PAGE).unwrap();
    let _last = pool.allocate(PAGE).unwrap();
    let offset = long.offset;
    pool.free(long);
    pool.free(short);
    assert_eq!(pool.allocate(65 * PAGE).unwrap().offset, offset);
}

#[test]
fn every_size_fits_a_run_of_exactly_that_size() {
    for pages in (0..32).map(|bit| 1u64 << bit) {
        for size in [pages - 1, pages, pages + 1, pages + pages / 3] {
            let size = size.clamp(1, u64::from(u32::MAX) - 1);
            let mut pool = pool_of(size);
            assert_eq!(pool.allocate(size * PAGE + 1), None);
            let extent = pool.allocate(size * PAGE).unwrap();
            assert_eq!((extent.offset, extent.bytes), (0, size * PAGE));
            assert_eq!(pool.allocate(1), None);
            pool.free(extent);
            assert_eq!(pool.state().largest_free_run_bytes, size * PAGE);
        }
    }
}

/// A pool whose free runs are exactly `runs` pages long, each between used pages.
fn fragmented(runs: &[u64]) -> Pool {
    let mut pool = pool_of(runs.iter().map(|run| run + 1).sum());
    let taken: Vec<(Extent, Extent)> =
        runs.iter().map(|run| (pool.allocate(run * PAGE).unwrap(), pool.allocate(PAGE).unwrap())).collect();
    for (run, _fence) in taken {
        pool.free(run);
    }
    assert_eq!(pool.state().free_ranges, runs.len() as u64);
    pool
}

#[test]
fn tensors_split_over_the_longest_runs_or_fail_whole() {
    // Pieces of 7 pages: 10 in the run of 75, 9 in the run of 66, 2 in the run of 20.
    let mut pool = fragmented(&[20, 75, 6, 66]);
    let sizes = |taken: &[Extent]| taken.iter().map(|extent| extent.bytes / PAGE).collect::<Vec<_>>();
    let before = pool.state();
    // 154 of 167 free pages, but only 21 pieces of 7 fit.
    let error = pool.allocate_tensors(7 * PAGE, 22).unwrap_err();
    assert_eq!(pool.state(), PoolState { failures: 1, ..before });
    for (name, pages) in
        [("asked_bytes", 154), ("free_bytes", 167), ("largest_free_run_bytes", 75), ("capacity_bytes", 171)]
    {
        assert_eq!(error.fact(name), Some((pages * PAGE).to_string().as_str()), "{error}");
    }
    let taken = pool.allocate_tensors(7 * PAGE, 21).unwrap();
    assert_eq!(sizes(&taken), [70, 63, 14]);
    taken.into_iter().for_each(|extent| pool.free(extent));
    // The last piece goes into the smallest run that holds it.
    assert_eq!(sizes(&pool.allocate_tensors(6 * PAGE, 13).unwrap()), [72, 6]);
    assert_eq!(pool.state().free_ranges, 3, "the run of 6 is gone; 3 of 75, 66 and 20 are left");
}

#[test]
fn tensors_beyond_all_numbers_are_out_of_memory() {
    let mut pool = pool_of(8);
    let asked = [
        (u64::MAX, u32::MAX, (u128::from(u64::MAX) + 1) * u128::from(u32::MAX)),
        (1 << 63, 2, 1 << 64),
        (PAGE << 31, 2, u128::from(PAGE) << 32),
        (PAGE << 16, 1 << 16, u128::from(PAGE) << 32),
        (3 * PAGE, 3, 9 * u128::from(PAGE)),
    ];
    for (bytes_each, count, rounded) in asked {
        let error = pool.allocate_tensors(bytes_each, count).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert_eq!(error.fact("asked_bytes"), Some(rounded.to_string().as_str()));
    }
    assert_eq!((pool.state().failures, pool.state().free_bytes), (5, 8 * PAGE));
}

/// A naive pool with one flag for each page, which shares only the page size with the real one.
#[derive(Default)]
struct Twin {
    used: Vec<bool>,
    peak: usize,
    frees: u64,
    allocations: u64,
    failures: u64,
}

fn pages(extent: &Extent) -> Range<usize> {
    (extent.offset / PAGE) as usize..((extent.offset + extent.bytes) / PAGE) as usize
}

impl Twin {
    fn new(pages: usize) -> Twin {
        Twin { used: vec![false; pages], ..Twin::default() }
    }

    /// Lengths of all free runs.
    fn runs(&self) -> Vec<usize> {
        self.used.split(|used| *used).map(<[bool]>::len).filter(|run| *run > 0).collect()
    }

    fn used_pages(&self) -> usize {
        self.used.iter().filter(|used| **used).count()
    }

    /// Marks a range that the pool has allocated. Fails if the range is not possible.
    fn hand_out(&mut self, extent: &Extent) -> Result<(), TestCaseError> {
        prop_assert_eq!((extent.offset % PAGE, extent.bytes % PAGE), (0, 0), "{:?}", extent);
        prop_assert!(extent.bytes > 0);
        let range = pages(extent);
        prop_assert!(range.end <= self.used.len(), "{extent:?} is out of bounds");
        prop_assert!(self.used[range.clone()].iter().all(|used| !used), "{extent:?} overlaps");
        self.used[range].fill(true);
        self.allocations += 1;
        Ok(())
    }

    fn take_back(&mut self, extent: &Extent) {
        self.used[pages(extent)].fill(false);
        self.frees += 1;
    }

    /// Returns the least number of extents for `count` pieces of `each` pages; `None` if they do not fit.
    fn extents_needed(&self, each: usize, count: usize) -> Option<usize> {
        let mut room: Vec<usize> = self.runs().iter().map(|run| run / each).collect();
        room.sort_unstable();
        let (mut left, mut needed) = (count, 0);
        while left > 0 {
            left = left.saturating_sub(room.pop().filter(|whole| *whole > 0)?);
            needed += 1;
        }
        Some(needed)
    }

    fn state(&self, live: usize) -> PoolState {
        let bytes = |pages: usize| pages as u64 * PAGE;
        let runs = self.runs();
        PoolState {
            capacity_bytes: bytes(self.used.len()),
            page_bytes: PAGE,
            used_bytes: bytes(self.used_pages()),
            free_bytes: bytes(self.used.len() - self.used_pages()),
            peak_used_bytes: bytes(self.peak),
            largest_free_run_bytes: bytes(runs.iter().copied().max().unwrap_or(0)),
            used_ranges: live as u64,
            free_ranges: runs.len() as u64,
            allocations: self.allocations,
            frees: self.frees,
            failures: self.failures,
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    /// Bytes of each tensor, and their number.
    Tensors(u64, u32),
    /// Index of a live extent, modulo their number.
    Free(usize),
}

fn step() -> impl Strategy<Value = Step> {
    // Page counts on both sides of 64, where classes start to hold more than one.
    let bytes = prop_oneof![
        4 => 0..8 * PAGE,
        4 => 60 * PAGE..140 * PAGE,
        1 => 0..2000 * PAGE,
        1 => any::<u64>(),
    ];
    prop_oneof![
        6 => bytes.prop_map(Step::Allocate),
        2 => (0..70 * PAGE, 0..40u32).prop_map(|(each, count)| Step::Tensors(each, count)),
        6 => any::<usize>().prop_map(Step::Free),
    ]
}

struct Duel<'a> {
    pool: Pool,
    twin: Twin,
    live: Vec<Extent>,
    seen: &'a Tally,
}

impl Duel<'_> {
    fn allocate(&mut self, bytes: u64) -> Result<(), TestCaseError> {
        let pages = bytes.div_ceil(PAGE).max(1) as usize;
        let fits = self.twin.runs().iter().any(|run| *run >= pages);
        let taken = self.pool.allocate(bytes);
        prop_assert_eq!(taken.is_some(), fits, "{} pages in runs of {:?}", pages, self.twin.runs());
        let Some(extent) = taken else {
            self.twin.failures += 1;
            self.seen.count("refused");
            if self.twin.used.len() - self.twin.used_pages() >= pages {
                self.seen.count("refused for fragments");
            }
            return Ok(());
        };
        prop_assert_eq!(extent.bytes, pages as u64 * PAGE);
        self.seen.count("taken");
        self.twin.hand_out(&extent)?;
        self.live.push(extent);
        Ok(())
    }

    fn tensors(&mut self, bytes_each: u64, wanted: u32) -> Result<(), TestCaseError> {
        let each = bytes_each.div_ceil(PAGE).max(1) as usize;
        let needed = self.twin.extents_needed(each, wanted as usize);
        match self.pool.allocate_tensors(bytes_each, wanted) {
            Ok(extents) => {
                prop_assert_eq!(Some(extents.len()), needed);
                self.seen.count(if extents.len() > 1 { "tensors in many" } else { "tensors in one" });
                let total: u64 = extents.iter().map(|extent| extent.bytes).sum();
                prop_assert_eq!(total, each as u64 * PAGE * u64::from(wanted));
                for extent in extents {
                    prop_assert_eq!(extent.bytes % (each as u64 * PAGE), 0);
                    self.twin.hand_out(&extent)?;
                    self.live.push(extent);
                }
            }
            Err(error) => {
                prop_assert_eq!(needed, None);
                prop_assert_eq!(error.kind(), ErrorKind::OutOfMemory);
                self.twin.failures += 1;
                self.seen.count("tensors refused");
                if self.twin.used.len() - self.twin.used_pages() >= each * wanted as usize {
                    self.seen.count("tensors rolled back");
                }
            }
        }
        Ok(())
    }

    fn free(&mut self, which: usize) {
        if self.live.is_empty() {
            return;
        }
        let extent = self.live.swap_remove(which % self.live.len());
        self.twin.take_back(&extent);
        self.pool.free(extent);
        self.seen.count("freed");
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Allocate(bytes) => self.allocate(bytes)?,
            Step::Tensors(bytes_each, count) => self.tensors(bytes_each, count)?,
            Step::Free(which) => self.free(which),
        }
        self.twin.peak = self.twin.peak.max(self.twin.used_pages());
        prop_assert_eq!(self.pool.state(), self.twin.state(self.live.len()));
        Ok(())
    }

    /// Frees everything, oldest or newest first, and checks that one run is left.
    fn end(mut self) -> Result<(), TestCaseError> {
        while !self.live.is_empty() {
            let freed = self.twin.frees as usize;
            self.step(&Step::Free(freed * 7))?;
        }
        let state = self.pool.state();
        prop_assert_eq!((state.free_ranges, state.used_ranges), (1, 0));
        prop_assert_eq!(state.largest_free_run_bytes, state.capacity_bytes);
        prop_assert!(self.pool.allocate(state.capacity_bytes).is_some());
        Ok(())
    }
}

#[test]
fn agrees_with_the_naive_twin() {
    let seen = Tally::default();
    let plays = (1..2500usize, vec(step(), 1..200));
    TestRunner::new(proptest_cases(1500))
        .run(&plays, |(pages, steps)| {
            let (pool, twin) = (pool_of(pages as u64), Twin::new(pages));
            let mut duel = Duel { pool, twin, live: Vec::new(), seen: &seen };
            steps.iter().try_for_each(|step| duel.step(step))?;
            duel.end()
        })
        .unwrap();
    seen.check(8, 41);
}
