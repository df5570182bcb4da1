//! Copies out of another process's memory through the kernel, where that memory cannot be mapped.
//!
//! This is a copier and no device: nothing is allocated from another process.

use std::sync::Arc;

use super::traits::Copier;
use crate::error::Result;
use crate::memory::PeerProcess;
use crate::memory::kernels::{Copy, Kernel};

/// A copier that reads the memory of one other process.
#[derive(Debug)]
pub struct ProcessReader(Arc<PeerProcess>);

impl ProcessReader {
    /// Creates a copier that reads `process`.
    pub fn new(process: Arc<PeerProcess>) -> Self {
        ProcessReader(process)
    }
}

impl Copier for ProcessReader {
    fn copy(&self, batch: &[Copy<'_>], _: Kernel) -> Result<()> {
        // An entry may be millions of windows, and a peer chooses how many. So they are listed a system call at a time.
        let mut pairs = Vec::with_capacity(PeerProcess::PAIRS);
        for pair in batch.iter().flat_map(|copy| copy.pairs()) {
            pairs.push(pair);
            if pairs.len() == PeerProcess::PAIRS {
                self.0.read(&pairs)?;
                pairs.clear();
            }
        }
        if pairs.is_empty() { Ok(()) } else { self.0.read(&pairs) }
    }

    fn batch(&self) -> usize {
        // As many as fit one system call, if each entry is one window.
        PeerProcess::PAIRS
    }

    fn unit(&self) -> (u64, u64) {
        // A system call costs more than passing a batch to the CPU, so the units are larger.
        (256 << 10, 4 << 20)
    }

    fn uses_kernels(&self) -> bool {
        false
    }
}
