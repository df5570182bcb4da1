//! Newtypes for the numbers that must not be mixed up, and the deadline every wait takes.
//!
//! Not for: arithmetic on sizes (`desc::Geometry`) or layers (`plan`).

use std::fmt;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};

/// Names one engine among all it links with; the whole unsigned 64-bit range is legal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClusterId(pub u64);

/// Names one cache of one engine: 1, 2, 3, … in the order of allocation and registration, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheId(pub i64);

impl fmt::Display for CacheId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The moment at which a call gives up. One per call, shared by every wait and every piece of it.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    /// A deadline `limit` from now. A limit beyond what the clock can hold is cut to ten years.
    #[must_use]
    pub fn after(limit: Duration) -> Self {
        let limit = limit.min(Duration::from_secs(10 * 365 * 24 * 3600));
        Deadline { at: Instant::now() + limit, limit }
    }

    /// What is left; zero once it has passed.
    #[must_use]
    pub fn left(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }

    /// The error for a call that was still `doing` something when the deadline passed.
    #[cold]
    #[must_use]
    pub fn error(&self, doing: &str) -> Error {
        Error::new(ErrorKind::Timeout, format!("sync_kv_timeout passed while {doing}"))
            .with("limit_ms", self.limit.as_millis())
    }

    /// `Err` once the deadline has passed.
    pub fn check(&self, doing: &str) -> Result<()> {
        if self.passed() { Err(self.error(doing)) } else { Ok(()) }
    }
}
