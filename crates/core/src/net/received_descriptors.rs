//! Descriptors that a peer has sent.
//!
//! A peer may send any descriptor, and can make closing it take arbitrarily long. So no thread that has other work closes
//! one that is not memory (`test_descriptors_that_close_slowly_hold_nobody_up`).

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use rustix::fs::fcntl_get_seals;

/// Descriptors that arrived with a frame.
#[derive(Debug, Default)]
pub struct ReceivedDescriptors(Vec<OwnedFd>);

impl ReceivedDescriptors {
    /// Returns those that are memory, and discards the others.
    pub fn memory_files(mut self) -> Vec<OwnedFd> {
        self.take_memory_files()
    }

    fn take_memory_files(&mut self) -> Vec<OwnedFd> {
        // Only memory files have seals.
        self.0.extract_if(.., |descriptor| fcntl_get_seals(descriptor).is_ok()).collect()
    }
}

impl Deref for ReceivedDescriptors {
    type Target = [OwnedFd];

    fn deref(&self) -> &[OwnedFd] {
        &self.0
    }
}

impl Extend<OwnedFd> for ReceivedDescriptors {
    fn extend<I: IntoIterator<Item = OwnedFd>>(&mut self, descriptors: I) {
        self.0.extend(descriptors);
    }
}

impl Drop for ReceivedDescriptors {
    fn drop(&mut self) {
        drop(self.take_memory_files());
        discard(std::mem::take(&mut self.0));
    }
}

/// Closes descriptors on a separate thread. If too many such threads are running, the descriptors stay open.
fn discard(descriptors: Vec<OwnedFd>) {
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    const MAX_THREADS: usize = 4;
    if descriptors.is_empty() {
        return;
    }
    if RUNNING.fetch_add(1, Ordering::Relaxed) >= MAX_THREADS {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
        return descriptors.into_iter().for_each(std::mem::forget);
    }
    let begun = Builder::new().name("llm-discard".into()).spawn(move || {
        drop(descriptors);
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    });
    if begun.is_err() {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    }
}
