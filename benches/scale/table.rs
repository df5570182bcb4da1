//! Keys and caches of one engine: the cost of one more while there are already many, and the memory of each.
//!
//! Not for: what a peer asks about them (`links`).

use std::sync::Arc;
use std::time::Instant;

use llm_datadist_core::bindings::{CacheKey, CacheLayout, Config, DataDist, Geometry};
use llm_datadist_core::testing::cache::Table;
use llm_datadist_core::testing::memory::{Generations, Region, Tensors};
use llm_datadist_core::{CacheId, CacheKind, Placement};

use crate::Options;
use crate::curve::{Curve, Report};
use crate::heap::Count;
use crate::setup::{Shuffle, config, desc, nanos};

/// Keys of one cache, one a row.
const ROWS: u64 = 16;
/// Look-ups of one measurement.
const LOOKS: u64 = 1024;
/// Minimum number of other operations of one measurement.
const LEAST: u64 = 4096;

pub fn request(id: u64) -> CacheKey {
    CacheKey::Request { model: id % 3, id }
}

/// An engine whose pool costs nothing until it is touched, which nothing here does.
fn engine(mib: u64) -> DataDist {
    let mut config: Config = config(1, "shm", mib, 10);
    config.links.listen = None;
    config.copy_workers = Some(1);
    DataDist::open(config).unwrap()
}

/// One cache with keys `first..first + rows`.
fn with_keys(engine: &DataDist, first: u64, rows: u64) -> CacheId {
    let keys: Vec<_> = (first..first + rows).map(|id| Some(request(id))).collect();
    engine.allocate(&desc(rows, 64, 1, Placement::Device), CacheKind::Batch, &keys).unwrap().id()
}

/// Makes caches that bind keys `from..to`. Returns the longest call in microseconds.
fn bind(engine: &DataDist, from: u64, to: u64, ids: &mut Vec<CacheId>) -> f64 {
    let (mut first, mut longest) = (from, 0f64);
    while first < to {
        let rows = ROWS.min(to - first);
        let started = Instant::now();
        ids.push(with_keys(engine, first, rows));
        longest = longest.max(started.elapsed().as_secs_f64() * 1e6);
        first += rows;
    }
    longest
}

pub fn keys(options: &Options, report: &mut Report) {
    const NOTE: &str = "16 keys a cache; the cache of 16 rows that comes with them is part of it";
    let new = |name, note| Curve::new(name, "ns", "keys in the table", note);
    let mut growing = new("bind a key while the table grows", NOTE);
    let mut longest =
        Curve::new("longest bind while the table grows", "us", "keys in the table", "one call binds 16 keys");
    let (mut binding, mut finding) = (new("bind a key", NOTE), new("look up a key", "keys in random order"));
    let mut releasing = new("release a key", "in random order; the last of a cache gives its memory back");
    let engine = engine(512);
    let (mut have, mut caches, mut shuffle) = (0, Vec::new(), Shuffle(42));
    for size in options.sizes(4, 1 << 20) {
        let mut most = 0f64;
        let took = nanos(|| most = bind(&engine, have, size, &mut caches));
        // Fewer are no whole cache.
        if size >= ROWS {
            growing.add(size, vec![took / (size - have) as f64]);
            longest.add(size, vec![most]);
        }
        have = size;
        let batch = (size / 4).clamp(ROWS, 1024);
        let again = (LEAST / batch).max(1);
        let (mut bound, mut found, mut released) = (vec![], vec![], vec![]);
        for _ in 0..options.rounds() {
            let mut times = [0f64; 3];
            for _ in 0..again {
                let (mut ids, order) = (Vec::new(), shuffle.order(batch));
                let asked: Vec<u64> = (0..LOOKS).map(|_| shuffle.next() % size).collect();
                times[0] += nanos(|| {
                    bind(&engine, size, size + batch, &mut ids);
                });
                times[1] += nanos(|| {
                    for &id in &asked {
                        std::hint::black_box(engine.find_key(request(id)).unwrap());
                    }
                });
                for &id in &ids {
                    engine.deallocate(id).unwrap();
                }
                times[2] += nanos(|| {
                    for &at in &order {
                        engine.remove_key(request(size + at as u64)).unwrap();
                    }
                });
            }
            for (times, (took, each)) in [&mut bound, &mut found, &mut released]
                .into_iter()
                .zip(times.into_iter().zip([batch, LOOKS, batch]))
            {
                times.push(took / (again * each) as f64);
            }
        }
        assert_eq!(engine.stats().table.keys, size, "what a round bound, it released");
        binding.add(size, bound);
        finding.add(size, found);
        releasing.add(size, released);
    }
    for curve in [growing, longest, binding, finding, releasing] {
        report.curve(&curve);
    }
}

pub fn caches(options: &Options, report: &mut Report) {
    let new = |name, note| Curve::new(name, "ns", "caches", note);
    let (mut taking, mut giving) =
        (new("allocate a cache", "two tensors"), new("free a cache", "in random order"));
    let mut finding = new("find a cache by id", "in random order");
    let mut stating = new("read all statistics", "a call for people, not for a hot path");
    let engine = engine(512);
    let shape = desc(16, 64, 2, Placement::Device);
    let take = || engine.allocate(&shape, CacheKind::Batch, &[]).unwrap().id();
    let (mut all, mut shuffle) = (Vec::<CacheId>::new(), Shuffle(43));
    for size in options.sizes(4, 100_000) {
        while (all.len() as u64) < size {
            all.push(take());
        }
        let batch = (size / 4).clamp(ROWS, 1024);
        let again = (LEAST / batch).max(1);
        let (mut took, mut gave, mut found, mut stated) = (vec![], vec![], vec![], vec![]);
        for _ in 0..options.rounds() {
            let mut times = [0f64; 3];
            for _ in 0..again {
                let (mut ids, order) = (Vec::with_capacity(batch as usize), shuffle.order(batch));
                let asked: Vec<usize> = (0..LOOKS).map(|_| (shuffle.next() % size) as usize).collect();
                times[0] += nanos(|| ids.extend((0..batch).map(|_| take())));
                times[1] += nanos(|| asked.iter().for_each(|&at| drop(engine.find(all[at]).unwrap())));
                // Give back caches of any age, keep the new ones.
                let stride = (size / batch).max(1);
                for (&at, id) in order.iter().filter(|&&at| (at as u64) < size).zip(&mut ids) {
                    std::mem::swap(&mut all[(at as u64 * stride) as usize], id);
                }
                times[2] += nanos(|| ids.iter().for_each(|&id| engine.deallocate(id).unwrap()));
            }
            for (times, (spent, each)) in [&mut took, &mut found, &mut gave]
                .into_iter()
                .zip(times.into_iter().zip([batch, LOOKS, batch]))
            {
                times.push(spent / (again * each) as f64);
            }
            stated.push(nanos(|| drop(engine.stats())));
        }
        assert_eq!(engine.stats().table.caches, size);
        taking.add(size, took);
        finding.add(size, found);
        giving.add(size, gave);
        stating.add(size, stated);
    }
    for curve in [taking, finding, giving, stating] {
        report.curve(&curve);
    }
    locating(options, report);
}

/// The request that a layer-wise transfer to bare addresses sends to the owner once.
fn locating(options: &Options, report: &mut Report) {
    let name = "find the cache of an address";
    let mut curve = Curve::new(name, "ns", "caches", "once for each layer-wise transfer to bare addresses");
    let region = Arc::new(Region::shared("scale", 1 << 30).unwrap());
    let shape = desc(16, 64, 2, Placement::Host);
    let geometry = Geometry::new(&shape).unwrap();
    let layout = CacheLayout { geometry, kind: CacheKind::Batch, placement: Placement::Host };
    let table = Table::new(Arc::new(Generations::new().unwrap()));
    let mut addrs = Vec::new();
    for size in options.sizes(4, 100_000) {
        while (addrs.len() as u64) < size {
            let at = addrs.len() as u64 * 4096;
            let tensors = Tensors::carved(region.clone(), [at, at + 2048], 16 * 64, ()).unwrap();
            addrs.push(table.allocate(None, &[], &shape, layout, tensors).unwrap().addrs()[0]);
        }
        let again = (LEAST / size).clamp(3, 256);
        let took = (0..options.rounds()).map(|_| {
            let asked = [addrs[addrs.len() / 2]];
            nanos(|| (0..again).for_each(|_| assert!(table.locate(&asked).is_ok()))) / again as f64
        });
        curve.add(size, took.collect());
    }
    report.curve(&curve);
}

/// Bytes on the heap.
pub fn memory(options: &Options, report: &mut Report) {
    const HEAP: &str = "bytes on the heap, counted by the allocator";
    let mut with_key = Curve::new("memory of keys, 16 a cache", "B", "keys in the table", HEAP);
    let mut alone = Curve::new("memory of caches with one key each", "B", "caches", HEAP);
    let mut bare = Curve::new("memory of caches without a key", "B", "caches", HEAP);
    let fresh = engine(512);
    let (mut have, mut ids) = (0, Vec::with_capacity(1 << 20));
    let count = Count::start();
    for size in options.sizes(4, 1 << 20) {
        bind(&fresh, have, size, &mut ids);
        have = size;
        with_key.add(size, vec![count.live() as f64]);
    }
    drop(count);
    drop(fresh);
    let shape = desc(1, 64, 2, Placement::Device);
    for (curve, keyed) in [(&mut alone, true), (&mut bare, false)] {
        let engine = engine(512);
        let count = Count::start();
        let mut have = 0;
        for size in options.sizes(4, 100_000) {
            for id in have..size {
                let keys = [Some(request(id))];
                let keys = if keyed { &keys[..] } else { &[] };
                engine.allocate(&shape, CacheKind::Batch, keys).unwrap();
            }
            have = size;
            curve.add(size, vec![count.live() as f64]);
        }
    }
    for curve in [with_key, alone, bare] {
        report.curve(&curve);
    }
}
