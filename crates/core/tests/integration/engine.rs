//! One set of cases, run over every device, route, number of workers and kernel, and over the naive twin itself.
//!
//! A case states by hand which block ends where; random requests are compared with the twin. After each case every
//! byte of every cache is read, and the bytes around the caller's memory and in neighbouring caches are looked at.
//! Not for: failures and limits (`faults.rs`).

use std::sync::Arc;

use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::testing::device::sim::SimDevice;
use llm_datadist_core::testing::memory::kernels::Kernel;
use llm_datadist_core::testing::oracle::{Twin, TwinCache};
use llm_datadist_core::{
    Cache, CacheDesc, CacheKind, CopyArgs, DataDist, End, ErrorKind, KernelChoice, Placement, SwapInPath,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::bed::{Own, config, desc, engine_on, patterned, proptest_cases};
use CacheKind::{Batch, Blocks};
use Placement::{Device, Host};

type Outcome = Result<(), ErrorKind>;

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

fn spec(
    placement: Placement,
    kind: CacheKind,
    tensors: usize,
    rows: usize,
    row_bytes: usize,
    seed: u8,
) -> Spec {
    Spec { placement, kind, tensors, rows, row_bytes, seed }
}

impl Spec {
    fn desc(&self) -> CacheDesc {
        desc(self.placement, self.tensors as u32, self.rows, self.row_bytes)
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        patterned(self.seed, self.tensors, self.rows * self.row_bytes)
    }
}

/// What can run a case: the engine in one of its set-ups, or the twin. Caches are numbered as they are made.
trait Machine {
    fn make(&mut self, spec: Spec) -> usize;
    fn copy_cache(&mut self, dst: usize, src: usize, args: CopyArgs) -> Outcome;
    fn copy_kv_cache(&mut self, src: usize, dst: usize, args: CopyArgs) -> Outcome;
    fn copy_blocks(&mut self, cache: usize, pairs: &[(i64, i64)]) -> Outcome;
    fn swap_blocks(&mut self, src: usize, dst: usize, pairs: &[(i64, i64)]) -> Outcome;
    fn read(&mut self, cache: usize) -> Vec<Vec<u8>>;
    /// Fails if something outside the caches changed; returns how many bytes it looked at.
    fn outside_untouched(&mut self) -> usize;
}

impl Machine for Twin {
    fn make(&mut self, spec: Spec) -> usize {
        let Spec { placement, kind, rows, .. } = spec;
        self.caches.push(TwinCache { placement, kind, rows, tensors: spec.bytes() });
        self.caches.len() - 1
    }
    fn copy_cache(&mut self, dst: usize, src: usize, args: CopyArgs) -> Outcome {
        self.copy_cache(dst, src, args)
    }
    fn copy_kv_cache(&mut self, src: usize, dst: usize, args: CopyArgs) -> Outcome {
        self.copy_kv_cache(src, dst, args)
    }
    fn copy_blocks(&mut self, cache: usize, pairs: &[(i64, i64)]) -> Outcome {
        self.copy_blocks(cache, pairs)
    }
    fn swap_blocks(&mut self, src: usize, dst: usize, pairs: &[(i64, i64)]) -> Outcome {
        self.swap_blocks(src, dst, pairs)
    }
    fn read(&mut self, cache: usize) -> Vec<Vec<u8>> {
        self.caches[cache].tensors.clone()
    }
    fn outside_untouched(&mut self) -> usize {
        1
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Under {
    /// Everything is host memory; device caches come from the pool.
    HostPool,
    /// Everything is host memory; device caches are the caller's own, between guard bytes.
    HostOwn,
    /// The lying device, which reads host memory in place.
    SimDirect,
    /// The lying device, which needs the ring.
    SimStaged,
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    under: Under,
    swap_in: SwapInPath,
    workers: usize,
    kernel: KernelChoice,
}

/// All combinations that can be opened.
fn setups() -> Vec<Setup> {
    let mut all = Vec::new();
    for under in [Under::HostPool, Under::HostOwn, Under::SimDirect, Under::SimStaged] {
        for swap_in in [SwapInPath::Auto, SwapInPath::Direct, SwapInPath::Ring] {
            for workers in [1, 2, 4, 9] {
                for kernel in [KernelChoice::Plain, KernelChoice::Streaming, KernelChoice::Auto] {
                    let no_way = under == Under::SimStaged && swap_in == SwapInPath::Direct;
                    let no_kernel =
                        kernel == KernelChoice::Streaming && !Kernel::all().iter().any(|one| one.streams());
                    if !no_way && !no_kernel {
                        all.push(Setup { under, swap_in, workers, kernel });
                    }
                }
            }
        }
    }
    assert!(all.len() >= 11 * 4 * 2, "{}", all.len());
    all
}

/// Of all combinations every seventh: each value of each setting is there, seldom the same pair twice.
fn some_setups() -> Vec<Setup> {
    let some: Vec<Setup> = setups().into_iter().step_by(7).collect();
    for workers in [1, 2, 4, 9] {
        assert!(some.iter().any(|setup| setup.workers == workers));
    }
    for under in [Under::HostPool, Under::HostOwn, Under::SimDirect, Under::SimStaged] {
        assert!(some.iter().any(|setup| setup.under == under));
    }
    some
}

/// The engine, and a cache on each side of every other, which nobody may touch.
struct Engine {
    dist: DataDist,
    setup: Setup,
    sim: Option<Arc<SimDevice>>,
    specs: Vec<Spec>,
    ends: Vec<End>,
    own: Vec<Option<Own>>,
    sentinels: Vec<(Arc<Cache>, u8)>,
}

impl Engine {
    fn open(setup: Setup) -> Engine {
        let mut config = config(256 << 20);
        (config.swap_in, config.copy_workers, config.kernel) =
            (setup.swap_in, Some(setup.workers), setup.kernel);
        let reach = if setup.under == Under::SimStaged { HostReach::Staged } else { HostReach::Direct };
        let sim = matches!(setup.under, Under::SimDirect | Under::SimStaged)
            .then(|| Arc::new(SimDevice::new(reach)));
        let engine = match &sim {
            Some(sim) => engine_on(config, sim.clone()),
            None => DataDist::open(config).unwrap(),
        };
        Engine { dist: engine, setup, sim, specs: vec![], ends: vec![], own: vec![], sentinels: vec![] }
    }

    fn sentinel(&mut self) {
        let seed = 200 + self.sentinels.len() as u8;
        let spec = spec(Device, Blocks, 1, 1, 65_536, seed);
        let cache = self.dist.allocate(&spec.desc(), Blocks, &[]).unwrap();
        self.fill(&End::Managed(cache.id()), spec);
        self.sentinels.push((cache, seed));
    }

    fn staging(spec: Spec) -> Own {
        Own::loose(&Spec { placement: Host, ..spec }.desc(), spec.kind)
    }

    fn fill(&self, to: &End, spec: Spec) {
        let own = Self::staging(spec);
        own.write(&spec.bytes());
        let from = End::Loose(own.cache.clone());
        self.all_rows(
            spec,
            |engine, row| engine.copy_cache(to, &from, row),
            |engine, rows| engine.swap_blocks(&from, to, rows),
        );
    }

    fn fetch(&self, from: &End, spec: Spec) -> Vec<Vec<u8>> {
        let own = Self::staging(spec);
        let to = End::Loose(own.cache.clone());
        self.all_rows(
            spec,
            |engine, row| engine.copy_cache(&to, from, row),
            |engine, rows| engine.swap_blocks(from, &to, rows),
        );
        own.outside_untouched();
        own.read()
    }

    fn all_rows(
        &self,
        spec: Spec,
        one: impl Fn(&DataDist, CopyArgs) -> llm_datadist_core::Result<()>,
        all: impl Fn(&DataDist, &[(i64, i64)]) -> llm_datadist_core::Result<()>,
    ) {
        let rows: Vec<(i64, i64)> = (0..spec.rows as i64).map(|row| (row, row)).collect();
        match spec.kind {
            Blocks => all(&self.dist, &rows).unwrap(),
            Batch => {
                rows.iter().for_each(|&(row, _)| one(&self.dist, slots(row as u32, row as u32)).unwrap());
            }
        }
    }
}

fn slots(dst_batch_index: u32, src_batch_index: u32) -> CopyArgs {
    CopyArgs { dst_batch_index, src_batch_index, offset: 0, size: -1 }
}

fn kind_of(result: llm_datadist_core::Result<()>) -> Outcome {
    result.map_err(|error| {
        assert!(!error.to_string().is_empty());
        error.kind()
    })
}

impl Machine for Engine {
    fn make(&mut self, spec: Spec) -> usize {
        self.sentinel();
        // Host caches are loose or registered in turn, and all in the caller's memory.
        let (end, own) = if spec.placement == Host || self.setup.under == Under::HostOwn {
            let own = if self.ends.len().is_multiple_of(2) {
                Own::loose(&spec.desc(), spec.kind)
            } else {
                Own::new(&spec.desc(), spec.kind, |adopted| {
                    self.dist.register(adopted, &[], Some(false)).unwrap()
                })
            };
            own.write(&spec.bytes());
            let id = own.cache.id();
            let end = if id.0 > 0 { End::Managed(id) } else { End::Loose(own.cache.clone()) };
            (end, Some(own))
        } else {
            let end = End::Managed(self.dist.allocate(&spec.desc(), spec.kind, &[]).unwrap().id());
            self.fill(&end, spec);
            (end, None)
        };
        self.specs.push(spec);
        self.ends.push(end);
        self.own.push(own);
        self.sentinel();
        self.specs.len() - 1
    }
    fn copy_cache(&mut self, dst: usize, src: usize, args: CopyArgs) -> Outcome {
        kind_of(self.dist.copy_cache(&self.ends[dst], &self.ends[src], args))
    }
    fn copy_kv_cache(&mut self, src: usize, dst: usize, args: CopyArgs) -> Outcome {
        kind_of(self.dist.copy_kv_cache(&self.ends[src], &self.ends[dst], args))
    }
    fn copy_blocks(&mut self, cache: usize, pairs: &[(i64, i64)]) -> Outcome {
        kind_of(self.dist.copy_blocks(&self.ends[cache], pairs))
    }
    fn swap_blocks(&mut self, src: usize, dst: usize, pairs: &[(i64, i64)]) -> Outcome {
        kind_of(self.dist.swap_blocks(&self.ends[src], &self.ends[dst], pairs))
    }
    fn read(&mut self, cache: usize) -> Vec<Vec<u8>> {
        match &self.own[cache] {
            Some(own) => own.read(),
            None => self.fetch(&self.ends[cache], self.specs[cache]),
        }
    }
    fn outside_untouched(&mut self) -> usize {
        let own: usize = self.own.iter().flatten().map(Own::outside_untouched).sum();
        let mut sentinels = 0;
        for (cache, seed) in &self.sentinels {
            let spec = spec(Device, Blocks, 1, 1, 65_536, *seed);
            assert!(
                self.fetch(&End::Managed(cache.id()), spec) == spec.bytes(),
                "a neighbouring cache was written"
            );
            sentinels += 65_536;
        }
        if let Some(sim) = &self.sim {
            assert!(sim.copies() > 0, "the device was not used");
        }
        own + sentinels
    }
}

/// Runs a case over the twin and over every set-up.
fn over(setups: &[Setup], case: impl Fn(&mut dyn Machine)) {
    case(&mut Twin::default());
    for setup in setups {
        let mut engine = Engine::open(*setup);
        let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            case(&mut engine);
            assert!(engine.outside_untouched() > 0);
        }));
        if let Err(panic) = told {
            eprintln!("in the set-up {setup:?}");
            std::panic::resume_unwind(panic);
        }
    }
    assert!(setups.len() > 5);
}

/// Every row of `cache` is a row of some cache as it was at first: `rows[r] = (spec, row)`.
fn rows_are(machine: &mut dyn Machine, cache: usize, rows: &[(Spec, usize)]) {
    let got = machine.read(cache);
    assert_eq!(got.len(), rows[0].0.tensors);
    for (tensor, bytes) in got.iter().enumerate() {
        let row_bytes = bytes.len() / rows.len();
        for (row, (from, from_row)) in rows.iter().enumerate() {
            assert_eq!(from.row_bytes, row_bytes);
            let expected: Vec<u8> = (from_row * row_bytes..(from_row + 1) * row_bytes)
                .map(|at| crate::bed::pattern(from.seed, tensor, at))
                .collect();
            let got = &bytes[row * row_bytes..(row + 1) * row_bytes];
            assert!(got == expected, "tensor {tensor} row {row} is not row {from_row} of seed {}", from.seed);
        }
    }
}

/// As at first, but for the rows given.
fn changed(spec: Spec, changes: &[(usize, (Spec, usize))]) -> Vec<(Spec, usize)> {
    let mut rows: Vec<(Spec, usize)> = (0..spec.rows).map(|row| (spec, row)).collect();
    for &(row, from) in changes {
        rows[row] = from;
    }
    rows
}

#[test]
fn copy_cache_between_all_placements() {
    over(&setups(), |machine| {
        for (from, to) in [(Device, Device), (Device, Host), (Host, Device), (Host, Host)] {
            let (a, b) = (spec(from, Batch, 3, 4, 64, 1), spec(to, Batch, 3, 5, 64, 2));
            let (src, dst) = (machine.make(a), machine.make(b));
            machine.copy_cache(dst, src, slots(4, 1)).unwrap();
            rows_are(machine, dst, &changed(b, &[(4, (a, 1))]));
            rows_are(machine, src, &changed(a, &[]));
            // Inside one cache: another slot, and the same slot.
            machine.copy_cache(dst, dst, slots(0, 4)).unwrap();
            machine.copy_cache(dst, dst, slots(1, 1)).unwrap();
            rows_are(machine, dst, &changed(b, &[(4, (a, 1)), (0, (a, 1))]));
        }
    });
}

#[test]
fn copy_cache_copies_the_range_and_nothing_beside_it() {
    over(&some_setups(), |machine| {
        // Different slot sizes on purpose: the same offset applies to both slots.
        let (a, b) = (spec(Device, Batch, 2, 3, 100, 1), spec(Host, Batch, 2, 4, 64, 2));
        let (src, dst) = (machine.make(a), machine.make(b));
        let mut expected = b.bytes();
        for (offset, size, len) in [(0, 1, 1), (63, 1, 1), (10, 54, 54), (7, 13, 13), (0, 64, 64)] {
            let args = CopyArgs { dst_batch_index: 3, src_batch_index: 2, offset, size };
            machine.copy_cache(dst, src, args).unwrap();
            for (tensor, bytes) in expected.iter_mut().enumerate() {
                let at = offset as usize;
                let from = &a.bytes()[tensor][2 * 100 + at..2 * 100 + at + len];
                bytes[3 * 64 + at..3 * 64 + at + len].copy_from_slice(from);
            }
            assert_eq!(machine.read(dst), expected);
        }
        let whole = CopyArgs { dst_batch_index: 0, src_batch_index: 1, offset: 60, size: -1 };
        machine.copy_cache(src, dst, whole).unwrap(); // the rest of the *source* slot: 4 bytes
        let mut back = a.bytes();
        for (tensor, bytes) in back.iter_mut().enumerate() {
            bytes[60..64].copy_from_slice(&b.bytes()[tensor][64 + 60..64 + 64]);
        }
        assert_eq!(machine.read(src), back);
        // Refused: nothing changes.
        let (src_slots, dst_slots) = (3, 4);
        for (dst_batch_index, src_batch_index, offset, size) in [
            (0, 0, 0, -1), // 100 bytes do not fit 64
            (0, 0, 10, 55),
            (0, 0, 64, 1),
            (0, 0, u64::MAX, -1),
            (0, 0, u64::MAX, 1),
            (0, 0, 0, 0),
            (0, 0, 0, -2),
            (0, 0, 0, i64::MIN),
            (0, 0, 0, i64::MAX),
            (0, 0, 63, i64::MAX),
            (dst_slots, 0, 0, 1),
            (0, src_slots, 0, 1),
            (u32::MAX, u32::MAX, 0, 1),
        ] {
            let args = CopyArgs { dst_batch_index, src_batch_index, offset, size };
            assert_eq!(machine.copy_cache(dst, src, args), Err(ErrorKind::InvalidArgument), "{args:?}");
        }
        assert_eq!((machine.read(dst), machine.read(src)), (expected, back));
        let other = machine.make(spec(Host, Batch, 3, 4, 64, 3));
        assert_eq!(
            machine.copy_cache(other, src, slots(0, 0)),
            Err(ErrorKind::TensorCountMismatch),
            "unlike tensor counts"
        );
    });
}

#[test]
fn copy_kv_cache_copies_from_a_device_only() {
    over(&some_setups(), |machine| {
        let (a, b) = (spec(Device, Batch, 2, 4, 64, 1), spec(Host, Batch, 2, 4, 64, 2));
        let (device, host) = (machine.make(a), machine.make(b));
        machine.copy_kv_cache(device, device, slots(1, 0)).unwrap();
        machine.copy_kv_cache(device, host, slots(3, 2)).unwrap();
        assert_eq!(machine.copy_kv_cache(host, device, slots(0, 0)), Err(ErrorKind::InvalidArgument));
        assert_eq!(machine.copy_kv_cache(host, host, slots(0, 1)), Err(ErrorKind::InvalidArgument));
        rows_are(machine, device, &changed(a, &[(1, (a, 0))]));
        rows_are(machine, host, &changed(b, &[(3, (a, 2))]));
    });
}

#[test]
fn copy_blocks_in_the_order_given() {
    over(&setups(), |machine| {
        for placement in [Device, Host] {
            let a = spec(placement, Blocks, 2, 12, 48, 1);
            type Change = (usize, usize);
            let cases: [(&[(i64, i64)], &[Change]); 9] = [
                (&[], &[]),
                (&[(3, 3), (0, 0)], &[]),
                (&[(1, 2)], &[(2, 1)]),
                // One source, many places.
                (&[(1, 2), (1, 3), (1, 9), (4, 5), (4, 6)], &[(2, 1), (3, 1), (9, 1), (5, 4), (6, 4)]),
                // {0: [1], 1: [2]}: the first block goes all the way.
                (&[(0, 1), (1, 2)], &[(1, 0), (2, 0)]),
                (&[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], &[(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]),
                // Two blocks change places through a third.
                (&[(0, 11), (1, 0), (11, 1)], &[(11, 0), (0, 1), (1, 0)]),
                // Of two that write one block the later wins.
                (&[(5, 7), (6, 7), (8, 2), (9, 2), (8, 2)], &[(7, 6), (2, 8)]),
                // A shift by one, whose blocks are read before they are overwritten.
                (&[(1, 0), (2, 1), (3, 2), (4, 3)], &[(0, 1), (1, 2), (2, 3), (3, 4)]),
            ];
            for (pairs, expected) in cases {
                let cache = machine.make(a);
                machine.copy_blocks(cache, pairs).unwrap();
                let changes: Vec<_> = expected.iter().map(|&(row, from)| (row, (a, from))).collect();
                rows_are(machine, cache, &changed(a, &changes));
            }
        }
    });
}

#[test]
fn swap_blocks_both_ways() {
    let pairs: [(i64, i64); 9] = [(3, 4), (0, 0), (1, 1), (2, 2), (5, 6), (6, 7), (7, 8), (8, 9), (9, 19)];
    over(&setups(), |machine| {
        let (a, b) = (spec(Host, Blocks, 2, 10, 128, 1), spec(Device, Blocks, 2, 20, 128, 2));
        let (host, device) = (machine.make(a), machine.make(b));
        machine.swap_blocks(host, device, &pairs).unwrap();
        let swapped: Vec<_> = pairs.iter().map(|&(from, to)| (to as usize, (a, from as usize))).collect();
        rows_are(machine, device, &changed(b, &swapped));
        rows_are(machine, host, &changed(a, &[]));
        // Back into other places: block 4 of the device is block 3 of the host, 18 is still its own.
        machine.swap_blocks(device, host, &[(4, 0), (18, 9), (19, 1)]).unwrap();
        rows_are(machine, host, &changed(a, &[(0, (a, 3)), (9, (b, 18)), (1, (a, 9))]));
        machine.swap_blocks(device, host, &[]).unwrap();
        machine.swap_blocks(host, device, &[]).unwrap();
        // Two sources into one place: the later wins, whichever way it travels.
        machine.swap_blocks(host, device, &[(7, 15), (5, 15), (4, 16), (6, 16)]).unwrap();
        let mut after = swapped.clone();
        after.extend([(15, (a, 5)), (16, (a, 6))]);
        rows_are(machine, device, &changed(b, &after));
    });
}

#[test]
fn a_refused_call_changes_nothing() {
    over(&some_setups(), |machine| {
        let (a, b) = (spec(Host, Blocks, 2, 10, 128, 1), spec(Device, Blocks, 2, 20, 128, 2));
        let (host, device) = (machine.make(a), machine.make(b));
        let other = machine.make(spec(Device, Blocks, 2, 20, 64, 3));
        let fewer = machine.make(spec(Device, Blocks, 1, 20, 128, 3));
        let batch = machine.make(spec(Device, Batch, 2, 20, 128, 3));
        use ErrorKind::InvalidArgument;
        // The last pair is the bad one.
        for bad in [(10, 0), (0, 20), (-1, 0), (0, -1), (i64::MAX, 0), (0, i64::MIN), (1 << 32, 0)] {
            assert_eq!(
                machine.swap_blocks(host, device, &[(0, 1), (1, 2), bad]),
                Err(InvalidArgument),
                "{bad:?}"
            );
        }
        for bad in [(20, 0), (0, 20), (-1, 0), (0, -1)] {
            assert_eq!(machine.copy_blocks(device, &[(0, 1), (1, 2), bad]), Err(InvalidArgument), "{bad:?}");
        }
        assert_eq!(machine.swap_blocks(host, other, &[(0, 1)]), Err(InvalidArgument));
        assert_eq!(machine.swap_blocks(host, fewer, &[(0, 1)]), Err(InvalidArgument));
        assert_eq!(machine.swap_blocks(host, host, &[(0, 1)]), Err(InvalidArgument));
        assert_eq!(machine.swap_blocks(device, device, &[(0, 1)]), Err(InvalidArgument));
        assert_eq!(machine.swap_blocks(host, batch, &[(0, 1)]), Err(InvalidArgument));
        assert_eq!(machine.swap_blocks(batch, host, &[(0, 1)]), Err(InvalidArgument));
        assert_eq!(machine.copy_blocks(batch, &[(0, 1)]), Err(InvalidArgument));
        rows_are(machine, host, &changed(a, &[]));
        rows_are(machine, device, &changed(b, &[]));
    });
}

#[test]
fn odd_sizes_and_many_tensors() {
    // (bytes of a block, blocks, tensors): one byte, primes, over a page, over a unit; one tensor and many.
    for (row_bytes, rows, tensors) in
        [(1, 33, 1), (1, 33, 80), (7, 33, 80), (4097, 12, 1), (4097, 12, 80), ((2 << 20) + 3, 5, 2)]
    {
        over(&some_setups(), |machine| {
            let (a, b) = (
                spec(Host, Blocks, tensors, rows, row_bytes, 1),
                spec(Device, Blocks, tensors, rows, row_bytes, 2),
            );
            let (host, device) = (machine.make(a), machine.make(b));
            // Every second block in, in reverse; one block out; one copied inside.
            let pairs: Vec<(i64, i64)> =
                (0..rows as i64).step_by(2).map(|row| (row, rows as i64 - 1 - row)).collect();
            machine.swap_blocks(host, device, &pairs).unwrap();
            machine.copy_blocks(device, &[(rows as i64 - 1, 1), (1, 2)]).unwrap();
            machine.swap_blocks(device, host, &[(2, 0)]).unwrap();
            let mut rows_now: Vec<_> =
                pairs.iter().map(|&(from, to)| (to as usize, (a, from as usize))).collect();
            rows_now.extend([(1, (a, 0)), (2, (a, 0))]);
            rows_are(machine, device, &changed(b, &rows_now));
            rows_are(machine, host, &changed(a, &[(0, (a, 0))]));
        });
    }
}

#[test]
fn several_units_and_workers() {
    // 24 MiB in 4 tensors: many units for every number of workers, and large enough for the choice of kernel.
    let setups: Vec<Setup> = some_setups().into_iter().step_by(2).collect();
    over(&setups, |machine| {
        let (a, b) = (spec(Host, Blocks, 4, 96, 65_537, 1), spec(Device, Blocks, 4, 96, 65_537, 2));
        let (host, device) = (machine.make(a), machine.make(b));
        let scattered: Vec<(i64, i64)> =
            (0..96).map(|row| (row, row * 35 % 96)).filter(|pair| pair.0 % 7 != 3).collect();
        machine.swap_blocks(host, device, &scattered).unwrap();
        let mut now: Vec<_> = scattered.iter().map(|&(from, to)| (to as usize, (a, from as usize))).collect();
        rows_are(machine, device, &changed(b, &now));
        // Two waves, each of several units.
        let inside: Vec<(i64, i64)> =
            (0..30).map(|row| (row, row + 30)).chain((30..60).map(|row| (row, row + 30))).collect();
        machine.copy_blocks(device, &inside).unwrap();
        let before = changed(b, &now);
        now.extend((0..30).flat_map(|row| [(row + 30, before[row]), (row + 60, before[row])]));
        rows_are(machine, device, &changed(b, &now));
        machine.swap_blocks(device, host, &[(60, 5), (61, 6), (59, 7)]).unwrap();
        rows_are(machine, host, &changed(a, &[(5, before[0]), (6, before[1]), (7, before[29])]));
    });
}

#[derive(Clone, Debug)]
enum Step {
    Copy(usize, usize, CopyArgs),
    Blocks(usize, Vec<(i64, i64)>),
    Swap(usize, usize, Vec<(i64, i64)>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pairs = prop::collection::vec((-1..11i64, -1..11i64), 0..12).prop_map(|mut pairs| {
        // Mostly legal: one list in four or so keeps an index outside.
        if pairs.len() % 4 != 3 {
            pairs.iter_mut().for_each(|pair| *pair = (pair.0.clamp(0, 8), pair.1.clamp(0, 8)));
        }
        pairs
    });
    let args = (0..9u32, 0..9u32, 0..30u64, -1..40i64).prop_map(
        |(dst_batch_index, src_batch_index, offset, size)| CopyArgs {
            dst_batch_index,
            src_batch_index,
            offset: offset.saturating_sub(8),
            size,
        },
    );
    let step = prop_oneof![
        (4..7usize, 4..7usize, args).prop_map(|(dst, src, args)| Step::Copy(dst, src, args)),
        (0..5usize, pairs.clone()).prop_map(|(cache, pairs)| Step::Blocks(cache, pairs)),
        (0..4usize, 0..4usize, pairs).prop_map(|(src, dst, pairs)| Step::Swap(src, dst, pairs)),
    ];
    prop::collection::vec(step, 1..12)
}

fn play(machine: &mut dyn Machine, steps: &[Step]) -> (Vec<Outcome>, Vec<Vec<Vec<u8>>>) {
    let caches = [
        spec(Host, Blocks, 2, 9, 17, 1),
        spec(Device, Blocks, 2, 9, 17, 2),
        spec(Device, Blocks, 2, 11, 17, 3),
        spec(Host, Blocks, 2, 10, 17, 4),
        spec(Device, Batch, 2, 9, 30, 5),
        spec(Host, Batch, 2, 8, 23, 6),
        spec(Device, Batch, 2, 9, 23, 7),
    ];
    for cache in caches {
        machine.make(cache);
    }
    let outcomes = steps
        .iter()
        .map(|step| match step {
            Step::Copy(dst, src, args) => machine.copy_cache(*dst, *src, *args),
            Step::Blocks(cache, pairs) => machine.copy_blocks(*cache, pairs),
            Step::Swap(src, dst, pairs) => machine.swap_blocks(*src, *dst, pairs),
        })
        .collect();
    let bytes = (0..caches.len()).map(|cache| machine.read(cache)).collect();
    assert!(machine.outside_untouched() > 0);
    (outcomes, bytes)
}

#[test]
fn random_requests_agree_with_the_twin() {
    let setups = setups();
    let (mut done, mut refused) = (0, 0);
    let counted = std::cell::RefCell::new((&mut done, &mut refused));
    TestRunner::new(proptest_cases(300))
        .run(&(steps(), 0..setups.len()), |(steps, setup)| {
            let (expected, bytes) = play(&mut Twin::default(), &steps);
            let (outcomes, got) = play(&mut Engine::open(setups[setup]), &steps);
            prop_assert_eq!(&outcomes, &expected);
            prop_assert!(got == bytes, "bytes differ from the twin in {:?}", setups[setup]);
            let mut counted = counted.borrow_mut();
            *counted.0 += expected.iter().filter(|outcome| outcome.is_ok()).count();
            *counted.1 += expected.iter().filter(|outcome| outcome.is_err()).count();
            Ok(())
        })
        .unwrap();
    assert!(done > 300 && refused > 100, "{done} done, {refused} refused");
}

#[test]
fn a_cache_in_the_callers_own_device_memory_is_refused_where_nothing_is_mapped() {
    // Addresses that nobody maps: the reason, not a fault.
    let engine = DataDist::open(config(1 << 20)).unwrap();
    let desc = desc(Host, 1, 4, 4096);
    let unmapped = crate::bed::adopt(&desc, Blocks, &[4096]);
    let cache = engine.register(unmapped, &[], Some(false)).unwrap();
    let device = engine.allocate(&CacheDesc { placement: Device, ..desc }, Blocks, &[]).unwrap();
    for (src, dst) in [(&cache, &device), (&device, &cache)] {
        let ends = (End::Managed(src.id()), End::Managed(dst.id()));
        let error = engine.swap_blocks(&ends.0, &ends.1, &[(0, 0)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("not mapped"), "{error}");
    }
    assert!(
        engine.swap_blocks(&End::Managed(cache.id()), &End::Managed(device.id()), &[]).is_ok(),
        "no pairs, no memory"
    );
}

#[test]
fn no_pairs_are_nothing_to_do_on_every_way() {
    let mut config = config(1 << 20);
    config.swap_in = SwapInPath::Direct;
    let engine = engine_on(config, Arc::new(SimDevice::new(HostReach::Staged)));
    let host = engine.allocate(&desc(Host, 1, 4, 64), Blocks, &[]).unwrap();
    let device = engine.allocate(&desc(Device, 1, 4, 64), Blocks, &[]).unwrap();
    let (host, device) = (End::Managed(host.id()), End::Managed(device.id()));
    let refused = engine.swap_blocks(&host, &device, &[(0, 0)]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotEnabled);
    assert!(refused.to_string().contains("llm.SwapInPath"), "{refused}");
    engine.swap_blocks(&host, &device, &[]).unwrap();
    engine.swap_blocks(&device, &host, &[(0, 0)]).unwrap();
}
