//! The cache table with 2^20 keys, and the planner: nanoseconds per operation, bytes per key.
//!
//! `cargo bench -p llm-datadist-core --bench table`. Medians over rounds; keys are visited in random order, so most of
//! the time is waiting for memory. Not for: copies (`copy`), plans between KV layouts
//! (`layouts`), pools (`pool`).

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark stops at the first surprise")]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "counts of a million"
)]
#![allow(unsafe_code, missing_docs, reason = "a counting allocator; nothing here is public")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use llm_datadist_core::bindings::{CacheKey, CacheLayout, Geometry};
use llm_datadist_core::testing::cache::Table;
use llm_datadist_core::testing::memory::{Generations, Region, Tensors};
use llm_datadist_core::testing::plan::{CacheCount, CopyPlan, Moves, Pieces};
use llm_datadist_core::{CacheDesc, CacheKind, DataType, Placement};

const KEYS: u64 = 1 << 20;

fn shuffled(count: u64) -> Vec<u64> {
    let mut state = 0x2545_F491_4F6C_DD1Du64;
    let mut list: Vec<u64> = (0..count).collect();
    for at in (1..list.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        list.swap(at, (state % (at as u64 + 1)) as usize);
    }
    list
}

/// The system's allocator, counting what is live.
struct Counting;

static LIVE: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn live_bytes() -> i64 {
    LIVE.load(Ordering::Relaxed)
}

fn key(id: u64) -> CacheKey {
    CacheKey::Request { model: id % 3, id }
}

/// Nanoseconds per item.
fn each(count: u64, call: impl FnOnce()) -> f64 {
    let started = Instant::now();
    call();
    started.elapsed().as_nanos() as f64 / count as f64
}

fn one_round(rows: u64) -> [f64; 5] {
    let region = Arc::new(Region::shared("bench", 1 << 20).unwrap());
    let desc = CacheDesc {
        num_tensors: 2,
        shape: vec![rows as i64, 1],
        data_type: DataType::Uint8,
        placement: Placement::Host,
        row_stride: None,
        kv_layout: None,
    };
    let geometry = Geometry::new(&desc).unwrap();
    let layout = CacheLayout { geometry, kind: CacheKind::Batch, placement: Placement::Host };
    let table = Table::new(Arc::new(Generations::new().unwrap()));
    let before = live_bytes();
    let mut caches = Vec::new();
    let bind = each(KEYS, || {
        for cache in 0..KEYS / rows {
            let keys: Vec<_> = (0..rows).map(|row| (row, key(cache * rows + row))).collect();
            let tensors = Tensors::carved(region.clone(), [0, 4096], rows, ()).unwrap();
            caches.push(table.allocate(None, &keys, &desc, layout, tensors).unwrap().id());
        }
    });
    assert_eq!(table.state().keys, KEYS);
    let bytes = (live_bytes() - before) as f64 / KEYS as f64;
    let order = shuffled(KEYS);
    let find = each(KEYS, || {
        for &id in &order {
            let (cache, row) = table.find_key(key(id)).unwrap();
            assert_eq!(u64::from(row), id % rows);
            std::hint::black_box(cache);
        }
    });
    let by_id = each(KEYS, || {
        for &id in &order {
            std::hint::black_box(table.find(caches[(id / rows) as usize]).unwrap());
        }
    });
    for &id in &caches {
        table.deallocate(id);
    }
    assert_eq!(table.state().caches, KEYS / rows, "keys hold the caches");
    let release = each(KEYS, || order.iter().for_each(|&id| table.remove_key(key(id))));
    assert_eq!((table.state().keys, table.state().caches), (0, 0));
    [bind, find, by_id, release, bytes]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    println!("{KEYS} keys, 5 rounds, medians");
    println!(
        "{:>14} {:>9} {:>9} {:>9} {:>9} {:>10}",
        "keys a cache", "bind ns", "find ns", "by id ns", "release", "bytes/key"
    );
    for rows in [1, 16, 256] {
        let rounds: Vec<_> = (0..5).map(|_| one_round(rows)).collect();
        let column = |at: usize| median(rounds.iter().map(|round| round[at]).collect());
        let [bind, find, by_id, release] = [0, 1, 2, 3].map(column);
        println!("{rows:14} {bind:9.0} {find:9.0} {by_id:9.0} {release:9.0} {:10.0}", rounds[0][4]);
    }
    planning();
}

fn planning() {
    println!("\nplanning 4,096 pairs in 80 tensors, microseconds, median of 101");
    let (from, to) = (shuffled(4096), shuffled(8192));
    let shuffled: Vec<_> = from.iter().copied().zip(to.iter().copied()).collect();
    let ascending: Vec<(u64, u64)> = (0..4096).map(|block| (block, block + 5000)).collect();
    let chain: Vec<(u64, u64)> = (0..4096).map(|block| (block, block + 1)).collect();
    let lists = [
        ("shuffled, two caches", shuffled.clone(), CacheCount::Two),
        ("shuffled, one cache", shuffled, CacheCount::One),
        ("ascending", ascending, CacheCount::Two),
        ("chain of 4,096 plans", chain, CacheCount::One),
    ];
    for (name, pairs, caches) in lists {
        // From the checked list on: its pieces, and the plan.
        let planned = || {
            let pieces = Pieces::blocks(65536, pairs.iter().copied()).unwrap();
            let mut moves = Moves { pieces, num_tensors: 80, ..Moves::default() };
            CopyPlan::moves_in_order(&mut moves, caches).unwrap()
        };
        let times = (0..101).map(|_| each(1, || drop(std::hint::black_box(planned())))).collect();
        println!("{name:24} {:9.0}", median(times) / 1e3);
    }
}
