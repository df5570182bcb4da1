//! Checksums of windows, whose bytes are copied into a small buffer before they are hashed.
//!
//! No slice may be made over memory that others may write. The buffer stays in the first-level cache, so the copy costs little
//! beside reading the memory.

use crate::checksums::{BlockChecksum, Checksums};
use crate::error::Result;
use crate::fallible;
use crate::memory::{Window, Windows, read_bytes};

/// Bytes that are read and hashed at a time.
const BUFFER: usize = 16 << 10;

/// The checksum of some bytes of a plan in the order of the plan, which is the same at both ends.
pub struct WindowSum {
    checksums: Checksums,
    checksum: BlockChecksum,
    buffer: Vec<u8>,
    filled: usize,
}

impl WindowSum {
    pub fn new(checksums: Checksums) -> Result<WindowSum> {
        let buffer = fallible::filled("the buffer of a checksum", 0, BUFFER)?;
        Ok(WindowSum { checksum: checksums.block(), checksums, buffer, filled: 0 })
    }

    /// Adds the bytes of windows as they are in memory now.
    pub(super) fn add(&mut self, windows: Windows<'_>) -> Result<()> {
        for window in windows.iter() {
            let mut done = 0;
            while done < window.len() {
                let part = window.part(done, (BUFFER - self.filled) as u64);
                let end = self.filled + usize::try_from(part.len()).unwrap_or(BUFFER);
                read_bytes(&part, self.buffer.get_mut(self.filled..end).unwrap_or_default())?;
                (self.filled, done) = (end, done + part.len());
                if self.filled >= BUFFER {
                    self.flush();
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self) {
        self.checksum.add(self.buffer.get(..self.filled).unwrap_or_default());
        self.filled = 0;
    }

    /// Returns the checksum of all bytes that were added, and begins the next one.
    pub(super) fn end_block(&mut self) -> u64 {
        self.flush();
        std::mem::replace(&mut self.checksum, self.checksums.block()).value()
    }

    /// Returns the checksum of all bytes that were added.
    pub fn value(mut self) -> u64 {
        self.end_block()
    }
}

/// Returns the checksum of the bytes of each window as they are in memory now, bound to the bytes beside it.
pub fn window_sums<'a>(pairs: impl ExactSizeIterator<Item = (&'a [u8], Window<'a>)>) -> Result<Vec<u64>> {
    let mut sums = fallible::with_capacity("the checksums of values", pairs.len())?;
    let mut sum: Option<WindowSum> = None;
    for (bound, window) in pairs {
        let checksums = Checksums::bound_to_bytes(bound)?;
        let sum = match &mut sum {
            Some(sum) => {
                sum.checksum = checksums.block();
                sum
            }
            empty => empty.insert(WindowSum::new(checksums)?),
        };
        sum.add(window.into())?;
        sums.push(sum.end_block());
    }
    Ok(sums)
}
