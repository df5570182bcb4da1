//! How much memory a thread of the tests has taken at once, for claims that bytes from outside cannot make it grow; and
//! allocations that fail when a test wants it.
//!
//! Not for: leaks, or memory outside the heap (`tests/memory.py`).
#![allow(unsafe_code, reason = "an allocator that counts and hands on")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static HEAP: Counting = Counting;

thread_local! {
    /// Bytes taken and not given back by this thread, and the most that was since `peak` began.
    static TAKEN: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
    /// Which allocation of this thread fails: the bytes from which on they are counted, and how many succeed before it.
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

// SAFETY: every call is handed on as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return std::ptr::null_mut();
        }
        count(layout.size() as isize);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return std::ptr::null_mut();
        }
        count(layout.size() as isize);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if fails(size) {
            return std::ptr::null_mut();
        }
        count(size as isize - layout.size() as isize);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

/// What `work` returns, and the most bytes this thread held at once on top of what it held before.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = TAKEN.with(|taken| {
        let (now, _) = taken.get();
        taken.set((now, now));
        now
    });
    let result = work();
    (result, TAKEN.with(|taken| (taken.get().1 - before).max(0) as usize))
}

/// What `work` returns if the allocation of this thread after `nth` others of at least `least` bytes fails; and whether there
/// was one.
pub fn failing<T>(least: usize, nth: usize, work: impl FnOnce() -> T) -> (T, bool) {
    FAILING.set(Some((least, nth)));
    let result = work();
    (result, FAILING.take().is_none())
}
