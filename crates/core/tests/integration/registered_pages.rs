//! Pages of the test's own that engines register, and which units of registered memory are merged into huge pages.
#![allow(unsafe_code, reason = "the test's own mappings")]

use std::ffi::c_void;
use std::ptr::null_mut;

use llm_datadist_core::testing::memory::{Region, Tensors};
use llm_datadist_core::{CacheKind, Placement};

use crate::fixtures::{adopt, desc, pattern};

pub(crate) const UNIT: usize = Region::UNIT_BYTES as usize;
pub(crate) const PAGE: usize = 4096;
pub(crate) const SEED: u8 = 11;

/// Pages that start at a whole unit, between one unit of address space on each side.
pub(crate) struct Pages {
    held: *mut c_void,
    len: usize,
}

impl Pages {
    /// Maps private memory.
    pub(crate) fn new(units: usize) -> Pages {
        let len = units * UNIT;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: no address is requested, so the kernel chooses an unused range.
        let held = unsafe { libc::mmap(null_mut(), len + 2 * UNIT, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(held, libc::MAP_FAILED);
        let pages = Pages { held, len };
        let (at, rights) = (pages.at() as *mut c_void, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the range lies inside the mapping just made, which nothing else uses.
        assert_eq!(unsafe { libc::mmap(at, len, rights, flags | libc::MAP_FIXED, -1, 0) }, at);
        pages
    }

    pub(crate) fn advise(&self, advice: libc::c_int) {
        assert!(self.takes_advice(advice));
    }

    /// Gives advice to the kernel. Returns whether the kernel accepts it.
    pub(crate) fn takes_advice(&self, advice: libc::c_int) -> bool {
        // SAFETY: advice on the mapping just made, which changes no contents here.
        unsafe { libc::madvise(self.at() as *mut c_void, self.len, advice) == 0 }
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

    /// Returns the bytes in huge pages, as the kernel reports them.
    pub(crate) fn huge(&self) -> usize {
        let (mut inside, mut huge) = (false, 0);
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            let address = |text| usize::from_str_radix(text, 16).ok();
            let range = words[0].split_once('-').and_then(|(from, to)| Some(address(from)?..address(to)?));
            if let Some(range) = range {
                inside = range.start < self.at() + self.len && self.at() < range.end;
            }
            if inside && words[0] == "AnonHugePages:" {
                huge += words[1].parse::<usize>().unwrap() << 10;
            }
        }
        huge
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping was made above, and nothing uses its addresses any more.
        unsafe { libc::munmap(self.held, self.len + 2 * UNIT) };
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
    // The memory of pools is not registered.
    let region = std::sync::Arc::new(Region::shared("test", 2 * unit).unwrap());
    assert_eq!(Tensors::carved(region, [0], 2 * unit, ()).unwrap().whole_units(), [0; 0]);
}
