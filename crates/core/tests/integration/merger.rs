//! Merging the memory of pools into huge pages: only touched memory is merged, and its bytes stay the same.
//!
//! `tests/test_huge_pages.py` covers when an engine merges. The tests first check with plain system calls
//! whether the kernel merges at all; if not, they report that they are skipped.
#![allow(unsafe_code, reason = "the test's own mapping of a descriptor, and its own question to the kernel")]

use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::testing::copy::CopyEngine;
use llm_datadist_core::testing::huge_pages::Merger;
use llm_datadist_core::testing::memory::kernels::{Kernel, copy};
use llm_datadist_core::testing::memory::{
    MapBudget, MergeRefusal, PeerMapping, PeerProcess, Region, Tensors, allow_readers, own_probe,
};
use llm_datadist_core::{CacheKind, Config, DataDist, Deadline, HugeChoice, Placement};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::fixtures::{Buffer, StopOnDrop, adopt, config, desc, pattern, skipped};
use crate::registered_pages::Pages;
use Placement::Host;

const UNIT: usize = Region::UNIT_BYTES as usize;
const PAGE: usize = 4096;
pub(crate) const CHOICES: [HugeChoice; 5] =
    [HugeChoice::Auto, HugeChoice::Off, HugeChoice::Merge, HugeChoice::MergeRegistered, HugeChoice::Eager];

/// Returns why this kernel does not merge shared memory into huge pages on request and only then, according
/// to what the kernel reports about itself.
fn excused() -> Option<&'static str> {
    let setting =
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    // SAFETY: the call takes plain numbers.
    let forbidden = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) } != 0;
    match setting {
        _ if (numbers.next(), numbers.next()) < (Some(6), Some(1)) => Some("the kernel is older than 6.1"),
        _ if forbidden => Some("huge pages are forbidden to this process"),
        setting if setting.is_empty() => Some("the kernel has no huge pages for shared memory"),
        setting if !setting.contains("[never]") && !setting.contains("[advise]") => {
            Some("the kernel makes huge pages unasked")
        }
        _ if reserve() > 0 => Some("pools are made of reserved huge pages"),
        _ => None,
    }
}

/// Returns the number of reserved huge pages that are not in use.
fn reserve() -> u64 {
    let facts = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = facts.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    line.map_or(0, |number| number.trim().parse().unwrap())
}

/// Returns whether this kernel merges shared memory into huge pages on request and only then. Checked without
/// the engine. A kernel that reports no reason against it must merge.
pub(crate) fn merges() -> bool {
    if let Some(why) = excused() {
        skipped(why);
        return false;
    }
    let file = memfd_create("probe", MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(file);
    file.set_len(UNIT as u64).unwrap();
    file.write_all_at(&[1], 0).unwrap();
    // SAFETY: no address is requested, so the kernel chooses an unused range.
    let held = unsafe {
        libc::mmap(null_mut(), 2 * UNIT, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    assert_ne!(held, libc::MAP_FAILED);
    let unit = (held as usize).next_multiple_of(UNIT) as *mut c_void;
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: the unit lies inside the mapping just made, which nothing else uses.
    assert_eq!(unsafe { libc::mmap(unit, UNIT, rights, flags, file.as_raw_fd(), 0) }, unit);
    // SAFETY: advice on the same mapping.
    let merged = unsafe { libc::madvise(unit, UNIT, 25) } == 0;
    // SAFETY: the mapping was made above, and nothing refers to it any more.
    unsafe { libc::munmap(held, 2 * UNIT) };
    assert!(merged, "this kernel should put memory into huge pages on request, and does not");
    true
}

fn region(units: usize) -> Arc<Region> {
    Arc::new(Region::shared("test", (units * UNIT) as u64).unwrap())
}

fn carved(region: &Arc<Region>, at: usize, len: usize) -> Tensors {
    Tensors::carved(region.clone(), [at as u64], len as u64, Box::new(())).unwrap()
}

/// Writes the pattern of `seed` to a range of a region.
fn touch(region: &Arc<Region>, seed: u8, range: Range<usize>) {
    let len = range.len();
    let buffer = Buffer::new(len, |at| pattern(seed, 0, range.start + at));
    let from = Tensors::adopted(buffer.adopt(0, len));
    let to = carved(region, range.start, len);
    copy(from.window(0, 0, len as u64).unwrap(), to.window(0, 0, len as u64).unwrap(), Kernel::PLAIN)
        .unwrap();
}

fn read(region: &Region, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let file = File::from(region.descriptor().unwrap().try_clone_to_owned().unwrap());
    file.read_exact_at(&mut bytes, at as u64).unwrap();
    bytes
}

pub(crate) fn ended(merger: &Merger) {
    // The merger works a tenth of the time, on cores that may be busy with other tests.
    let until = Instant::now() + Duration::from_secs(120);
    while merger.running() {
        assert!(Instant::now() < until, "the merger never ended");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_nobody_touched_stays_uncommitted() {
    if !merges() {
        return;
    }
    let region = region(40);
    let base = usize::try_from(region.base()).unwrap();
    touch(&region, 1, 0..3 * UNIT); // whole units
    touch(&region, 1, 5 * UNIT..5 * UNIT + UNIT / 8 * 7); // just enough of one
    touch(&region, 1, 7 * UNIT..7 * UNIT + UNIT / 8 * 7 - PAGE); // a page less
    touch(&region, 1, 9 * UNIT + UNIT / 2..10 * UNIT + UNIT / 2); // two halves
    touch(&region, 1, 20 * UNIT + 77 * PAGE..20 * UNIT + 78 * PAGE); // one page
    touch(&region, 1, 39 * UNIT..40 * UNIT); // the last
    let few = (UNIT / 8 * 7 - PAGE) + UNIT + PAGE;
    assert_eq!(region.committed_bytes() as usize, 4 * UNIT + UNIT / 8 * 7 + few);
    let before = read(&region, 0, 40 * UNIT);
    // This reads holes, which commits nothing, because it reads the descriptor and not the mapping.
    assert_eq!(region.committed_bytes() as usize, 4 * UNIT + UNIT / 8 * 7 + few);

    let merger = Merger::new([region.clone()]);
    merger.check_for_work();
    ended(&merger);
    let report = merger.merged(&region);
    assert_eq!(report.errno, None);
    assert_eq!(report.bytes as usize, 5 * UNIT, "three, the one that is touched enough, and the last");
    assert_eq!(region.committed_bytes() as usize, 5 * UNIT + few, "an eighth of one unit more");
    assert_eq!(region.huge_bytes() as usize, 5 * UNIT, "the kernel says the same");
    assert_eq!(region.base() as usize, base);
    assert!(read(&region, 0, 40 * UNIT) == before, "merging changed bytes");

    // Nothing is left to merge, so the check starts no thread.
    merger.check_for_work();
    assert!(!merger.running());
    // The rest of the unit that lacked a page, and more.
    touch(&region, 1, 7 * UNIT + UNIT / 8 * 7 - PAGE..9 * UNIT);
    merger.check_for_work();
    ended(&merger);
    assert_eq!(merger.merged(&region).bytes as usize, 7 * UNIT);
    assert_eq!(region.huge_bytes() as usize, 7 * UNIT);
}

#[test]
fn a_group_without_room_is_short_of_memory_and_not_busy() {
    let of = |errno| MergeRefusal::from(std::io::Error::from_raw_os_error(errno));
    // madvise(2): EBUSY, the control group has no room; ENOMEM, no huge page is free; EAGAIN, pages are in use.
    assert_eq!([libc::EBUSY, libc::ENOMEM].map(of), [MergeRefusal::NoMemory; 2]);
    assert_eq!([libc::EAGAIN, libc::EINTR].map(of), [MergeRefusal::Busy; 2]);
    assert_eq!(of(libc::EINVAL), MergeRefusal::Unable(libc::EINVAL));
}

#[test]
fn the_merger_ends_when_there_is_nothing_left() {
    if !merges() {
        return;
    }
    let large = region(24);
    touch(&large, 3, 0..24 * UNIT);
    let merger = Merger::new([large.clone(), region(2)]);
    merger.check_for_work();
    merger.close();
    let done = merger.merged(&large).bytes as usize;
    assert!(done <= 24 * UNIT, "{done}");
    merger.check_for_work();
    merger.note_use(u64::MAX);
    assert!(merger.merged(&large).bytes as usize == done && large.huge_bytes() as usize == done);
    drop(merger);
    // A second merger continues where the first was closed, once 64 MiB were moved.
    let merger = Merger::new([large.clone()]);
    (0..63).for_each(|_| merger.note_use(1 << 20));
    assert!(!merger.running());
    merger.note_use(1 << 20);
    ended(&merger);
    assert_eq!(merger.merged(&large).bytes as usize, 24 * UNIT);
    // However much is moved, nothing new was touched.
    merger.note_use(u64::MAX);
    assert!(!merger.running());
}

/// One thread reads through a peer's mapping, one through the kernel and one writes while units are merged. Every byte
/// read is right, and every byte written is there at the end.
#[test]
fn readers_and_writers_do_not_notice_merging() {
    const UNITS: usize = 48;
    const BLOCK: usize = 48 << 10;
    if !merges() {
        return;
    }
    let region = region(UNITS);
    let half = UNITS / 2 * UNIT;
    touch(&region, 4, 0..UNITS * UNIT);
    let descriptor = region.descriptor().unwrap().try_clone_to_owned().unwrap();
    let soon = Deadline::after(Duration::from_secs(1));
    let peer = PeerMapping::map(descriptor, region.len(), &MapBudget::new(None), soon).unwrap();
    allow_readers();
    let own = i32::try_from(std::process::id()).unwrap();
    let process = PeerProcess::open(own, own_probe().unwrap()).unwrap();
    let merger = Merger::new([region.clone()]);
    let stop = AtomicBool::new(false);
    let all = BLOCK as u64;

    // The first half is only read.
    let read_blocks = |by_kernel: bool| {
        let (mut seen, mut turn) = (0, 0);
        while !stop.load(Ordering::Relaxed) || seen == 0 {
            turn = (turn * 5 + 4099) % (half / PAGE);
            let at = (turn * PAGE).min(half - BLOCK);
            let buffer = Buffer::new(BLOCK, |_| 0);
            let to = Tensors::adopted(buffer.adopt(0, BLOCK));
            let to = to.window(0, 0, all).unwrap();
            if by_kernel {
                let addr = region.base() + at as u64;
                let from = Tensors::of_process(process.clone(), [addr].into(), all).unwrap();
                process.read(&[(from.window(0, 0, all).unwrap(), to)]).unwrap();
            } else {
                let from = Tensors::mapped(peer.clone(), [at as u64], all).unwrap();
                copy(from.window(0, 0, all).unwrap(), to, Kernel::PLAIN).unwrap();
            }
            let bytes = buffer.read(0, BLOCK);
            let wrong = (0..BLOCK).find(|&i| bytes[i] != pattern(4, 0, at + i));
            assert_eq!(wrong, None, "a byte of the block at {at} is wrong");
            seen += 1;
        }
    };
    thread::scope(|scope| {
        for by_kernel in [false, true] {
            let read_blocks = &read_blocks;
            scope.spawn(move || read_blocks(by_kernel));
        }
        // The second half is rewritten, in an order that meets the merger everywhere.
        let writer = scope.spawn(|| {
            let steps = half / UNIT * 8;
            for step in 0..steps {
                let at = half + (step * 37 % steps) * (UNIT / 8);
                touch(&region, 5, at..at + UNIT / 8);
            }
        });
        let _stopping = StopOnDrop(&stop);
        merger.check_for_work();
        writer.join().unwrap();
        ended(&merger);
    });
    // Units that the kernel was reading each time they were tried may be left.
    assert!(merger.merged(&region).bytes as usize >= half, "{:?}", merger.merged(&region));
    let bytes = read(&region, 0, UNITS * UNIT);
    let wrong = (0..bytes.len()).find(|&at| bytes[at] != pattern(if at < half { 4 } else { 5 }, 0, at));
    assert_eq!(wrong, None);
}

#[test]
fn memory_of_a_device_is_left_alone() {
    let region = Arc::new(Region::opaque(0xDEAD_0000_0000_0000, 64 << 20));
    assert_eq!((region.units(), region.merges()), (0, false));
    let engine =
        CopyEngine::new(&config(1 << 20), llm_datadist_core::testing::device::DeviceSet::host_only())
            .unwrap();
    let merger = Merger::new([region.clone()]);
    merger.commit(&engine).unwrap();
    merger.note_use(u64::MAX);
    assert_eq!((merger.running(), merger.merged(&region).bytes), (false, 0));
    assert!(region.commit(0).unwrap().is_err() && region.merge(0).is_err());
}

#[test]
fn registered_memory_is_merged_at_once_by_eager_engines_only() {
    if !merges() {
        return;
    }
    let huge = CHOICES.map(|choice| {
        let engine = DataDist::open(Config { huge_pages: choice, ..config(1 << 20) }).unwrap();
        let pages = Pages::new(10, None);
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
    assert_eq!(huge, [0, 0, 0, 0, 7 * UNIT]);
}
