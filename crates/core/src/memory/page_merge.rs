//! Huge pages on request: finds the parts of a mapping that were touched, and has the kernel merge them into
//! huge pages.
//!
//! A unit is an aligned range of the size of one huge page. From Linux 6.1 on, the kernel merges a unit into
//! one huge page if any page of it was touched, regardless of the system's settings for automatic merging,
//! and commits all of it. Meanwhile readers and writers in this process and others see the same bytes; at
//! most they wait for it. The module `crate::huge_pages` decides when merging is worthwhile.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::param::page_size;

use super::descriptors::above_standard_streams;
use super::region::HUGE_PAGE;
use super::{Adopted, Region, Tensors};
use crate::error::{Error, ErrorKind, Result};

/// Defined here because the C library may be too old to define it.
const MADV_COLLAPSE: libc::c_int = 25;
/// Number of units of registered memory that are merged between two calls of `check`.
const UNITS_AT_ONCE: usize = 32;

/// Pages of a unit in the page map; [`OwnPages`] supports no other number.
const UNIT_PAGES: usize = 512;
/// Bits of a page map entry: the page is present; it belongs to a file or to shared memory; it is mapped by
/// this process alone (the kernel's admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const FILE: u64 = 1 << 61;
const EXCLUSIVE: u64 = 1 << 56;

const PAGEMAP_SCAN: Opcode = opcode::read_write::<PagemapScan>(b'f', 16);
const SCAN_PRESENT: u64 = 1 << 3;
const SCAN_HUGE: u64 = 1 << 6;

/// Why the kernel did not merge a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeRefusal {
    /// A page of the unit is in use. A later attempt may succeed.
    Busy,
    /// No huge page is free, or the control group has no room. Another attempt would make the kernel search
    /// again.
    NoMemory,
    /// The kernel does not support or does not permit it; with the error number.
    Unable(i32),
}

impl From<io::Error> for MergeRefusal {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => MergeRefusal::Busy,
            Some(libc::ENOMEM | libc::EBUSY) => MergeRefusal::NoMemory,
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

    /// Returns whether the region consists of ordinary pages, which can be merged into huge pages.
    pub fn merges(&self) -> bool {
        self.ordinary().is_some()
    }

    /// Returns the first unit, from `from` on, of which any page was touched.
    pub fn touched_unit(&self, from: u64) -> Option<u64> {
        // This moves the offset of the descriptor, which nothing else uses.
        let start = from.checked_mul(Self::UNIT_BYTES)?;
        let at = seek(self.ordinary()?, SeekFrom::Data(start)).ok()?;
        Some(at / Self::UNIT_BYTES).filter(|&unit| unit < self.units())
    }

    /// Returns the committed bytes of `unit`; 0 if the kernel does not report them.
    pub fn touched_bytes(&self, unit: u64) -> u64 {
        let mut pages = [0_u8; 512];
        let Some(at) = self.unit_at(unit).filter(|_| HUGE_PAGE / page_size() <= pages.len()) else {
            return 0;
        };
        // SAFETY: the unit lies in this region's mapping (`unit_at`), and `pages` has a byte for each of its
        // pages.
        let status = unsafe { libc::mincore(at as *mut c_void, HUGE_PAGE, pages.as_mut_ptr().cast()) };
        let resident = pages.iter().filter(|&&page| page & 1 == 1).count();
        if status == 0 { (resident * page_size()) as u64 } else { 0 }
    }

    /// Merges `unit` into one huge page, which commits all of it. Succeeds without effect if it already is
    /// one. The error states why the kernel did not merge it.
    pub fn merge(&self, unit: u64) -> std::result::Result<(), MergeRefusal> {
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
    /// because the gaps are not the caller's, and so is a cache whose tensors differ.
    ///
    /// Calls `check` before the first of every 32 units in a contiguous range, and returns its error if it
    /// fails.
    pub(crate) fn merge(&self, mut check: impl FnMut() -> Result<()>) -> Result<u64> {
        let (mut merged, geometry) = (0, self.layout().geometry);
        let addrs =
            if geometry.row_sizes().has_gaps() || self.mixed().is_some() { &[] } else { self.addrs() };
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
    /// caller's, if it has gaps between rows, or if the tensors differ.
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
        let known = HUGE_PAGE / page_size() == UNIT_PAGES;
        let file = File::open("/proc/self/pagemap").ok().filter(|_| known)?;
        above_standard_streams(file.into()).ok().map(|file| OwnPages(file.into()))
    }

    /// Merges the unit at `at` into one huge page if that commits no additional memory: all of its pages are
    /// present, and they are private memory of this process alone.
    ///
    /// Returns `None` if this is not so. For example, a page that was read and never written is the kernel's
    /// zero page, and a page from before a fork is shared. Otherwise the inner result states whether the
    /// kernel merged it.
    pub fn merge(&self, at: u64) -> Option<std::result::Result<(), MergeRefusal>> {
        let from = usize::try_from(at).ok().filter(|at| at.is_multiple_of(HUGE_PAGE))?;
        let mut entries = [0_u8; UNIT_PAGES * 8];
        self.0.read_exact_at(&mut entries, at / page_size() as u64 * 8).ok()?;
        let (entries, _) = entries.as_chunks::<8>();
        let own = |entry: &[u8; 8]| {
            u64::from_ne_bytes(*entry) & (PRESENT | FILE | EXCLUSIVE) == PRESENT | EXCLUSIVE
        };
        entries.iter().all(own).then(|| Ok(merge(from, HUGE_PAGE)?))
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

/// Has the kernel merge the whole units from `at` on into huge pages.
fn merge(at: usize, len: usize) -> io::Result<()> {
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
