//! The place where a test can make a stream misbehave; outside tests nothing interferes
//! (`testing::faulty` has the faults).

use std::borrow::Cow;
use std::fmt::Debug;
use std::io;

use super::step::{Moved, Way};
use super::stream::Stream;

/// What happens to the bytes of one stream on their way through its socket.
pub(crate) trait Interference: Debug + Send + Sync {
    /// Returns how many of `len` bytes may pass now; `None` while the stream stalls.
    fn allow(&self, way: Way, len: usize) -> io::Result<Option<usize>>;

    /// Returns how many of the windows with lengths `lens` may pass now. `skip` bytes of the first one have
    /// passed already.
    fn allow_windows(&self, way: Way, lens: &[u64], skip: u64) -> io::Result<Option<usize>>;

    /// Changes bytes of frames, which are about to be sent or have been received.
    fn garble(&self, way: Way, bytes: &mut [u8]);

    /// Counts bytes that have passed.
    fn passed(&self, way: Way, bytes: usize);

    /// Whether no bytes pass any more.
    fn stalled(&self, way: Way) -> bool;
}

impl Stream {
    pub(super) fn allowed(&self, way: Way, len: usize) -> io::Result<Option<usize>> {
        self.faults.as_ref().map_or(Ok(Some(len)), |faults| faults.allow(way, len))
    }

    /// Returns `bytes` as they are sent.
    pub(super) fn garbled<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        let mut bytes = Cow::Borrowed(bytes);
        if let Some(faults) = &self.faults {
            faults.garble(Way::Out, bytes.to_mut());
        }
        bytes
    }

    /// Counts what has passed.
    pub(super) fn passed(&self, way: Way, moved: Moved) -> Moved {
        if let (Some(faults), &Moved::Bytes(bytes)) = (&self.faults, &moved) {
            faults.passed(way, bytes);
        }
        moved
    }
}
