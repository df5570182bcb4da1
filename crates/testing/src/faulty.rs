//! A transport whose dialed streams misbehave on purpose: both sides see a peer or a network that does.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::io::Errno;

use llm_datadist_core::testing::error::Result;
use llm_datadist_core::testing::model::Deadline;
use llm_datadist_core::testing::net::{Address, Interference, Listener, Stream, Transport, Way};

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
}

/// A transport whose dialed streams have faults.
pub struct Faulty {
    under: Arc<dyn Transport>,
    faults: Box<dyn Fn(usize) -> Faults + Send + Sync>,
    dials: AtomicUsize,
}

impl Faulty {
    /// Wraps `under`. `faults` returns the faults of each dial, which it gets as a number from 0.
    pub fn new(under: Arc<dyn Transport>, faults: impl Fn(usize) -> Faults + Send + Sync + 'static) -> Self {
        Faulty { under, faults: Box::new(faults), dials: AtomicUsize::new(0) }
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({:?}, {:?} dials)", self.under, self.dials)
    }
}

impl Transport for Faulty {
    fn name(&self) -> &'static str {
        self.under.name()
    }

    fn dial(&self, to: &Address, deadline: Deadline) -> Result<Stream> {
        let faults = (self.faults)(self.dials.fetch_add(1, Ordering::Relaxed));
        let mut stream = self.under.dial(to, deadline)?;
        let running = |fault| ArmedFault { fault, gone: AtomicU64::new(0) };
        stream.faults = Some(Box::new(Ways([faults.receiving, faults.sending].map(running))));
        Ok(stream)
    }

    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>> {
        self.under.listen(at)
    }
}

/// The faults of one stream while it runs: receiving, and sending.
#[derive(Debug)]
struct Ways([ArmedFault; 2]);

/// A fault, and how many bytes have passed in its direction.
#[derive(Debug)]
struct ArmedFault {
    fault: Option<Fault>,
    gone: AtomicU64,
}

impl Ways {
    fn of(&self, way: Way) -> &ArmedFault {
        &self.0[usize::from(way == Way::Out)]
    }
}

impl Interference for Ways {
    fn allow(&self, way: Way, len: usize) -> io::Result<Option<usize>> {
        match self.of(way).left() {
            Some(0) => self.of(way).stop(),
            Some(left) => Ok(Some(len.min(usize::try_from(left).unwrap_or(len)))),
            None => Ok(Some(len)),
        }
    }

    fn allow_windows(&self, way: Way, lens: &[u64], skip: u64) -> io::Result<Option<usize>> {
        let Some(mut left) = self.of(way).left().map(|left| left.saturating_add(skip)) else {
            return Ok(Some(lens.len()));
        };
        let fits = |len: &&u64| {
            let fits = **len <= left;
            left = left.saturating_sub(**len);
            fits
        };
        let whole = lens.iter().take_while(fits).count();
        if whole == 0 { self.of(way).stop() } else { Ok(Some(whole)) }
    }

    fn garble(&self, way: Way, bytes: &mut [u8]) {
        let ArmedFault { fault: Some(Fault::Garble(at)), gone } = self.of(way) else { return };
        let inside = at.checked_sub(gone.load(Ordering::Relaxed)).and_then(|at| usize::try_from(at).ok());
        if let Some(byte) = inside.and_then(|at| bytes.get_mut(at)) {
            *byte ^= 0xFF;
        }
    }

    fn passed(&self, way: Way, bytes: usize) {
        self.of(way).gone.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn stalled(&self, way: Way) -> bool {
        matches!(self.of(way).fault, Some(Fault::Stall(_))) && self.of(way).left() == Some(0)
    }
}

impl ArmedFault {
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
}
