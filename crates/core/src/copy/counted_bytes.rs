//! Counts the bytes that an engine has copied, by the stores of the kernel.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory::kernels::Kernel;

/// Bytes copied with ordinary stores, and with streaming stores.
#[derive(Debug, Default)]
pub struct CountedBytes([AtomicU64; 2]);

impl CountedBytes {
    /// Adds `bytes` bytes that `kernel` has copied.
    pub(super) fn add(&self, kernel: Kernel, bytes: u64) {
        self.0[usize::from(kernel.streams())].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes copied with ordinary stores and with streaming stores.
    pub fn bytes(&self) -> (u64, u64) {
        let [plain, streaming] = &self.0;
        (plain.load(Ordering::Relaxed), streaming.load(Ordering::Relaxed))
    }
}
