//! Moves short windows between a stream and memory through a buffer, which stays in the CPU caches.
//!
//! The operating system copies a list of short windows more slowly than the copy kernels do, so the additional copy
//! saves time (benches/results/log.md).

use super::engine::CopyEngine;
use super::window_batch::{SHORT_BYTES, WindowBatch};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::kernels::{Copy, Kernel, copy_all};
use crate::memory::{BounceBuffer, Window};
use crate::plan::Side;

/// The buffer of one transmission. It is allocated for the first batch of short windows.
pub(super) struct ShortWindowBuffer<'a> {
    engine: &'a CopyEngine,
    /// Bytes of the whole transmission.
    total: u64,
    buffer: Option<BounceBuffer>,
}

impl<'a> ShortWindowBuffer<'a> {
    pub(super) fn new(engine: &'a CopyEngine, total: u64) -> Self {
        ShortWindowBuffer { engine, total, buffer: None }
    }

    /// Returns whether `batch` goes through the buffer, and makes room for it.
    pub(super) fn prepare(&mut self, batch: &WindowBatch<'_>) -> bool {
        if batch.is_short() && self.buffer.is_none() {
            // Without memory for a buffer, the stream takes the windows themselves.
            self.buffer = BounceBuffer::new(self.total.min(SHORT_BYTES)).ok();
        }
        batch.is_short() && self.buffer.is_some()
    }

    /// Returns the window of the buffer for the bytes of `batch`.
    pub(super) fn window(&self, batch: &WindowBatch<'_>) -> Result<Window<'_>> {
        Ok(self.buffer()?.windows(0, batch.bytes, 1)?.first())
    }

    /// Copies the windows of `batch` into the buffer (`Source`), or out of it those that are complete in its first `bytes` bytes.
    /// Returns their bytes.
    pub(super) fn copy(
        &self,
        batch: &WindowBatch<'_>,
        side: Side,
        bytes: u64,
        kernel: Kernel,
    ) -> Result<u64> {
        let (mut copies, mut at) = (Vec::with_capacity(batch.runs.len()), 0);
        for &run in &batch.runs {
            let len = run.first().len();
            let count = run.count().min((bytes - at) / len.max(1));
            if count > 0 {
                let between = self.buffer()?.windows(at, len, count)?;
                let (src, dst) = side.source_first(run.first_of(count), between);
                copies.push(Copy { src, dst });
                at += len * count;
            }
            if count < run.count() {
                break;
            }
        }
        copy_all(&copies, kernel)?;
        self.engine.counted().add(kernel, at);
        Ok(at)
    }

    fn buffer(&self) -> Result<&BounceBuffer> {
        let none = || Error::new(ErrorKind::System, "no batch of short windows was prepared");
        self.buffer.as_ref().ok_or_else(none)
    }
}
