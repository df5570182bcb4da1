//! Random calls of the cache table, local and from peers, compared with a naive model.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use llm_datadist_core::bindings::{Cache, CacheKey, CacheLayout, Geometry};
use llm_datadist_core::testing::cache::Table;
use llm_datadist_core::testing::memory::{Generations, Region, Tensors};
use llm_datadist_core::testing::model::{GrantId, Name};
use llm_datadist_core::testing::validate::bindings;
use llm_datadist_core::{CacheId, CacheKind, ErrorKind, Placement, Result};
use llm_datadist_testing::oracle::TwinTable;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::fixtures::{adopt, desc, proptest_cases};
use CacheKind::{Batch, Blocks};

type Keys = Vec<Option<CacheKey>>;

/// The numbers 0 to 3 are two ids of two models.
fn request(number: u64) -> CacheKey {
    CacheKey::Request { model: number / 2, id: number % 2 }
}

fn prefix(number: u64) -> CacheKey {
    CacheKey::Prefix { model: number / 2, id: number % 2 }
}

fn row(cache: CacheId, row: u32) -> Name {
    Name::Row { cache, row }
}

#[derive(Clone, Debug)]
struct Shape {
    allocated: bool,
    kind: CacheKind,
    tensors: u32,
    rows: u64,
    keys: Keys,
}

struct Real {
    table: Table,
    generations: Arc<Generations>,
    region: Arc<Region>,
}

impl Real {
    fn new() -> Real {
        let generations = Arc::new(Generations::new().unwrap());
        let region = Arc::new(Region::shared("remote_table", 1 << 16).unwrap());
        Real { table: Table::new(generations.clone()), generations, region }
    }

    fn enter(&self, Shape { allocated, kind, tensors, rows, keys }: &Shape) -> Result<Arc<Cache>> {
        let desc = desc(Placement::Host, *tensors, *rows as usize, 4);
        let keys = bindings(keys).unwrap();
        if !allocated {
            let addrs: Vec<u64> = (1..=u64::from(*tensors)).map(|tensor| tensor * 4096).collect();
            return self.table.register(None, &keys, adopt(&desc, *kind, &addrs), true);
        }
        let layout =
            CacheLayout { geometry: Geometry::new(&desc).unwrap(), kind: *kind, placement: Placement::Host };
        let offsets = (0..u64::from(*tensors)).map(|tensor| tensor * 64);
        let memory = Tensors::carved(self.region.clone(), offsets, rows * 4, ()).unwrap();
        self.table.allocate(None, &keys, &desc, layout, memory)
    }
}

/// Every key that a call may name.
fn all_keys() -> impl Iterator<Item = CacheKey> {
    let blocks = (0..2).map(|model| CacheKey::Blocks { model });
    (0..4).map(request).chain((0..3).map(prefix)).chain(blocks)
}

/// The model of the table, with what pulls add to it. Caches are numbered as they are made.
struct Twin {
    table: TwinTable,
    caches: Vec<(CacheId, Shape)>,
    /// Tensors that were pulled by a key of a cache.
    pulled: BTreeMap<(usize, u32), BTreeSet<u32>>,
}

impl Twin {
    fn new() -> Twin {
        Twin { table: TwinTable::default(), caches: vec![], pulled: BTreeMap::new() }
    }

    fn alive(&self, at: usize) -> bool {
        self.table.alive().contains(&at)
    }

    /// The number of a cache; for an unknown id, one that no cache has.
    fn index(&self, id: CacheId) -> usize {
        self.caches.iter().position(|cache| cache.0 == id).unwrap_or(usize::MAX)
    }

    fn key(&self, at: usize, row: u32) -> Option<CacheKey> {
        all_keys().find(|&key| self.table.find_key(key) == Some((at, row)))
    }

    /// Number of keys of a cache, which only falls.
    fn keys(&self, at: usize) -> usize {
        all_keys().filter(|&key| self.table.find_key(key).is_some_and(|found| found.0 == at)).count()
    }

    /// Index and row of a name (contract §12.2, §12.4).
    fn find(&self, name: Name) -> Option<(usize, u32)> {
        let (id, row) = match name {
            Name::Key(key) => return self.table.find_key(key),
            Name::Row { cache, row } => (cache, row),
            Name::Grant(_) => return None,
        };
        let at = if id.0 <= 0 { self.table.find_key(request(0))?.0 } else { self.index(id) };
        self.alive(at).then_some(())?;
        let Shape { kind, rows, .. } = self.caches[at].1;
        let rows = if kind == Batch { rows } else { 1 };
        (u64::from(row) < rows).then_some((at, row))
    }

    /// contract §12.3.
    fn consume(
        &mut self,
        name: Name,
        cache: CacheId,
        first: u32,
        count: u32,
    ) -> std::result::Result<(), ErrorKind> {
        if matches!(name, Name::Key(CacheKey::Prefix { .. } | CacheKey::Blocks { .. })) {
            return Ok(());
        }
        let (at, row) = self.find(name).ok_or(ErrorKind::CacheNotFound)?;
        let (id, Shape { tensors, kind, .. }) = &self.caches[at];
        if *id != cache {
            return Err(ErrorKind::CacheNotFound);
        }
        if u64::from(first) + u64::from(count) > u64::from(*tensors) {
            return Err(ErrorKind::InvalidArgument);
        }
        let pulled = self.pulled.entry((at, row)).or_default();
        pulled.extend(first..first + count);
        if *kind == Batch && pulled.len() == *tensors as usize {
            self.release_row(at, row);
        }
        Ok(())
    }

    fn release_row(&mut self, at: usize, row: u32) {
        if let Some(key @ CacheKey::Request { .. }) = self.key(at, row)
            && self.caches[at].1.kind == Batch
        {
            self.table.remove_key(key);
        }
    }
}

/// Caches are given as an index, which may name no cache.
#[derive(Clone, Debug)]
enum Call {
    Enter(Shape),
    Deallocate(usize),
    Unregister(usize),
    RemoveKey(CacheKey),
    /// A key, or a row of a cache; then whether the cache to which it resolves is meant, or any other.
    Consume(Option<CacheKey>, usize, u32, bool, (u32, u32)),
    ReleaseRow(usize, u32),
}

fn keys() -> impl Strategy<Value = CacheKey> {
    prop_oneof![
        6 => (0..4u64).prop_map(request),
        2 => (0..3u64).prop_map(prefix),
        1 => (0..2u64).prop_map(|model| CacheKey::Blocks { model }),
    ]
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let list = prop::collection::vec(prop::option::weighted(0.8, keys()), 0..4);
    let kind = prop_oneof![4 => Just(Batch), 1 => Just(Blocks)];
    let shape = (prop::bool::weighted(0.85), kind, 1..4u32, 1..4u64, list).prop_map(
        |(allocated, kind, tensors, rows, mut keys)| {
            keys.truncate(rows as usize);
            Shape { allocated, kind, tensors, rows, keys }
        },
    );
    let name = (prop::option::weighted(0.5, keys()), 0..20usize, 0..4u32, prop::bool::weighted(0.9));
    let range = prop_oneof![9 => (0..4u32, 0..4u32), 1 => Just((u32::MAX, 2))];
    let call = prop_oneof![
        6 => shape.prop_map(Call::Enter),
        2 => (0..20usize).prop_map(Call::Deallocate),
        1 => (0..20usize).prop_map(Call::Unregister),
        1 => keys().prop_map(Call::RemoveKey),
        10 => (name, range).prop_map(|((key, pick, row, same), range)| Call::Consume(key, pick, row, same, range)),
        1 => (0..20usize, 0..4u32).prop_map(|(pick, row)| Call::ReleaseRow(pick, row)),
    ];
    prop::collection::vec(call, 1..60)
}

struct Both {
    real: Real,
    twin: Twin,
    made: Vec<Weak<Cache>>,
    /// Index and generation that the table described, the index of the cache, and its number of keys at that time.
    described: Vec<((u32, u64), usize, usize)>,
    consumed: u64,
    refused: u64,
}

impl Both {
    fn id(&self, pick: usize) -> CacheId {
        self.twin.caches.get(pick % (self.twin.caches.len() + 1)).map_or(CacheId(-3), |cache| cache.0)
    }

    fn call(&mut self, call: &Call) {
        match call {
            Call::Enter(shape) => {
                let entered = if shape.allocated {
                    self.twin.table.allocate(shape.kind, shape.rows as usize, &shape.keys)
                } else {
                    Ok(self.twin.table.register(shape.kind, &shape.keys))
                };
                match self.real.enter(shape) {
                    Ok(cache) => {
                        let index = entered.expect("the twin refuses it");
                        assert!(index == self.made.len() && (cache.id().0 as usize) == index + 1);
                        self.twin.caches.push((cache.id(), shape.clone()));
                        self.made.push(Arc::downgrade(&cache));
                    }
                    Err(error) => assert_eq!(Err(error.kind()), entered, "{error}"),
                }
            }
            Call::Deallocate(pick) => {
                let id = self.id(*pick);
                self.real.table.deallocate(id);
                self.twin.table.deallocate(self.twin.index(id));
            }
            Call::Unregister(pick) => {
                let id = self.id(*pick);
                self.real.table.unregister(id).unwrap();
                self.twin.table.unregister(self.twin.index(id));
            }
            Call::RemoveKey(key) => {
                self.real.table.remove_key(*key);
                self.twin.table.remove_key(*key);
            }
            Call::Consume(key, pick, at, same, (first, count)) => {
                let name = key.map_or(row(self.id(*pick), *at), Name::Key);
                let found = self.twin.find(name).map(|(at, _)| self.twin.caches[at].0);
                let cache = found.filter(|_| *same).unwrap_or_else(|| self.id(*pick));
                // Most ranges fit the cache. A count of 0 and the largest numbers stay as they are.
                let tensors = self.twin.caches.get(self.twin.index(cache)).map_or(1, |cache| cache.1.tensors);
                let (first, count) = match (*first, *count) {
                    (first, 0) if *same => (first, first),
                    (first, count) if count > 0 && first < u32::MAX => {
                        (first % tensors, count.min(tensors - first % tensors))
                    }
                    range => range,
                };
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
                self.twin.release_row(self.twin.index(id), *row);
            }
        }
    }

    /// Checks that names resolve to the same place in both, and that generations change with a cache's keys.
    fn agree(&mut self) {
        for (at, made) in self.made.iter().enumerate() {
            assert_eq!(made.strong_count() > 0, self.twin.alive(at), "cache {at}");
        }
        assert_eq!(self.real.table.state().keys, self.twin.table.keys() as u64);
        for &((located, generation), at, keys) in &self.described {
            let expected = self.twin.alive(at) && self.twin.keys(at) == keys;
            assert_eq!(self.real.generations.of(located) == generation, expected);
        }
        // The oldest entries are kept, because their indices have been reused since.
        self.described.truncate(500);
        let mut names: Vec<Name> = all_keys().map(Name::Key).collect();
        let unknown = [0, i64::MIN, 1 << 40].map(CacheId);
        for id in self.twin.caches.iter().map(|cache| cache.0).chain(unknown) {
            names.extend([0, 1, 2, 3, u32::MAX].map(|at| row(id, at)));
        }
        for name in names {
            let found = self.real.table.describe(name);
            let expected = self.twin.find(name);
            let located = found.as_ref().ok().map(|found| (found.cache.id(), found.row));
            assert_eq!(located, expected.map(|(at, row)| (self.twin.caches[at].0, row)), "{name}");
            match (found, expected) {
                (Ok(found), Some((at, _))) => {
                    self.described.push(((found.index, found.generation), at, self.twin.keys(at)));
                }
                (found, _) => assert_eq!(found.map(drop).unwrap_err().kind(), ErrorKind::CacheNotFound),
            }
        }
        let grant = Name::Grant(GrantId { slot: 0, generation: 0, secret: [0; 16] });
        let error = self.real.table.describe(grant).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System, "grants are not in the table: {error}");
    }
}

#[test]
fn agrees_with_the_naive_twin() {
    let (consumed, refused) = (Cell::new(0), Cell::new(0));
    TestRunner::new(proptest_cases(300))
        .run(&calls(), |calls| {
            let (real, twin) = (Real::new(), Twin::new());
            let mut both = Both { real, twin, made: vec![], described: vec![], consumed: 0, refused: 0 };
            for call in &calls {
                both.call(call);
                both.agree();
            }
            consumed.set(consumed.get() + both.consumed);
            refused.set(refused.get() + both.refused);
            Ok(())
        })
        .unwrap();
    assert!(consumed.get() > 10 && refused.get() > 10, "{consumed:?} consumed, {refused:?} refused");
}
