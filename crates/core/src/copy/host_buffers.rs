//! Buffers of host memory, through which the bytes of a device pass where nothing reaches its memory directly, and short windows
//! where they pass a socket faster (`short_windows`).

use std::sync::Arc;

use crate::device::{Copier, Copy};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::memory::kernels::Kernel;
use crate::memory::{BounceBuffer, Window, Windows};
use crate::plan::Side;
use crate::sync::Mutex;

/// Bytes of a buffer: enough that starting a copy of a device costs little beside the copy, and few enough that the
/// bytes stay in a core's second-level cache between the two hops.
pub(super) const BUFFER_BYTES: u64 = 512 << 10;
/// Maximum number of windows that a device copies at once.
pub(super) const WINDOWS: usize = 1024;
/// Maximum number of idle buffers that are kept. Further ones are freed when they are returned.
const MAX_IDLE: usize = 8;

/// The buffers of one engine. They are allocated when a copy needs them.
#[derive(Debug, Default)]
pub(super) struct HostBuffers {
    idle: Mutex<Vec<BounceBuffer>>,
}

impl HostBuffers {
    /// Returns an idle buffer, or a new one. Returns `Err(OutOfMemory)` if there is no memory for one.
    pub(super) fn take(self: &Arc<Self>) -> Result<HostBuffer> {
        let idle = self.idle.lock().pop();
        let buffer = match idle {
            Some(buffer) => buffer,
            None => BounceBuffer::new(BUFFER_BYTES)?,
        };
        Ok(HostBuffer { owner: self.clone(), buffer: Some(buffer) })
    }

    /// Returns the number of idle buffers.
    #[cfg(feature = "testing")]
    pub(super) fn idle(&self) -> usize {
        self.idle.lock().len()
    }
}

/// A buffer that one hop after the other uses; returned on drop.
#[derive(Debug)]
pub(super) struct HostBuffer {
    owner: Arc<HostBuffers>,
    /// `None` only during drop.
    buffer: Option<BounceBuffer>,
}

impl HostBuffer {
    /// Returns a window of `len` bytes from byte `at` on. Returns `Err(System)` if the buffer does not contain it.
    pub(super) fn window(&self, at: u64, len: u64) -> Result<Window<'_>> {
        Ok(self.windows(at, len, 1)?.first())
    }

    /// Returns windows as [`BounceBuffer::windows`] does.
    pub(super) fn windows(&self, at: u64, len: u64, count: u64) -> Result<Windows<'_>> {
        let gone = || Error::new(ErrorKind::System, "the buffer was returned");
        self.buffer.as_ref().ok_or_else(gone)?.windows(at, len, count)
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let mut idle = self.owner.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.extend(self.buffer.take());
        }
    }
}

/// Windows whose bytes a device copies into a host buffer (`Source`) or out of it, where they lie one after the other.
pub(super) struct PackedWindows<'a> {
    device: &'a dyn Copier,
    buffer: &'a HostBuffer,
    side: Side,
    /// Copies that are not yet made.
    copies: Vec<Copy<'a>>,
    /// Bytes of all windows since the last [`flush`](Self::flush).
    filled: u64,
}

impl<'a> PackedWindows<'a> {
    pub(super) fn new(device: &'a dyn Copier, buffer: &'a HostBuffer, side: Side) -> Self {
        PackedWindows { device, buffer, side, copies: Vec::new(), filled: 0 }
    }

    /// Bytes for which the buffer has room.
    pub(super) fn room(&self) -> u64 {
        BUFFER_BYTES - self.filled
    }

    /// Adds a window for which the buffer has room.
    pub(super) fn add(&mut self, window: Window<'a>) -> Result<()> {
        if self.copies.len() == WINDOWS {
            self.copy()?;
        }
        let between = self.buffer.window(self.filled, window.len())?;
        let (src, dst) = self.side.source_first(window, between);
        fallible::push("the windows of a device", &mut self.copies, Copy::one(src, dst))?;
        self.filled += window.len();
        Ok(())
    }

    /// Makes all copies, and begins at the start of the buffer again. Returns the bytes of the buffer that the windows took.
    pub(super) fn flush(&mut self) -> Result<Window<'a>> {
        self.copy()?;
        self.buffer.window(0, std::mem::take(&mut self.filled))
    }

    fn copy(&mut self) -> Result<()> {
        // One of the two hops has just moved these bytes, or the other one is next, so ordinary stores keep them in the caches.
        self.device.copy(&self.copies, Kernel::PLAIN)?;
        self.copies.clear();
        Ok(())
    }
}
