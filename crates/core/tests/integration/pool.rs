//! The pool of ranges: single facts, and a run of random requests against a naive twin.
//!
//! Not for: memory behind a pool (`datadist`) or speed (`benches/pool.rs`).
#![allow(clippy::unwrap_used, reason = "a test that finds nothing fails")]

use std::cell::Cell;

use llm_datadist_core::ErrorKind;
use llm_datadist_core::testing::pool::{Extent, Pool, PoolState};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

const SHIFT: u32 = 10;
const PAGE: u64 = 1 << SHIFT;

fn pool_of(pages: u64) -> Pool {
    Pool::new(pages * PAGE, SHIFT).unwrap()
}

/// `count` extents of `pages` pages each, lowest offset first.
fn extents(pool: &mut Pool, pages: u64, count: usize) -> Vec<Extent> {
    let mut taken: Vec<Extent> = (0..count).map(|_| pool.allocate(pages * PAGE).unwrap()).collect();
    taken.sort_by_key(|extent| extent.offset);
    taken
}

fn argument_error(capacity: u64, page_shift: u32) -> String {
    let error = Pool::new(capacity, page_shift).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    error.to_string()
}

#[test]
fn refuses_what_is_no_pool() {
    assert!(argument_error(1 << 40, 9).contains("page_shift=9"));
    assert!(argument_error(1 << 40, 31).contains("page_shift=31"));
    assert!(argument_error(1 << 40, u32::MAX).contains("page_shift"));
    assert!(argument_error(0, 10).contains("capacity=0"));
    assert!(argument_error((1 << 16) - 1, 16).contains("at least 65536"));
    let limit = u64::from(u32::MAX) << 10;
    assert!(argument_error(limit, 10).contains(&format!("below {limit}")));
    assert!(argument_error(u64::MAX, 30).contains("below"));

    assert_eq!(Pool::new(limit - 1, 10).unwrap().state().capacity_bytes, limit - PAGE);
    assert_eq!(Pool::new(1 << 30, 30).unwrap().state().capacity_bytes, 1 << 30);
}

#[test]
fn a_new_pool_is_one_free_run_of_whole_pages() {
    let pool = Pool::new(10 * PAGE + 1023, SHIFT).unwrap();
    let expected = PoolState {
        capacity_bytes: 10 * PAGE,
        page_bytes: PAGE,
        free_bytes: 10 * PAGE,
        largest_free_run_bytes: 10 * PAGE,
        free_ranges: 1,
        ..PoolState::default()
    };
    assert_eq!(pool.state(), expected);
    assert_eq!(pool.page_bytes(), PAGE);
}

#[test]
fn rounds_up_to_pages_and_nothing_takes_one() {
    let mut pool = pool_of(100);
    for (bytes, pages) in [(0, 1), (1, 1), (PAGE - 1, 1), (PAGE, 1), (PAGE + 1, 2), (40 * PAGE + 1, 41)] {
        assert_eq!(pool.rounded(bytes), Some(pages * PAGE));
        let extent = pool.allocate(bytes).unwrap();
        assert_eq!(extent.bytes, pages * PAGE, "{bytes} bytes");
        assert_eq!(extent.offset % PAGE, 0);
    }
    assert_eq!(pool.state().used_bytes, 47 * PAGE);
    assert_eq!(pool.rounded(u64::MAX), None);
    assert_eq!(pool.rounded(u64::MAX - PAGE + 1), Some(u64::MAX - PAGE + 1));
    assert_eq!(pool.rounded(u64::MAX - PAGE + 2), None);
}

#[test]
fn refuses_what_is_too_big_and_counts_it() {
    let mut pool = pool_of(8);
    let before = pool.state();
    for bytes in [8 * PAGE + 1, u64::from(u32::MAX) * PAGE, (1 << 42) + 1, u64::MAX - 1, u64::MAX] {
        assert_eq!(pool.allocate(bytes), None, "{bytes} bytes");
    }
    assert_eq!(pool.state(), PoolState { failures: 5, ..before });
    assert_eq!(pool.allocate(8 * PAGE).unwrap().bytes, 8 * PAGE);
    assert_eq!(pool.allocate(0), None);
}

#[test]
fn merges_with_each_neighbour_that_is_free() {
    // Whether the range before and the range after are free when the middle one comes back.
    for (before, after, runs, largest) in
        [(false, false, 1, 10), (true, false, 1, 20), (false, true, 1, 20), (true, true, 1, 30)]
    {
        let mut pool = pool_of(50);
        let five = extents(&mut pool, 10, 5);
        assert_eq!(pool.state().free_ranges, 0);
        if before {
            assert!(pool.free(five[1]));
        }
        if after {
            assert!(pool.free(five[3]));
        }
        assert!(pool.free(five[2]));
        let state = pool.state();
        assert_eq!(
            (state.free_ranges, state.largest_free_run_bytes),
            (runs, largest * PAGE),
            "{before} {after}"
        );
        // The merged run is one range to the next request, and no longer.
        assert_eq!(pool.allocate((largest + 1) * PAGE), None);
        let low = if before { five[1] } else { five[2] };
        assert_eq!(pool.allocate(largest * PAGE).unwrap().offset, low.offset);
    }
}

#[test]
fn the_edges_of_the_pool_merge_with_nothing_beyond() {
    let mut pool = pool_of(30);
    let three = extents(&mut pool, 10, 3);
    assert!(pool.free(three[0]));
    assert!(pool.free(three[2]));
    assert_eq!(pool.state().free_ranges, 2);
    assert_eq!(pool.allocate(11 * PAGE), None);
    assert!(pool.free(three[1]));
    assert_eq!(pool.state().free_ranges, 1);
    assert_eq!(pool.state().largest_free_run_bytes, 30 * PAGE);
}

#[test]
fn a_second_free_is_refused() {
    let mut pool = pool_of(30);
    let three = extents(&mut pool, 10, 3);
    assert!(pool.free(three[1]));
    let before = pool.state();
    assert!(!pool.free(three[1]));
    assert_eq!(pool.state(), before);
    // Also when its node is gone in a merge.
    assert!(pool.free(three[0]));
    assert!(pool.free(three[2]));
    let before = pool.state();
    assert!(three.iter().all(|extent| !pool.free(*extent)));
    assert_eq!(pool.state(), before);
    assert_eq!((before.frees, before.free_ranges, before.used_ranges), (3, 1, 0));
}

#[test]
fn a_stale_handle_cannot_free_the_range_that_came_after() {
    let mut pool = pool_of(30);
    let stale = pool.allocate(10 * PAGE).unwrap();
    assert!(pool.free(stale));
    let live = pool.allocate(10 * PAGE).unwrap();
    assert_eq!((live.offset, live.bytes), (stale.offset, stale.bytes), "the same range was handed out again");
    assert_ne!(live, stale);
    assert!(!pool.free(stale));
    assert_eq!(pool.state().used_bytes, 10 * PAGE);
    assert!(pool.free(live));
}

#[test]
fn the_extent_of_another_pool_is_refused() {
    let (mut ours, mut theirs) = (pool_of(30), pool_of(30));
    let (mine, other) = (ours.allocate(PAGE).unwrap(), theirs.allocate(PAGE).unwrap());
    assert_eq!((mine.offset, mine.bytes), (other.offset, other.bytes));
    assert!(!ours.free(other));
    assert_eq!(ours.state().used_ranges, 1);
    assert!(ours.free(mine));
    // A node number that this pool does not have at all.
    let many = extents(&mut theirs, 1, 20);
    assert!(many.iter().all(|extent| !ours.free(*extent)));
    assert!(theirs.free(other));
}

#[test]
fn an_extent_with_altered_numbers_is_refused() {
    let mut pool = pool_of(30);
    let extent = pool.allocate(10 * PAGE).unwrap();
    let (mut shorter, mut elsewhere) = (extent, extent);
    shorter.bytes = 5 * PAGE;
    elsewhere.offset += 5 * PAGE;
    assert!(!pool.free(shorter));
    assert!(!pool.free(elsewhere));
    assert_eq!(pool.state().used_bytes, 10 * PAGE);
    assert!(pool.free(extent));
}

#[test]
fn a_fit_behind_the_head_of_its_own_class_is_found() {
    // 64 and 65 pages share a class. The shorter run comes back last and so is the head.
    let mut pool = pool_of(64 + 1 + 65 + 1);
    let long = pool.allocate(65 * PAGE).unwrap();
    let _between = pool.allocate(PAGE).unwrap();
    let short = pool.allocate(64 * PAGE).unwrap();
    let _last = pool.allocate(PAGE).unwrap();
    assert!(pool.free(long));
    assert!(pool.free(short));
    assert_eq!(pool.state().free_ranges, 2);
    assert_eq!(pool.state().largest_free_run_bytes, 65 * PAGE);
    assert_eq!(pool.allocate(66 * PAGE), None);
    assert_eq!(pool.allocate(65 * PAGE).unwrap().offset, long.offset);
    assert_eq!(pool.allocate(65 * PAGE), None);
}

#[test]
fn every_size_fits_a_run_of_exactly_that_size() {
    let mut pages = 1u64;
    let mut tried = 0;
    while pages < u64::from(u32::MAX) {
        for size in [pages - 1, pages, pages + 1, pages + pages / 3] {
            let size = size.clamp(1, u64::from(u32::MAX) - 1);
            let mut pool = pool_of(size);
            assert_eq!(pool.allocate(size * PAGE + 1), None);
            let extent = pool.allocate(size * PAGE).unwrap();
            assert_eq!((extent.offset, extent.bytes), (0, size * PAGE));
            assert_eq!(pool.allocate(1), None);
            assert!(pool.free(extent));
            assert_eq!(pool.state().largest_free_run_bytes, size * PAGE);
            tried += 1;
        }
        pages *= 2;
    }
    assert_eq!(tried, 4 * 32);
}

#[test]
fn tensors_take_one_extent_where_a_run_is_long_enough() {
    let mut pool = pool_of(100);
    let taken = pool.allocate_tensors(2 * PAGE + 1, 33).unwrap();
    assert_eq!(taken.len(), 1);
    assert_eq!(taken[0].bytes, 99 * PAGE);
    assert_eq!(pool.state().peak_used_bytes, 99 * PAGE);
    assert!(pool.free(taken[0]));
    assert_eq!(pool.allocate_tensors(0, 100).unwrap()[0].bytes, 100 * PAGE);
    assert_eq!(pool.allocate_tensors(0, 0).unwrap(), []);
    assert_eq!((pool.state().allocations, pool.state().failures), (2, 0));
}

/// A pool whose free runs are exactly `runs` pages long, each between used pages.
fn fragmented(runs: &[u64]) -> Pool {
    let mut pool = pool_of(runs.iter().map(|run| run + 1).sum());
    let taken: Vec<(Extent, Extent)> =
        runs.iter().map(|run| (pool.allocate(run * PAGE).unwrap(), pool.allocate(PAGE).unwrap())).collect();
    for (run, _fence) in taken {
        assert!(pool.free(run));
    }
    assert_eq!(pool.state().free_ranges, runs.len() as u64);
    pool
}

#[test]
fn tensors_split_over_the_longest_runs() {
    // Pieces of 7 pages: 10 in the run of 75, 9 in the run of 66, 2 in the run of 20.
    let mut pool = fragmented(&[20, 75, 6, 66]);
    let taken = pool.allocate_tensors(7 * PAGE, 21).unwrap();
    let sizes: Vec<u64> = taken.iter().map(|extent| extent.bytes / PAGE).collect();
    assert_eq!(sizes, [70, 63, 14]);
    assert_eq!(pool.state().allocations, 8 + 3);
    assert!(taken.iter().all(|extent| pool.free(*extent)));
    assert_eq!(pool.state().largest_free_run_bytes, 75 * PAGE);
    assert_eq!(pool.state().free_ranges, 4);
    // The last piece goes where it fits best, not into the longest run that is left.
    let sizes: Vec<u64> =
        pool.allocate_tensors(6 * PAGE, 13).unwrap().iter().map(|extent| extent.bytes / PAGE).collect();
    assert_eq!(sizes, [72, 6]);
    assert_eq!(pool.state().free_ranges, 3, "the run of 6 is gone, 3 of 75, 66 and 20 are left");
}

#[test]
fn tensors_are_all_or_nothing() {
    let mut pool = fragmented(&[20, 75, 6, 66]);
    let before = pool.state();
    // 147 of 167 free pages, but only 21 pieces of 7 fit.
    let error = pool.allocate_tensors(7 * PAGE, 22).unwrap_err();
    assert_eq!(pool.state(), PoolState { failures: 1, ..before });
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert_eq!(error.fact("asked_bytes"), Some((154 * PAGE).to_string().as_str()));
    assert_eq!(error.fact("free_bytes"), Some((167 * PAGE).to_string().as_str()));
    assert_eq!(error.fact("largest_free_run_bytes"), Some((75 * PAGE).to_string().as_str()));
    assert_eq!(error.fact("capacity_bytes"), Some((171 * PAGE).to_string().as_str()));
    // And what was there is still there to be had.
    for run in [75, 66, 20, 6] {
        assert_eq!(pool.allocate(run * PAGE).unwrap().bytes, run * PAGE);
    }
    assert_eq!(pool.state().free_bytes, 0);
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

#[test]
fn bookkeeping_does_not_grow_with_pages() {
    // One bit for each of 2^32 pages would be half a terabyte here.
    let mut pools: Vec<Pool> =
        (0..1000).map(|_| Pool::new((u64::from(u32::MAX) << 10) - 1, 10).unwrap()).collect();
    assert!(pools.iter_mut().all(|pool| pool.allocate(1 << 36).is_some()));
    assert!(size_of::<Pool>() < 4096);
}

// -- the naive twin --

/// The pool from first principles: one flag for each page. Shares nothing with the pool but the page size.
struct Twin {
    used: Vec<bool>,
    peak: usize,
    frees: u64,
    allocations: u64,
    failures: u64,
}

impl Twin {
    fn new(pages: usize) -> Twin {
        Twin { used: vec![false; pages], peak: 0, frees: 0, allocations: 0, failures: 0 }
    }

    /// Lengths of all free runs.
    fn runs(&self) -> Vec<usize> {
        self.used.split(|used| *used).map(<[bool]>::len).filter(|run| *run > 0).collect()
    }

    fn used_pages(&self) -> usize {
        self.used.iter().filter(|used| **used).count()
    }

    /// Marks a range that the pool says it handed out; complains if it cannot be so.
    fn hand_out(&mut self, extent: Extent) -> Result<(), TestCaseError> {
        prop_assert_eq!((extent.offset % PAGE, extent.bytes % PAGE), (0, 0), "{:?}", extent);
        prop_assert!(extent.bytes > 0);
        let first = usize::try_from(extent.offset / PAGE).unwrap();
        let range = first..first + usize::try_from(extent.bytes / PAGE).unwrap();
        prop_assert!(range.end <= self.used.len(), "{extent:?} is out of bounds");
        prop_assert!(self.used[range.clone()].iter().all(|used| !used), "{extent:?} overlaps");
        self.used[range].fill(true);
        self.allocations += 1;
        Ok(())
    }

    fn take_back(&mut self, extent: Extent) {
        let first = usize::try_from(extent.offset / PAGE).unwrap();
        self.used[first..first + usize::try_from(extent.bytes / PAGE).unwrap()].fill(false);
        self.frees += 1;
    }

    /// How many extents `count` pieces of `each` pages need at least; `None` if they do not fit.
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
    Allocate {
        bytes: u64,
    },
    Tensors {
        bytes_each: u64,
        count: u32,
    },
    /// Which of the live extents, modulo their number.
    Free(usize),
    /// Which of the extents that were freed before.
    FreeAgain(usize),
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
        6 => bytes.prop_map(|bytes| Step::Allocate { bytes }),
        2 => (0..70 * PAGE, 0..40u32).prop_map(|(bytes_each, count)| Step::Tensors { bytes_each, count }),
        6 => any::<usize>().prop_map(Step::Free),
        1 => any::<usize>().prop_map(Step::FreeAgain),
    ]
}

/// What the random runs have met. A kind of event that never came up was never checked.
#[derive(Debug, Default)]
struct Seen {
    taken: Cell<u32>,
    refused: Cell<u32>,
    refused_for_fragments: Cell<u32>,
    tensors_in_one: Cell<u32>,
    tensors_in_many: Cell<u32>,
    tensors_refused: Cell<u32>,
    tensors_rolled_back: Cell<u32>,
    freed: Cell<u32>,
    stale: Cell<u32>,
}

fn count(cell: &Cell<u32>) {
    cell.set(cell.get() + 1);
}

struct Duel<'a> {
    pool: Pool,
    twin: Twin,
    live: Vec<Extent>,
    dead: Vec<Extent>,
    seen: &'a Seen,
}

impl Duel<'_> {
    fn allocate(&mut self, bytes: u64) -> Result<(), TestCaseError> {
        let pages = usize::try_from(bytes.div_ceil(PAGE).max(1)).unwrap();
        let fits = self.twin.runs().iter().any(|run| *run >= pages);
        let taken = self.pool.allocate(bytes);
        prop_assert_eq!(taken.is_some(), fits, "{} pages in runs of {:?}", pages, self.twin.runs());
        let Some(extent) = taken else {
            self.twin.failures += 1;
            count(&self.seen.refused);
            if self.twin.used.len() - self.twin.used_pages() >= pages {
                count(&self.seen.refused_for_fragments);
            }
            return Ok(());
        };
        prop_assert_eq!(extent.bytes, pages as u64 * PAGE);
        count(&self.seen.taken);
        self.twin.hand_out(extent)?;
        self.live.push(extent);
        Ok(())
    }

    fn tensors(&mut self, bytes_each: u64, wanted: u32) -> Result<(), TestCaseError> {
        let each = usize::try_from(bytes_each.div_ceil(PAGE).max(1)).unwrap();
        let needed = self.twin.extents_needed(each, wanted as usize);
        match self.pool.allocate_tensors(bytes_each, wanted) {
            Ok(extents) => {
                prop_assert_eq!(Some(extents.len()), needed);
                count(if extents.len() > 1 { &self.seen.tensors_in_many } else { &self.seen.tensors_in_one });
                let total: u64 = extents.iter().map(|extent| extent.bytes).sum();
                prop_assert_eq!(total, each as u64 * PAGE * u64::from(wanted));
                for extent in extents {
                    prop_assert_eq!(extent.bytes % (each as u64 * PAGE), 0);
                    self.twin.hand_out(extent)?;
                    self.live.push(extent);
                }
            }
            Err(error) => {
                prop_assert_eq!(needed, None);
                prop_assert_eq!(error.kind(), ErrorKind::OutOfMemory);
                self.twin.failures += 1;
                count(&self.seen.tensors_refused);
                if self.twin.used.len() - self.twin.used_pages() >= each * wanted as usize {
                    count(&self.seen.tensors_rolled_back);
                }
            }
        }
        Ok(())
    }

    fn free(&mut self, which: usize) -> Result<(), TestCaseError> {
        if self.live.is_empty() {
            return Ok(());
        }
        let extent = self.live.swap_remove(which % self.live.len());
        prop_assert!(self.pool.free(extent));
        self.twin.take_back(extent);
        self.dead.push(extent);
        count(&self.seen.freed);
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Allocate { bytes } => self.allocate(bytes)?,
            Step::Tensors { bytes_each, count } => self.tensors(bytes_each, count)?,
            Step::Free(which) => self.free(which)?,
            Step::FreeAgain(which) if !self.dead.is_empty() => {
                prop_assert!(!self.pool.free(self.dead[which % self.dead.len()]));
                count(&self.seen.stale);
            }
            Step::FreeAgain(_) => {}
        }
        self.twin.peak = self.twin.peak.max(self.twin.used_pages());
        prop_assert_eq!(self.pool.state(), self.twin.state(self.live.len()));
        Ok(())
    }

    /// Everything comes back, oldest or newest first, and is one run again.
    fn end(mut self) -> Result<(), TestCaseError> {
        while !self.live.is_empty() {
            self.step(&Step::Free(self.dead.len() * 7))?;
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
    let seen = Seen::default();
    let asked = Config::default();
    let config = Config { cases: asked.cases.max(1500), failure_persistence: None, ..asked };
    let plays = (1..2500usize, vec(step(), 1..200));
    TestRunner::new(config)
        .run(&plays, |(pages, steps)| {
            let (pool, twin) = (pool_of(pages as u64), Twin::new(pages));
            let mut duel = Duel { pool, twin, live: Vec::new(), dead: Vec::new(), seen: &seen };
            for step in &steps {
                duel.step(step)?;
            }
            duel.end()
        })
        .unwrap();
    for met in [
        &seen.taken,
        &seen.refused,
        &seen.refused_for_fragments,
        &seen.tensors_in_one,
        &seen.tensors_in_many,
        &seen.tensors_refused,
        &seen.tensors_rolled_back,
        &seen.freed,
        &seen.stale,
    ] {
        assert!(met.get() > 40, "a kind of event was hardly met: {seen:?}");
    }
}
