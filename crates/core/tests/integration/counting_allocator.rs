//! An allocator that counts the bytes each thread holds, to test limits on untrusted input, and that fails on request.
#![allow(unsafe_code, reason = "a global allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static HEAP: Counting = Counting;

thread_local! {
    /// Bytes that this thread holds, and the most that it has held since `peak` began.
    static TAKEN: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
    /// The failing allocation of this thread: the minimum size that counts, and how many succeed before it.
    static FAILING: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

/// Whether an allocation of `bytes` is the one that fails.
fn fails(bytes: usize) -> bool {
    let next = FAILING.try_with(|failing| match failing.get() {
        Some((least, left)) if bytes >= least => {
            failing.set(left.checked_sub(1).map(|left| (least, left)));
            left == 0
        }
        _ => false,
    });
    next.unwrap_or(false)
}

fn count(bytes: isize) {
    // A thread that ends may free after its counters are gone.
    let _ = TAKEN.try_with(|taken| {
        let (now, most) = taken.get();
        taken.set((now + bytes, most.max(now + bytes)));
    });
}

/// Allocates `size` bytes and counts `grown` additional bytes, unless this allocation is the one that fails.
fn counted(size: usize, grown: isize, allocate: impl FnOnce() -> *mut u8) -> *mut u8 {
    if fails(size) {
        return std::ptr::null_mut();
    }
    count(grown);
    allocate()
}

// SAFETY: every call passes its arguments to `System`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as promised by the caller.
        counted(layout.size(), layout.size() as isize, || unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as promised by the caller.
        counted(layout.size(), layout.size() as isize, || unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let grown = size as isize - layout.size() as isize;
        // SAFETY: as promised by the caller.
        counted(size, grown, || unsafe { System.realloc(at, layout, size) })
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs `work`. Returns its result and the largest number of additional bytes that this thread held meanwhile.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = TAKEN.with(|taken| {
        let (now, _) = taken.get();
        taken.set((now, now));
        now
    });
    let result = work();
    (result, TAKEN.with(|taken| (taken.get().1 - before).max(0) as usize))
}

/// Runs `work` with one failing allocation: the one after `nth` others of at least `least` bytes. Also
/// returns whether that allocation was reached.
pub fn failing<T>(least: usize, nth: usize, work: impl FnOnce() -> T) -> (T, bool) {
    FAILING.set(Some((least, nth)));
    let result = work();
    (result, FAILING.take().is_none())
}
