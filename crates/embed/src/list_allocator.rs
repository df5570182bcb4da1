//! An allocator for the Python and C libraries that keeps the memory of a few long lists between calls, and returns that of
//! other long lists to the kernel at once.
//!
//! A call with thousands of blocks builds lists of up to a few MiB. The C library returns such memory to the
//! kernel after each call, and faulting it in again took longer than planning the call (DESIGN.md, "Memory").
//!
//! The C library has many heaps, and keeps up to 64 MiB of freed memory in each of them. It serves lists below 128 KiB from these
//! heaps, and longer ones after the first one was freed. So the memory of many messages of peers would remain in the process
//! (`test_hostile_memory.py`). Here, each list of more than 16 KiB is a mapping of its own.
//!
//! The thresholds of the C library belong to the host process, so they are not changed
//! (`test_opening_an_engine_leaves_malloc_alone`). Only allocations of the library that declares this
//! allocator use it. The memory of caches does not.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap, munmap};

/// Bytes of a kept block of the first class. Each further class doubles the size. Smaller lists remain in the
/// heap anyway.
const SMALLEST: usize = 32 << 10;
/// Number of size classes. The largest is 2 MiB, a list of 131,072 pairs; larger lists are rare and not kept.
const CLASSES: usize = 7;
/// Maximum number of blocks kept in each class: about as many lists of equal size as one call has at a time.
const SLOTS: usize = 4;
/// The alignment that the system allocator guarantees by default on every 64-bit target.
const ALIGN: usize = 16;
/// The minimum alignment of a mapping. It is larger on machines with larger pages.
const PAGE: usize = 4096;

/// A global allocator that delegates to the system allocator, but keeps freed blocks of 32 KiB to 2 MiB for
/// reuse, and maps blocks of more than 16 KiB.
///
/// It keeps at most four blocks of each size, and at most [`KeptLists::MAX_BYTES`] in all. It takes no lock,
/// so a fork is harmless at any moment.
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
    /// Maximum number of bytes that are kept.
    pub const MAX_BYTES: usize = SLOTS * SMALLEST * ((1 << CLASSES) - 1);

    /// Creates an allocator that keeps no blocks yet.
    #[must_use]
    pub const fn new() -> Self {
        KeptLists { slots: [const { [const { AtomicPtr::new(null_mut()) }; SLOTS] }; CLASSES] }
    }

    /// Returns the bytes of the blocks that are kept now.
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

    /// Keeps `block` if a slot of its class is free, and returns whether it does.
    fn give(&self, class: usize, block: *mut u8) -> bool {
        let taken = |slot: &AtomicPtr<u8>| {
            slot.compare_exchange(null_mut(), block, Ordering::Release, Ordering::Relaxed).is_ok()
        };
        self.slots.get(class).is_some_and(|slots| slots.iter().any(taken))
    }

    /// Frees all kept blocks, because memory is short.
    #[cold]
    fn free_kept(&self) {
        for class in 0..CLASSES {
            while let Some(block) = self.take(class) {
                // SAFETY: `take` returns each kept block once, and kept blocks were allocated with this
                // layout (`fresh`).
                unsafe { release(block, whole(class)) };
            }
        }
    }

    /// Allocates a new block of `class`. If memory is short, frees the kept blocks and tries again; returns
    /// null if that fails too.
    fn fresh(&self, class: usize, zeroed: bool) -> *mut u8 {
        let ask = || {
            // SAFETY: the size of the layout is not zero.
            unsafe { obtain(whole(class), zeroed) }
        };
        let made = ask();
        if !made.is_null() {
            return made;
        }
        self.free_kept();
        ask()
    }
}

/// Whether blocks of `layout` are mappings. This depends on the layout alone, so each block is freed as it was allocated.
fn is_mapped(layout: Layout) -> bool {
    layout.size() > SMALLEST / 2 && layout.align() <= PAGE
}

/// Allocates a block that is not a kept one. Returns null if there is no memory.
///
/// # Safety
///
/// The size of `layout` must not be 0.
unsafe fn obtain(layout: Layout, zeroed: bool) -> *mut u8 {
    if is_mapped(layout) {
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let made = unsafe { mmap_anonymous(null_mut(), layout.size(), rights, flags) };
        return made.map_or(null_mut(), <*mut _>::cast);
    }
    // SAFETY: the caller's promise about the layout.
    if zeroed { unsafe { System.alloc_zeroed(layout) } } else { unsafe { System.alloc(layout) } }
}

/// Frees a block.
///
/// # Safety
///
/// The block must come from [`obtain`] with this layout, and nothing may use it any more.
unsafe fn release(block: *mut u8, layout: Layout) {
    if is_mapped(layout) {
        // SAFETY: the mapping is one of `obtain`. The kernel rounds the length to pages, as it did there. It may have merged the
        // mapping with its neighbours. If the process then has as many mappings as it may have (vm.max_map_count), it cannot split
        // them and refuses (ENOMEM). An allocator cannot report that, so the block then stays mapped and is not used any more.
        let _ = unsafe { munmap(block.cast(), layout.size()) };
        return;
    }
    // SAFETY: the caller's promise; the system allocator served the layout.
    unsafe { System.dealloc(block, layout) };
}

/// Returns the class whose blocks can hold `layout`; `None` if no block for it is kept.
fn class_of(layout: Layout) -> Option<usize> {
    let size = layout.size();
    if size <= SMALLEST / 2 || size > SMALLEST << (CLASSES - 1) || layout.align() > ALIGN {
        return None;
    }
    Some((size.next_power_of_two().max(SMALLEST) / SMALLEST).trailing_zeros() as usize)
}

/// Returns the layout of a block of a class.
fn whole(class: usize) -> Layout {
    // SAFETY: the alignment is a power of two. The size is 2 MiB at most, so it does not overflow when
    // rounded up to the alignment.
    unsafe { Layout::from_size_align_unchecked(SMALLEST << class, ALIGN) }
}

// SAFETY: requests outside the classes are served by the system allocator, or by a mapping of their own. A block of a class can hold every
// layout it is returned for (`class_of`). It belongs to one owner at a time, because a slot returns each
// block once (`take`). It is freed under its own class, because `class_of` depends on the layout alone.
unsafe impl GlobalAlloc for KeptLists {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class_of(layout) {
            // SAFETY: the caller's promise about the layout.
            None => unsafe { obtain(layout, false) },
            Some(class) => self.take(class).unwrap_or_else(|| self.fresh(class, false)),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(class) = class_of(layout) else {
            // SAFETY: the caller's promise about the layout.
            return unsafe { obtain(layout, true) };
        };
        let Some(block) = self.take(class) else { return self.fresh(class, true) };
        // SAFETY: the block can hold the layout, and belongs to this caller alone.
        unsafe { block.write_bytes(0, layout.size()) };
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match class_of(layout) {
            // SAFETY: the caller promises that the block came from this allocator with this layout.
            None => unsafe { release(block, layout) },
            Some(class) if self.give(class, block) => {}
            // SAFETY: blocks of a class are allocated with this layout (`fresh`).
            Some(class) => unsafe { release(block, whole(class)) },
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that `size`, rounded up to the alignment, does not overflow.
        let now = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (class_of(layout), class_of(now)) {
            (None, None) if is_mapped(layout) && is_mapped(now) => {
                // SAFETY: the mapping is one of `obtain`, and the caller gives it up.
                let moved = unsafe { mremap(block.cast(), layout.size(), size, MremapFlags::MAYMOVE) };
                moved.map_or(null_mut(), <*mut _>::cast)
            }
            (None, None) if !is_mapped(layout) && !is_mapped(now) => {
                // SAFETY: the caller's promise; the system allocator serves both layouts.
                unsafe { System.realloc(block, layout, size) }
            }
            (Some(from), Some(to)) if from == to => block,
            _ => {
                // SAFETY: the caller promises that `size` is not 0.
                let moved = unsafe { self.alloc(now) };
                if !moved.is_null() {
                    let bytes = layout.size().min(size);
                    // SAFETY: both blocks have at least that many bytes, and the new one does not overlap the
                    // old one.
                    unsafe { moved.copy_from_nonoverlapping(block, bytes) };
                    // SAFETY: the caller's promise; the old block is not used any more.
                    unsafe { self.dealloc(block, layout) };
                }
                moved
            }
        }
    }
}
