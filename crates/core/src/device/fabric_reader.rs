//! Copies out of memory of another host by UCX.
//!
//! This is a copier and no device: nothing is allocated from a peer.

use std::sync::Arc;
use std::time::Duration;

use super::traits::Copier;
use crate::error::Result;
use crate::memory::kernels::{Copy, Kernel};
use crate::memory::{FabricRegion, Window};
use crate::model::Deadline;

/// Maximum number of pieces that are handed over together.
const PIECES: usize = 4096;

/// A copier that reads a pool of one peer, until a deadline.
#[derive(Debug)]
pub struct FabricReader {
    region: Arc<FabricRegion>,
    deadline: Deadline,
    silence: Option<Duration>,
}

impl FabricReader {
    /// Creates a copier that reads `region`. The memory may take at most `silence` for each list of pieces.
    pub fn new(region: Arc<FabricRegion>, deadline: Deadline, silence: Option<Duration>) -> Self {
        FabricReader { region, deadline, silence }
    }

    fn read(&self, pairs: &[(Window<'_>, Window<'_>)]) -> Result<()> {
        self.region.read(pairs, self.silence.map_or(self.deadline, |silence| self.deadline.at_most(silence)))
    }
}

impl Copier for FabricReader {
    fn copy(&self, batch: &[Copy<'_>], _: Kernel) -> Result<()> {
        // An entry may be millions of windows, and a peer chooses how many.
        let mut pairs = Vec::with_capacity(PIECES.min(batch.len()));
        for pair in batch.iter().flat_map(|copy| copy.pairs()) {
            pairs.push(pair);
            if pairs.len() == PIECES {
                self.read(&pairs)?;
                pairs.clear();
            }
        }
        if pairs.is_empty() { Ok(()) } else { self.read(&pairs) }
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
