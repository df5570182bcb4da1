//! Merging registered memory into huge pages: only what is present and private is merged, its bytes stay the same, and
//! unregistered memory is left alone. `tests/test_huge_pages.py` covers when an engine merges.
#![allow(unsafe_code, reason = "the test's own mappings, and a child that only sleeps")]

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::null_mut;

use llm_datadist_core::testing::huge_pages::Merger;
use llm_datadist_core::testing::memory::{OwnPages, Region, Tensors};
use llm_datadist_core::{CacheId, CacheKind, Placement};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::fixtures::{adopt, desc, pattern, skipped};
use crate::merger::{ended, merges};

const UNIT: usize = Region::UNIT_BYTES as usize;
pub(crate) const PAGE: usize = 4096;
pub(crate) const SEED: u8 = 11;

/// Pages that start at a whole unit, between one unit of address space on each side.
pub(crate) struct Pages {
    held: *mut c_void,
    len: usize,
}

impl Pages {
    /// Maps private memory; or a file, shared or not.
    pub(crate) fn new(units: usize, file: Option<(&File, libc::c_int)>) -> Pages {
        let len = units * UNIT;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: no address is requested, so the kernel chooses an unused range.
        let held = unsafe { libc::mmap(null_mut(), len + 2 * UNIT, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(held, libc::MAP_FAILED);
        let pages = Pages { held, len };
        let (flags, descriptor) = file.map_or((flags, -1), |(file, flags)| (flags, file.as_raw_fd()));
        let (at, rights) = (pages.at() as *mut c_void, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the range lies inside the mapping just made, which nothing else uses.
        assert_eq!(unsafe { libc::mmap(at, len, rights, flags | libc::MAP_FIXED, descriptor, 0) }, at);
        // Another test forks: its child must not share these.
        pages.advise(libc::MADV_DONTFORK);
        pages
    }

    pub(crate) fn advise(&self, advice: libc::c_int) {
        // SAFETY: advice on the mapping just made, which changes no contents here.
        assert_eq!(unsafe { libc::madvise(self.at() as *mut c_void, self.len, advice) }, 0);
    }

    pub(crate) fn at(&self) -> usize {
        (self.held as usize + 1).next_multiple_of(UNIT)
    }

    pub(crate) fn write(&self, from: usize, to: usize) {
        for offset in from..to {
            // SAFETY: inside the mapping, which nobody else writes.
            unsafe { ((self.at() + offset) as *mut u8).write_volatile(pattern(SEED, 0, offset)) };
        }
    }

    fn byte(&self, offset: usize) -> u8 {
        // SAFETY: inside the mapping, which nobody writes now.
        unsafe { ((self.at() + offset) as *const u8).read_volatile() }
    }

    pub(crate) fn check(&self, from: usize, to: usize) {
        let wrong = (from..to).find(|&offset| self.byte(offset) != pattern(SEED, 0, offset));
        assert_eq!(wrong, None, "a byte changed");
    }

    /// Returns all of the pages as one registered tensor of blocks.
    pub(crate) fn tensors(&self) -> Tensors {
        let spec = desc(Placement::Host, 1, self.len / PAGE, PAGE);
        Tensors::adopted(adopt(&spec, CacheKind::Blocks, &[self.at() as u64]))
    }

    /// Bytes in huge pages, and bytes that are present, as the kernel reports them.
    fn facts(&self) -> (usize, usize) {
        let (mut inside, mut huge, mut present) = (false, 0, 0);
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            let address = |text| usize::from_str_radix(text, 16).ok();
            let range = words[0].split_once('-').and_then(|(from, to)| Some(address(from)?..address(to)?));
            if let Some(range) = range {
                inside = range.start < self.at() + self.len && self.at() < range.end;
            }
            let bytes = || words[1].parse::<usize>().unwrap() << 10;
            match words[0] {
                "AnonHugePages:" | "ShmemPmdMapped:" | "FilePmdMapped:" if inside => huge += bytes(),
                "Rss:" if inside => present += bytes(),
                _ => {}
            }
        }
        (huge, present)
    }

    pub(crate) fn huge(&self) -> usize {
        self.facts().0
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping was made above, and nothing uses its addresses any more.
        unsafe { libc::munmap(self.held, self.len + 2 * UNIT) };
    }
}

/// Returns whether this kernel merges pages of a process on request and only then.
pub(crate) fn asked() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if setting.contains("[always]") {
        skipped("the kernel makes huge pages unasked");
        return false;
    }
    merges()
}

/// A merger that may merge `pages`, which an owner registers and unregisters.
struct Bench<'a>(Merger, &'a Pages);

impl Bench<'_> {
    fn register(&self, id: i64) -> bool {
        self.0.lend(CacheId(id), &self.1.tensors(), || true)
    }

    /// Runs the merger until it is idle; returns the bytes that it has merged, and those in huge pages.
    fn run(&self) -> (usize, usize) {
        self.0.check_for_work();
        ended(&self.0);
        self.facts()
    }

    fn facts(&self) -> (usize, usize) {
        (self.0.lent_bytes() as usize, self.1.huge())
    }
}

#[test]
fn registered_memory_is_merged_where_it_is_present_and_private() {
    if !asked() {
        return;
    }
    let pages = Pages::new(7, None);
    pages.write(0, 2 * UNIT);
    pages.write(2 * UNIT, 3 * UNIT - PAGE); // the last page is not present
    pages.write(3 * UNIT, 4 * UNIT - PAGE); // the last page was only read
    assert_eq!(pages.byte(4 * UNIT - 1), 0);
    assert!((4 * UNIT..5 * UNIT).step_by(PAGE).all(|offset| pages.byte(offset) == 0), "only read");
    pages.write(6 * UNIT, 7 * UNIT); // the unit before is not present
    let present = pages.facts().1;

    let bench = Bench(Merger::with_registered([]), &pages);
    assert!(bench.register(1));
    assert!(!bench.register(1), "it has it");
    assert_eq!(bench.facts().0, 0, "nothing is merged before the first check");
    assert_eq!(bench.run(), (3 * UNIT, 3 * UNIT));
    assert_eq!(pages.facts().1, present, "nothing was committed");
    pages.check(0, 3 * UNIT - PAGE);
    pages.check(6 * UNIT, 7 * UNIT);
    // What is left is not tried again at once, but when memory is registered.
    pages.write(2 * UNIT, 3 * UNIT);
    bench.0.check_for_work();
    assert!(!bench.0.running());
    let more = Pages::new(1, None);
    more.write(0, UNIT);
    let bench = Bench(bench.0, &more);
    assert!(bench.register(2));
    assert_eq!(bench.run(), (5 * UNIT, UNIT));
    drop(bench);
}

#[test]
fn unregistered_memory_is_left_alone() {
    if !asked() {
        return;
    }
    let pages = Pages::new(4, None);
    pages.write(0, 4 * UNIT);
    let bench = Bench(Merger::with_registered([]), &pages);
    assert!(!bench.0.lend(CacheId(1), &pages.tensors(), || false), "it was unregistered meanwhile");
    assert!(bench.register(1));
    bench.0.give_back(CacheId(1));
    bench.0.give_back(CacheId(1));
    assert_eq!(bench.run(), (0, 0));
    // Memory may be given back at any moment of the work. Nothing is merged afterwards.
    assert!(bench.register(1));
    bench.0.check_for_work();
    bench.0.give_back(CacheId(1));
    let by_then = bench.facts();
    ended(&bench.0);
    assert_eq!(bench.facts(), by_then);
    assert!(bench.register(1));
    assert_eq!(bench.run().1, 4 * UNIT);
    drop(bench);
}

#[test]
fn a_merger_without_registered_memory_takes_none() {
    let pages = Pages::new(1, None);
    pages.write(0, UNIT);
    // A merger that merges nothing, and one for pools only.
    for merger in [Merger::default(), Merger::new([])] {
        let bench = Bench(merger, &pages);
        assert!(!bench.register(1));
        bench.0.give_back(CacheId(1));
        bench.0.note_use(u64::MAX);
        assert_eq!(bench.run(), (0, 0));
    }
}

#[test]
fn memory_of_files_and_of_others_is_left_alone() {
    if !asked() {
        return;
    }
    let own = OwnPages::open().unwrap();
    let at = |pages: &Pages| pages.at() as u64;
    let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&vec![7; UNIT], 0).unwrap();
    for flags in [libc::MAP_SHARED, libc::MAP_PRIVATE] {
        let pages = Pages::new(1, Some((&file, flags)));
        assert!((0..UNIT).step_by(PAGE).all(|offset| pages.byte(offset) == 7));
        assert_eq!((own.merge(at(&pages)), pages.huge()), (None, 0));
    }
    let pages = Pages::new(1, None);
    pages.advise(libc::MADV_DOFORK);
    pages.write(0, UNIT);
    // SAFETY: the child calls nothing but the two below.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no arguments; a signal ends it.
        unsafe { libc::pause() };
        // SAFETY: nothing of this process runs in the child.
        unsafe { libc::_exit(0) };
    }
    let while_shared = own.merge(at(&pages));
    // SAFETY: the child made above, which nobody has reaped.
    unsafe { libc::kill(child, libc::SIGKILL) };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::waitpid(child, null_mut(), 0) }, child);
    assert_eq!(while_shared, None);
    assert_eq!((own.merge(at(&pages)), pages.huge()), (Some(Ok(())), UNIT), "it is alone again");
    // Between two units, and where nothing is mapped.
    for addr in [at(&pages) + PAGE as u64, at(&pages) + UNIT as u64, 1 << 46, u64::MAX - (UNIT as u64 - 1)] {
        assert_eq!(own.merge(addr), None, "at {addr:x}");
    }
}

#[test]
fn only_whole_units_are_merged() {
    let unit = UNIT as u64;
    let start = 64 * unit;
    let cases: [(&[u64], usize, &[u64]); 7] = [
        (&[start], UNIT, &[start]),
        (&[start], UNIT - 1, &[]),
        (&[start + 1], UNIT, &[]),
        (&[start + 1], 2 * UNIT, &[start + unit]),
        // Adjacent tensors form one range, whatever their order.
        (&[start + unit / 2, start], UNIT / 2, &[start]),
        (&[start + unit, start], UNIT, &[start, start + unit]),
        (&[start, start], UNIT, &[start]),
    ];
    for (addrs, bytes, units) in cases {
        let spec = desc(Placement::Host, addrs.len() as u32, 1, bytes);
        assert_eq!(Tensors::adopted(adopt(&spec, CacheKind::Blocks, addrs)).whole_units(), units);
    }
    // The memory of pools is merged without being registered.
    let region = std::sync::Arc::new(Region::shared("test", 2 * unit).unwrap());
    assert_eq!(Tensors::carved(region, [0], 2 * unit, Box::new(())).unwrap().whole_units(), [0; 0]);
}
