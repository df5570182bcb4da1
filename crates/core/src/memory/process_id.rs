//! Which process this is, without asking the kernel each time.
//!
//! The kernel is asked once in every process: the answer lies in a page that a fork finds wiped (`MADV_WIPEONFORK`), so
//! a child never takes its parent's number for its own, however it was forked
//! (`tests/test_lifecycle.py`, `test_a_forked_child_is_told_and_the_parent_goes_on`). A system call took longer than all
//! other checks of a small call together. Not for: other processes (`process`), or what a child may not do (the bindings).

use std::process;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The page, once mapped; it stays for good.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());

/// The number of this process.
#[must_use]
pub fn this_process() -> u32 {
    // SAFETY: null, or a page that `map` made, zeroed, aligned and never unmapped; only atomics touch it.
    let Some(known) = (unsafe { PAGE.load(Ordering::Acquire).as_ref() }) else { return process::id() };
    match known.load(Ordering::Relaxed) {
        0 => {
            let id = process::id();
            known.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// Has [`this_process`] remember from now on, where the kernel can wipe a page for a fork; elsewhere it asks each time.
pub fn remember_process() {
    if !PAGE.load(Ordering::Acquire).is_null() {
        return;
    }
    let len = rustix::param::page_size();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new private mapping at an address of the kernel's choice.
    let Ok(page) = (unsafe { mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE) }) else { return };
    // SAFETY: the mapping made above, which nobody else knows yet.
    let wiped = unsafe { madvise(page, len, Advice::LinuxWipeOnFork) }.is_ok();
    let ours = page.cast();
    let kept = wiped && PAGE.compare_exchange(null_mut(), ours, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if !kept {
        // SAFETY: the mapping made above; it was not published.
        let _unmapped = unsafe { munmap(page, len) };
    }
}
