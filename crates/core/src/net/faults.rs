//! Streams that misbehave on purpose, to test the modules above. Without the feature `testing`, all of this
//! does nothing.
//!
//! Faults act on the bytes inside [`Stream`](super::Stream), so both sides see a peer or a network that
//! misbehaves. `device::sim` has the faults of memory and devices.

use std::borrow::Cow;
use std::io;

use super::step::{Moved, Way};

#[cfg(feature = "testing")]
pub use self::testing::{Fault, Faults};

/// The faults of one stream, and how many of its bytes have passed.
#[derive(Debug, Default)]
pub(super) struct Running {
    #[cfg(feature = "testing")]
    ways: Option<[testing::Running; 2]>,
}

#[cfg(not(feature = "testing"))]
#[expect(
    clippy::unused_self,
    clippy::unnecessary_wraps,
    clippy::needless_pass_by_value,
    reason = "the faults of a release: none"
)]
impl Running {
    pub(super) fn allow(&self, _: Way, len: usize) -> io::Result<Option<usize>> {
        Ok(Some(len))
    }

    pub(super) fn allow_windows(
        &self,
        _: Way,
        lens: impl ExactSizeIterator<Item = u64>,
        _: u64,
    ) -> io::Result<Option<usize>> {
        Ok(Some(lens.len()))
    }

    pub(super) fn garbled<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        Cow::Borrowed(bytes)
    }

    pub(super) fn garble(&self, _: &mut [u8], _: &rustix::io::Result<usize>) {}

    pub(super) fn passed(&self, _: Way, moved: Moved) -> Moved {
        moved
    }

    pub(super) fn stalled(&self, _: Way) -> bool {
        false
    }
}

#[cfg(feature = "testing")]
impl Running {
    pub(super) fn new(faults: Faults) -> Self {
        Running { ways: Some([faults.receiving, faults.sending].map(testing::Running::new)) }
    }

    fn way(&self, way: Way) -> Option<&testing::Running> {
        self.ways.as_ref().map(|ways| &ways[usize::from(way == Way::Out)])
    }

    /// Returns how many of `len` bytes may pass now: `None` while the stream stalls, an error where it is
    /// cut.
    pub(super) fn allow(&self, way: Way, len: usize) -> io::Result<Option<usize>> {
        self.way(way).map_or(Ok(Some(len)), |running| running.allow(len))
    }

    /// Returns how many of the windows with lengths `lens` may pass now. `skip` bytes of the first one have
    /// passed already.
    pub(super) fn allow_windows(
        &self,
        way: Way,
        lens: impl ExactSizeIterator<Item = u64>,
        skip: u64,
    ) -> io::Result<Option<usize>> {
        let count = lens.len();
        self.way(way).map_or(Ok(Some(count)), |running| running.allow_windows(lens, skip))
    }

    /// Returns `bytes` as they are sent.
    pub(super) fn garbled<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        let mut bytes = Cow::Borrowed(bytes);
        if let Some(at) = self.way(Way::Out).and_then(|running| running.garble_at(bytes.len())) {
            bytes.to_mut()[at] ^= 0xFF;
        }
        bytes
    }

    /// Inverts the byte at the position of the fault, if it is among the received bytes.
    pub(super) fn garble(&self, bytes: &mut [u8], got: &rustix::io::Result<usize>) {
        let at = |&len| self.way(Way::In).and_then(|running| running.garble_at(len));
        if let Some(at) = got.as_ref().ok().and_then(at) {
            bytes[at] ^= 0xFF;
        }
    }

    /// Counts the bytes that have passed.
    pub(super) fn passed(&self, way: Way, moved: Moved) -> Moved {
        if let (Some(running), &Moved::Bytes(bytes)) = (self.way(way), &moved) {
            running.count(bytes);
        }
        moved
    }

    /// Whether no bytes pass any more.
    pub(super) fn stalled(&self, way: Way) -> bool {
        self.way(way).is_some_and(testing::Running::stalled)
    }
}

#[cfg(feature = "testing")]
mod testing {
    use std::io;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::io::Errno;

    /// A fault in one direction. Bytes count from the start of the stream.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Fault {
        /// The stream breaks after this many bytes. If the position is inside a window, it breaks before that
        /// window.
        Cut(u64),
        /// No bytes pass after this many. If the position is inside a window, none of that window passes.
        Stall(u64),
        /// The byte at this position arrives inverted. Bytes of windows are not changed.
        Garble(u64),
    }

    /// The faults of one stream.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Faults {
        /// Fault in the bytes that are sent.
        pub sending: Option<Fault>,
        /// Fault in the bytes that are received.
        pub receiving: Option<Fault>,
        /// Whether dialing itself is refused.
        pub refuse: bool,
    }

    #[derive(Debug)]
    pub(super) struct Running {
        fault: Option<Fault>,
        gone: AtomicU64,
    }

    impl Running {
        pub(super) fn new(fault: Option<Fault>) -> Self {
            Running { fault, gone: AtomicU64::new(0) }
        }

        /// Returns the bytes until the fault stops the stream.
        fn left(&self) -> Option<u64> {
            match self.fault {
                Some(Fault::Cut(at) | Fault::Stall(at)) => {
                    Some(at.saturating_sub(self.gone.load(Ordering::Relaxed)))
                }
                _ => None,
            }
        }

        fn stop<T>(&self) -> io::Result<Option<T>> {
            if matches!(self.fault, Some(Fault::Cut(_))) { Err(Errno::CONNRESET.into()) } else { Ok(None) }
        }

        pub(super) fn allow(&self, len: usize) -> io::Result<Option<usize>> {
            match self.left() {
                Some(0) => self.stop(),
                Some(left) => Ok(Some(len.min(usize::try_from(left).unwrap_or(len)))),
                None => Ok(Some(len)),
            }
        }

        pub(super) fn allow_windows(
            &self,
            lens: impl ExactSizeIterator<Item = u64>,
            skip: u64,
        ) -> io::Result<Option<usize>> {
            let Some(mut left) = self.left().map(|left| left.saturating_add(skip)) else {
                return Ok(Some(lens.len()));
            };
            let fits = |len: &u64| {
                let fits = *len <= left;
                left = left.saturating_sub(*len);
                fits
            };
            let whole = lens.take_while(fits).count();
            if whole == 0 { self.stop() } else { Ok(Some(whole)) }
        }

        pub(super) fn garble_at(&self, len: usize) -> Option<usize> {
            let Some(Fault::Garble(at)) = self.fault else { return None };
            let inside = at.checked_sub(self.gone.load(Ordering::Relaxed))?;
            usize::try_from(inside).ok().filter(|&inside| inside < len)
        }

        pub(super) fn count(&self, bytes: usize) {
            self.gone.fetch_add(bytes as u64, Ordering::Relaxed);
        }

        pub(super) fn stalled(&self) -> bool {
            matches!(self.fault, Some(Fault::Stall(_))) && self.left() == Some(0)
        }
    }
}
