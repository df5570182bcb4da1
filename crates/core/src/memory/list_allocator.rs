//! An allocator for the Python and C libraries that keeps the memory of a few long lists between calls.
//!
//! A call with thousands of blocks makes lists of up to some MiB. The C library returns such memory to the kernel after
//! each call, and faulting it in anew took longer than planning the call (docs/performance.md). The C library's limits
//! belong to the host process, so they stay as they are (`test_opening_an_engine_leaves_malloc_alone`). Only allocations of
//! the library that names this allocator pass through it. Not for: memory of caches (`region`).

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Bytes of a kept block of the first class; each class after it has twice as many. Smaller lists stay in the heap anyway.
const SMALLEST: usize = 32 << 10;
/// Up to 2 MiB: a list of 131,072 pairs. Larger ones are rare, and passed on.
const CLASSES: usize = 7;
/// Blocks kept of each class: about as many equal lists as one call has at a time.
const SLOTS: usize = 4;
/// What the system's allocator promises without being asked, on every 64-bit target.
const ALIGN: usize = 16;

/// Passes everything on to the system's allocator, but keeps blocks of 32 KiB to 2 MiB that are freed: at most four of each
/// size, [`KeptLists::MOST_BYTES`] in all. It takes no lock, so a fork at any moment is harmless.
#[derive(Debug)]
pub struct KeptLists {
    slots: [[AtomicPtr<u8>; SLOTS]; CLASSES],
}

impl Default for KeptLists {
    fn default() -> Self {
        Self::new()
    }
}

impl KeptLists {
    /// Bytes that are kept at most.
    pub const MOST_BYTES: usize = SLOTS * SMALLEST * ((1 << CLASSES) - 1);

    /// One that keeps nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        KeptLists { slots: [const { [const { AtomicPtr::new(null_mut()) }; SLOTS] }; CLASSES] }
    }

    /// Bytes that are kept now.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        let kept = |slots: &[AtomicPtr<u8>; SLOTS]| {
            slots.iter().filter(|slot| !slot.load(Ordering::Relaxed).is_null()).count()
        };
        self.slots.iter().enumerate().map(|(class, slots)| kept(slots) * (SMALLEST << class)).sum()
    }

    fn take(&self, class: usize) -> Option<*mut u8> {
        let kept = |slot: &AtomicPtr<u8>| slot.swap(null_mut(), Ordering::Acquire);
        self.slots.get(class)?.iter().map(kept).find(|block| !block.is_null())
    }

    /// Whether there was room for it.
    fn give(&self, class: usize, block: *mut u8) -> bool {
        let taken = |slot: &AtomicPtr<u8>| {
            slot.compare_exchange(null_mut(), block, Ordering::Release, Ordering::Relaxed).is_ok()
        };
        self.slots.get(class).is_some_and(|slots| slots.iter().any(taken))
    }

    /// Frees what is kept: memory is short.
    #[cold]
    fn let_go(&self) {
        for class in 0..CLASSES {
            while let Some(block) = self.take(class) {
                // SAFETY: `take` hands out each kept block once, and kept blocks were allocated with this layout (`fresh`).
                unsafe { System.dealloc(block, whole(class)) };
            }
        }
    }

    /// New memory for a block of `class`; null if there is none even after what is kept was freed.
    fn fresh(&self, class: usize, zeroed: bool) -> *mut u8 {
        let ask = || {
            let layout = whole(class);
            // SAFETY: the layout is not empty.
            if zeroed { unsafe { System.alloc_zeroed(layout) } } else { unsafe { System.alloc(layout) } }
        };
        let made = ask();
        if !made.is_null() {
            return made;
        }
        self.let_go();
        ask()
    }
}

/// The class whose blocks hold `layout`; `None` for what is passed on.
fn class_of(layout: Layout) -> Option<usize> {
    let size = layout.size();
    if size <= SMALLEST / 2 || size > SMALLEST << (CLASSES - 1) || layout.align() > ALIGN {
        return None;
    }
    Some((size.next_power_of_two().max(SMALLEST) / SMALLEST).trailing_zeros() as usize)
}

/// All of a block of a class.
fn whole(class: usize) -> Layout {
    // SAFETY: the alignment is a power of two, and the size, 2 MiB at most, does not overflow when rounded up to it.
    unsafe { Layout::from_size_align_unchecked(SMALLEST << class, ALIGN) }
}

// SAFETY: what is passed on is the system's. A block of a class holds the layout it is handed out for (`class_of`), belongs to
// one owner at a time (a slot gives each block out once), and goes back with the class that the same layout has.
unsafe impl GlobalAlloc for KeptLists {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class_of(layout) {
            // SAFETY: the caller's promise about the layout.
            None => unsafe { System.alloc(layout) },
            Some(class) => self.take(class).unwrap_or_else(|| self.fresh(class, false)),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(class) = class_of(layout) else {
            // SAFETY: the caller's promise about the layout.
            return unsafe { System.alloc_zeroed(layout) };
        };
        let Some(block) = self.take(class) else { return self.fresh(class, true) };
        // SAFETY: the block holds the layout, and is this caller's alone.
        unsafe { block.write_bytes(0, layout.size()) };
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match class_of(layout) {
            // SAFETY: the caller's promise: a block of this allocator, passed on when it was allocated.
            None => unsafe { System.dealloc(block, layout) },
            Some(class) if self.give(class, block) => {}
            // SAFETY: blocks of a class are allocated with this layout (`fresh`).
            Some(class) => unsafe { System.dealloc(block, whole(class)) },
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise: `size`, rounded up to the alignment, does not overflow.
        let now = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (class_of(layout), class_of(now)) {
            // SAFETY: the caller's promise; both are passed on.
            (None, None) => unsafe { System.realloc(block, layout, size) },
            (from, to) if from == to => block,
            _ => {
                // SAFETY: the caller's promise: `size` is not 0.
                let moved = unsafe { self.alloc(now) };
                if !moved.is_null() {
                    let bytes = layout.size().min(size);
                    // SAFETY: both blocks hold that many bytes, and the new one overlaps nothing.
                    unsafe { moved.copy_from_nonoverlapping(block, bytes) };
                    // SAFETY: the caller's promise; the block is not used any more.
                    unsafe { self.dealloc(block, layout) };
                }
                moved
            }
        }
    }
}
