//! The end of a link is reported after the ends of the calls that used it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::model::ClusterId;

/// How long the end of a link waits for calls: a read that the kernel does not let go may last for minutes.
pub(crate) const MAX_HELD: Duration = Duration::from_secs(1);

/// The end of a link that its queue has not reported yet. It does so once the last reference is dropped, at the latest.
pub(crate) struct HeldEnd {
    pub(super) queue: Weak<dyn ReportsEnds>,
    /// Names it at the queue.
    pub(super) number: u64,
}

/// Who has the ends of links that are not reported yet: the event queue.
pub(super) trait ReportsEnds: Send + Sync {
    /// Reports the end of a link, unless it was reported.
    fn report_end(&self, number: u64);
}

/// Who knows the calls that run.
pub(crate) trait CallsOfPeers: Send + Sync {
    /// Has every call to `cluster` that runs keep `end` until its own end was reported, but has `end` reported after
    /// [`MAX_HELD`].
    fn hold(&self, cluster: ClusterId, end: &Arc<HeldEnd>);
}

impl HeldEnd {
    /// Has the end reported now, unless it was.
    pub(crate) fn report(&self) {
        if let Some(queue) = self.queue.upgrade() {
            queue.report_end(self.number);
        }
    }
}

impl Drop for HeldEnd {
    fn drop(&mut self) {
        self.report();
    }
}
