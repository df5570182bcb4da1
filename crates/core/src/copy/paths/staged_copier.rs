//! Copies from memory that a device cannot read into memory of that device, in two hops through a host buffer.
//!
//! Each worker makes both hops for its own unit. So while one worker reads, another one writes, and the bytes of the
//! buffer are still in the caches of the worker that has just read them. Reads by UCX run on one thread.

use std::sync::Arc;

use crate::copy::host_buffers::{BUFFER_BYTES, HostBuffers, PackedWindows, WINDOWS};
use crate::device::{Copier, Copy};
use crate::error::Result;
use crate::memory::kernels::Kernel;
use crate::plan::Side;

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
        // Both have the same bytes of the buffer, so they make their copies at the same windows, the first hop first.
        let mut first = PackedWindows::new(&*self.first, &buffer, Side::Source);
        let mut second = PackedWindows::new(&*self.second, &buffer, Side::Destination);
        for (src, dst) in batch.iter().flat_map(|copy| copy.pairs()) {
            let mut done = 0;
            while done < src.len() {
                if first.room() == 0 {
                    first.flush().and_then(|_| second.flush())?;
                }
                let part = src.part(done, first.room());
                first.add(part)?;
                second.add(dst.part(done, part.len()))?;
                done += part.len();
            }
        }
        first.flush().and_then(|_| second.flush()).map(drop)
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
