//! The system allocator, which counts the live bytes and their maximum while a [`Count`] exists.
//!
//! Not for: memory that is mapped, which the kernel counts (`setup::status`).

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

pub struct Counting;

static ON: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);

fn count(bytes: i64) {
    if ON.load(Ordering::Relaxed) {
        let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if bytes > 0 {
            PEAK.fetch_max(live, Ordering::Relaxed);
        }
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }

    // Forwarded, because the default methods of the trait would touch and copy memory needlessly.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Counting is on while this value exists.
pub struct Count(());

impl Count {
    pub fn start() -> Count {
        LIVE.store(0, Ordering::Relaxed);
        PEAK.store(0, Ordering::Relaxed);
        ON.store(true, Ordering::Relaxed);
        Count(())
    }

    /// Returns the bytes allocated and not freed since the start.
    #[expect(clippy::unused_self, reason = "it counts only while a value lives")]
    pub fn live(&self) -> i64 {
        LIVE.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of live bytes since the start.
    #[expect(clippy::unused_self, reason = "as above")]
    pub fn most(&self) -> i64 {
        PEAK.load(Ordering::Relaxed)
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        ON.store(false, Ordering::Relaxed);
    }
}
