//! Copies that fail, run late, panic, or run sixteen at a time.

use std::collections::{BTreeSet, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use llm_datadist_core::testing::copy::{CopyEngine, Staging};
use llm_datadist_core::testing::device::sim::SimDevice;
use llm_datadist_core::testing::device::{self, Copier, Copy, DeviceSet, HostReach};
use llm_datadist_core::testing::memory::kernels::Kernel;
use llm_datadist_core::testing::memory::{Region, Tensors};
use llm_datadist_core::testing::plan::{BlockPairs, CopyPlan, Ends};
use llm_datadist_core::{
    Cache, CacheKey, CacheKind, DataDist, Deadline, End, Error, ErrorKind, Placement, Snapshot, SwapInPath,
};

use crate::bed::{Gated, Own, config, contents, desc, engine_on, fill, patterned};
use CacheKind::Blocks;
use Placement::{Device, Host};

fn end(cache: &Arc<Cache>) -> End {
    End::Managed(cache.id())
}

fn progress(error: &Error) -> (u64, u64) {
    let fact =
        |name| error.fact(name).unwrap_or_else(|| panic!("{error} has no {name}")).parse::<u64>().unwrap();
    let (copied, of) = (fact("copied_bytes"), fact("of_bytes"));
    assert!(copied <= of, "{error}");
    (copied, of)
}

fn all(rows: i64) -> Vec<(i64, i64)> {
    (0..rows).map(|row| (row, row)).collect()
}

/// Spans that do not merge, so that each block is a copy of its own.
fn scattered(rows: i64) -> Vec<(i64, i64)> {
    let pairs: Vec<_> = (0..rows).map(|row| (row, (row * row * 7 + row * 3) % (2 * rows))).collect();
    let mut seen = HashSet::new();
    let mut kept: Vec<_> = pairs.into_iter().filter(|(_, to)| seen.insert(*to)).collect();
    kept.sort_unstable();
    assert!(kept.len() as i64 > rows / 4);
    kept
}

/// The memory and tables of an engine, without the counters of calls.
fn resources(stats: &Snapshot) -> (u64, u64, u64, u64, u64) {
    let (device, host) = (stats.device_pool.unwrap().pool, stats.host_pool.unwrap().pool);
    (device.used_bytes, device.used_ranges, host.used_bytes, stats.table.caches, stats.table.keys)
}

#[test]
fn a_device_that_fails_says_how_far_it_got_and_the_engine_lives_on() {
    for workers in [1, 4] {
        let sim = Arc::new(SimDevice::new(HostReach::Direct));
        let mut config = config(64 << 20);
        config.copy_workers = Some(workers);
        let engine = engine_on(config, sim.clone());
        let cache = engine.allocate(&desc(Device, 4, 512, 16 << 10), Blocks, &[]).unwrap();
        let pairs: Vec<(i64, i64)> = scattered(200).into_iter().map(|(from, to)| (from, to + 100)).collect();
        let pairs: Vec<(i64, i64)> = pairs.into_iter().filter(|(from, _)| *from < 100).collect();
        let of_all = pairs.len() as u64 * 4 * (16 << 10);
        let before = resources(&engine.stats());
        let mut failures = 0;
        for after in [0, 1, 60, 200] {
            sim.fail_after(after);
            let before_call = sim.copies();
            let error = engine.copy_blocks(&end(&cache), &pairs).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::System);
            assert!(error.to_string().contains("failed as told"), "{error}");
            let (copied, of) = progress(&error);
            assert_eq!(of, of_all);
            assert!(copied < of && copied <= (sim.copies() - before_call) * (16 << 10), "{error}");
            // Not one copy is started after the failure but by those who were already at it.
            assert!(sim.copies() - before_call <= after);
            failures += 1;
        }
        sim.fail_after(u64::MAX);
        engine.copy_blocks(&end(&cache), &pairs).unwrap();
        assert_eq!(resources(&engine.stats()), before);
        let op = engine.stats().ops.into_iter().find(|(name, _)| *name == "copy_blocks").unwrap().1;
        assert_eq!((op.calls, op.failures, op.bytes), (failures + 1, failures, of_all));
        engine.deallocate(cache.id()).unwrap();
        drop(cache);
        assert_eq!(engine.stats().device_pool.unwrap().pool.used_bytes, 0, "a failed copy holds no memory");
    }
}

#[test]
fn the_ring_passes_on_the_failure_of_either_stage() {
    let sim = Arc::new(SimDevice::new(HostReach::Staged));
    let engine = engine_on(config(16 << 20), sim.clone());
    let host = Own::loose(&desc(Host, 2, 24, 4096), Blocks);
    host.write(&patterned(1, 2, 24 * 4096));
    let device = engine.allocate(&desc(Device, 2, 24, 4096), Blocks, &[]).unwrap();
    let from = End::Loose(host.cache.clone());
    let mut failures = 0;
    // Fills and drains alternate somehow: whichever comes to the n-th copy fails.
    for after in 0..95 {
        sim.fail_after(after);
        let error = engine.swap_blocks(&from, &end(&device), &all(24)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System, "{error}");
        assert!(error.to_string().contains("failed as told"), "after {after}: {error}");
        assert!(progress(&error).0 < 2 * 24 * 4096);
        failures += 1;
    }
    sim.fail_after(u64::MAX);
    engine.swap_blocks(&from, &end(&device), &all(24)).unwrap();
    let back = Own::loose(&desc(Host, 2, 24, 4096), Blocks);
    engine.swap_blocks(&end(&device), &End::Loose(back.cache.clone()), &all(24)).unwrap();
    assert!(back.read() == host.read());
    let stats = engine.stats();
    assert_eq!((stats.swap_in_ring, stats.swap_in_direct, stats.ring_bytes), (1, 0, 4 * 4096));
    assert_eq!(failures, 95);
}

#[test]
fn the_ring_is_kept_and_grows() {
    let engine = engine_on(config(64 << 20), Arc::new(SimDevice::new(HostReach::Staged)));
    assert_eq!(engine.stats().ring_bytes, 0, "nobody needs it yet");
    for (block, expected) in
        [(4096, 4 * 4096), (4096, 4 * 4096), (1000, 4 * 4096), (1 << 20, 4 << 20), (7, 4 << 20)]
    {
        let host = Own::loose(&desc(Host, 3, 6, block), Blocks);
        host.write(&patterned(9, 3, 6 * block));
        let device = engine.allocate(&desc(Device, 3, 6, block), Blocks, &[]).unwrap();
        engine.swap_blocks(&End::Loose(host.cache.clone()), &end(&device), &all(6)).unwrap();
        assert_eq!(engine.stats().ring_bytes, expected, "{block}");
        let back = Own::loose(&desc(Host, 3, 6, block), Blocks);
        engine.swap_blocks(&end(&device), &End::Loose(back.cache.clone()), &all(6)).unwrap();
        assert!(back.read() == host.read());
        engine.deallocate(device.id()).unwrap();
    }
}

#[test]
fn a_ring_that_cannot_be_allocated_fails_that_call_only() {
    let device = Gated::new(HostReach::Staged);
    let engine = engine_on(config(16 << 20), device.clone());
    let host = engine.allocate(&desc(Host, 1, 6, 4096), Blocks, &[]).unwrap();
    let remote = engine.allocate(&desc(Device, 1, 6, 4096), Blocks, &[]).unwrap();
    device.no_memory.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        let error = engine.swap_blocks(&end(&host), &end(&remote), &[(0, 0)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert_eq!(progress(&error), (0, 4096));
    }
    device.no_memory.store(false, Ordering::SeqCst);
    engine.swap_blocks(&end(&host), &end(&remote), &[(0, 0)]).unwrap();
}

/// A device whose copies take a moment now and then, long enough that the other stage of the ring falls asleep.
#[derive(Debug)]
struct Uneven(SimDevice, AtomicU64);

impl device::Device for Uneven {
    fn allocate(&self, name: &str, len: u64) -> Result<Region, Error> {
        self.0.allocate(name, len)
    }

    fn host_reach(&self) -> HostReach {
        self.0.host_reach()
    }
}

impl Copier for Uneven {
    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<(), Error> {
        let turn = self.1.fetch_add(1, Ordering::SeqCst).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60;
        if turn < 3 {
            std::thread::sleep(Duration::from_micros(20 << turn));
        }
        self.0.copy(batch, kernel)
    }
}

#[test]
fn stages_of_the_ring_that_fall_asleep_are_woken() {
    const ROWS: usize = 1500;
    let engine =
        engine_on(config(16 << 20), Arc::new(Uneven(SimDevice::new(HostReach::Staged), AtomicU64::new(0))));
    let host = Own::loose(&desc(Host, 2, ROWS, 96), Blocks);
    host.write(&patterned(3, 2, ROWS * 96));
    let device = engine.allocate(&desc(Device, 2, ROWS, 96), Blocks, &[]).unwrap();
    // Rows of which none joins its neighbour, so that each goes through the ring for itself; 13 and 1,500 are coprime.
    let pairs: Vec<(i64, i64)> = (0..ROWS as i64).map(|row| (row, row * 13 % ROWS as i64)).collect();
    let back: Vec<(i64, i64)> = pairs.iter().map(|&(from, to)| (to, from)).collect();
    for _ in 0..2 {
        engine.swap_blocks(&End::Loose(host.cache.clone()), &end(&device), &pairs).unwrap();
        // Short ones as well, whose stages end at once.
        for pair in pairs.chunks(7).take(50) {
            engine.swap_blocks(&End::Loose(host.cache.clone()), &end(&device), pair).unwrap();
        }
    }
    assert_eq!(engine.stats().swap_in_ring, 2 * 51);
    let copy = Own::loose(&desc(Host, 2, ROWS, 96), Blocks);
    engine.swap_blocks(&end(&device), &End::Loose(copy.cache.clone()), &back).unwrap();
    assert!(copy.read() == host.read());
}

/// A device whose first copy takes until the limit of every call has passed. It notes which threads copy.
#[derive(Debug)]
struct Late {
    sim: SimDevice,
    over: &'static AtomicBool,
    threads: Mutex<BTreeSet<String>>,
}

impl Late {
    fn new(reach: HostReach) -> Arc<Late> {
        let over = Box::leak(Box::new(AtomicBool::new(false)));
        Arc::new(Late { sim: SimDevice::new(reach), over, threads: Mutex::default() })
    }
}

impl device::Device for Late {
    fn allocate(&self, name: &str, len: u64) -> Result<Region, Error> {
        self.sim.allocate(name, len)
    }

    fn host_reach(&self) -> HostReach {
        self.sim.host_reach()
    }
}

impl Copier for Late {
    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<(), Error> {
        let here = std::thread::current().name().unwrap_or("").to_owned();
        self.threads.lock().unwrap().insert(here);
        self.sim.copy(batch, kernel)?;
        self.over.store(true, Ordering::SeqCst);
        Ok(())
    }
}

const LATE_ROWS: usize = 160;
const LATE_ROW: usize = 64 << 10;
type Pairs = Vec<(i64, i64)>;

/// 160 pairs that no two of merge.
fn apart() -> Pairs {
    (0..160).map(|row| (row, row * row * 3 % 163)).filter(|pair| pair.1 < 160).collect()
}

/// A call, from host (`local`) and device caches that were filled with different bytes, whose limit passes and whose caller
/// is interrupted while its first bytes move. All of it must be there, on every thread that may copy; the next call finds
/// its limit passed and moves nothing.
fn outlasts_its_limit(reach: HostReach, swap_in: SwapInPath, from: Placement, to: Placement, pairs: &Pairs) {
    for workers in [1, 4] {
        let device = Late::new(reach);
        let mut config = config(64 << 20);
        (config.swap_in, config.copy_workers) = (swap_in, Some(workers));
        let engine = engine_on(config, device.clone()).over_when(device.over).interrupted_by(|| true);
        let [local, remote, back] = [Host, Device, Host]
            .map(|placement| engine.allocate(&desc(placement, 1, LATE_ROWS, LATE_ROW), Blocks, &[]).unwrap());
        let bytes = |seed| patterned(seed, 1, LATE_ROWS * LATE_ROW).remove(0);
        let calls = |src: &Arc<Cache>, dst: &Arc<Cache>, pairs: &Pairs| {
            device.over.store(false, Ordering::SeqCst);
            if src.id() == dst.id() {
                engine.copy_blocks(&end(src), pairs)
            } else {
                engine.swap_blocks(&end(src), &end(dst), pairs)
            }
        };
        fill(&local, &[bytes(2)]);
        calls(&local, &remote, &all(160)).unwrap();
        fill(&local, &[bytes(1)]);
        let cache = |placement| if placement == Host { &local } else { &remote };
        device.threads.lock().unwrap().clear();
        calls(cache(from), cache(to), pairs)
            .unwrap_or_else(|error| panic!("{from} to {to} by {workers} workers: {error}"));
        let names = std::mem::take(&mut *device.threads.lock().unwrap());

        // What the pairs say, one after the other.
        let (mut host, mut other) = (bytes(1), bytes(2));
        for &(src, dst) in pairs {
            let row = |at: i64| at as usize * LATE_ROW..(at as usize + 1) * LATE_ROW;
            let moved = if from == Host { &host } else { &other }[row(src)].to_vec();
            let target = if to == Host { &mut host } else { &mut other };
            target[row(dst)].copy_from_slice(&moved);
        }
        assert!(contents(&local)[0] == host);
        calls(&remote, &back, &all(160)).unwrap();
        assert!(contents(&back)[0] == other);

        let own = std::thread::current().name().unwrap_or("").to_owned();
        let ring = from == Host && (swap_in == SwapInPath::Ring || reach == HostReach::Staged);
        assert_eq!(names.contains("llm-ring-0"), ring, "{names:?}");
        for name in &names {
            let worker = name.strip_prefix("llm-copy-").and_then(|index| index.parse::<usize>().ok());
            let known =
                *name == own || name == "llm-ring-0" || worker.is_some_and(|index| index < workers - 1);
            assert!(known && (name.len() <= 15 || *name == own), "{names:?}");
        }

        // The limit has passed before the first byte: nothing is moved.
        device.over.store(true, Ordering::SeqCst);
        let copies = device.sim.copies();
        let refused = if from == to {
            engine.copy_blocks(&end(cache(from)), pairs)
        } else {
            engine.swap_blocks(&end(cache(from)), &end(cache(to)), pairs)
        };
        let error = refused.unwrap_err();
        assert_eq!((error.kind(), progress(&error).0), (ErrorKind::Timeout, 0), "{error}");
        assert_eq!(device.sim.copies(), copies);
        calls(cache(from), cache(to), &vec![(0, 0), (159, 1)]).expect("no pin is left");
    }
}

#[test]
fn a_copy_that_has_begun_outlasts_its_limit() {
    let chain = (0..159).map(|row| (row, row + 1)).collect();
    outlasts_its_limit(HostReach::Direct, SwapInPath::Auto, Device, Device, &apart());
    // Each pair in a wave of its own.
    outlasts_its_limit(HostReach::Direct, SwapInPath::Auto, Device, Device, &chain);
}

#[test]
fn a_swap_that_has_begun_outlasts_its_limit() {
    outlasts_its_limit(HostReach::Direct, SwapInPath::Auto, Host, Device, &apart());
    outlasts_its_limit(HostReach::Staged, SwapInPath::Auto, Device, Host, &apart());
}

#[test]
fn a_swap_that_has_entered_the_ring_outlasts_its_limit() {
    outlasts_its_limit(HostReach::Staged, SwapInPath::Auto, Host, Device, &apart());
    outlasts_its_limit(HostReach::Direct, SwapInPath::Ring, Host, Device, &apart());
}

/// Transfers keep their limit: the same copies, under a limit on the whole, end after the units that were begun.
#[test]
fn a_limit_on_the_whole_ends_a_copy_half_way() {
    for (reach, swap_in) in [(HostReach::Direct, SwapInPath::Auto), (HostReach::Direct, SwapInPath::Ring)] {
        let device = Late::new(reach);
        let devices = DeviceSet::with_device(device.clone());
        let mut config = config(1 << 20);
        config.copy_workers = Some(1);
        let engine = CopyEngine::new(&config, devices.clone()).unwrap();
        let [src, dst] = [Host, Device].map(|placement| {
            let len = (LATE_ROWS * LATE_ROW) as u64;
            let region = Arc::new(devices.at(placement).allocate("test", len).unwrap());
            (Arc::new(Tensors::carved(region, [0], len, Box::new(())).unwrap()), placement)
        });
        let pairs = apart().into_iter().map(|(from, to)| (from as u64, to as u64)).collect();
        let request = BlockPairs { pairs, block_bytes: LATE_ROW as u64, num_tensors: 1 };
        let plan = CopyPlan::blocks(&request, Ends::TwoCaches).unwrap();
        let (limit, staging) = (
            Deadline::after(Duration::from_secs(3600)).over_when(Some(device.over)),
            Staging { path: swap_in, buffer_bytes: LATE_ROW as u64 },
        );
        let error =
            engine.run(plan, (&src.0, src.1), (&dst.0, dst.1), staging, limit, &Arc::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let (copied, of) = progress(&error);
        assert!(copied < of, "{error}");
        // One unit when it goes straight; what was under way in the ring.
        assert!(device.sim.copies() <= 64, "{} copies", device.sim.copies());
    }
}

#[test]
fn swap_ins_that_wait_for_the_ring_notice_their_limit() {
    let device = Gated::new(HostReach::Staged);
    let mut config = config(16 << 20);
    config.sync_timeout = Duration::from_millis(300);
    let engine = engine_on(config, device.clone());
    let (a, b) = (
        engine.allocate(&desc(Host, 1, 6, 4096), Blocks, &[]).unwrap(),
        engine.allocate(&desc(Device, 1, 6, 4096), Blocks, &[]).unwrap(),
    );
    device.shut();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| engine.swap_blocks(&end(&a), &end(&b), &[(0, 0)]));
        device.wait_for(1);
        // Other blocks, so that only the ring is in the way.
        let error = engine.swap_blocks(&end(&a), &end(&b), &[(1, 1)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().contains("swap-in ring"), "{error}");
        assert_eq!(progress(&error), (0, 4096));
        device.open();
        let _ = first.join().unwrap();
    });
    engine.swap_blocks(&end(&a), &end(&b), &[(1, 1)]).unwrap();
}

#[test]
fn a_ring_behind_busy_workers_still_ends() {
    // The only worker thread is held by a direct copy; the draining stage of the ring cannot start.
    let device = Gated::new(HostReach::Staged);
    let mut config = config(64 << 20);
    (config.copy_workers, config.sync_timeout) = (Some(2), Duration::from_millis(400));
    let engine = engine_on(config, device.clone());
    let host = engine.allocate(&desc(Host, 1, 64, 64 << 10), Blocks, &[]).unwrap();
    let remote = engine.allocate(&desc(Device, 1, 64, 64 << 10), Blocks, &[]).unwrap();
    device.shut();
    std::thread::scope(|scope| {
        let pairs: Vec<_> = (0..32).map(|row| (row, 32 + row * 5 % 32)).collect();
        let (engine, remote, host) = (&engine, &remote, &host);
        let busy = scope.spawn(move || engine.copy_blocks(&end(remote), &pairs));
        device.wait_for(2); // its own thread and the only worker
        let blocked = scope.spawn(move || engine.swap_blocks(&end(host), &end(remote), &[(0, 0)]));
        let started = Instant::now();
        while !blocked.is_finished() && started.elapsed() < Duration::from_secs(3) {
            std::thread::sleep(Duration::from_millis(10));
        }
        device.open();
        let _ = busy.join().unwrap();
        let _ = blocked.join().unwrap();
    });
    engine.swap_blocks(&end(&host), &end(&remote), &[(0, 0)]).unwrap();
}

#[test]
fn a_device_that_panics_on_a_worker_fails_the_call() {
    let device = Gated::new(HostReach::Staged);
    let engine = engine_on(config(64 << 20), device.clone());
    let host = engine.allocate(&desc(Host, 1, 64, 64 << 10), Blocks, &[]).unwrap();
    let remote = engine.allocate(&desc(Device, 1, 64, 64 << 10), Blocks, &[]).unwrap();
    // The draining stage.
    *device.panics.lock().unwrap() = Some("llm-ring".into());
    let error = engine.swap_blocks(&end(&host), &end(&remote), &all(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System);
    assert!(error.to_string().contains("ended early"), "{error}");
    assert!(device.panics.lock().unwrap().is_none(), "nobody panicked");
    engine.swap_blocks(&end(&host), &end(&remote), &all(20)).unwrap();

    // Units of a direct copy: the calling thread is kept at the gate until a worker has panicked.
    *device.panics.lock().unwrap() = Some("llm-copy".into());
    device.shut();
    std::thread::scope(|scope| {
        let (engine, remote, host) = (&engine, &remote, &host);
        let call = scope.spawn(move || engine.swap_blocks(&end(remote), &end(host), &all(64)));
        while device.panics.lock().unwrap().is_some() {
            std::thread::yield_now();
        }
        device.open();
        let error = call.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        assert!(error.to_string().contains("panicked"), "{error}");
    });
    engine.swap_blocks(&end(&remote), &end(&host), &all(64)).unwrap();
}

#[test]
fn a_panic_on_the_calling_thread_leaves_nobody_inside() {
    let device = Gated::new(HostReach::Direct);
    let engine = engine_on(config(64 << 20), device.clone());
    let remote = engine.allocate(&desc(Device, 1, 128, 64 << 10), Blocks, &[]).unwrap();
    let pairs: Vec<_> = (0..64).map(|row| (row, 64 + row)).collect();
    device.shut();
    std::thread::scope(|scope| {
        let call = std::thread::Builder::new()
            .name("caller".into())
            .spawn_scoped(scope, || {
                // Panics as soon as the caller enters the device, while a worker is held at the gate.
                let (engine, remote, device) = (&engine, &remote, &device);
                *device.panics.lock().unwrap() = Some("caller".into());
                let outcome = catch_unwind(AssertUnwindSafe(|| engine.copy_blocks(&end(remote), &pairs)));
                // The call is over for its caller: no worker may be copying for it.
                (outcome.map_err(|_| ()), device.inside.load(Ordering::SeqCst))
            })
            .unwrap();
        device.wait_for(1);
        std::thread::sleep(Duration::from_millis(100));
        device.open();
        let (outcome, inside) = call.join().unwrap();
        assert!(!matches!(outcome, Ok(Ok(()))), "a panic is no success");
        assert_eq!(inside, 0, "workers still copied for a call that was over");
    });
    engine.copy_blocks(&end(&remote), &pairs).expect("no pin is left");
}

#[test]
fn a_copy_made_while_its_thread_unwinds_is_judged_by_itself() {
    struct CopiesOnDrop<'a>(&'a DataDist, End, &'a mut Option<Result<(), Error>>);
    impl Drop for CopiesOnDrop<'_> {
        fn drop(&mut self) {
            let pairs: Vec<_> = (0..64).map(|row| (row, 64 + row)).collect();
            *self.2 = Some(self.0.copy_blocks(&self.1, &pairs));
        }
    }
    let engine = DataDist::open(config(64 << 20)).unwrap();
    let remote = engine.allocate(&desc(Device, 1, 128, 64 << 10), Blocks, &[]).unwrap();
    let mut outcome = None;
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _copies = CopiesOnDrop(&engine, end(&remote), &mut outcome);
        std::panic::panic_any("unwinding");
    }));
    assert!(unwound.is_err());
    outcome.unwrap().expect("nothing is wrong with this copy");
}

#[test]
fn a_refused_call_takes_nothing() {
    let engine = DataDist::open(config(1 << 20)).unwrap(); // 16 pages
    let key = |id| Some(CacheKey::Request { model: 0, id });
    let kept = engine.allocate(&desc(Device, 2, 4, 64), CacheKind::Batch, &[key(1)]).unwrap();
    let before = resources(&engine.stats());
    let refused = [
        (desc(Device, 17, 4, 64), vec![], ErrorKind::OutOfMemory),
        (desc(Device, 2, 4, 1 << 20), vec![], ErrorKind::OutOfMemory),
        (desc(Device, 1, 4, 64), vec![key(2), key(1)], ErrorKind::KeyTaken),
        (desc(Device, 1, 1, 64), vec![key(2), key(3)], ErrorKind::InvalidArgument),
        (desc(Device, 0, 1, 64), vec![], ErrorKind::InvalidArgument),
        (desc(Device, 1, 0, 64), vec![], ErrorKind::InvalidArgument),
    ];
    for (desc, keys, kind) in refused {
        assert_eq!(engine.allocate(&desc, CacheKind::Batch, &keys).unwrap_err().kind(), kind, "{desc:?}");
        assert_eq!(resources(&engine.stats()), before, "{desc:?}");
        assert!(engine.find_key(key(2).unwrap()).is_err());
        assert_eq!(engine.find_key(key(1).unwrap()).unwrap().0.id(), kept.id());
    }
    let next = engine.allocate(&desc(Device, 14, 4, 64), CacheKind::Batch, &[key(2)]).unwrap();
    assert_eq!(next.id().0, kept.id().0 + 1);
}

#[test]
fn sixteen_threads_on_blocks_of_their_own() {
    for swap_in in [SwapInPath::Auto, SwapInPath::Ring] {
        let mut config = config(64 << 20);
        config.swap_in = swap_in;
        let engine = DataDist::open(config).unwrap();
        let device = engine.allocate(&desc(Device, 3, 128, 8191), Blocks, &[]).unwrap();
        let verified: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16u8)
                .map(|thread| {
                    let (engine, device) = (&engine, &device);
                    scope.spawn(move || {
                        let own = Own::loose(&desc(Host, 3, 8, 8191), Blocks);
                        let first = i64::from(thread) * 8;
                        let there: Vec<_> = (0..8).map(|row| (row, first + row)).collect();
                        let back: Vec<_> = (0..4).map(|row| (first + 4 + row, row)).collect();
                        for round in 0..12 {
                            let bytes = patterned(thread * 13 + round, 3, 8 * 8191);
                            own.write(&bytes);
                            engine.swap_blocks(&End::Loose(own.cache.clone()), &end(device), &there).unwrap();
                            engine
                                .copy_blocks(&end(device), &[(first, first + 7), (first + 1, first + 6)])
                                .unwrap();
                            engine.swap_blocks(&end(device), &End::Loose(own.cache.clone()), &back).unwrap();
                            let block =
                                |tensor: usize, row: usize| &bytes[tensor][row * 8191..(row + 1) * 8191];
                            for (tensor, got) in own.read().iter().enumerate() {
                                for (row, from) in [4, 5, 1, 0, 4, 5, 6, 7].into_iter().enumerate() {
                                    assert!(
                                        &got[row * 8191..(row + 1) * 8191] == block(tensor, from),
                                        "row {row}"
                                    );
                                }
                            }
                            own.outside_untouched();
                        }
                        12
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(verified, 16 * 12);
    }
}

#[test]
fn sixteen_threads_on_the_same_blocks_never_tear_one() {
    // Blocks 0..8 hold eight letters; every thread copies letters over 8..12 and 12..16, in fan-outs and chains.
    let engine = DataDist::open(config(64 << 20)).unwrap();
    let cache = engine.allocate(&desc(Device, 4, 16, 40_000), Blocks, &[]).unwrap();
    let letters = Own::loose(&desc(Host, 4, 16, 40_000), Blocks);
    let bytes: Vec<Vec<u8>> =
        (0..4).map(|_| (0..16u8).flat_map(|row| vec![row % 8; 40_000]).collect()).collect();
    letters.write(&bytes);
    engine.swap_blocks(&End::Loose(letters.cache.clone()), &end(&cache), &all(16)).unwrap();
    let whole = |tensors: &[Vec<u8>]| {
        let mut looked_at = 0;
        for row in 0..16 {
            let letter = tensors[0][row * 40_000];
            for tensor in tensors {
                let block = &tensor[row * 40_000..(row + 1) * 40_000];
                assert!(block.iter().all(|&byte| byte == letter), "block {row} is torn");
                looked_at += 1;
            }
            assert!(letter < 8 && (row >= 8 || usize::from(letter) == row));
        }
        looked_at
    };
    let looked_at: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16i64)
            .map(|thread| {
                let (engine, cache, whole) = (&engine, &cache, &whole);
                scope.spawn(move || {
                    let mut looked_at = 0;
                    for round in 0..20 {
                        let (from, to) = ((thread + round) % 8, 8 + (thread * 3 + round) % 4);
                        let pairs =
                            [(from, to), (from, to + 4), (to + 4, 8 + (to + 1) % 4), ((from + 1) % 8, to)];
                        engine.copy_blocks(&end(cache), &pairs).unwrap();
                        if round % 10 == 9 {
                            let own = Own::loose(&desc(Host, 4, 16, 40_000), Blocks);
                            engine
                                .swap_blocks(&end(cache), &End::Loose(own.cache.clone()), &all(16))
                                .unwrap();
                            looked_at += whole(&own.read());
                        }
                    }
                    looked_at
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(looked_at, 16 * 2 * 16 * 4);
}
