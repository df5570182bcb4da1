//! Deadlines of copies: a copy that has begun is finished, a transfer ends half way, and neither starts late.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use llm_datadist_core::bindings::{Cache, Config, SwapInPath};
use llm_datadist_core::testing::copy::{CopyEngine, Staging};
use llm_datadist_core::testing::device::{DeviceSet, HostReach};
use llm_datadist_core::testing::memory::Tensors;
use llm_datadist_core::{CacheKind, Deadline, ErrorKind, Placement};
use llm_datadist_testing::SimDevice;

use crate::fixtures::{
    block_plan, config, contents, copied_bytes, desc, end, engine_on, fill, patterned, same_rows,
};
use CacheKind::Blocks;
use HostReach::{Direct, Staged};
use Placement::{Device, Host};

const ROWS: usize = 160;
const ROW: usize = 64 << 10;

/// A device at whose first copy the limit of every call passes. It notes which threads copy.
struct Late {
    sim: Arc<SimDevice>,
    passed: &'static AtomicBool,
    threads: Arc<Mutex<HashSet<(String, ThreadId)>>>,
}

impl Late {
    fn new(reach: HostReach) -> Late {
        let passed: &AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
        let threads = Arc::<Mutex<HashSet<_>>>::default();
        let seen = threads.clone();
        let sim = SimDevice::new(reach).before_copies(move || {
            seen.lock().unwrap().insert((this_thread(), thread::current().id()));
            passed.store(true, Ordering::SeqCst);
        });
        Late { sim: Arc::new(sim), passed, threads }
    }
}

fn this_thread() -> String {
    thread::current().name().unwrap_or("").to_owned()
}

/// Pairs of which no two merge.
fn scattered() -> Vec<(i64, i64)> {
    (0..160).map(|row| (row, row * row * 3 % 163)).filter(|pair| pair.1 < 160).collect()
}

/// Pairs of which each waits for the one before.
fn chain() -> Vec<(i64, i64)> {
    (0..159).map(|row| (row, row + 1)).collect()
}

/// A copy between a host and a device cache with different bytes. While its first bytes move, its limit
/// passes and its caller is interrupted. All bytes must arrive anyway. The next copy finds that its limit has
/// passed and moves nothing.
fn outlasts_its_limit(
    reach: HostReach,
    swap_in: SwapInPath,
    from: Placement,
    to: Placement,
    pairs: &[(i64, i64)],
) {
    for workers in [1, 4] {
        let device = Late::new(reach);
        let config = Config { swap_in, copy_workers: Some(workers), ..config(64 << 20) };
        let engine = engine_on(config, device.sim.clone()).over_when(device.passed).interrupted_by(|| true);
        let [host, remote, back] = [Host, Device, Host]
            .map(|placement| engine.allocate(&desc(placement, 1, ROWS, ROW), Blocks, &[]).unwrap());
        let bytes = |seed| patterned(seed, 1, ROWS * ROW).remove(0);
        let copy_late = |src: &Arc<Cache>, dst: &Arc<Cache>, pairs: &[(i64, i64)]| {
            if src.id() == dst.id() {
                engine.copy_blocks(&end(src), pairs).run()
            } else {
                engine.swap_blocks(&end(src), &end(dst), pairs).run()
            }
        };
        let copy = |src, dst, pairs: &[(i64, i64)]| {
            device.passed.store(false, Ordering::SeqCst);
            copy_late(src, dst, pairs)
        };
        fill(&host, &[bytes(2)]);
        copy(&host, &remote, &same_rows(160)).unwrap();
        fill(&host, &[bytes(1)]);
        let [src, dst] = [from, to].map(|placement| if placement == Host { &host } else { &remote });
        device.threads.lock().unwrap().clear();
        copy(src, dst, pairs).unwrap_or_else(|error| panic!("{from} to {to} by {workers} workers: {error}"));
        let threads = std::mem::take(&mut *device.threads.lock().unwrap());

        // Apply the pairs one after the other.
        let (mut of_host, mut of_device) = (bytes(1), bytes(2));
        for &(src, dst) in pairs {
            let row = |at: i64| at as usize * ROW..(at as usize + 1) * ROW;
            let moved = if from == Host { &of_host } else { &of_device }[row(src)].to_vec();
            let target = if to == Host { &mut of_host } else { &mut of_device };
            target[row(dst)].copy_from_slice(&moved);
        }
        assert!(contents(&host)[0] == of_host);
        copy(&remote, &back, &same_rows(160)).unwrap();
        assert!(contents(&back)[0] == of_device);

        let named = |role: &str| threads.iter().filter(|(name, _)| name == role).count();
        assert!(named("llm-copy") < workers, "{threads:?}");
        assert_eq!(named("llm-copy") + named(&this_thread()), threads.len(), "{threads:?}");

        device.passed.store(true, Ordering::SeqCst);
        let copies = device.sim.copies();
        let error = copy_late(src, dst, pairs).unwrap_err();
        // The limit passed before any byte moved, so the error has no number of bytes.
        assert_eq!((error.kind(), error.fact("copied_bytes")), (ErrorKind::Timeout, None), "{error}");
        assert_eq!(device.sim.copies(), copies);
        copy(src, dst, &[(0, 0), (159, 1)]).expect("no pin is left");
    }
}

#[test]
fn a_copy_that_has_begun_outlasts_its_limit() {
    outlasts_its_limit(Direct, SwapInPath::Auto, Device, Device, &scattered());
    outlasts_its_limit(Direct, SwapInPath::Auto, Device, Device, &chain());
    outlasts_its_limit(Direct, SwapInPath::Auto, Host, Device, &scattered());
    outlasts_its_limit(Staged, SwapInPath::Auto, Device, Host, &scattered());
    // Both of these go through the ring.
    outlasts_its_limit(Staged, SwapInPath::Auto, Host, Device, &scattered());
    outlasts_its_limit(Direct, SwapInPath::Ring, Host, Device, &scattered());
}

/// A transfer limits the whole copy: it ends after the units that had begun.
#[test]
fn a_limit_on_the_whole_copy_ends_it_half_way() {
    for path in [SwapInPath::Auto, SwapInPath::Ring] {
        let device = Late::new(Direct);
        let devices = DeviceSet::with_device(device.sim.clone());
        let config = Config { copy_workers: Some(1), ..config(1 << 20) };
        let engine = CopyEngine::new(&config, devices.clone());
        let len = (ROWS * ROW) as u64;
        let [src, dst] = [Host, Device].map(|placement| {
            let region = Arc::new(devices.at(placement).allocate("test", len).unwrap());
            Arc::new(Tensors::carved(region, [0], len, ()).unwrap())
        });
        let pairs: Vec<_> = scattered().into_iter().map(|(from, to)| (from as u64, to as u64)).collect();
        let plan = block_plan(&pairs, ROW as u64, 1);
        let limit = Deadline::after(Duration::from_secs(3600)).over_when(Some(device.passed));
        let staging = Staging { path, buffer_bytes: ROW as u64 };
        let run = engine.run(plan, (&src, Host), (&dst, Device), staging, limit, &Arc::default());
        let error = run.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let (copied, of) = copied_bytes(&error);
        assert!(copied < of, "{error}");
        // One unit of a direct copy, or what was in the ring.
        assert!(device.sim.copies() <= 64, "{} copies", device.sim.copies());
    }
}
