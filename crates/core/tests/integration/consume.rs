//! What peers ask of the table: names, generations, and keys released by pulls; against a naive twin.
//!
//! Not for: messages, or bytes.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use llm_datadist_core::testing::cache::Table;
use llm_datadist_core::testing::memory::{Generations, Region, Tensors};
use llm_datadist_core::testing::model::Name;
use llm_datadist_core::testing::validate::{Side, bindings};
use llm_datadist_core::{Cache, CacheId, CacheKey, CacheKind, ErrorKind, Geometry, Placement};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::bed::{adopt, desc, proptest_cases};
use CacheKind::{Batch, Blocks};
use Placement::Host;

type Keys = Vec<Option<CacheKey>>;

fn request(id: u64) -> CacheKey {
    CacheKey::Request { model: 0, id }
}

fn prefix(id: u64) -> CacheKey {
    CacheKey::Prefix { model: 0, id }
}

fn row(cache: CacheId, row: u32) -> Name {
    Name::Row { cache, row }
}

struct Real {
    table: Table,
    generations: Arc<Generations>,
    region: Arc<Region>,
}

impl Real {
    fn new() -> Real {
        let generations = Arc::new(Generations::new().unwrap());
        Real {
            table: Table::new(generations.clone()),
            generations,
            region: Arc::new(Region::shared("consume", 1 << 16).unwrap()),
        }
    }

    fn allocate(&self, kind: CacheKind, tensors: u32, rows: u64, keys: &Keys) -> Option<Arc<Cache>> {
        let desc = desc(Host, tensors, rows as usize, 4);
        let side = Side { geometry: Geometry::new(&desc).unwrap(), kind, placement: Host };
        let offsets = (0..u64::from(tensors)).map(|tensor| tensor * 64);
        let memory = Tensors::carved(self.region.clone(), offsets, rows * 4, Box::new(())).unwrap();
        self.table.allocate(&desc, side, memory, &bindings(keys).unwrap()).ok()
    }

    fn register(&self, kind: CacheKind, tensors: u32, rows: u64, keys: &Keys) -> Arc<Cache> {
        let addrs: Vec<u64> = (1..=u64::from(tensors)).map(|tensor| tensor * 4096).collect();
        let memory = adopt(&desc(Host, tensors, rows as usize, 4), kind, &addrs);
        self.table.register(memory, &bindings(keys).unwrap(), true).unwrap()
    }
}

/// One cache, as a list of what each row is called.
struct TwinCache {
    id: CacheId,
    real: Weak<Cache>,
    kind: CacheKind,
    allocated: bool,
    tensors: u32,
    rows: u64,
    held: bool,
    alive: bool,
    /// Raised with every key it loses.
    changes: u64,
    /// Per row: its key, and the tensors that are still to be pulled.
    slots: Vec<Option<(CacheKey, BTreeSet<u32>)>>,
}

impl TwinCache {
    fn lose(&mut self, row: usize) {
        self.slots[row] = None;
        self.changes += 1;
        self.settle();
    }

    fn settle(&mut self) {
        if self.allocated && !self.held && self.slots.iter().all(Option::is_none) {
            self.alive = false;
        }
    }

    fn end(&mut self) {
        self.alive = false;
        self.slots.iter_mut().for_each(|slot| *slot = None);
    }
}

#[derive(Default)]
struct Twin(Vec<TwinCache>);

impl Twin {
    fn find_key(&self, key: CacheKey) -> Option<(usize, usize)> {
        let caches = self.0.iter().enumerate().filter(|(_, cache)| cache.alive);
        caches
            .flat_map(|(at, cache)| cache.slots.iter().enumerate().map(move |(row, slot)| (at, row, slot)))
            .find_map(|(at, row, slot)| {
                slot.as_ref().is_some_and(|(known, _)| *known == key).then_some((at, row))
            })
    }

    /// Index and row of a name (contract §12.2, §12.4).
    fn find(&self, name: Name) -> Option<(usize, usize)> {
        let (id, row) = match name {
            Name::Key(key) => return self.find_key(key),
            Name::Row { cache, row } => (cache, row as usize),
        };
        let at = if id.0 <= 0 {
            self.find_key(request(0))?.0
        } else {
            self.0.iter().position(|cache| cache.alive && cache.id == id)?
        };
        let rows = if self.0[at].kind == Batch { self.0[at].rows as usize } else { 1 };
        (row < rows).then_some((at, row))
    }

    fn enter(&mut self, real: &Arc<Cache>, allocated: bool, keys: &Keys) {
        let geometry = real.geometry();
        let mut slots: Vec<_> = (0..geometry.rows()).map(|_| None).collect();
        for (row, key) in keys.iter().enumerate() {
            let Some(key) = key else { continue };
            if let Some((at, row)) = self.find_key(*key) {
                self.0[at].lose(row);
            }
            slots.iter_mut().for_each(|slot: &mut Option<(CacheKey, BTreeSet<u32>)>| {
                *slot = slot.take().filter(|(known, _)| known != key);
            });
            slots[row] = Some((*key, (0..geometry.num_tensors()).collect()));
        }
        let (id, kind, tensors, rows) = (real.id(), real.kind(), geometry.num_tensors(), geometry.rows());
        let (real, held, alive, changes) = (Arc::downgrade(real), true, true, 0);
        self.0.push(TwinCache { id, real, kind, allocated, tensors, rows, held, alive, changes, slots });
    }

    /// contract §12.3.
    fn consume(&mut self, name: Name, cache: CacheId, first: u32, count: u32) -> Result<(), ErrorKind> {
        if matches!(name, Name::Key(CacheKey::Prefix { .. } | CacheKey::Blocks { .. })) {
            return Ok(());
        }
        let (at, row) = self.find(name).ok_or(ErrorKind::CacheNotFound)?;
        let found = &mut self.0[at];
        if found.id != cache {
            return Err(ErrorKind::CacheNotFound);
        }
        if u64::from(first) + u64::from(count) > u64::from(found.tensors) {
            return Err(ErrorKind::InvalidArgument);
        }
        if !found.allocated || found.kind == Blocks {
            return Ok(());
        }
        if let Some((CacheKey::Request { .. }, missing)) = &mut found.slots[row] {
            missing.retain(|tensor| !(first..first + count).contains(tensor));
            if missing.is_empty() {
                found.lose(row);
            }
        }
        Ok(())
    }

    fn release_row(&mut self, cache: CacheId, row: usize) {
        for found in self.0.iter_mut().filter(|found| found.alive && found.id == cache) {
            let key = found.slots.get(row).and_then(|slot| slot.as_ref().map(|(key, _)| *key));
            if found.allocated && found.kind == Batch && matches!(key, Some(CacheKey::Request { .. })) {
                found.lose(row);
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Call {
    Allocate(CacheKind, u32, u64, Keys),
    Register(CacheKind, u32, u64, Keys),
    Deallocate(usize),
    Unregister(usize),
    RemoveKey(CacheKey),
    /// By key or by row of a cache; the cache it led to when it was described, or any other.
    Consume(Option<CacheKey>, usize, u32, bool, u32, u32),
    ReleaseRow(usize, u32),
}

fn keys() -> impl Strategy<Value = CacheKey> {
    prop_oneof![
        6 => (0..4u64).prop_map(request),
        2 => (0..3u64).prop_map(prefix),
        1 => Just(CacheKey::Blocks { model: 0 }),
    ]
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let list = prop::collection::vec(prop::option::weighted(0.8, keys()), 0..4).boxed();
    let kind = prop_oneof![4 => Just(Batch), 1 => Just(Blocks)].boxed();
    let shape = (kind, 1..4u32, 1..4u64, list);
    let fit = |rows: u64, mut keys: Keys| {
        keys.truncate(rows as usize);
        keys
    };
    let consumed = (prop::option::weighted(0.5, keys()), 0..20usize, 0..4u32, prop::bool::weighted(0.9));
    let call = prop_oneof![
        5 => shape.clone().prop_map(move |(kind, tensors, rows, keys)| Call::Allocate(kind, tensors, rows, fit(rows, keys))),
        1 => shape.prop_map(move |(kind, tensors, rows, keys)| Call::Register(kind, tensors, rows, fit(rows, keys))),
        2 => (0..20usize).prop_map(Call::Deallocate),
        1 => (0..20usize).prop_map(Call::Unregister),
        1 => keys().prop_map(Call::RemoveKey),
        10 => (consumed, 0..4u32, 0..4u32).prop_map(|((key, pick, row, same), first, count)| {
            Call::Consume(key, pick, row, same, first, count)
        }),
        1 => (0..20usize, 0..4u32).prop_map(|(pick, row)| Call::ReleaseRow(pick, row)),
    ];
    prop::collection::vec(call, 1..60)
}

struct Both {
    real: Real,
    twin: Twin,
    /// Place and generation that were told, the index of the cache, and its changes at that time.
    told: Vec<((u32, u64), usize, u64)>,
    consumed: u64,
    refused: u64,
}

impl Both {
    fn id(&self, pick: usize) -> CacheId {
        let index = pick.checked_rem(self.twin.0.len() + 1).unwrap_or(0);
        self.twin.0.get(index).map_or(CacheId(-3), |cache| cache.id)
    }

    fn call(&mut self, call: &Call) {
        match call {
            Call::Allocate(kind, tensors, rows, keys) => {
                let taken = keys.iter().flatten().any(|&key| self.twin.find_key(key).is_some());
                let made = self.real.allocate(*kind, *tensors, *rows, keys);
                assert_eq!(made.is_none(), taken);
                if let Some(cache) = made {
                    self.twin.enter(&cache, true, keys);
                }
            }
            Call::Register(kind, tensors, rows, keys) => {
                let cache = self.real.register(*kind, *tensors, *rows, keys);
                self.twin.enter(&cache, false, keys);
            }
            Call::Deallocate(pick) => {
                let id = self.id(*pick);
                self.real.table.deallocate(id);
                for cache in self.twin.0.iter_mut().filter(|cache| cache.id == id && cache.allocated) {
                    cache.held = false;
                    if cache.kind == Blocks { cache.end() } else { cache.settle() }
                }
            }
            Call::Unregister(pick) => {
                let id = self.id(*pick);
                self.real.table.unregister(id).unwrap();
                self.twin.0.iter_mut().filter(|c| c.id == id && !c.allocated).for_each(TwinCache::end);
            }
            Call::RemoveKey(key) => {
                self.real.table.remove_key(*key);
                if let Some((at, row)) = self.twin.find_key(*key).filter(|&(at, _)| self.twin.0[at].allocated)
                {
                    self.twin.0[at].lose(row);
                }
            }
            Call::Consume(key, pick, at, same, first, count) => {
                let name = key.map_or(row(self.id(*pick), *at), Name::Key);
                let led = self.twin.find(name).map(|(at, _)| self.twin.0[at].id);
                let cache = led.filter(|_| *same).unwrap_or_else(|| self.id(*pick));
                // A count of 0 leaves the numbers as they are; others mostly fit the cache.
                let tensors = self.twin.0.iter().find(|twin| twin.id == cache).map_or(1, |twin| twin.tensors);
                let (mut first, mut count) = (*first, *count);
                if count > 0 {
                    first %= tensors;
                    count = count.min(tensors - first);
                } else if *same {
                    count = first;
                }
                let keys = self.real.table.state().keys;
                let expected = self.twin.consume(name, cache, first, count);
                let done = self.real.table.consume(name, cache, first, count);
                assert_eq!(done.map_err(|error| error.kind()), expected, "{name}");
                self.consumed += keys - self.real.table.state().keys;
                self.refused += u64::from(expected.is_err());
            }
            Call::ReleaseRow(pick, row) => {
                let id = self.id(*pick);
                self.real.table.release_row(id, *row);
                self.twin.release_row(id, *row as usize);
            }
        }
    }

    /// Every name leads to the same place in both, and what was told before is believed exactly while it holds.
    fn agree(&mut self) {
        for cache in &self.twin.0 {
            assert_eq!(cache.real.strong_count() > 0, cache.alive, "cache {}", cache.id);
        }
        for &((place, generation), at, changes) in &self.told {
            let twin = &self.twin.0[at];
            let expected = twin.alive && twin.changes == changes;
            assert_eq!(self.real.generations.of(place) == generation, expected);
        }
        // Also what was told long ago, of places that have had other caches since.
        self.told.truncate(500);
        let mut names: Vec<Name> = (0..4).map(request).chain((0..3).map(prefix)).map(Name::Key).collect();
        names.push(Name::Key(CacheKey::Blocks { model: 0 }));
        for id in
            self.twin.0.iter().map(|cache| cache.id).chain([CacheId(0), CacheId(i64::MIN), CacheId(1 << 40)])
        {
            names.extend((0..4).chain([u32::MAX]).map(|at| row(id, at)));
        }
        for name in names {
            let expected = self.twin.find(name);
            match self.real.table.describe(name) {
                Ok(found) => {
                    let (at, row) = expected.unwrap_or_else(|| panic!("{name} should lead nowhere"));
                    assert_eq!((found.cache.id(), found.row as usize), (self.twin.0[at].id, row), "{name}");
                    self.told.push(((found.place, found.generation), at, self.twin.0[at].changes));
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::CacheNotFound);
                    assert!(expected.is_none(), "{name} should be found: {error}");
                }
            }
        }
    }
}

#[test]
fn agrees_with_the_naive_twin() {
    let sums = (Cell::new(0), Cell::new(0));
    TestRunner::new(proptest_cases(300))
        .run(&calls(), |calls| {
            let (real, twin) = (Real::new(), Twin::default());
            let mut both = Both { real, twin, told: vec![], consumed: 0, refused: 0 };
            for call in &calls {
                both.call(call);
                both.agree();
            }
            sums.0.set(sums.0.get() + both.consumed);
            sums.1.set(sums.1.get() + both.refused);
            Ok(())
        })
        .unwrap();
    assert!(sums.0.get() > 100 && sums.1.get() > 100, "{sums:?} keys consumed, consumptions refused");
}

#[test]
fn partial_pulls_count_per_key() {
    let real = Real::new();
    let cache = real.allocate(Batch, 4, 2, &vec![Some(request(1)), Some(request(2))]).unwrap();
    let table = &real.table;
    let pull =
        |id: u64, first, count| table.consume(Name::Key(request(id)), cache.id(), first, count).unwrap();
    let bound = |id: u64| table.describe(Name::Key(request(id))).is_ok();
    pull(1, 0, 2);
    pull(2, 2, 2);
    pull(1, 1, 1);
    pull(1, 3, 1);
    assert!(bound(1) && bound(2), "one has tensor 2 to go, the other 0 and 1");
    pull(1, 4, 0);
    assert!(bound(1));
    // The rest of one by its row.
    table.consume(row(cache.id(), 0), cache.id(), 2, 1).unwrap();
    assert!(!bound(1) && bound(2));
    let gone = table.consume(Name::Key(request(1)), cache.id(), 0, 4).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::CacheNotFound);
    // The same key, bound again, starts anew.
    let again = real.allocate(Batch, 4, 1, &vec![Some(request(1))]).unwrap();
    table.consume(Name::Key(request(1)), again.id(), 2, 2).unwrap();
    assert!(bound(1));
    pull(2, 0, 2);
    assert!(!bound(2));
    let weak = Arc::downgrade(&cache);
    table.deallocate(cache.id());
    drop(cache);
    assert_eq!(weak.strong_count(), 0);
    let beyond = table.consume(Name::Key(request(1)), again.id(), u32::MAX, 2).unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::InvalidArgument);
    // A key removed with tensors to go leaves nothing behind for its successor.
    table.remove_key(request(1));
    let third = real.allocate(Batch, 4, 1, &vec![Some(request(1))]).unwrap();
    table.consume(Name::Key(request(1)), third.id(), 0, 2).unwrap();
    assert!(bound(1), "tensors 2 and 3 were pulled from another cache");
}

/// Seed `deprecated.md`, `allocate_cache`: of duplicate keys the last takes effect; the slot before has none.
#[test]
fn of_duplicate_keys_the_last_slot_is_meant() {
    let real = Real::new();
    let cache =
        real.allocate(Batch, 1, 3, &vec![Some(request(7)), Some(request(8)), Some(request(7))]).unwrap();
    let table = &real.table;
    assert_eq!(table.describe(Name::Key(request(7))).unwrap().row, 2);
    table.consume(row(cache.id(), 0), cache.id(), 0, 1).unwrap();
    table.release_row(cache.id(), 0);
    assert_eq!(table.state().keys, 2);
    assert_eq!(table.describe(Name::Key(request(7))).unwrap().row, 2);
    table.consume(row(cache.id(), 2), cache.id(), 0, 1).unwrap();
    assert!(table.describe(Name::Key(request(7))).is_err());
    assert!(table.describe(Name::Key(request(8))).is_ok());
}

/// A pull may end after its key was consumed, and bound to another cache: nobody then knows whose bytes they were.
#[test]
fn a_name_that_leads_elsewhere_by_now() {
    let real = Real::new();
    let first = real.allocate(Batch, 1, 1, &vec![Some(request(0))]).unwrap();
    let told = real.table.describe(Name::Key(request(0))).unwrap();
    real.table.consume(Name::Key(request(0)), first.id(), 0, 1).unwrap();
    assert_ne!(real.generations.of(told.place), told.generation);
    assert!(real.table.reached(Name::Key(request(0)), first.id()).is_none());
    let second = real.allocate(Batch, 1, 1, &vec![Some(request(0))]).unwrap();
    assert!(
        real.table.reached(Name::Key(request(0)), first.id()).is_none(),
        "the key leads to another cache"
    );
    assert_eq!(real.table.reached(Name::Key(request(0)), second.id()).unwrap().id(), second.id());
    let late = real.table.consume(Name::Key(request(0)), first.id(), 0, 1).unwrap_err();
    assert_eq!((late.kind(), late.fact("cache_id")), (ErrorKind::CacheNotFound, Some("1")), "{late}");
    // Ids 0 and below are the key (0, 0) (contract §12.4).
    assert_eq!(real.table.describe(row(CacheId(0), 0)).unwrap().cache.id(), second.id());
    real.table.consume(row(CacheId(-1), 0), second.id(), 0, 1).unwrap();
    assert!(real.table.describe(row(CacheId(0), 0)).is_err());
    assert!(real.table.reached(row(second.id(), 0), second.id()).is_some(), "held by its id");
    assert!(real.table.reached(row(second.id(), 1), second.id()).is_none(), "there is no such slot");
}
