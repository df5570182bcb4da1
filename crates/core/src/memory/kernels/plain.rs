//! The kernel that every CPU has: ordinary stores, as in the C library.

use crate::memory::{Window, Windows};

/// One copy: a window to read, and a window of equal length to write. Or several copies of equal length: as many
/// windows to read as to write, in the same order.
#[derive(Clone, Copy, Debug)]
pub struct Copy<'a> {
    /// The source.
    pub src: Windows<'a>,
    /// The destination.
    pub dst: Windows<'a>,
}

impl<'a> Copy<'a> {
    /// Returns the copy of one window to another.
    pub fn one(src: Window<'a>, dst: Window<'a>) -> Self {
        Copy { src: src.into(), dst: dst.into() }
    }

    /// Returns the two windows of each copy.
    pub fn pairs(self) -> impl Iterator<Item = (Window<'a>, Window<'a>)> {
        self.src.iter().zip(self.dst.iter())
    }
}

/// A single copy as pointers.
#[derive(Clone, Copy)]
pub(super) struct RawCopy {
    pub(super) from: *const u8,
    pub(super) to: *mut u8,
    pub(super) len: usize,
}

impl RawCopy {
    pub(super) const NONE: RawCopy = RawCopy { from: std::ptr::null(), to: std::ptr::null_mut(), len: 0 };

    /// Returns whether source and destination have a byte in common.
    pub(super) fn overlaps(self) -> bool {
        let (from, to) = (self.from.addr(), self.to.addr());
        from.abs_diff(to) < self.len
    }
}

/// An entry of a batch as pointers.
#[derive(Clone, Copy)]
pub(super) struct RawRun {
    pub(super) first: RawCopy,
    pub(super) count: usize,
    /// Bytes from one source to the next, and from one destination to the next.
    steps: (isize, isize),
}

impl RawRun {
    /// Returns the pointers of an entry. The numbers of a sound one fit.
    #[inline]
    pub(super) fn of(copy: &Copy<'_>) -> RawRun {
        let Copy { src, dst } = copy;
        let (from, to) = (src.first().addr() as *const u8, dst.first().addr() as *mut u8);
        let size = |number: u64| usize::try_from(number).unwrap_or(0);
        let step = |step: i64| isize::try_from(step).unwrap_or(0);
        RawRun {
            first: RawCopy { from, to, len: size(src.first().len()) },
            count: size(src.count()),
            steps: (step(src.step()), step(dst.step())),
        }
    }

    /// Returns the copy with this index.
    #[inline]
    pub(super) fn at(self, index: usize) -> RawCopy {
        let bytes = |step: isize| step.wrapping_mul(index.cast_signed());
        RawCopy {
            from: self.first.from.wrapping_offset(bytes(self.steps.0)),
            to: self.first.to.wrapping_offset(bytes(self.steps.1)),
            len: self.first.len,
        }
    }
}

/// The single copies of a batch.
pub(super) struct RawCopies<'a> {
    batch: std::slice::Iter<'a, Copy<'a>>,
    /// The current entry, and the number of its copies that were returned.
    run: RawRun,
    done: usize,
}

impl<'a> RawCopies<'a> {
    pub(super) fn of(batch: &'a [Copy<'a>]) -> Self {
        let run = RawRun { first: RawCopy::NONE, count: 0, steps: (0, 0) };
        RawCopies { batch: batch.iter(), run, done: 0 }
    }
}

impl Iterator for RawCopies<'_> {
    type Item = RawCopy;

    #[inline]
    fn next(&mut self) -> Option<RawCopy> {
        if self.done == self.run.count {
            (self.run, self.done) = (RawRun::of(self.batch.next()?), 0);
        }
        self.done += 1;
        Some(self.run.at(self.done - 1))
    }
}

/// Makes one copy with ordinary stores.
///
/// # Safety
///
/// `from..from + len` is readable and `to..to + len` is writable.
pub(super) unsafe fn plain(copy: RawCopy) {
    let RawCopy { from, to, len } = copy;
    if copy.overlaps() {
        // SAFETY: as promised by the caller. `copy_to` allows overlap.
        unsafe { from.copy_to(to, len) };
    } else {
        // SAFETY: as promised by the caller, and the two do not overlap.
        unsafe { from.copy_to_nonoverlapping(to, len) };
    }
}
