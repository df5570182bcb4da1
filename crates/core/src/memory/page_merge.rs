//! Huge pages on request: has the kernel merge memory into huge pages, and asks it for the size of pages.
//!
//! A unit is an aligned range of 2 MiB, which is one huge page if pages have 4 KiB. Otherwise nothing is merged
//! ([`units_are_huge_pages`]). From Linux 6.1 on, the kernel merges a unit into
//! one huge page if any page of it was touched, regardless of the system's settings for automatic merging,
//! and commits all of it. Meanwhile readers and writers in this process and others see the same bytes; at
//! most they wait for it (`readers_and_writers_do_not_notice_merging`).

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use super::descriptors::above_standard_streams;
use super::pages::page_size;
use super::region::HUGE_PAGE;
use super::{Adopted, Region, Tensors};
use crate::error::{Error, ErrorKind, Result};

/// Defined here because the C library may be too old to define it.
const MADV_COLLAPSE: libc::c_int = 25;
/// Number of units of registered memory that are merged between two calls of `check`.
const UNITS_AT_ONCE: usize = 32;

/// Number of 4 KiB pages in a unit. A huge page consists of as many pages as a page can hold entries of 8 bytes: with pages of 16 or
/// 64 KiB, it has 32 or 512 MiB.
const UNIT_PAGES: usize = 512;

const PAGEMAP_SCAN: Opcode = opcode::read_write::<PagemapScan>(b'f', 16);
const SCAN_PRESENT: u64 = 1 << 3;
const SCAN_HUGE: u64 = 1 << 6;

/// Why the kernel did not merge a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeRefusal {
    /// A page of the unit is in use, no huge page is free, or the control group has no room. A later attempt
    /// may succeed.
    Temporary,
    /// The kernel does not support or does not permit it; with the error number.
    Unable(i32),
}

impl From<io::Error> for MergeRefusal {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR | libc::ENOMEM | libc::EBUSY) => MergeRefusal::Temporary,
            other => MergeRefusal::Unable(other.unwrap_or(0)),
        }
    }
}

impl Region {
    /// Bytes of a unit.
    pub const UNIT_BYTES: u64 = HUGE_PAGE as u64;

    /// Returns the number of units; 0 for memory of a device.
    pub fn units(&self) -> u64 {
        if self.host_addressable() { self.len().div_ceil(Self::UNIT_BYTES) } else { 0 }
    }

    /// Merges `unit` into one huge page, which commits all of it. Succeeds without effect if it already is
    /// one. The error states why the kernel did not merge it.
    fn merge(&self, unit: u64) -> std::result::Result<(), MergeRefusal> {
        let at = self.unit_at(unit).ok_or(MergeRefusal::Unable(libc::EINVAL))?;
        Ok(merge(at, HUGE_PAGE)?)
    }

    /// Commits `unit`, in one huge page if the kernel permits.
    ///
    /// The inner result states why it is not in one huge page. The outer one is `Err` of kind
    /// [`ErrorKind::OutOfMemory`] if the memory cannot be committed.
    pub fn commit(&self, unit: u64) -> Result<std::result::Result<(), MergeRefusal>> {
        let Some(descriptor) = self.raw_descriptor().filter(|_| unit < self.units()) else {
            return Ok(Err(MergeRefusal::Unable(libc::EINVAL)));
        };
        let from = unit * Self::UNIT_BYTES;
        if self.merges() {
            // One committed page is enough for the kernel to commit the rest when it merges.
            reserve(descriptor, from, page_size() as u64)?;
        }
        let merged = self.merge(unit);
        if merged.is_err() {
            reserve(descriptor, from, Self::UNIT_BYTES)?;
        }
        Ok(merged)
    }

    /// Returns the address of `unit`, if the region has this unit and consists of ordinary pages.
    fn unit_at(&self, unit: u64) -> Option<usize> {
        let inside = unit < self.units() && self.merges();
        let at = unit.checked_mul(Self::UNIT_BYTES).and_then(|offset| self.base().checked_add(offset));
        at.filter(|_| inside).and_then(|at| usize::try_from(at).ok())
    }
}

impl Adopted {
    /// Advises the kernel to use huge pages for these addresses, and merges what is present, unit by unit, as
    /// far as possible. Returns the bytes that now lie in huge pages. Memory with gaps between rows is left alone,
    /// because the gaps are not the caller's.
    ///
    /// Calls `check` before the first of every 32 units in a contiguous range, and returns its error if it
    /// fails.
    pub(crate) fn merge(&self, mut check: impl FnMut() -> Result<()>) -> Result<u64> {
        let (mut merged, geometry) = (0, self.layout().geometry);
        let addrs = if geometry.row_sizes().has_gaps() { &[] } else { self.addrs() };
        for (start, end) in units_within(ranges(addrs, geometry.tensor_bytes())) {
            // SAFETY: the advice does not change any contents, and the kernel reports addresses that are not
            // mapped.
            let _ = unsafe { libc::madvise(start as *mut c_void, end - start, libc::MADV_HUGEPAGE) };
            for (index, unit) in (start..end).step_by(HUGE_PAGE).enumerate() {
                if index % UNITS_AT_ONCE == 0 {
                    check()?;
                }
                merged += if merge(unit, HUGE_PAGE).is_ok() { HUGE_PAGE as u64 } else { 0 };
            }
        }
        Ok(merged)
    }
}

impl Tensors {
    /// Returns the addresses of all whole units inside the caller's memory; empty if the memory is not the
    /// caller's, or if it has gaps between rows.
    pub fn whole_units(&self) -> Vec<u64> {
        let addrs = if self.adopted_whole() { self.addrs() } else { &[] };
        let spans = units_within(ranges(addrs, self.tensor_bytes()));
        spans.flat_map(|(from, to)| (from..to).step_by(HUGE_PAGE)).map(|at| at as u64).collect()
    }
}

/// A query about a range of pages: `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct PagemapScan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// The answer to a query: `struct page_region`.
#[repr(C)]
#[derive(Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// The kernel's page map of this process.
#[derive(Debug)]
pub struct OwnPages(File);

impl OwnPages {
    /// Opens the page map; `None` if the kernel has none or the page size is not supported.
    pub fn open() -> Option<OwnPages> {
        let file = File::open("/proc/self/pagemap").ok().filter(|_| units_are_huge_pages())?;
        above_standard_streams(file.into()).ok().map(|file| OwnPages(file.into()))
    }

    /// Returns whether the page at `at` is a huge page; `None` if no page is present, or the kernel does not
    /// report it (before Linux 6.7).
    pub fn huge(&self, at: u64) -> Option<bool> {
        let mut found = PageRegion::default();
        let mut scan = PagemapScan {
            size: size_of::<PagemapScan>() as u64,
            start: at,
            end: at.checked_add(page_size() as u64)?,
            vec: (&raw mut found) as u64,
            vec_len: 1,
            category_mask: SCAN_PRESENT,
            return_mask: SCAN_PRESENT | SCAN_HUGE,
            ..PagemapScan::default()
        };
        // SAFETY: the kernel defines this opcode for this structure. It reads and writes only the structure
        // and `found`.
        let question = unsafe { Updater::<PAGEMAP_SCAN, _>::new(&mut scan) };
        // SAFETY: the call writes only to the two values above, which live until it returns. It does not
        // change the pages.
        unsafe { ioctl(&self.0, question) }.ok()?;
        // If the kernel finds no such page, it does not write `found`.
        (found.categories & SCAN_PRESENT != 0).then_some(found.categories & SCAN_HUGE != 0)
    }
}

/// Returns the bytes of equal tensors as address ranges, ascending and disjoint.
fn ranges(addrs: &[u64], bytes: u64) -> Vec<(u64, u64)> {
    let mut tensors: Vec<_> = addrs.iter().map(|&at| (at, at.saturating_add(bytes))).collect();
    tensors.sort_unstable();
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for (from, to) in tensors {
        match apart.last_mut() {
            Some((_, end)) if from <= *end => *end = to.max(*end),
            _ => apart.push((from, to)),
        }
    }
    apart
}

/// Returns the whole units inside address ranges. Units that contain bytes outside the ranges are left out.
fn units_within(ranges: Vec<(u64, u64)>) -> impl Iterator<Item = (usize, usize)> {
    ranges.into_iter().filter_map(|(from, to)| {
        let (from, to) = (usize::try_from(from).ok()?, usize::try_from(to).ok()?);
        let (first, end) = (from.checked_next_multiple_of(HUGE_PAGE)?, to / HUGE_PAGE * HUGE_PAGE);
        Some((first, end)).filter(|(first, end)| first < end)
    })
}

/// Returns whether the kernel merges pages into huge pages of the size of a unit.
fn units_are_huge_pages() -> bool {
    HUGE_PAGE / page_size() == UNIT_PAGES
}

/// Has the kernel merge the whole units from `at` on into huge pages.
fn merge(at: usize, len: usize) -> io::Result<()> {
    // A kernel with larger huge pages reports success without merging anything if `at` is the start of one.
    if !units_are_huge_pages() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: this advice changes neither contents nor access rights, and the kernel reports addresses that
    // are not mapped.
    let refused = unsafe { libc::madvise(at as *mut c_void, len, MADV_COLLAPSE) };
    if refused == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Commits bytes of a region without touching them. If memory is short, this is an error, whereas a touch
/// would end the process.
fn reserve(descriptor: BorrowedFd<'_>, from: u64, len: u64) -> Result<()> {
    loop {
        match fallocate(descriptor, FallocateFlags::empty(), from, len) {
            Err(rustix::io::Errno::INTR) => {}
            done => {
                let text = "the pool could not be committed (huge_pages=\"eager\")";
                let error = |errno| Error::new(ErrorKind::OutOfMemory, text).errno(errno);
                return done.map_err(|errno| error(errno).with("committed_up_to", from));
            }
        }
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;

    /// Whatever the size of pages, a unit is committed as a whole, and a region of a few bytes consists of whole pages.
    #[test]
    fn units_are_committed_with_pages_of_every_size() {
        for len in [1, 1 << 10, Region::UNIT_BYTES + 1] {
            let region = Region::ordinary("test", len).unwrap();
            let units = region.units();
            let merged: Vec<_> = (0..units).map(|unit| region.commit(unit).unwrap()).collect();
            assert_eq!(region.committed_bytes(), units * Region::UNIT_BYTES, "{merged:?}");
            assert!(
                Region::UNIT_BYTES.is_multiple_of(page_size() as u64) && units * Region::UNIT_BYTES >= len
            );
            if page_size() != 4096 {
                assert!(
                    merged.iter().all(|unit| *unit == Err(MergeRefusal::Unable(libc::EINVAL))),
                    "{merged:?}"
                );
                assert!(OwnPages::open().is_none());
            }
        }
    }
}
