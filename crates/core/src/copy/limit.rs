//! What the deadline of a copy limits: the wait before its first byte, or the whole copy.

use crate::error::Result;
use crate::model::Deadline;

/// How long a copy may take.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// Limits the wait before the first byte, and is checked once after that wait. A copy that has begun runs
    /// to its end, because a caller cannot use half a copy, and the rest takes only as long as the memory
    /// needs (`a_copy_that_has_begun_outlasts_its_limit`). For copies within this process.
    Start(Deadline),
    /// Limits every unit. For transfers, because the peer may stop at any moment.
    Whole(Deadline),
}

impl Limit {
    /// Deadline of the wait before the copy begins.
    pub fn deadline(self) -> Deadline {
        match self {
            Limit::Start(deadline) | Limit::Whole(deadline) => deadline,
        }
    }

    /// Checks the limit once, after all waits and before the first byte. Returns `Err(Timeout)` if the limit
    /// covers only the start and has passed.
    pub fn begin(&self) -> Result<()> {
        match self {
            Limit::Start(deadline) => deadline.check("waiting to copy"),
            Limit::Whole(_) => Ok(()),
        }
    }

    /// Checks the limit between two pieces of the work. Returns `Err(Timeout)` if the limit covers the whole
    /// work and has passed.
    pub fn check(&self, doing: &str) -> Result<()> {
        match self {
            Limit::Start(_) => Ok(()),
            Limit::Whole(deadline) => deadline.check(doing),
        }
    }
}

impl From<Deadline> for Limit {
    /// A plain deadline limits the whole work.
    fn from(deadline: Deadline) -> Self {
        Limit::Whole(deadline)
    }
}
