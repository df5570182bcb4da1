//! The events of an engine, and the end of its asynchronous calls.

use std::sync::Arc;
use std::time::Duration;

use super::DataDist;
use crate::error::Result;
use crate::events::{Event, EventQueue};
use crate::model::Deadline;

impl DataDist {
    /// Returns at most `most` outcomes of transfers that nobody has taken yet, in the order in which they ended, and
    /// removes them from the queue. Never waits.
    pub fn poll(&self, most: usize) -> Result<Vec<Event>> {
        self.calls.queue().poll(most)
    }

    /// Returns the queue of events.
    pub fn events(&self) -> &Arc<EventQueue> {
        self.calls.queue()
    }

    /// Waits until no asynchronous call runs. Returns `false` once `limit` has passed, and `Err` only if interrupted.
    pub fn drain(&self, limit: Duration) -> Result<bool> {
        self.calls.drain(Deadline::after(limit).named("timeout_ms").watched(self.interrupted))
    }

    /// Ends all asynchronous calls and layer-wise transfers with an error of kind `Closed` and refuses new ones, because the
    /// engine is about to be dropped. Other threads may still be in calls of the engine.
    pub fn end_transfers(&self) {
        self.tasks.close();
        self.calls.close();
    }
}
