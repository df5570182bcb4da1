//! Lifetimes of caches, keys and memory: random calls against the naive twin, releases while the memory is in use.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::testing::cache::{pin_reads, pin_writes};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::testing::device::sim::SimDevice;
use llm_datadist_core::testing::oracle::TwinTable;
use llm_datadist_core::testing::tensors;
use llm_datadist_core::{
    Cache, CacheId, CacheKey, CacheKind, Config, CopyArgs, DataDist, Deadline, End, ErrorKind, Placement,
    PoolConfig, SwapInPath,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::fixtures::{Gated, Own, adopt, config, desc, engine_on, proptest_cases};
use CacheKind::{Batch, Blocks};
use Placement::{Device, Host};

const PAGE: u64 = 1 << 10;

/// An engine with a device pool of `pages` pages of 1 KiB and no host pool.
fn engine(pages: u64) -> DataDist {
    let device_pool = Some(PoolConfig { memory_size: pages * PAGE, page_shift: 10 });
    DataDist::open(Config { host_pool: None, device_pool, ..config(1 << 20) }).unwrap()
}

fn request(model: u64, id: u64) -> CacheKey {
    CacheKey::Request { model, id }
}

fn used(engine: &DataDist) -> u64 {
    engine.stats().device_pool.unwrap().pool.used_bytes
}

/// The number of caches, the number of keys and the bytes in use.
fn sums_of(engine: &DataDist) -> (u64, u64, u64) {
    let table = engine.stats().table;
    (table.caches, table.keys, used(engine))
}

#[derive(Clone, Debug)]
enum Call {
    Allocate(CacheKind, usize, u32, Vec<Option<CacheKey>>),
    Register(CacheKind, Vec<Option<CacheKey>>),
    Deallocate(usize),
    Unregister(usize),
    RemoveKey(CacheKey),
    Unknown(i64),
}

/// Every key that the random calls use.
fn all_keys() -> Vec<CacheKey> {
    let ids = (0..2).flat_map(|model| (0..6).map(move |id| (model, id)));
    let keys = ids.flat_map(|(model, id)| [request(model, id), CacheKey::Prefix { model, id }]);
    keys.chain((0..2).map(|model| CacheKey::Blocks { model })).collect()
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let key = prop::sample::select(all_keys());
    let list = prop::collection::vec(prop::option::weighted(0.7, key.clone()), 0..5).boxed();
    let kind = prop_oneof![3 => Just(Batch), 1 => Just(Blocks)];
    let call = prop_oneof![
        4 => (kind.clone(), 1..5usize, 1..9u32, list.clone()).prop_map(|(k, r, t, keys)| Call::Allocate(k, r, t, keys)),
        1 => (kind, list).prop_map(|(kind, keys)| Call::Register(kind, keys)),
        3 => (0..40usize).prop_map(Call::Deallocate),
        1 => (0..40usize).prop_map(Call::Unregister),
        4 => key.prop_map(Call::RemoveKey),
        1 => prop::sample::select(vec![-1, 0, i64::MAX, i64::MIN]).prop_map(Call::Unknown),
    ];
    prop::collection::vec(call, 1..60)
}

/// The engine and the twin, which get the same calls.
struct Both {
    engine: DataDist,
    twin: TwinTable,
    /// Name in the twin and id in the engine of every cache ever made.
    made: Vec<(usize, CacheId)>,
    refused: u64,
    released: u64,
}

impl Both {
    fn made(&mut self, name: usize, cache: &Arc<Cache>) {
        assert!(self.made.last().is_none_or(|&(_, last)| cache.id() > last), "ids grow");
        self.made.push((name, cache.id()));
    }

    /// One of the caches ever made, existing or not.
    fn pick(&self, pick: usize) -> Option<(usize, CacheId)> {
        Some(self.made[pick.checked_rem(self.made.len())?])
    }

    fn call(&mut self, call: &Call) {
        let before = self.twin.alive().len();
        match call {
            Call::Allocate(kind, rows, tensors, keys) => {
                let desc = desc(Device, *tensors, *rows, PAGE as usize / rows);
                let expected = self.twin.allocate(*kind, *rows, u64::from(*tensors) * PAGE, keys);
                match self.engine.allocate(&desc, *kind, keys) {
                    Ok(cache) => self.made(expected.expect("the twin refuses it"), &cache),
                    Err(error) => {
                        assert_eq!(Err(error.kind()), expected, "{error}");
                        self.refused += 1;
                    }
                }
            }
            Call::Register(kind, keys) => {
                let memory = adopt(&desc(Host, 1, 2, 8), *kind, &[4096]);
                let name = self.twin.register(*kind, keys);
                let cache = self.engine.register(memory, keys, Some(false)).unwrap();
                self.made(name, &cache);
            }
            Call::Deallocate(pick) => {
                if let Some((name, id)) = self.pick(*pick) {
                    self.twin.deallocate(name);
                    self.engine.deallocate(id).unwrap();
                }
            }
            Call::Unregister(pick) => {
                if let Some((name, id)) = self.pick(*pick) {
                    self.twin.unregister(name);
                    self.engine.unregister(id).unwrap();
                }
            }
            Call::RemoveKey(key) => {
                self.twin.remove_key(*key);
                self.engine.remove_key(*key).unwrap();
            }
            Call::Unknown(id) => {
                self.engine.deallocate(CacheId(*id)).unwrap();
                self.engine.unregister(CacheId(*id)).unwrap();
            }
        }
        self.released += u64::from(self.twin.alive().len() < before);
    }

    /// Checks that every cache and every key is found as in the twin.
    fn agree(&self) {
        let alive = self.twin.alive();
        for (name, id) in &self.made {
            let found = self.engine.find(*id).map(|cache| cache.id());
            let expected = if alive.contains(name) { Ok(*id) } else { Err(ErrorKind::CacheNotFound) };
            assert_eq!(found.map_err(|error| error.kind()), expected, "{id}");
        }
        for key in all_keys() {
            let found = self.engine.find_key(key).ok().map(|(cache, row)| (cache.id(), row));
            let id = |name| self.made.iter().find(|made| made.0 == name).unwrap().1;
            assert_eq!(found, self.twin.find_key(key).map(|(name, row)| (id(name), row)), "{key}");
        }
    }

    /// Called rarely, because reading the statistics reads the memory map of the process.
    fn sums_agree(&self) {
        let twin = (self.twin.alive().len() as u64, self.twin.keys() as u64, self.twin.used_bytes());
        assert_eq!(sums_of(&self.engine), twin);
    }
}

#[test]
fn agrees_with_the_naive_twin() {
    let sums = RefCell::new((0, 0, 0));
    TestRunner::new(proptest_cases(250))
        .run(&calls(), |calls| {
            let (engine, twin) = (engine(24), TwinTable::new(24 * PAGE));
            let mut both = Both { engine, twin, made: vec![], refused: 0, released: 0 };
            for (index, call) in calls.iter().enumerate() {
                if index % 16 == 15 {
                    both.sums_agree();
                }
                both.call(call);
                both.agree();
            }
            both.sums_agree();
            // Once everything is released, the pool is empty.
            for &(_, id) in &both.made {
                both.engine.deallocate(id).unwrap();
                both.engine.unregister(id).unwrap();
            }
            all_keys().into_iter().for_each(|key| both.engine.remove_key(key).unwrap());
            assert_eq!(sums_of(&both.engine), (0, 0, 0));
            let mut sums = sums.borrow_mut();
            *sums = (sums.0 + calls.len(), sums.1 + both.refused, sums.2 + both.released);
            Ok(())
        })
        .unwrap();
    let sums = sums.into_inner();
    assert!(sums.0 > 3000 && sums.1 > 300 && sums.2 > 300, "calls, refused, released: {sums:?}");
}

#[test]
fn keys_and_ids() {
    assert_eq!(CacheKey::new(u64::MAX, u64::MAX, 0), None);
    assert_eq!(CacheKey::new(5, u64::MAX, 1), Some(request(1, 5)));
    assert_eq!(CacheKey::new(u64::MAX, 5, 1), Some(CacheKey::Prefix { model: 1, id: 5 }));
    let engine = engine(64);
    let allocate = || engine.allocate(&desc(Device, 1, 4, 8), Batch, &[Some(request(0, 1))]);
    assert_eq!(allocate().unwrap().id(), CacheId(1));
    let taken = allocate().unwrap_err();
    assert_eq!((taken.kind(), taken.fact("cache_id")), (ErrorKind::KeyTaken, Some("1")));
    engine.deallocate(CacheId(1)).unwrap();
    engine.remove_key(request(0, 1)).unwrap();
    assert_eq!(allocate().unwrap().id(), CacheId(2));
}

/// A second call must not report success while the memory is still in use.
#[test]
fn unregister_waits_each_time_while_the_cache_is_in_use() {
    let config = Config { sync_timeout: Duration::from_millis(20), ..config(1 << 16) };
    let engine = DataDist::open(config).unwrap();
    let own =
        Own::new(&desc(Host, 1, 4, 8), Batch, |adopted| engine.register(adopted, &[], Some(true)).unwrap());
    let id = own.cache.id();
    let long = || Deadline::after(Duration::from_secs(9));
    for pin in [pin_reads, pin_writes] {
        let pinned = pin(&own.cache, vec![2], long()).unwrap();
        for _ in 0..3 {
            let error = engine.unregister(id).unwrap_err();
            assert_eq!((error.kind(), error.fact("cache_id")), (ErrorKind::Timeout, Some("1")));
            assert_eq!(engine.find(id).unwrap_err().kind(), ErrorKind::CacheNotFound, "it left at once");
        }
        drop(pinned);
    }
    engine.unregister(id).unwrap();
    let _pinned = pin_reads(&own.cache, vec![2], long()).unwrap();
    engine.unregister(id).unwrap();
    assert_eq!(engine.stats().table.caches, 0);
}

#[test]
fn memory_released_during_a_copy_returns_when_the_copy_ends() {
    for (kind, key) in [(Blocks, None), (Batch, None), (Batch, Some(request(0, 1)))] {
        let device = Gated::new(HostReach::Direct);
        let engine = engine_on(config(1 << 20), device.clone());
        let id = engine.allocate(&desc(Device, 1, 4, 64), kind, &[key]).unwrap().id();
        let end = End::Managed(id);
        device.shut();
        std::thread::scope(|scope| {
            let copy = scope.spawn(|| match kind {
                Blocks => engine.copy_blocks(&end, &[(0, 1)]),
                Batch => {
                    let args = CopyArgs { dst_batch_index: 1, src_batch_index: 0, offset: 0, size: -1 };
                    engine.copy_cache(&end, &end, args)
                }
            });
            device.wait_for(1);
            engine.deallocate(id).unwrap();
            key.into_iter().for_each(|key| engine.remove_key(key).unwrap());
            assert!(engine.find(id).is_err());
            // No other cache gets the memory: 15 of the 16 pages are free.
            assert_eq!(used(&engine), 1 << 16);
            let all = engine.allocate(&desc(Device, 16, 1, 8), Batch, &[]);
            assert_eq!(all.unwrap_err().kind(), ErrorKind::OutOfMemory);
            device.open();
            copy.join().unwrap().unwrap();
        });
        assert_eq!(used(&engine), 0);
        assert_eq!(engine.copy_blocks(&end, &[(0, 1)]).unwrap_err().kind(), ErrorKind::CacheNotFound);
    }
}

/// Copies of several units on several workers, and the ring, keep no reference after the call.
#[test]
fn memory_is_free_when_the_call_returns() {
    for (reach, swap_in) in [(HostReach::Direct, SwapInPath::Direct), (HostReach::Staged, SwapInPath::Ring)] {
        let config = Config { copy_workers: Some(4), swap_in, ..config(16 << 20) };
        let engine = engine_on(config, Arc::new(SimDevice::new(reach)));
        let own = Own::loose(&desc(Host, 2, 64, 40_000), Blocks);
        let rows: Vec<_> = (0..64).map(|row| (row, 63 - row)).collect();
        for _ in 0..60 {
            let id = engine.allocate(&desc(Device, 2, 64, 40_000), Blocks, &[]).unwrap().id();
            engine.swap_blocks(&End::Loose(own.cache.clone()), &End::Managed(id), &rows).unwrap();
            engine.swap_blocks(&End::Managed(id), &End::Loose(own.cache.clone()), &rows).unwrap();
            engine.deallocate(id).unwrap();
            assert_eq!(used(&engine), 0);
        }
        assert_eq!(Arc::strong_count(tensors(&own.cache)), 1, "the caller's memory is still referenced");
    }
}
