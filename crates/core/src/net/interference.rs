//! The place where a test can make a stream misbehave; outside tests nothing interferes
//! (`crates/testing` has the faults).

use std::fmt::Debug;
use std::io;

use super::step::Way;

/// What happens to the bytes of one stream on their way through its socket.
pub trait Interference: Debug + Send + Sync {
    /// Returns how many of `len` bytes may pass now; `None` while the stream stalls.
    fn allow(&self, _way: Way, len: usize) -> io::Result<Option<usize>> {
        Ok(Some(len))
    }

    /// Returns how many of the windows with lengths `lens` may pass now. `skip` bytes of the first one have
    /// passed already.
    fn allow_windows(&self, _way: Way, lens: &[u64], _skip: u64) -> io::Result<Option<usize>> {
        Ok(Some(lens.len()))
    }

    /// Changes bytes of frames, which are about to be sent or have been received.
    fn garble(&self, way: Way, bytes: &mut [u8]);

    /// Counts bytes that have passed.
    fn passed(&self, _way: Way, _bytes: usize) {}

    /// Whether no bytes pass any more.
    fn stalled(&self, _way: Way) -> bool {
        false
    }
}
