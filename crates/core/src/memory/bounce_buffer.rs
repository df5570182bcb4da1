//! A buffer of the engine, through which bytes pass: short windows that are gathered or scattered, and those of a device.

use std::cell::Cell;
use std::fmt;

use super::{Reach, Window, Windows};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;

/// Bytes of a cache line.
const LINE: usize = 64;

/// A buffer of zeros, aligned to a cache line. Only its windows give access to it.
pub struct BounceBuffer(Vec<CacheLine>);

#[derive(Clone)]
#[repr(align(64))]
struct CacheLine(#[expect(dead_code, reason = "accessed by address")] Cell<[u8; LINE]>);

impl BounceBuffer {
    /// Allocates a buffer of at least `bytes` bytes. Returns `Err(OutOfMemory)` if there is no memory for it.
    pub fn new(bytes: u64) -> Result<BounceBuffer> {
        let lines = usize::try_from(bytes.div_ceil(LINE as u64)).unwrap_or(usize::MAX);
        Ok(BounceBuffer(fallible::filled(
            "a buffer for bytes in transit",
            CacheLine(Cell::new([0; LINE])),
            lines,
        )?))
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        (self.0.len() * LINE) as u64
    }

    /// Returns `count` windows of `len` bytes each, one after the other, of which the first starts at byte `at`.
    /// Returns `Err` of kind [`ErrorKind::System`] if the buffer does not contain them.
    pub fn windows(&self, at: u64, len: u64, count: u64) -> Result<Windows<'_>> {
        let end = len.checked_mul(count).and_then(|bytes| bytes.checked_add(at));
        if count == 0 || end.is_none_or(|end| end > self.bytes()) {
            let text = "the windows are not inside the buffer";
            return Err(Error::new(ErrorKind::System, text)
                .with("at", at)
                .with("window_bytes", len)
                .with("windows", count)
                .with("buffer_bytes", self.bytes()));
        }
        let first = Window::inside(self.0.as_ptr() as u64 + at, len, Reach::Host);
        Ok(Windows::inside(first, count, len.cast_signed()))
    }
}

impl fmt::Debug for BounceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BounceBuffer({} bytes)", self.bytes())
    }
}
