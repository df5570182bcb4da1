//! Merging into huge pages: only engines with `huge_pages="eager"` merge, and no byte changes.
//!
//! `tests/test_huge_pages.py` covers pools. The tests first check with plain system calls whether the kernel
//! merges at all; if not, they report that they are skipped.
#![allow(unsafe_code, reason = "the test's own question to the kernel")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use llm_datadist_core::bindings::{Config, DataDist, HugeChoice};
use llm_datadist_core::testing::copy::CopyEngine;
use llm_datadist_core::testing::device::DeviceSet;
use llm_datadist_core::testing::huge_pages::{Merged, commit_pools};
use llm_datadist_core::testing::memory::{
    MergeRefusal, PeerProcess, Region, Tensors, allow_readers, own_probe,
};
use llm_datadist_core::{CacheKind, Placement};

use crate::emulation;
use crate::fixtures::{Buffer, StopOnDrop, adopt, config, desc, pattern, skipped};
use crate::registered_pages::{PAGE, Pages, SEED};
use Placement::Host;

const UNIT: usize = Region::UNIT_BYTES as usize;
pub(crate) const CHOICES: [HugeChoice; 3] = [HugeChoice::Auto, HugeChoice::Off, HugeChoice::Eager];

/// Returns whether this kernel merges private memory into huge pages on request. Checked without the engine. A kernel that
/// reports no reason against it must merge.
fn merges() -> bool {
    // SAFETY: the call takes plain numbers. An emulator may not know it.
    if unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) } > 0 {
        skipped("huge pages are forbidden to this process");
        return false;
    }
    !emulation::MERGED_PAGES.skips()
}

fn eager() -> DataDist {
    DataDist::open(Config { huge_pages: HugeChoice::Eager, ..config(1 << 20) }).unwrap()
}

#[test]
fn pages_in_use_and_lack_of_memory_are_temporary_refusals() {
    let of = |errno| MergeRefusal::from(std::io::Error::from_raw_os_error(errno));
    // madvise(2): EBUSY, the control group has no room; ENOMEM, no huge page is free; EAGAIN, pages are in use.
    let temporary = [libc::EBUSY, libc::ENOMEM, libc::EAGAIN, libc::EINTR];
    assert_eq!(temporary.map(of), [MergeRefusal::Temporary; 4]);
    assert_eq!(of(libc::EINVAL), MergeRefusal::Unable(libc::EINVAL));
}

/// While memory is registered and merged, one thread reads half of it through the kernel, as a peer does, and
/// one writes the other half. Every byte read is right, and every byte written is there at the end.
#[test]
fn readers_and_writers_do_not_notice_merging() {
    const UNITS: usize = 32;
    const BLOCK: usize = 48 << 10;
    if !merges() {
        return;
    }
    let half = UNITS / 2 * UNIT;
    let pages = Pages::new(UNITS);
    pages.advise(libc::MADV_NOHUGEPAGE);
    pages.write(0, half);
    (half..2 * half).step_by(PAGE).for_each(|page| pages.write(page, page + 1));
    allow_readers();
    let own = i32::try_from(std::process::id()).unwrap();
    let process = PeerProcess::open(own, own_probe().unwrap()).unwrap();
    let (engine, start, all) = (eager(), pages.at() as u64, BLOCK as u64);
    let (reading, stop) = (AtomicBool::new(false), AtomicBool::new(false));

    let cache = thread::scope(|scope| {
        let _stopping = StopOnDrop(&stop);
        let reader = scope.spawn(|| {
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                round = (round * 5 + 4099) % (half / PAGE);
                let at = (round * PAGE).min(half - BLOCK);
                let buffer = Buffer::new(BLOCK, |_| 0);
                let to = Tensors::adopted(buffer.adopt(0, BLOCK));
                let from = Tensors::of_process(process.clone(), [start + at as u64].into(), all).unwrap();
                let [from, to] = [&from, &to].map(|tensors| tensors.window(0, 0, all).unwrap());
                process.read(&[(from, to)]).unwrap();
                let bytes = buffer.read(0, BLOCK);
                let wrong = (0..BLOCK).find(|&i| bytes[i] != pattern(SEED, 0, at + i));
                assert_eq!(wrong, None, "a byte of the block at {at} is wrong");
                reading.store(true, Ordering::Relaxed);
            }
        });
        while !reading.load(Ordering::Relaxed) && !reader.is_finished() {
            thread::yield_now();
        }
        let register = scope.spawn(|| {
            let adopted = adopt(&desc(Host, 1, UNITS, UNIT), CacheKind::Blocks, &[start]);
            engine.register(adopted, &[], Some(false)).unwrap()
        });
        // In an order that meets the merging everywhere, until it is over.
        let (count, mut round) = (half / PAGE, 0);
        while round < count || !register.is_finished() {
            let page = half + round * 4099 % count * PAGE;
            pages.write(page, page + PAGE);
            round += 1;
        }
        register.join().unwrap()
    });
    // Units that the kernel was reading when they were tried may be left.
    assert!(pages.huge() >= half, "{} bytes were merged", pages.huge());
    pages.check(0, 2 * half);
    engine.unregister(cache.id()).unwrap();
    drop((cache, engine));
}

#[test]
fn memory_of_a_device_is_left_alone() {
    let region = Arc::new(Region::opaque(0xDEAD_0000_0000_0000, 64 << 20));
    assert_eq!((region.units(), region.merges()), (0, false));
    let engine = CopyEngine::new(&config(1 << 20), DeviceSet::host_only());
    assert_eq!(commit_pools([Some(region.clone()), None], &engine).unwrap(), [Merged::default(); 2]);
    assert!(region.commit(0).unwrap().is_err());
}

#[test]
fn only_eager_engines_merge_registered_memory() {
    if !merges() {
        return;
    }
    let huge = CHOICES.map(|choice| {
        let engine = DataDist::open(Config { huge_pages: choice, ..config(1 << 20) }).unwrap();
        let pages = Pages::new(10);
        pages.advise(libc::MADV_NOHUGEPAGE);
        pages.write(0, 10 * UNIT);
        // Four adjacent tensors, unaligned, with other bytes around them.
        let first = pages.at() as u64 + 4096;
        let addrs: Vec<u64> = (0..4).map(|tensor| first + tensor * 2 * UNIT as u64).collect();
        let adopted = adopt(&desc(Host, 4, 2, UNIT), CacheKind::Blocks, &addrs);
        let cache = engine.register(adopted, &[], Some(false)).unwrap();
        let huge = pages.huge();
        pages.check(0, 10 * UNIT);
        engine.unregister(cache.id()).unwrap();
        drop((cache, engine));
        huge
    });
    // The tensors take eight units and are not aligned to them, so seven units are whole.
    assert_eq!(huge, [0, 0, 7 * UNIT]);
}
