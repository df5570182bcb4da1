//! Buffers of host memory, through which the bytes of a device pass where nothing reaches its memory directly.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::{BounceBuffer, Window};
use crate::sync::Mutex;

/// Bytes of a buffer: enough that starting a copy of a device costs little beside the copy, and few enough that the
/// bytes stay in a core's second-level cache between the two hops.
pub(super) const BUFFER_BYTES: u64 = 512 << 10;
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
        let gone = || Error::new(ErrorKind::System, "the buffer was returned");
        Ok(self.buffer.as_ref().ok_or_else(gone)?.windows(at, len, 1)?.first())
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
