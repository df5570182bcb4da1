//! Copies from memory that a device cannot read into memory of that device, in two hops through a host buffer.
//!
//! Each worker makes both hops for its own unit. So while one worker reads, another one writes, and the bytes of the
//! buffer are still in the caches of the worker that has just read them. Reads by UCX run on one thread.

use std::sync::Arc;

use crate::copy::host_buffers::{BUFFER_BYTES, HostBuffer, HostBuffers};
use crate::device::{Copier, Copy};
use crate::error::Result;
use crate::memory::Window;
use crate::memory::kernels::Kernel;

/// Maximum number of windows that pass the buffer together.
const WINDOWS: usize = 1024;

/// A copier in two hops.
#[derive(Debug)]
pub(super) struct StagedCopier {
    /// Copies from the source into the buffer.
    pub(super) first: Arc<dyn Copier>,
    /// Copies from the buffer to the destination.
    pub(super) second: Arc<dyn Copier>,
    pub(super) buffers: Arc<HostBuffers>,
}

impl Copier for StagedCopier {
    fn copy(&self, batch: &[Copy<'_>], _: Kernel) -> Result<()> {
        let buffer = self.buffers.take()?;
        let mut hops =
            StagedWindows { copier: self, buffer: &buffer, first: Vec::new(), second: Vec::new(), bytes: 0 };
        for (src, dst) in batch.iter().flat_map(|copy| copy.pairs()) {
            hops.add(src, dst)?;
        }
        hops.run()
    }

    fn batch(&self) -> usize {
        WINDOWS
    }

    fn unit(&self) -> (u64, u64) {
        (BUFFER_BYTES, 4 * BUFFER_BYTES)
    }

    fn uses_kernels(&self) -> bool {
        false
    }
}

/// The windows that pass the buffer together.
struct StagedWindows<'a> {
    copier: &'a StagedCopier,
    buffer: &'a HostBuffer,
    first: Vec<Copy<'a>>,
    second: Vec<Copy<'a>>,
    bytes: u64,
}

impl<'a> StagedWindows<'a> {
    /// Adds a copy. Runs both hops whenever the buffer is full.
    fn add(&mut self, src: Window<'a>, dst: Window<'a>) -> Result<()> {
        let mut done = 0;
        while done < src.len() {
            if self.bytes == BUFFER_BYTES || self.first.len() == WINDOWS {
                self.run()?;
            }
            let part = src.part(done, BUFFER_BYTES - self.bytes);
            let between = self.buffer.window(self.bytes, part.len())?;
            self.first.push(Copy::one(part, between));
            self.second.push(Copy::one(between, dst.part(done, part.len())));
            (self.bytes, done) = (self.bytes + part.len(), done + part.len());
        }
        Ok(())
    }

    /// Makes both hops of what was added.
    fn run(&mut self) -> Result<()> {
        // The second hop reads the buffer next, so ordinary stores keep it in the caches.
        self.copier.first.copy(&self.first, Kernel::PLAIN)?;
        self.copier.second.copy(&self.second, Kernel::PLAIN)?;
        self.first.clear();
        self.second.clear();
        self.bytes = 0;
        Ok(())
    }
}
