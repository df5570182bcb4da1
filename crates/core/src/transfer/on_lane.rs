//! For which asynchronous call a lane works: the waits of its deadlines end early once that call is stopped.

use std::cell::RefCell;
use std::sync::Arc;

use crate::events::Transfer;
use crate::model::Deadline;

thread_local! {
    /// The transfer for which this thread works.
    static RUNNING: RefCell<Option<Arc<Transfer>>> = const { RefCell::new(None) };
}

/// The time during which this thread works for a transfer; holds the one for which it worked before.
pub(crate) struct OnLane(Option<Arc<Transfer>>);

impl OnLane {
    /// Has this thread work for `transfer` until the result is dropped.
    pub(super) fn of(transfer: &Arc<Transfer>) -> OnLane {
        OnLane(RUNNING.replace(Some(transfer.clone())))
    }

    /// Returns `deadline` with waits that end early once the transfer of this thread is stopped.
    pub(super) fn watched(deadline: Deadline) -> Deadline {
        deadline.watched(Some(stopped))
    }
}

impl Drop for OnLane {
    fn drop(&mut self) {
        RUNNING.set(self.0.take());
    }
}

/// Whether the transfer for which this thread works must end early. The waits of its deadlines ask this.
fn stopped() -> bool {
    RUNNING.with_borrow(|running| running.as_ref().is_some_and(|transfer| transfer.proceed().is_err()))
}
