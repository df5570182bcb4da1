//! The moment at which a call gives up.

#[cfg(feature = "testing")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{ThreadId, current};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};

/// The moment at which a call gives up. A call has one deadline, which all of its waits and parts share.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    /// Nanoseconds. A `u64` takes half the memory of a `Duration`, and each transfer in flight has a deadline.
    limit: u64,
    /// The option or argument that set it, for error messages.
    name: &'static str,
    /// A function that is called from time to time while the caller waits, and returns whether the wait must
    /// end early (Ctrl-C); and the caller's thread.
    interrupted: Option<(fn() -> bool, ThreadId)>,
    #[cfg(feature = "testing")]
    over: Option<&'static AtomicBool>,
}

impl Deadline {
    /// Maximum sleep in a wait that can be interrupted, and so the time within which Ctrl-C is noticed.
    pub(crate) const INTERRUPT_INTERVAL: Duration = Duration::from_millis(100);

    /// Returns a deadline that is `limit` from now, with the name `sync_kv_timeout`. A limit of more than ten
    /// years is reduced to ten years, because the clock cannot represent every limit.
    pub fn after(limit: Duration) -> Self {
        Deadline::since(Instant::now(), limit)
    }

    /// Returns a deadline as [`after`](Self::after) does, whose limit counts from `begin`.
    pub(crate) fn since(begin: Instant, limit: Duration) -> Self {
        let limit = limit.min(Duration::from_secs(10 * 365 * 24 * 3600));
        Deadline {
            at: begin + limit,
            limit: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX),
            name: "sync_kv_timeout",
            interrupted: None,
            #[cfg(feature = "testing")]
            over: None,
        }
    }

    /// Returns the moment at which it passes.
    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// Test only: returns the same deadline, which also counts as passed once `over` is set.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn over_when(self, over: Option<&'static AtomicBool>) -> Self {
        Deadline { over, ..self }
    }

    /// Returns the same deadline under the name of the option or argument that set it.
    #[must_use]
    pub fn named(self, name: &'static str) -> Self {
        Deadline { name, ..self }
    }

    /// Returns the same deadline with interruptible waits: waits of this thread end early once `interrupted`
    /// returns `true`. It is not called on other threads that work for the call; these end with the call.
    #[must_use]
    pub fn watched(self, interrupted: Option<fn() -> bool>) -> Self {
        Deadline { interrupted: interrupted.map(|asked| (asked, current().id())), ..self }
    }

    /// Returns the same deadline, but at most `limit` from now.
    #[must_use]
    pub(crate) fn at_most(self, limit: Duration) -> Self {
        let sooner = Instant::now().checked_add(limit);
        Deadline { at: sooner.map_or(self.at, |sooner| self.at.min(sooner)), ..self }
    }

    /// Returns the time that is left; zero once the deadline has passed.
    pub fn left(&self) -> Duration {
        #[cfg(feature = "testing")]
        if self.over.is_some_and(|over| over.load(Ordering::SeqCst)) {
            return Duration::ZERO;
        }
        self.at.saturating_duration_since(Instant::now())
    }

    /// Returns whether the deadline has passed.
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }

    /// Returns how long to sleep before the next check: the time that is left, in slices of at most 100
    /// milliseconds if the wait can be interrupted. A waiting thread must call [`waiting`](Self::waiting)
    /// each time it wakes without what it waited for.
    #[doc(hidden)]
    pub fn wait_limit(&self) -> Duration {
        if self.interrupted.is_some() { self.left().min(Self::INTERRUPT_INTERVAL) } else { self.left() }
    }

    /// Returns the error of kind [`ErrorKind::Timeout`] for a call that was still `doing` something when the
    /// deadline passed.
    pub fn error(&self, doing: &str) -> Error {
        Error::new(ErrorKind::Timeout, format!("{} passed while {doing}", self.name))
            .with("limit_ms", Duration::from_nanos(self.limit).as_millis())
    }

    /// Returns `Err` of kind [`ErrorKind::Timeout`] once the deadline has passed.
    pub fn check(&self, doing: &str) -> Result<()> {
        if self.passed() { Err(self.error(doing)) } else { Ok(()) }
    }

    /// Returns `Err` of kind [`ErrorKind::Interrupted`] once the caller was interrupted. It must never be
    /// called under a lock, because the check runs signal handlers, which may call the engine.
    pub(crate) fn interruption(&self, doing: &str) -> Result<()> {
        if self.interrupted.is_some_and(|(asked, caller)| caller == current().id() && asked()) {
            return Err(Error::new(ErrorKind::Interrupted, format!("interrupted while {doing}")));
        }
        Ok(())
    }

    /// Returns `Err` once the caller was interrupted or the deadline has passed. Like
    /// [`interruption`](Self::interruption), it must never be called under a lock.
    #[doc(hidden)]
    pub fn waiting(&self, doing: &str) -> Result<()> {
        self.interruption(doing)?;
        self.check(doing)
    }
}
