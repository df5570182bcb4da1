//! Registered memory that is lent to the merger: only what is there and the owner's own is merged, nothing changes but the
//! size of the pages, and what was given back is left alone.
//!
//! Where the kernel does not merge on request the tests say so. Not for: who lends, and when
//! (`tests/test_huge_pages.py`), or speed.
#![allow(unsafe_code, reason = "the test's own mappings, and a child that only waits")]

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::null_mut;

use llm_datadist_core::testing::huge_pages::Merger;
use llm_datadist_core::testing::memory::{OwnPages, Region, Tensors};
use llm_datadist_core::{CacheId, CacheKind, Placement};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::bed::{adopt, desc, pattern, skipped};
use crate::merger::{ended, merges};

const UNIT: usize = Region::UNIT_BYTES as usize;
pub(crate) const PAGE: usize = 4096;
const SEED: u8 = 11;

/// Pages that start at a whole unit, between one unit of address space on each side.
pub(crate) struct Pages {
    held: *mut c_void,
    len: usize,
}

impl Pages {
    /// Of the process; or of a file, shared or not.
    pub(crate) fn new(units: usize, file: Option<(&File, libc::c_int)>) -> Pages {
        let len = units * UNIT;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: no address is asked for, so the kernel chooses a range nobody uses.
        let held = unsafe { libc::mmap(null_mut(), len + 2 * UNIT, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(held, libc::MAP_FAILED);
        let pages = Pages { held, len };
        let (flags, descriptor) = file.map_or((flags, -1), |(file, flags)| (flags, file.as_raw_fd()));
        let (at, rights) = (pages.at() as *mut c_void, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: inside the mapping just made, which nobody else knows of.
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

    /// All of it as one registered tensor of blocks.
    pub(crate) fn tensors(&self) -> Tensors {
        let side = desc(Placement::Host, 1, self.len / PAGE, PAGE);
        Tensors::adopted(adopt(&side, CacheKind::Blocks, &[self.at() as u64]))
    }

    /// Bytes that lie in huge pages, and bytes that are there, as the kernel says.
    fn facts(&self) -> (usize, usize) {
        let (mut inside, mut huge, mut there) = (false, 0, 0);
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let number = |text| usize::from_str_radix(text, 16).ok();
            if let Some((from, to)) = range.and_then(|(from, to)| Some((number(from)?, number(to)?))) {
                inside = from < self.at() + self.len && self.at() < to;
            } else if let (true, Some((name, rest))) = (inside, line.split_once(':')) {
                let bytes = || rest.trim().split(' ').next().unwrap().parse::<usize>().unwrap() << 10;
                match name {
                    "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => huge += bytes(),
                    "Rss" => there += bytes(),
                    _ => {}
                }
            }
        }
        (huge, there)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping made above; what was given its addresses is gone.
        unsafe { libc::munmap(self.held, self.len + 2 * UNIT) };
    }
}

/// Whether this kernel puts a process's own pages into huge ones when asked, and only then.
pub(crate) fn asked() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if setting.contains("[always]") {
        skipped("the kernel makes huge pages unasked");
        return false;
    }
    merges()
}

fn merged(merger: &Merger) -> usize {
    merger.lent_bytes() as usize
}

#[test]
fn what_is_lent_is_merged_where_it_is_there_and_the_owners_own() {
    if !asked() {
        return;
    }
    let pages = Pages::new(7, None);
    pages.write(0, 2 * UNIT); // two whole units
    pages.write(2 * UNIT, 3 * UNIT - PAGE); // all but a page, which nobody touched
    pages.write(3 * UNIT, 4 * UNIT - PAGE); // all but a page, which was only read
    assert_eq!(pages.byte(4 * UNIT - 1), 0);
    for page in 0..UNIT / PAGE {
        assert_eq!(pages.byte(4 * UNIT + page * PAGE), 0, "only read");
    }
    pages.write(6 * UNIT, 7 * UNIT); // the fifth was never touched
    let there = pages.facts().1;

    let merger = Merger::with_registered([]);
    assert!(merger.lend(CacheId(1), &pages.tensors(), || true));
    assert!(!merger.lend(CacheId(1), &pages.tensors(), || true), "it has it");
    assert_eq!(merged(&merger), 0, "nothing happens before it looks");
    merger.look();
    ended(&merger);
    assert_eq!(merged(&merger), 3 * UNIT);
    assert_eq!(pages.facts(), (3 * UNIT, there), "huge where all is there, and nothing was committed");
    for offset in (0..3 * UNIT - PAGE).chain(6 * UNIT..7 * UNIT) {
        assert_eq!(pages.byte(offset), pattern(SEED, 0, offset), "at {offset}");
    }
    // What is left is not tried again at once.
    pages.write(2 * UNIT, 3 * UNIT);
    merger.look();
    assert!(!merger.running());
    // A new loan is looked at, whatever else rests.
    let more = Pages::new(1, None);
    more.write(0, UNIT);
    assert!(merger.lend(CacheId(2), &more.tensors(), || true));
    merger.look();
    ended(&merger);
    assert_eq!((more.facts().0, merged(&merger)), (UNIT, 5 * UNIT), "and the rest with it");
    drop(merger);
}

#[test]
fn what_was_given_back_is_left_alone() {
    if !asked() {
        return;
    }
    let pages = Pages::new(4, None);
    pages.write(0, 4 * UNIT);
    let merger = Merger::with_registered([]);
    assert!(!merger.lend(CacheId(1), &pages.tensors(), || false), "it was unregistered meanwhile");
    assert!(merger.lend(CacheId(1), &pages.tensors(), || true));
    merger.give_back(CacheId(1));
    merger.give_back(CacheId(1));
    merger.look();
    ended(&merger);
    assert_eq!((merged(&merger), pages.facts().0), (0, 0));
    // At any moment of the work: what was merged by then, and nothing after.
    assert!(merger.lend(CacheId(1), &pages.tensors(), || true));
    merger.look();
    merger.give_back(CacheId(1));
    let (by_then, huge) = (merged(&merger), pages.facts().0);
    ended(&merger);
    assert_eq!((merged(&merger), pages.facts().0), (by_then, huge));
    // Registered again, it is lent again.
    assert!(merger.lend(CacheId(1), &pages.tensors(), || true));
    merger.look();
    ended(&merger);
    assert_eq!(pages.facts().0, 4 * UNIT);
    drop(merger);
}

#[test]
fn a_merger_that_merges_nothing_takes_nothing() {
    let pages = Pages::new(1, None);
    pages.write(0, UNIT);
    let merger = Merger::default();
    assert!(!merger.lend(CacheId(1), &pages.tensors(), || true));
    merger.look();
    merger.give_back(CacheId(1));
    merger.moved(u64::MAX);
    assert_eq!((merger.running(), merged(&merger), pages.facts().0), (false, 0, 0));
    // One of pools alone: registered memory is not named.
    let merger = Merger::new([]);
    assert!(!merger.lend(CacheId(1), &pages.tensors(), || true));
    merger.look();
    ended(&merger);
    assert_eq!((merged(&merger), pages.facts().0), (0, 0));
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
        assert_eq!((own.merge(at(&pages)), pages.facts().0), (None, 0));
    }
    // Since a fork the pages belong to two; the second only waits to be told to end.
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
    assert_eq!((own.merge(at(&pages)), pages.facts().0), (Some(Ok(())), UNIT), "it is alone again");
    // Where there is nothing, and between two units.
    for nowhere in [at(&pages) + PAGE as u64, at(&pages) + UNIT as u64, 1 << 46, u64::MAX - (UNIT as u64 - 1)]
    {
        assert_eq!(own.merge(nowhere), None, "at {nowhere:x}");
    }
}

#[test]
fn only_whole_units_of_registered_memory_are_lent() {
    let start = 64 * UNIT as u64;
    let of = |addrs: &[u64], bytes: usize| {
        let side = desc(Placement::Host, addrs.len() as u32, 1, bytes);
        Tensors::adopted(adopt(&side, CacheKind::Blocks, addrs)).lent_units()
    };
    let unit = UNIT as u64;
    assert_eq!(of(&[start], UNIT), [start]);
    assert_eq!(of(&[start + 1], UNIT), [0; 0]);
    assert_eq!(of(&[start + 1], 2 * UNIT), [start + unit]);
    assert_eq!(of(&[start], UNIT - 1), [0; 0]);
    // Tensors that lie end to end are one stretch, in whatever order they are named.
    assert_eq!(of(&[start + unit / 2, start], UNIT / 2), [start]);
    assert_eq!(of(&[start + unit, start], UNIT), [start, start + unit]);
    assert_eq!(of(&[start, start], UNIT), [start], "once");
    // A pool's memory is not lent: it is the merger's anyway.
    let region = std::sync::Arc::new(Region::shared("test", 2 * unit).unwrap());
    assert_eq!(Tensors::carved(region, [0], 2 * unit, Box::new(())).unwrap().lent_units(), [0; 0]);
}
