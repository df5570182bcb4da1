//! The checksum of the bytes that pass a stream. Both ends calculate it while the bytes are in the CPU caches.

use crate::checksums::{BlockChecksum, Checksums};
use crate::error::Result;
use crate::fallible;
use crate::memory::{Window, Windows, read_bytes};

/// Bytes that are read and hashed at a time.
const BUFFER: usize = 16 << 10;
/// Bytes that move between two times of hashing, so that they are still in the CPU caches.
pub(super) const SUMMED_BYTES: u64 = 256 << 10;

/// The checksum of some bytes of a plan in the order of the plan, which is the same at both ends.
pub struct StreamSum {
    checksum: BlockChecksum,
    buffer: Vec<u8>,
    filled: usize,
}

impl StreamSum {
    pub fn new(checksums: &Checksums) -> Result<StreamSum> {
        let buffer = fallible::filled("the buffer of a checksum", 0, BUFFER)?;
        Ok(StreamSum { checksum: checksums.block(), buffer, filled: 0 })
    }

    /// Adds the bytes of the windows as they are in memory now.
    pub(super) fn add(&mut self, runs: &[Windows<'_>]) -> Result<()> {
        runs.iter().flat_map(|run| run.iter()).try_for_each(|window| self.add_window(&window))
    }

    fn add_window(&mut self, window: &Window<'_>) -> Result<()> {
        let mut done = 0;
        while done < window.len() {
            let room = (BUFFER - self.filled) as u64;
            let part = window.part(done, room);
            let end = self.filled + usize::try_from(part.len()).unwrap_or(BUFFER);
            read_bytes(&part, self.buffer.get_mut(self.filled..end).unwrap_or_default())?;
            (self.filled, done) = (end, done + part.len());
            if self.filled >= BUFFER {
                self.flush();
            }
        }
        Ok(())
    }

    fn flush(&mut self) {
        self.checksum.add(self.buffer.get(..self.filled).unwrap_or_default());
        self.filled = 0;
    }

    /// Returns the checksum of all bytes that were added.
    pub fn value(mut self) -> u64 {
        self.flush();
        self.checksum.value()
    }
}
