//! The moment at which a call gives up.

#[cfg(feature = "testing")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{ThreadId, current};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};

/// The moment at which a call gives up. One per call, shared by every wait and every piece of it.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    limit: Duration,
    /// The option or argument that set it, for the message.
    name: &'static str,
    /// Asked now and then while the caller waits: whether the wait shall end early (Ctrl-C).
    interrupted: Option<(fn() -> bool, ThreadId)>,
    #[cfg(feature = "testing")]
    over: Option<&'static AtomicBool>,
}

impl Deadline {
    /// The longest sleep of a wait that may be interrupted: Ctrl-C is noticed within this time.
    const NAP: Duration = Duration::from_millis(100);

    /// A deadline `limit` from now, set by `sync_kv_timeout`. A limit beyond what the clock can hold is cut to ten years.
    #[must_use]
    pub fn after(limit: Duration) -> Self {
        let limit = limit.min(Duration::from_secs(10 * 365 * 24 * 3600));
        Deadline {
            at: Instant::now() + limit,
            limit,
            name: "sync_kv_timeout",
            interrupted: None,
            #[cfg(feature = "testing")]
            over: None,
        }
    }

    /// The same deadline, which has also passed once `over` is set: a test says when, and no clock.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn over_when(self, over: Option<&'static AtomicBool>) -> Self {
        Deadline { over, ..self }
    }

    /// The same moment, set by the option or argument called `name`.
    #[must_use]
    pub fn named(self, name: &'static str) -> Self {
        Deadline { name, ..self }
    }

    /// The same moment, and waits of this thread that end early once `interrupted` says so. Other threads that work for
    /// the call are not asked: they end with it.
    #[must_use]
    pub fn watched(self, interrupted: Option<fn() -> bool>) -> Self {
        Deadline { interrupted: interrupted.map(|asked| (asked, current().id())), ..self }
    }

    /// What is left; zero once it has passed.
    #[must_use]
    pub fn left(&self) -> Duration {
        #[cfg(feature = "testing")]
        if self.over.is_some_and(|over| over.load(Ordering::SeqCst)) {
            return Duration::ZERO;
        }
        self.at.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }

    /// How long to sleep before looking again: what is left, in slices where the wait may be interrupted. Whoever sleeps
    /// calls [`waiting`](Self::waiting) each time it wakes without what it waited for.
    #[must_use]
    pub fn nap(&self) -> Duration {
        if self.interrupted.is_some() { self.left().min(Self::NAP) } else { self.left() }
    }

    /// The error for a call that was still `doing` something when the deadline passed.
    #[cold]
    #[must_use]
    pub fn error(&self, doing: &str) -> Error {
        Error::new(ErrorKind::Timeout, format!("{} passed while {doing}", self.name))
            .with("limit_ms", self.limit.as_millis())
    }

    /// `Err` once the deadline has passed.
    pub fn check(&self, doing: &str) -> Result<()> {
        if self.passed() { Err(self.error(doing)) } else { Ok(()) }
    }

    /// `Err` once the caller was interrupted. Never to be called under a lock: what is asked runs signal handlers, which
    /// may call the engine.
    pub fn interruption(&self, doing: &str) -> Result<()> {
        if self.interrupted.is_some_and(|(asked, caller)| caller == current().id() && asked()) {
            return Err(Error::new(ErrorKind::Interrupted, format!("interrupted while {doing}")));
        }
        Ok(())
    }

    /// `Err` once the deadline has passed or the caller was interrupted. As [`interruption`](Self::interruption), never
    /// under a lock.
    pub fn waiting(&self, doing: &str) -> Result<()> {
        self.interruption(doing)?;
        self.check(doing)
    }
}
