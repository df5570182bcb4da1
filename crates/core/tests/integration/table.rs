//! Caches and keys: random calls against the naive twin, and memory that is released while a copy uses it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::testing::cache::{pin_reads, pin_writes};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::testing::device::sim::SimDevice;
use llm_datadist_core::testing::oracle::TwinTable;
use llm_datadist_core::{
    Cache, CacheId, CacheKey, CacheKind, Config, DataDist, Deadline, End, ErrorKind, Placement, PoolConfig,
    SwapInPath,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::bed::{Gated, Own, adopt, config, desc, engine_on, proptest_cases};
use CacheKind::{Batch, Blocks};
use Placement::{Device, Host};

const PAGE: u64 = 1 << 10;

/// A device pool of `pages` pages of 1 KiB and no host pool.
fn engine(pages: u64) -> DataDist {
    let mut config = config(1 << 20);
    config.host_pool = None;
    config.device_pool = Some(PoolConfig { memory_size: pages * PAGE, page_shift: 10 });
    DataDist::open(config).unwrap()
}

fn request(model: u64, id: u64) -> CacheKey {
    CacheKey::Request { model, id }
}

fn prefix(model: u64, id: u64) -> CacheKey {
    CacheKey::Prefix { model, id }
}

fn used(engine: &DataDist) -> u64 {
    engine.stats().device_pool.unwrap().pool.used_bytes
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

fn keys() -> impl Strategy<Value = CacheKey> {
    let (model, id) = (0..2u64, 0..6u64);
    prop_oneof![
        5 => (model.clone(), id.clone()).prop_map(|(model, id)| request(model, id)),
        3 => (model.clone(), id).prop_map(|(model, id)| prefix(model, id)),
        1 => model.prop_map(|model| CacheKey::Blocks { model }),
    ]
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let list = prop::collection::vec(prop::option::weighted(0.7, keys()), 0..5).boxed();
    let kind = prop_oneof![3 => Just(Batch), 1 => Just(Blocks)];
    let call = prop_oneof![
        4 => (kind.clone(), 1..5usize, 1..9u32, list.clone()).prop_map(|(k, r, t, keys)| Call::Allocate(k, r, t, keys)),
        1 => (kind, list).prop_map(|(kind, keys)| Call::Register(kind, keys)),
        3 => (0..40usize).prop_map(Call::Deallocate),
        1 => (0..40usize).prop_map(Call::Unregister),
        4 => keys().prop_map(Call::RemoveKey),
        1 => prop_oneof![Just(-1i64), Just(0), Just(i64::MAX), Just(i64::MIN)].prop_map(Call::Unknown),
    ];
    prop::collection::vec(call, 1..60)
}

/// The engine and the twin side by side.
struct Both {
    engine: DataDist,
    twin: TwinTable,
    ids: HashMap<usize, CacheId>,
    made: Vec<usize>,
    last_id: i64,
    refused: u64,
    released: u64,
}

impl Both {
    fn new() -> Self {
        Both {
            engine: engine(24),
            twin: TwinTable::new(24 * PAGE),
            ids: HashMap::new(),
            made: vec![],
            last_id: 0,
            refused: 0,
            released: 0,
        }
    }

    fn made(&mut self, name: usize, cache: &Arc<Cache>) {
        assert!(cache.id().0 > self.last_id, "ids grow");
        self.last_id = cache.id().0;
        self.ids.insert(name, cache.id());
        self.made.push(name);
    }

    /// The `pick`-th cache ever made, living or not.
    fn pick(&self, pick: usize) -> Option<(usize, CacheId)> {
        let name = *self.made.get(pick.checked_rem(self.made.len())?)?;
        Some((name, self.ids[&name]))
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

    /// Everything that can be asked gets the same answer.
    fn agree(&self) {
        let alive = self.twin.alive();
        for (name, id) in &self.ids {
            match self.engine.find(*id) {
                Ok(cache) => assert!(cache.id() == *id && alive.contains(name), "{id} should be gone"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::CacheNotFound);
                    assert!(!alive.contains(name), "{id} should live");
                }
            }
        }
        for model in 0..2 {
            let all = (0..6).flat_map(|id| [request(model, id), prefix(model, id)]);
            for key in all.chain([CacheKey::Blocks { model }]) {
                let expected = self.twin.find_key(key).map(|(name, row)| (self.ids[&name], row));
                let found = self.engine.find_key(key).ok().map(|(cache, row)| (cache.id(), row));
                assert_eq!(found, expected, "{key}");
            }
        }
    }

    /// Asked once per case: reading the statistics reads the memory map of the process.
    fn sums_agree(&self) {
        let stats = self.engine.stats();
        assert_eq!(
            (stats.table.caches, stats.table.keys),
            (self.twin.alive().len() as u64, self.twin.keys() as u64)
        );
        assert_eq!(stats.device_pool.unwrap().pool.used_bytes, self.twin.used_bytes());
    }
}

#[test]
fn agrees_with_the_naive_twin() {
    let sums = RefCell::new((0, 0, 0));
    TestRunner::new(proptest_cases(250))
        .run(&calls(), |calls| {
            let mut both = Both::new();
            for (index, call) in calls.iter().enumerate() {
                if index % 16 == 15 {
                    both.sums_agree();
                }
                both.call(call);
                both.agree();
            }
            both.sums_agree();
            // Whatever is left can be given up, and then the pool is empty.
            for name in both.made.clone() {
                let id = both.ids[&name];
                both.engine.deallocate(id).unwrap();
                both.engine.unregister(id).unwrap();
            }
            for model in 0..2 {
                for id in 0..6 {
                    both.engine.remove_key(request(model, id)).unwrap();
                    both.engine.remove_key(prefix(model, id)).unwrap();
                }
                both.engine.remove_key(CacheKey::Blocks { model }).unwrap();
            }
            let table = both.engine.stats().table;
            assert_eq!((used(&both.engine), table.caches, table.keys), (0, 0, 0));
            let mut sums = sums.borrow_mut();
            *sums = (sums.0 + calls.len(), sums.1 + both.refused, sums.2 + both.released);
            Ok(())
        })
        .unwrap();
    let (calls, refused, released) = sums.into_inner();
    assert!(
        calls > 3000 && refused > 300 && released > 300,
        "{calls} calls, {refused} refused, {released} releases"
    );
}

#[test]
fn a_cache_lives_until_its_last_key_goes() {
    let engine = engine(64);
    let keys = [Some(request(0, 1)), None, Some(request(0, 2)), None];
    let id = engine.allocate(&desc(Device, 2, 4, 256), Batch, &keys).unwrap().id();
    assert_eq!(engine.find_key(request(0, 2)).unwrap().1, 2);
    engine.deallocate(id).unwrap();
    engine.deallocate(id).unwrap();
    assert_eq!((engine.find(id).is_ok(), used(&engine)), (true, 2 * PAGE));
    engine.remove_key(request(0, 1)).unwrap();
    assert!(engine.find_key(request(0, 1)).is_err());
    assert_eq!((engine.find(id).is_ok(), used(&engine)), (true, 2 * PAGE));
    engine.remove_key(request(0, 2)).unwrap();
    assert_eq!((engine.find(id).is_err(), used(&engine)), (true, 0));
    engine.remove_key(request(0, 2)).unwrap();
    assert_eq!(engine.allocate(&desc(Device, 1, 4, 256), Batch, &keys).unwrap().id(), CacheId(id.0 + 1));
}

#[test]
fn the_last_of_equal_keys_takes_effect() {
    let engine = engine(64);
    let key = request(3, 7);
    let keys = [Some(key), None, Some(key), Some(prefix(3, 7)), None];
    let cache = engine.allocate(&desc(Device, 1, 5, 100), Batch, &keys).unwrap();
    assert_eq!(engine.find_key(key).unwrap().1, 2);
    assert_eq!(engine.find_key(prefix(3, 7)).unwrap().1, 3);
    assert!(engine.find_key(request(4, 7)).is_err(), "another model");
    assert_eq!(engine.stats().table.keys, 2);
    engine.deallocate(cache.id()).unwrap();
    engine.remove_key(key).unwrap();
    assert!(engine.find(cache.id()).is_ok());
    engine.remove_key(prefix(3, 7)).unwrap();
    assert!(engine.find(cache.id()).is_err(), "the overwritten key counts no more");
}

#[test]
fn placeholders_bind_nothing_however_many() {
    assert_eq!(CacheKey::new(u64::MAX, u64::MAX, 0), None);
    assert_eq!(CacheKey::new(5, u64::MAX, 1), Some(request(1, 5)));
    assert_eq!(CacheKey::new(u64::MAX, 5, 1), Some(prefix(1, 5)));
    let engine = engine(64);
    engine.allocate(&desc(Device, 1, 4, 8), Blocks, &[Some(CacheKey::Blocks { model: 0 })]).unwrap();
    for _ in 0..3 {
        engine.allocate(&desc(Device, 1, 4, 8), Batch, &[None, None, None, None]).unwrap();
    }
    assert_eq!((engine.stats().table.caches, engine.stats().table.keys), (4, 1));
}

#[test]
fn one_blocks_cache_per_model_and_it_goes_at_once() {
    let engine = engine(64);
    let key = [Some(CacheKey::Blocks { model: 9 })];
    let first = engine.allocate(&desc(Device, 1, 4, 8), Blocks, &key).unwrap().id();
    let error = engine.allocate(&desc(Device, 1, 4, 8), Blocks, &key).unwrap_err();
    assert_eq!((error.kind(), error.fact("cache_id")), (ErrorKind::KeyTaken, Some("1")));
    engine.deallocate(first).unwrap();
    assert_eq!((used(&engine), engine.stats().table.keys), (0, 0));
    let second = engine.allocate(&desc(Device, 1, 4, 8), Blocks, &key).unwrap().id();
    // The caller's own memory takes the name over; the allocated one keeps living by its id.
    let own =
        Own::new(&desc(Host, 1, 4, 8), Blocks, |adopted| engine.register(adopted, &key, Some(true)).unwrap());
    assert_eq!(engine.find_key(key[0].unwrap()).unwrap().0.id(), own.cache.id());
    assert!(engine.find(second).is_ok());
    engine.remove_key(key[0].unwrap()).unwrap();
    assert!(engine.find_key(key[0].unwrap()).is_ok(), "keys of registered caches stay");
    engine.deallocate(own.cache.id()).unwrap();
    assert!(engine.find(own.cache.id()).is_ok(), "and so do they");
    engine.deallocate(second).unwrap();
    assert!(engine.find_key(key[0].unwrap()).is_ok(), "a name that was taken over is not taken along");
    engine.unregister(own.cache.id()).unwrap();
    assert!(engine.find_key(key[0].unwrap()).is_err());
    assert_eq!((engine.stats().table.caches, used(&engine)), (0, 0));
}

/// Memory that a call still uses must not look free because somebody asked twice.
#[test]
fn a_cache_that_is_still_used_is_waited_for_again() {
    let engine =
        DataDist::open(Config { sync_timeout: Duration::from_millis(20), ..config(1 << 16) }).unwrap();
    let own =
        Own::new(&desc(Host, 1, 4, 8), Batch, |adopted| engine.register(adopted, &[], Some(true)).unwrap());
    let id = own.cache.id();
    for write in [false, true] {
        let pin = if write { pin_writes } else { pin_reads };
        let used = pin(&own.cache, vec![2], Deadline::after(Duration::from_secs(9))).unwrap();
        for _ in 0..3 {
            let error = engine.unregister(id).unwrap_err();
            assert_eq!((error.kind(), error.fact("cache_id")), (ErrorKind::Timeout, Some("1")));
            assert_eq!(engine.find(id).unwrap_err().kind(), ErrorKind::CacheNotFound, "it left at once");
        }
        drop(used);
    }
    engine.unregister(id).unwrap();
    let used = pin_reads(&own.cache, vec![2], Deadline::after(Duration::from_secs(9))).unwrap();
    engine.unregister(id).unwrap();
    drop(used);
    assert_eq!(engine.stats().table.caches, 0);
}

#[test]
fn unregister_leaves_allocated_caches_alone() {
    let engine = engine(64);
    let cache = engine.allocate(&desc(Device, 1, 4, 8), Batch, &[]).unwrap();
    engine.unregister(cache.id()).unwrap();
    assert!(engine.find(cache.id()).is_ok());
}

/// What ends the last reference of the cache that is being copied.
type Release = fn(&DataDist, CacheId);

#[test]
fn released_during_a_copy() {
    let ways: [(CacheKind, Option<CacheKey>, Release); 3] = [
        (Blocks, None, |engine, id| engine.deallocate(id).unwrap()),
        (Batch, None, |engine, id| engine.deallocate(id).unwrap()),
        (Batch, Some(request(0, 1)), |engine, id| {
            engine.deallocate(id).unwrap();
            engine.remove_key(request(0, 1)).unwrap();
        }),
    ];
    for (kind, key, release) in ways {
        let device = Gated::new(HostReach::Direct);
        let mut config = config(1 << 20);
        config.sync_timeout = Duration::from_secs(30);
        let engine = engine_on(config, device.clone());
        let id = engine.allocate(&desc(Device, 1, 4, 64), kind, &[key]).unwrap().id();
        let end = End::Managed(id);
        device.shut();
        std::thread::scope(|scope| {
            let copy = scope.spawn(|| match kind {
                Blocks => engine.copy_blocks(&end, &[(0, 1)]),
                Batch => engine.copy_cache(
                    &end,
                    &end,
                    llm_datadist_core::CopyArgs {
                        dst_batch_index: 1,
                        src_batch_index: 0,
                        offset: 0,
                        size: -1,
                    },
                ),
            });
            device.wait_for(1);
            release(&engine, id);
            assert!(engine.find(id).is_err(), "nobody finds it any more");
            assert_eq!(used(&engine), 1 << 16, "but the copy still has its memory");
            // Its memory is handed to nobody else: the pool of 16 pages has 15.
            assert_eq!(
                engine.allocate(&desc(Device, 16, 1, 8), Batch, &[]).unwrap_err().kind(),
                ErrorKind::OutOfMemory
            );
            device.open();
            copy.join().unwrap().unwrap();
        });
        assert_eq!(used(&engine), 0, "memory comes back with the end of the copy");
        assert_eq!(engine.copy_blocks(&end, &[(0, 1)]).unwrap_err().kind(), ErrorKind::CacheNotFound);
    }
}

#[test]
fn memory_is_back_when_the_call_returns() {
    // Several units on several workers, and the ring: none of them may keep what was copied a moment longer.
    for (reach, swap_in) in [(HostReach::Direct, SwapInPath::Direct), (HostReach::Staged, SwapInPath::Ring)] {
        let mut config = config(16 << 20);
        (config.copy_workers, config.swap_in) = (Some(4), swap_in);
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
        assert_eq!(
            Arc::strong_count(llm_datadist_core::testing::tensors(&own.cache)),
            1,
            "nor the caller's memory"
        );
    }
}

#[test]
fn many_threads_leave_nothing_behind() {
    let engine = engine(256);
    let made: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u64)
            .map(|thread| {
                let engine = &engine;
                scope.spawn(move || {
                    let mut made = 0;
                    for round in 0..200 {
                        // Keys of its own, and one that all threads want.
                        let keys = [Some(request(thread, round)), Some(request(99, 0))];
                        let keys = if round % 3 == 0 { &keys[..] } else { &keys[..1] };
                        match engine.allocate(&desc(Device, 4, 2, 512), Batch, keys) {
                            Ok(cache) => {
                                made += 1;
                                engine.deallocate(cache.id()).unwrap();
                                assert_eq!(
                                    engine.find_key(request(thread, round)).unwrap().0.id(),
                                    cache.id()
                                );
                                if keys.len() == 2 {
                                    engine.remove_key(request(99, 0)).unwrap();
                                }
                                engine.remove_key(request(thread, round)).unwrap();
                                assert!(engine.find(cache.id()).is_err());
                            }
                            Err(error) => assert_eq!(error.kind(), ErrorKind::KeyTaken),
                        }
                    }
                    made
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(made > 8 * 100);
    assert_eq!((used(&engine), engine.stats().table.caches, engine.stats().table.keys), (0, 0, 0));
}
