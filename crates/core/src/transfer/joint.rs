//! One transfer for all destinations of a layer-wise push: it succeeds once all have succeeded, and ends once all have ended.
//!
//! If one fails, the others are cancelled. A notification is delivered when all layers are in place everywhere.

use std::sync::Arc;
use std::time::Duration;

use super::async_calls::AsyncCalls;
use super::executor::{ExecutorHandle, Job, JobClass};
use super::running_calls::RunningCalls;
use super::slot_map::SlotKey;
use crate::error::{Error, ErrorKind, Result};
use crate::events::Transfer;
use crate::model::{ClusterId, Deadline};
use crate::session::{Link, ReservedNotification};
use crate::sync::Mutex;

/// The transfer of all destinations.
#[derive(Debug)]
pub(super) struct Joint {
    pub(super) transfer: Arc<Transfer>,
    /// Its key among the calls that run.
    pub(super) key: SlotKey,
    running: Arc<RunningCalls>,
    executor: ExecutorHandle,
    notice: Option<Arc<LayerNotice>>,
    /// How long the delivery of the notification may take.
    limit: Duration,
    ends: Mutex<Ends>,
}

/// How the destinations have ended so far.
#[derive(Debug, Default)]
struct Ends {
    expected: u64,
    bytes: u64,
    /// The first failure.
    failed: Option<Error>,
}

/// The notification for the peer of all destinations.
pub(crate) struct LayerNotice {
    cluster: ClusterId,
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

    fn deliver(&self, deadline: Deadline) -> Result<()> {
        let Some(reserved) = self.reserved.lock().take() else { return Ok(()) };
        reserved.wait_for_earlier(deadline)?;
        reserved.deliver(None, deadline)
    }
}

impl Joint {
    pub(super) fn new(
        calls: &AsyncCalls,
        (transfer, key): (&Arc<Transfer>, SlotKey),
        notice: Option<Arc<LayerNotice>>,
        limit: Duration,
    ) -> Arc<Self> {
        let (running, executor) = (calls.running().clone(), calls.executor().clone());
        Arc::new(Joint {
            transfer: transfer.clone(),
            key,
            running,
            executor,
            notice,
            limit,
            ends: Mutex::default(),
        })
    }

    /// Notes that all layers of one more destination have `bytes` bytes.
    pub(super) fn expect(&self, bytes: u64) {
        let mut ends = self.ends.lock();
        ends.expected += bytes;
        self.transfer.expect(ends.expected);
    }

    /// Notes how a destination has ended. Returns whether it is the first one that has failed.
    pub(super) fn note(&self, end: Result<u64>) -> bool {
        let mut ends = self.ends.lock();
        match end {
            Ok(bytes) => ends.bytes += bytes,
            Err(error) if ends.failed.is_none() => {
                ends.failed = Some(error);
                return true;
            }
            Err(_) => {}
        }
        false
    }

    fn outcome(&self) -> Result<u64> {
        let ends = self.ends.lock();
        ends.failed.clone().map_or(Ok(ends.bytes), Err)
    }

    /// Ends the transfer, whose destinations have all ended. A notification is delivered first, by a worker.
    pub(super) fn finish(self: &Arc<Self>) {
        let outcome = self.outcome();
        match &self.notice {
            Some(notice) if outcome.is_ok() => {
                let job = NoticeJob { joint: self.clone() };
                self.executor.submit(JobClass::Calls(notice.cluster), Arc::new(job));
            }
            _ => self.end(outcome),
        }
    }

    fn end(&self, outcome: Result<u64>) {
        // Room that was reserved and is not needed is given back before anybody learns of the end.
        drop(self.notice.as_ref().and_then(|notice| notice.reserved.lock().take()));
        self.transfer.finish(outcome);
        self.running.leave(self.key);
    }
}

/// Delivers the notification, and ends the transfer.
struct NoticeJob {
    joint: Arc<Joint>,
}

impl Job for NoticeJob {
    fn run(self: Arc<Self>) {
        let joint = &self.joint;
        let deliver = |notice: &Arc<LayerNotice>| notice.deliver(Deadline::after(joint.limit));
        let delivered = joint.transfer.commit().and_then(|()| joint.notice.as_ref().map_or(Ok(()), deliver));
        joint.end(delivered.and_then(|()| joint.outcome()));
    }

    fn refused(self: Arc<Self>, why: Error) {
        self.joint.end(Err(why));
    }
}

impl Drop for NoticeJob {
    /// Ends the transfer if the thread has panicked. Otherwise it has ended, and this changes nothing.
    fn drop(&mut self) {
        let text = "the thread of a transfer ended without a result";
        self.joint.end(Err(Error::new(ErrorKind::System, text)));
    }
}

impl std::fmt::Debug for LayerNotice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerNotice").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}
