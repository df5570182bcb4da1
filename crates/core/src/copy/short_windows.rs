//! Moves short windows between a stream and memory through a buffer, which stays in the CPU caches.
//!
//! The operating system copies a list of short windows more slowly than the copy kernels do, so the additional copy
//! saves time (benches/results/log.md).

use std::ops::Range;
use std::time::Instant;

use super::tuner::{Source, Tuner};
use super::window_batch::{SHORT_BYTES, WindowBatch};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::kernels::{Copy, copy_all};
use crate::memory::{BounceBuffer, Window, Windows, faulted};

/// The buffer of one transmission. It is allocated for the first batch of short windows, and holds at most 256 KiB.
pub(super) struct ShortWindowBuffer<'a> {
    tuner: &'a Tuner,
    /// Bytes of the whole transmission.
    total: u64,
    buffer: Option<BounceBuffer>,
}

impl<'a> ShortWindowBuffer<'a> {
    pub(super) fn new(tuner: &'a Tuner, range: &Range<u64>) -> Self {
        ShortWindowBuffer { tuner, total: range.end.saturating_sub(range.start), buffer: None }
    }

    /// Returns whether `batch` goes through the buffer, and makes room for it.
    pub(super) fn prepare(&mut self, batch: &WindowBatch<'_>) -> bool {
        if !batch.is_short() {
            return false;
        }
        if self.buffer.is_none() {
            // Without memory for a buffer, the stream takes the windows themselves.
            self.buffer = BounceBuffer::new(self.total.min(SHORT_BYTES)).ok();
        }
        self.buffer.is_some()
    }

    /// Returns the window of the buffer for the bytes of `batch`.
    pub(super) fn window(&self, batch: &WindowBatch<'_>) -> Result<Window<'_>> {
        Ok(self.windows(0, batch.bytes, 1)?.first())
    }

    /// Copies the bytes of `batch` into the buffer, and returns their window.
    pub(super) fn gather(&self, batch: &WindowBatch<'_>) -> Result<Window<'_>> {
        let (mut copies, mut at) = (Vec::with_capacity(batch.runs.len()), 0);
        for &run in &batch.runs {
            copies.push(Copy { src: run, dst: self.windows(at, run.first().len(), run.count())? });
            at += run.bytes();
        }
        let kernel = self.tuner.cached();
        copy_all(&copies, kernel)?;
        self.tuner.count(kernel, at);
        self.window(batch)
    }

    /// Copies from the buffer, into which `arrived` bytes were received, the windows of `batch` that are complete.
    /// Returns their bytes. If `read_again`, the bytes stay in the CPU caches.
    pub(super) fn scatter(&self, batch: &WindowBatch<'_>, arrived: u64, read_again: bool) -> Result<u64> {
        let (mut copies, mut at) = (Vec::with_capacity(batch.runs.len()), 0);
        for &run in &batch.runs {
            let len = run.first().len();
            let count = run.count().min((arrived - at) / len.max(1));
            if count > 0 {
                copies.push(Copy { src: self.windows(at, len, count)?, dst: run.first_of(count) });
                at += len * count;
            }
            if count < run.count() {
                break;
            }
        }
        let piece = batch.bytes / batch.windows.max(1);
        if read_again {
            let kernel = self.tuner.cached();
            copy_all(&copies, kernel)?;
            self.tuner.count(kernel, at);
            return Ok(at);
        }
        let kernel = self.tuner.choose(Source::Buffer, self.total, piece);
        let started = Instant::now();
        copy_all(&copies, kernel)?;
        let took = started.elapsed();
        // The first touch of a destination says nothing about kernels.
        if Tuner::learns(self.total) && faulted() {
            self.tuner.count(kernel, at);
        } else {
            self.tuner.learn(Source::Buffer, self.total, piece, kernel, at, took);
        }
        Ok(at)
    }

    fn windows(&self, at: u64, len: u64, count: u64) -> Result<Windows<'_>> {
        match &self.buffer {
            Some(buffer) => buffer.windows(at, len, count),
            None => Err(Error::new(ErrorKind::System, "no batch of short windows was prepared")),
        }
    }
}
