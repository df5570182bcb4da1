//! The call for which a thread of the engine works: the waits of its deadlines end early once that call is stopped.

use std::cell::RefCell;
use std::sync::Arc;

use crate::events::Transfer;
use crate::model::Deadline;
use crate::sync::OnDrop;

thread_local! {
    /// The transfer for which this thread works.
    static RUNNING: RefCell<Option<Arc<Transfer>>> = const { RefCell::new(None) };
}

/// Has this thread work for `transfer` until the result is dropped, and then for the one for which it worked before.
pub(crate) fn work_for(transfer: &Arc<Transfer>) -> impl Drop + use<> {
    let mut before = RUNNING.replace(Some(transfer.clone()));
    OnDrop(move || RUNNING.set(before.take()))
}

/// Returns `deadline` with waits that end early once the transfer of this thread is stopped.
pub(crate) fn watched(deadline: Deadline) -> Deadline {
    deadline.watched(Some(stopped))
}

/// Whether the transfer for which this thread works must end early. The waits of its deadlines ask this.
fn stopped() -> bool {
    RUNNING.with_borrow(|running| running.as_ref().is_some_and(|transfer| transfer.proceed().is_err()))
}
