//! A transport whose streams have faults, for tests.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use super::faults::Faults;
use super::stream::Stream;
use super::{Address, Listener, Transport, unreachable};
use crate::error::Result;
use crate::model::Deadline;

/// A transport whose dialed streams misbehave.
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
        if faults.refuse {
            return Err(unreachable(to, "connect to", Errno::CONNREFUSED));
        }
        Ok(self.under.dial(to, deadline)?.with_faults(faults))
    }

    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>> {
        self.under.listen(at)
    }
}
