//! What the deadline of a copy bounds: the wait before its first byte, or all of it.
//!
//! Not for: the clock (`id::Deadline`).

use crate::error::Result;
use crate::model::Deadline;

/// How long a copy may take.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// Bounds the wait before the first byte and is checked once after it. A copy that has begun is finished, because a
    /// caller can do little with half of it, and the rest takes no longer than memory needs
    /// (`a_copy_that_has_begun_outlasts_its_limit`). For copies within this process.
    Start(Deadline),
    /// Bounds every unit. For transfers, whose other side may stop at any moment.
    Whole(Deadline),
}

impl Limit {
    /// How long the copy may wait before it begins.
    #[must_use]
    pub fn to_wait(&self) -> Deadline {
        match *self {
            Limit::Start(deadline) | Limit::Whole(deadline) => deadline,
        }
    }

    /// Asked once, after all waits and before the first byte.
    pub fn begin(&self) -> Result<()> {
        match self {
            Limit::Start(deadline) => deadline.check("waiting to copy"),
            Limit::Whole(_) => Ok(()),
        }
    }

    /// Asked between two pieces of the work: `Err` if the limit covers the work and has passed.
    pub fn go_on(&self, doing: &str) -> Result<()> {
        match self {
            Limit::Start(_) => Ok(()),
            Limit::Whole(deadline) => deadline.check(doing),
        }
    }
}

impl From<Deadline> for Limit {
    /// A deadline that says no more is for all of the work.
    fn from(deadline: Deadline) -> Self {
        Limit::Whole(deadline)
    }
}
