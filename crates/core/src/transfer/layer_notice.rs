//! The notification of a layer-wise push, which is delivered when all layers are in place everywhere.

use std::sync::Arc;
use std::time::Duration;

use super::executor::Job;
use super::running_calls::RunningCalls;
use crate::error::{Error, ErrorKind, Result};
use crate::events::Transfer;
use crate::model::{ClusterId, Deadline};
use crate::session::{Link, ReservedNotification};
use crate::sync::Mutex;

/// The notification for the peer of all destinations.
pub(crate) struct LayerNotice {
    pub(super) cluster: ClusterId,
    message: Vec<u8>,
    reserved: Mutex<Option<ReservedNotification>>,
}

impl LayerNotice {
    pub(crate) fn new(cluster: ClusterId, message: Vec<u8>) -> Arc<Self> {
        Arc::new(LayerNotice { cluster, message, reserved: Mutex::default() })
    }

    /// Reserves room in the queue of the peer, before the first layer moves.
    pub(super) fn reserve(&self, link: &Arc<Link>) -> Result<()> {
        *self.reserved.lock() = Some(link.reserve_notification(&self.message)?);
        Ok(())
    }

    /// Gives the room back, unless the notification was delivered.
    pub(super) fn give_back(&self) {
        drop(self.reserved.lock().take());
    }

    fn deliver(&self, deadline: Deadline) -> Result<()> {
        let Some(reserved) = self.reserved.lock().take() else { return Ok(()) };
        reserved.wait_for_earlier(deadline)?;
        reserved.deliver(None, deadline)
    }
}

/// How a task ends.
#[derive(Clone)]
pub(super) struct TaskEnd {
    pub(super) transfer: Arc<Transfer>,
    pub(super) running: Arc<RunningCalls>,
}

impl TaskEnd {
    /// Ends the transfer, once.
    pub(super) fn finish(&self, outcome: Result<u64>) {
        self.transfer.finish(outcome);
        self.running.leave(&self.transfer);
    }
}

/// Delivers the notification, and ends the task, whose layers are in place.
pub(super) struct NoticeJob {
    pub(super) notice: Arc<LayerNotice>,
    pub(super) end: TaskEnd,
    /// How long the delivery may take.
    pub(super) limit: Duration,
    pub(super) bytes: u64,
}

impl NoticeJob {
    fn end(&self, outcome: Result<u64>) {
        // Before anybody learns of the end.
        self.notice.give_back();
        self.end.finish(outcome);
    }
}

impl Job for NoticeJob {
    fn run(self: Arc<Self>) {
        let committed = self.end.transfer.commit();
        let delivered = committed.and_then(|()| self.notice.deliver(Deadline::after(self.limit)));
        self.end(delivered.map(|()| self.bytes));
    }

    fn refused(self: Arc<Self>, why: Error) {
        self.end(Err(why));
    }
}

impl Drop for NoticeJob {
    /// Ends the transfer if the thread has panicked. Otherwise it has ended, and this changes nothing.
    fn drop(&mut self) {
        let text = "the thread of a transfer ended without a result";
        self.end(Err(Error::new(ErrorKind::System, text)));
    }
}
