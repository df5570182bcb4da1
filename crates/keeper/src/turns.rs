//! The order of calls that ask the keeper: one at a time.

use std::sync::{Condvar, Mutex, PoisonError};

use llm_datadist_core::{Deadline, ErrorKind, Result};

/// Calls that wait for each other.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    taken: Mutex<bool>,
    returned: Condvar,
}

/// The turn of a call; returned on drop.
#[derive(Debug)]
pub(crate) struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits for a turn. `None` if the deadline passes before.
    pub(crate) fn take(&self, deadline: Deadline) -> Result<Option<Turn<'_>>> {
        loop {
            let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
            if *taken && !deadline.passed() {
                let waited = self.returned.wait_timeout(taken, deadline.wait_limit());
                taken = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if !*taken {
                *taken = true;
                return Ok(Some(Turn(self)));
            }
            drop(taken);
            match deadline.waiting("waiting for other calls") {
                Err(error) if error.kind() == ErrorKind::Timeout => return Ok(None),
                other => other?,
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.returned.notify_one();
    }
}
