//! Copies out of another process's memory, done by the kernel: where it cannot be mapped.
//!
//! Not for: being allocated from; another process's memory is its own.

use std::sync::Arc;

use super::{Copier, Copy};
use crate::error::Result;
use crate::memory::PeerProcess;
use crate::memory::kernels::Kernel;

/// Reads one other process.
#[derive(Debug)]
pub struct ProcessReader(Arc<PeerProcess>);

impl ProcessReader {
    /// Reads `process`.
    #[must_use]
    pub fn new(process: Arc<PeerProcess>) -> Self {
        ProcessReader(process)
    }
}

impl Copier for ProcessReader {
    fn copy(&self, batch: &[Copy<'_>], _: Kernel) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let pairs: Vec<_> = batch.iter().map(|copy| (copy.src, copy.dst)).collect();
        self.0.read(&pairs)
    }

    fn batch(&self) -> usize {
        // What fits one call, beside the proof that it is still the same process.
        PeerProcess::PAIRS
    }

    fn unit(&self) -> (u64, u64) {
        // A call of the kernel costs more than handing a batch to the CPU.
        (256 << 10, 4 << 20)
    }

    fn uses_kernels(&self) -> bool {
        false
    }
}
