//! Copies within one engine, compared with the naive twin, on every device and path.
//!
//! After each case every byte of every cache is read, and so are the bytes around the caller's memory and the neighbouring
//! caches. Refused calls are covered by `arguments.rs`, failures by `copy_faults.rs`, and limits by `copy_deadlines.rs`.

use std::sync::Arc;

use llm_datadist_core::bindings::{Cache, CopyArgs, DataDist, End, SwapInPath};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{CacheDesc, CacheKind, ErrorKind, Placement};
use llm_datadist_testing::SimDevice;
use llm_datadist_testing::oracle::{Twin, TwinCache};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::fixtures::{
    Own, Tally, adopt, config, contents, desc, end, engine_on, fill, patterned, proptest_cases,
};
use CacheKind::{Batch, Blocks};
use Placement::{Device, Host};

type Outcome = Result<(), ErrorKind>;
type Tensors = Vec<Vec<u8>>;
type Pairs = Vec<(i64, i64)>;

/// A cache of a case; its bytes start as `patterned(seed, …)`.
#[derive(Clone, Copy, Debug)]
struct Spec {
    placement: Placement,
    kind: CacheKind,
    tensors: usize,
    rows: usize,
    row_bytes: usize,
    seed: u8,
}

fn batch(placement: Placement, tensors: usize, rows: usize, row_bytes: usize, seed: u8) -> Spec {
    Spec { placement, kind: Batch, tensors, rows, row_bytes, seed }
}

fn blocks(placement: Placement, tensors: usize, rows: usize, row_bytes: usize, seed: u8) -> Spec {
    Spec { kind: Blocks, ..batch(placement, tensors, rows, row_bytes, seed) }
}

impl Spec {
    fn desc(&self) -> CacheDesc {
        desc(self.placement, self.tensors as u32, self.rows, self.row_bytes)
    }

    fn bytes(&self) -> Tensors {
        patterned(self.seed, self.tensors, self.rows * self.row_bytes)
    }
}

/// One call. Caches are numbered as they are made; a source comes before its destination.
#[derive(Clone, Debug)]
enum Step {
    Copy(usize, usize, CopyArgs),
    CopyKv(usize, usize, CopyArgs),
    Blocks(usize, Pairs),
    Swap(usize, usize, Pairs),
}
use Step::{Copy, CopyKv, Swap};

fn args(src_batch_index: u32, dst_batch_index: u32, offset: u64, size: i64) -> CopyArgs {
    CopyArgs { dst_batch_index, src_batch_index, offset, size }
}

fn by_twin(caches: &[Spec], steps: &[Step]) -> (Vec<Outcome>, Vec<Tensors>) {
    let cache = |spec: &Spec| {
        let Spec { placement, kind, rows, .. } = *spec;
        TwinCache { placement, kind, rows, tensors: spec.bytes() }
    };
    let mut twin = Twin { caches: caches.iter().map(cache).collect() };
    let outcomes = steps.iter().map(|step| match step {
        Copy(src, dst, args) => twin.copy_cache(*dst, *src, *args),
        CopyKv(src, dst, args) => twin.copy_kv_cache(*src, *dst, *args),
        Step::Blocks(cache, pairs) => twin.copy_blocks(*cache, pairs),
        Swap(src, dst, pairs) => twin.swap_blocks(*src, *dst, pairs),
    });
    (outcomes.collect(), twin.caches.into_iter().map(|cache| cache.tensors).collect())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Memory {
    /// Everything is host memory; device caches come from the pool.
    HostPool,
    /// Everything is host memory; device caches are in the caller's memory, between guard bytes.
    HostOwn,
    /// The simulated device, which reads host memory in place.
    SimDirect,
    /// The simulated device, which needs the staging ring.
    SimStaged,
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    memory: Memory,
    swap_in: SwapInPath,
    workers: usize,
}

/// All combinations that can be opened.
fn setups() -> Vec<Setup> {
    let mut all = Vec::new();
    for memory in [Memory::HostPool, Memory::HostOwn, Memory::SimDirect, Memory::SimStaged] {
        for swap_in in [SwapInPath::Auto, SwapInPath::Direct, SwapInPath::Ring] {
            for workers in [1, 2, 4, 9] {
                if (memory, swap_in) != (Memory::SimStaged, SwapInPath::Direct) {
                    all.push(Setup { memory, swap_in, workers });
                }
            }
        }
    }
    assert_eq!(all.len(), 11 * 4);
    all
}

/// A cache of an engine: in its pool, or in the caller's memory.
struct TestCache {
    spec: Spec,
    end: End,
    memory: Result<Arc<Cache>, Own>,
}

impl TestCache {
    fn in_pool(engine: &DataDist, spec: Spec) -> TestCache {
        let cache = engine.allocate(&spec.desc(), spec.kind, &[]).unwrap();
        fill(&cache, &spec.bytes());
        TestCache { spec, end: end(&cache), memory: Ok(cache) }
    }

    /// Loose, or registered with `engine`.
    fn own(engine: Option<&DataDist>, spec: Spec) -> TestCache {
        let own = match engine {
            Some(engine) => Own::new(&spec.desc(), spec.kind, |adopted| {
                engine.register(adopted, &[], Some(false)).unwrap()
            }),
            None => Own::loose(&spec.desc(), spec.kind),
        };
        own.write(&spec.bytes());
        let end = if engine.is_some() { end(&own.cache) } else { own.end() };
        TestCache { spec, end, memory: Err(own) }
    }

    fn read(&self) -> Tensors {
        match &self.memory {
            Ok(cache) => contents(cache),
            Err(own) => {
                own.outside_untouched();
                own.read()
            }
        }
    }

    fn changed(&self) -> bool {
        self.read() != self.spec.bytes()
    }
}

fn by_engine(setup: Setup, caches: &[Spec], steps: &[Step]) -> (Vec<Outcome>, Vec<Tensors>) {
    let mut config = config(256 << 20);
    config.swap_in = setup.swap_in;
    config.copy_workers = Some(setup.workers);
    let reach = if setup.memory == Memory::SimStaged { HostReach::Staged } else { HostReach::Direct };
    let sim = Arc::new(SimDevice::new(reach));
    let simulated = matches!(setup.memory, Memory::SimDirect | Memory::SimStaged);
    let engine = if simulated { engine_on(config, sim.clone()) } else { DataDist::open(config).unwrap() };

    // No call may change the caches on either side of those of the case.
    let neighbour = || TestCache::in_pool(&engine, blocks(Device, 1, 1, 65_536, 200));
    let mut neighbours = vec![neighbour()];
    let mut placed = vec![];
    for (at, &spec) in caches.iter().enumerate() {
        placed.push(match (spec.placement == Host || setup.memory == Memory::HostOwn, at % 2) {
            (true, 0) => TestCache::own(None, spec),
            (true, _) => TestCache::own(Some(&engine), spec),
            (false, _) => TestCache::in_pool(&engine, spec),
        });
        neighbours.push(neighbour());
    }
    let end = |cache: &usize| &placed[*cache].end;
    let outcomes = steps.iter().map(|step| match step {
        Copy(src, dst, args) => engine.copy_cache(end(dst), end(src), *args).run(),
        CopyKv(src, dst, args) => engine.copy_kv_cache(end(src), end(dst), *args).run(),
        Step::Blocks(cache, pairs) => engine.copy_blocks(end(cache), pairs).run(),
        Swap(src, dst, pairs) => engine.swap_blocks(end(src), end(dst), pairs).run(),
    });
    let outcomes = outcomes.map(|result| result.map_err(|error| error.kind())).collect();
    assert!(!neighbours.iter().any(TestCache::changed), "a neighbouring cache was written");
    let by_device = placed.iter().any(|cache| cache.spec.placement == Device && cache.changed());
    assert!(!simulated || !by_device || sim.copies() > 0, "the device was not used");
    (outcomes, placed.iter().map(TestCache::read).collect())
}

/// Runs a case of legal calls on the twin and in every set-up. Returns the bytes of all caches, which must be equal.
fn agreed(setups: &[Setup], caches: &[Spec], steps: &[Step]) -> Vec<Tensors> {
    let expected = by_twin(caches, steps);
    assert_eq!(expected.0, vec![Ok(()); steps.len()]);
    assert!(setups.len() > 5);
    for &setup in setups {
        eprintln!("{setup:?}");
        let got = by_engine(setup, caches, steps);
        assert_eq!(got.0, expected.0);
        assert!(got.1 == expected.1, "the bytes differ from the twin's");
    }
    expected.1
}

#[test]
fn copy_blocks_in_the_order_given() {
    // Pairs, and the rows that change, each with the row that it now equals.
    let cases: [(&[(i64, i64)], &[(i64, i64)]); 9] = [
        (&[], &[]),
        (&[(3, 3), (0, 0)], &[]),
        (&[(1, 2)], &[(2, 1)]),
        // One source, many places.
        (&[(1, 2), (1, 3), (1, 9), (4, 5), (4, 6)], &[(2, 1), (3, 1), (9, 1), (5, 4), (6, 4)]),
        // {0: [1], 1: [2]}: block 0 is copied to block 1, and from there to block 2.
        (&[(0, 1), (1, 2)], &[(1, 0), (2, 0)]),
        (&[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], &[(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]),
        // Two blocks are exchanged through a third.
        (&[(0, 11), (1, 0), (11, 1)], &[(11, 0), (0, 1), (1, 0)]),
        // If two pairs write one block, the later one takes effect.
        (&[(5, 7), (6, 7), (8, 2), (9, 2), (8, 2)], &[(7, 6), (2, 8)]),
        // A shift by one, whose blocks are read before they are overwritten.
        (&[(1, 0), (2, 1), (3, 2), (4, 3)], &[(0, 1), (1, 2), (2, 3), (3, 4)]),
    ];
    let steps: Vec<_> =
        cases.iter().enumerate().map(|(cache, (pairs, _))| Step::Blocks(cache, pairs.to_vec())).collect();
    for placement in [Device, Host] {
        let spec = blocks(placement, 2, 12, 48, 1);
        let bytes = agreed(&setups(), &[spec; 9], &steps);
        for (bytes, (pairs, rows)) in bytes.iter().zip(cases) {
            let mut expected = spec.bytes();
            for (tensor, old) in expected.iter_mut().zip(spec.bytes()) {
                let old = |row: i64| &old[row as usize * 48..][..48];
                rows.iter()
                    .for_each(|&(row, from)| tensor[row as usize * 48..][..48].copy_from_slice(old(from)));
            }
            assert!(*bytes == expected, "{pairs:?}");
        }
    }
}

/// One byte, primes, more than a page, more than a unit of work; one tensor and many; and 24 MiB in many units.
#[test]
fn odd_sizes_and_many_units() {
    // Every third combination: each value of each setting occurs, the same pair of values rarely twice.
    let some: Vec<Setup> = setups().into_iter().step_by(3).collect();
    for (row_bytes, rows, tensors) in [
        (1, 33, 1),
        (1, 33, 80),
        (7, 33, 80),
        (4097, 12, 1),
        (4097, 12, 80),
        ((1 << 20) + 3, 5, 1),
        (65_537, 40, 2),
    ] {
        let caches = [blocks(Host, tensors, rows, row_bytes, 1), blocks(Device, tensors, rows, row_bytes, 2)];
        let (third, end) = (rows as i64 / 3, rows as i64);
        let steps = [
            // Every second block in, in reverse; then scattered ones.
            Swap(0, 1, (0..end).step_by(2).map(|row| (row, end - 1 - row)).collect()),
            Swap(0, 1, (0..end).filter(|row| row % 7 != 3).map(|row| (row, row * 35 % end)).collect()),
            // Two plans: the second half of the pairs reads what the first wrote.
            Step::Blocks(1, (0..2 * third).map(|row| (row, row + third)).collect()),
            Step::Blocks(1, vec![(end - 1, 1), (1, 2)]),
            Swap(1, 0, vec![(2, 0), (end - 2, 1)]),
        ];
        agreed(&some, &caches, &steps);
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pairs = prop::collection::vec((-1..11i64, -1..11i64), 0..12).prop_map(|mut pairs| {
        // Mostly legal: about one list in four keeps an index that is out of range.
        if pairs.len() % 4 != 3 {
            pairs.iter_mut().for_each(|pair| *pair = (pair.0.clamp(0, 8), pair.1.clamp(0, 8)));
        }
        pairs
    });
    let args = (0..9u32, 0..9u32, 0..30u64, -1..40i64)
        .prop_map(|(src, dst, offset, size)| args(src, dst, offset.saturating_sub(8), size));
    let step = prop_oneof![
        (4..7usize, 4..7usize, args.clone()).prop_map(|(src, dst, args)| Copy(src, dst, args)),
        (4..7usize, 4..7usize, args).prop_map(|(src, dst, args)| CopyKv(src, dst, args)),
        (0..5usize, pairs.clone()).prop_map(|(cache, pairs)| Step::Blocks(cache, pairs)),
        (0..4usize, 0..4usize, pairs).prop_map(|(src, dst, pairs)| Swap(src, dst, pairs)),
    ];
    prop::collection::vec(step, 1..12)
}

#[test]
fn random_requests_agree_with_the_twin() {
    let caches = [
        blocks(Host, 2, 9, 17, 1),
        blocks(Device, 2, 9, 17, 2),
        blocks(Device, 2, 11, 17, 3),
        blocks(Host, 2, 10, 17, 4),
        batch(Device, 2, 9, 30, 5),
        batch(Host, 2, 8, 23, 6),
        batch(Device, 2, 9, 23, 7),
    ];
    let setups = setups();
    let seen = Tally::default();
    TestRunner::new(proptest_cases(300))
        .run(&(steps(), 0..setups.len()), |(steps, setup)| {
            let (expected, bytes) = by_twin(&caches, &steps);
            let (outcomes, got) = by_engine(setups[setup], &caches, &steps);
            prop_assert_eq!(&outcomes, &expected);
            prop_assert!(got == bytes, "bytes differ from the twin in {:?}", setups[setup]);
            let legal = expected.iter().filter(|outcome| outcome.is_ok()).count();
            seen.add("done", legal);
            seen.add("refused", expected.len() - legal);
            Ok(())
        })
        .unwrap();
    seen.check(2, 101);
}

#[test]
fn only_an_empty_swap_needs_neither_memory_nor_a_path() {
    let refused = (ErrorKind::InvalidArgument, "not mapped");
    for (reach, inward) in
        [(HostReach::Direct, refused), (HostReach::Staged, (ErrorKind::NotEnabled, "option=swap_in_path"))]
    {
        let mut config = config(1 << 20);
        config.swap_in = SwapInPath::Direct;
        let engine = engine_on(config, Arc::new(SimDevice::new(reach)));
        let unmapped = adopt(&desc(Host, 1, 4, 4096), Blocks, &[4096]);
        let unmapped = end(&engine.register(unmapped, &[], Some(false)).unwrap());
        let allocated = |placement| end(&engine.allocate(&desc(placement, 1, 4, 4096), Blocks, &[]).unwrap());
        let (host, device) = (allocated(Host), allocated(Device));
        for (src, dst, (kind, fact)) in [(&unmapped, &device, inward), (&device, &unmapped, refused)] {
            let error = engine.swap_blocks(src, dst, &[(0, 0)]).run().unwrap_err();
            assert!(error.kind() == kind && error.to_string().contains(fact), "{error}");
            engine.swap_blocks(src, dst, &[]).run().unwrap();
        }
        engine.swap_blocks(&device, &host, &[(0, 0)]).run().unwrap();
    }
}

/// A row that a plan cannot name is refused after all other errors of the arguments, by its number.
#[test]
fn rows_beyond_32_bits_are_refused() {
    let engine = DataDist::open(config(1 << 20)).unwrap();
    let register = |placement| {
        let memory = adopt(&desc(placement, 1, (1 << 32) + 2, 1), Blocks, &[1 << 40]);
        end(&engine.register(memory, &[], Some(false)).unwrap())
    };
    let (host, other) = (register(Host), register(Host));
    let far = [(3, 5), (1 << 32, (1 << 32) + 1)];
    let error = engine.copy_blocks(&host, &far).run().unwrap_err();
    let text = "source block=4294967296 is out of range (0 to 4294967295)";
    assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains(text), "{error}");
    assert_eq!(error.fact("position"), Some("1"));
    let error = engine.swap_blocks(&host, &other, &far).run().unwrap_err();
    assert!(error.to_string().contains("placements"), "{error}");
}
