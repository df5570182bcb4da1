//! Pins for calls that wait without a thread: whoever releases the last row hands all of them over.

use std::fmt;
use std::sync::Arc;

use super::call_pins::{Pins, RowsOfCall, Tickets};
use super::row_pins::Waiter;
use crate::error::Result;
use crate::sync::Mutex;

/// The rows that a call waits for.
#[derive(Debug, Default)]
pub struct PendingPins(Mutex<Option<Pending>>);

struct Pending {
    rows: RowsOfCall,
    tickets: Tickets,
    ready: Box<dyn FnOnce(Pins) + Send>,
}

/// Has `ready` called with the pins on `rows` once all of these are free: at once on this thread, or later on a
/// thread that releases rows or withdraws a claim. It must be short, and no lock is held meanwhile. Returns `None`
/// if it was called, otherwise what [withdraws](PendingPins::withdraw) the claim.
pub fn pin_when_free(
    rows: RowsOfCall,
    ready: impl FnOnce(Pins) + Send + 'static,
) -> Result<Option<Arc<PendingPins>>> {
    let pending = Arc::new(PendingPins::default());
    // Locked before the rows, as in `try_again`. Nobody else has the lock before the claim is entered.
    let mut state = pending.0.lock();
    let mut locked = rows.lock()?;
    if locked.conflict(None).is_none() {
        locked.take(None);
        drop(locked);
        drop(state);
        ready(rows.pins());
        return Ok(None);
    }
    let waiter: Arc<dyn Waiter> = pending.clone();
    let tickets = locked.claim(Some(&waiter))?;
    drop(locked);
    *state = Some(Pending { rows, tickets, ready: Box::new(ready) });
    drop(state);
    Ok(Some(pending))
}

impl PendingPins {
    /// Gives up the claim. Returns `false` if the call already has its rows, or has given up before.
    pub fn withdraw(&self) -> bool {
        let Some(Pending { rows, tickets, .. }) = self.0.lock().take() else { return false };
        // The counters were allocated when the claim was entered, so this does not fail.
        if let Ok(mut locked) = rows.lock() {
            locked.withdraw(Some(tickets));
        }
        rows.wake_others();
        true
    }
}

impl Waiter for PendingPins {
    fn try_again(&self) {
        let mut state = self.0.lock();
        let Some(Pending { rows, tickets, .. }) = state.as_ref() else { return };
        let Ok(mut locked) = rows.lock() else { return };
        if locked.conflict(Some(*tickets)).is_some() {
            return;
        }
        locked.take(Some(*tickets));
        drop(locked);
        let taken = state.take();
        drop(state);
        if let Some(Pending { rows, ready, .. }) = taken {
            ready(rows.pins());
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("rows", &self.rows)
            .field("tickets", &self.tickets)
            .finish_non_exhaustive()
    }
}
