//! Returns the id of this process without a system call each time.
//!
//! The kernel is asked once in every process. The answer lies in a page that a fork wipes
//! (`MADV_WIPEONFORK`), so a child never takes its parent's id for its own, however it was forked
//! (`a_child_and_its_child_know_their_own_ids`). A system call took longer than all other checks of a small
//! call together.

use std::process;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::pages::page_size;

/// The page, once it is mapped. It is never unmapped.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());

/// Returns the id of this process. It asks the kernel in each call until [`remember_process`] has been
/// called.
pub fn this_process() -> u32 {
    // SAFETY: the pointer is null, or refers to a page that `remember_process` mapped: zeroed, aligned, never
    // unmapped, and accessed only as an atomic.
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

/// Makes [`this_process`] remember its result from now on, if the kernel can wipe a page in a forked child.
/// Otherwise it continues to ask each time.
pub fn remember_process() {
    if !PAGE.load(Ordering::Acquire).is_null() {
        return;
    }
    let len = page_size();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: this makes a new private mapping at an address that the kernel chooses.
    let Ok(page) = (unsafe { mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE) }) else { return };
    // SAFETY: the range is the mapping made above, and nothing else refers to it yet.
    let wiped = unsafe { madvise(page, len, Advice::LinuxWipeOnFork) }.is_ok();
    let ours = page.cast();
    let kept = wiped && PAGE.compare_exchange(null_mut(), ours, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if !kept {
        // SAFETY: the range is the mapping made above, which was not published.
        let _unmapped = unsafe { munmap(page, len) };
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Whether `child()` returns true in a forked process. It may take no lock that another thread may hold.
    pub(in crate::memory) fn holds_in_a_child(child: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs what its caller promises, and ends with `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: this takes a number. The alarm ends a child that waits for ever.
            unsafe { libc::alarm(10) };
            let status = i32::from(!child());
            // SAFETY: nothing of the parent needs to be unwound.
            unsafe { libc::_exit(status) };
        }
        let mut status = -1;
        // SAFETY: the child belongs to this test, and the status is a valid pointer.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        status == 0
    }

    fn knows_itself() -> bool {
        (0..2).all(|_| this_process() == process::id())
    }

    #[test]
    fn a_child_and_its_child_know_their_own_ids() {
        remember_process();
        assert!(knows_itself());
        // The fork of the C library: no hook of Python or of another language runs.
        assert!(holds_in_a_child(|| knows_itself() && holds_in_a_child(knows_itself)));
        assert!(knows_itself());
    }
}
