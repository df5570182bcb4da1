//! Copies out of memory of another host by UCX.
//!
//! This is a copier and no device: nothing is allocated from a peer.

use std::sync::Arc;

use super::traits::Copier;
use crate::error::Result;
use crate::memory::FabricRegion;
use crate::memory::kernels::{Copy, Kernel};
use crate::model::Deadline;

/// Maximum number of pieces that are handed over together.
const PIECES: usize = 4096;

/// A copier that reads a pool of one peer, until a deadline.
#[derive(Debug)]
pub struct FabricReader {
    region: Arc<FabricRegion>,
    deadline: Deadline,
}

impl FabricReader {
    /// Creates a copier that reads `region`.
    pub fn new(region: Arc<FabricRegion>, deadline: Deadline) -> Self {
        FabricReader { region, deadline }
    }
}

impl Copier for FabricReader {
    fn copy(&self, batch: &[Copy<'_>], _: Kernel) -> Result<()> {
        // An entry may be millions of windows, and a peer chooses how many.
        let mut pairs = Vec::with_capacity(PIECES.min(batch.len()));
        for pair in batch.iter().flat_map(|copy| copy.pairs()) {
            pairs.push(pair);
            if pairs.len() == PIECES {
                self.region.read(&pairs, self.deadline)?;
                pairs.clear();
            }
        }
        if pairs.is_empty() { Ok(()) } else { self.region.read(&pairs, self.deadline) }
    }

    fn batch(&self) -> usize {
        PIECES
    }

    fn unit(&self) -> (u64, u64) {
        // The network is idle between two units, so there are few.
        (16 << 20, 64 << 20)
    }

    fn uses_kernels(&self) -> bool {
        false
    }
}
