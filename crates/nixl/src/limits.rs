//! When a read must end, and how it waits.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use llm_datadist_fabric::Error;

/// Interval between two calls of `cancelled`.
pub(crate) const ASK: Duration = Duration::from_millis(100);
/// How long a read polls before it sleeps.
const POLL: Duration = Duration::from_micros(50);
/// The shortest and the longest sleep between two polls.
const SLEEPS: (Duration, Duration) = (Duration::from_micros(10), Duration::from_millis(1));

/// The reasons to give up a read.
pub(crate) struct Limits<'a> {
    deadline: Option<Instant>,
    cancelled: &'a dyn Fn() -> bool,
    closed: &'a AtomicBool,
    asked: Cell<Instant>,
}

impl<'a> Limits<'a> {
    pub(crate) fn new(
        deadline: Option<Instant>,
        cancelled: &'a dyn Fn() -> bool,
        closed: &'a AtomicBool,
    ) -> Self {
        Limits { deadline, cancelled, closed, asked: Cell::new(Instant::now()) }
    }

    /// Returns `Err` if the read must end.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let now = Instant::now();
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::Closed);
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            return Err(Error::DeadlinePassed);
        }
        if now.duration_since(self.asked.get()) >= ASK {
            self.asked.set(now);
            if (self.cancelled)() {
                return Err(Error::Cancelled);
            }
        }
        Ok(())
    }

    /// Returns at most `limit`, and no more than is left until the deadline.
    pub(crate) fn left(&self, limit: Duration) -> Duration {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        left.map_or(limit, |left| left.min(limit))
    }
}

/// The pauses between two polls: none at first, then growing ones.
pub(crate) struct Pauses {
    since: Instant,
    next: Duration,
}

impl Pauses {
    pub(crate) fn new() -> Self {
        Pauses { since: Instant::now(), next: SLEEPS.0 }
    }

    pub(crate) fn pause(&mut self, limits: &Limits<'_>) {
        if self.since.elapsed() < POLL {
            std::hint::spin_loop();
            return;
        }
        std::thread::sleep(limits.left(self.next));
        self.next = (self.next * 2).min(SLEEPS.1);
    }
}
