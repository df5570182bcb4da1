//! Moves short windows between a socket and memory through a buffer, which stays in the CPU caches.
//!
//! The operating system copies a list of short windows more slowly than the copy kernels copy a run of them. The additional copy
//! saves time for tiny windows, and for all short ones if the bytes are not in the CPU caches (benches/results/log.md, "Short
//! windows"). Rings are filled by the CPU, which needs no buffer.

use super::engine::CopyEngine;
use super::host_buffers::HostBuffer;
use super::window_batch::WindowBatch;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Window;
use crate::memory::kernels::{Copy, Kernel, copy_all};
use crate::net::Stream;
use crate::plan::Side;

/// Minimum number of windows of a run, on average. A buffer saves no time for single windows.
const MIN_OF_RUN: u64 = 8;
/// Windows of fewer bytes than this are tiny.
const TINY: u64 = 512;
/// Minimum number of bytes of a transmission whose windows need not be tiny: more than the CPU caches usually hold.
const LARGE: u64 = 16 << 20;

/// The buffer of one transmission. It is taken for the first batch that needs it.
pub(super) struct ShortWindowBuffer<'a> {
    engine: &'a CopyEngine,
    /// Whether the bytes go through a socket.
    socket: bool,
    /// Bytes of the whole transmission.
    total: u64,
    buffer: Option<HostBuffer>,
}

impl<'a> ShortWindowBuffer<'a> {
    /// Prepares for a transmission of `total` bytes through `stream`.
    pub(super) fn new(engine: &'a CopyEngine, stream: &Stream, total: u64) -> Self {
        ShortWindowBuffer { engine, socket: !stream.has_rings(), total, buffer: None }
    }

    /// Returns whether `batch` goes through the buffer, and makes room for it.
    pub(super) fn prepare(&mut self, batch: &WindowBatch<'_>) -> bool {
        let runs = batch.windows >= MIN_OF_RUN * batch.runs.len() as u64;
        let gains = self.total >= LARGE || batch.bytes < batch.windows * TINY;
        if !(self.socket && batch.is_short() && runs && gains) {
            return false;
        }
        if self.buffer.is_none() {
            // Without memory for a buffer, the stream takes the windows themselves.
            self.buffer = self.engine.host_buffers.take().ok();
        }
        self.buffer.is_some()
    }

    /// Returns the window of the buffer for the bytes of `batch`.
    pub(super) fn window(&self, batch: &WindowBatch<'_>) -> Result<Window<'_>> {
        self.buffer()?.window(0, batch.bytes)
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

    fn buffer(&self) -> Result<&HostBuffer> {
        let none = || Error::new(ErrorKind::System, "no batch of short windows was prepared");
        self.buffer.as_ref().ok_or_else(none)
    }
}
