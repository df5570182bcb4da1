//! Sends notifications on a worker, so that `notify` does not wait.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::executor::{ExecutorHandle, Job, JobClass};
use crate::error::{Error, Result};
use crate::session::Link;

/// Accepts a notification for the peer of `link`, and returns. A worker sends it behind those that were accepted before. Returns
/// `Err(System)` if no worker can be started.
pub(crate) fn notify(
    executor: &ExecutorHandle,
    link: &Arc<Link>,
    message: Vec<u8>,
    limit: Duration,
) -> Result<()> {
    if link.accept_notification(message)? {
        let refused = Arc::default();
        let job = NotifyJob { link: link.clone(), limit, refused: Arc::clone(&refused) };
        executor.submit(JobClass::Notifications(link.peer.cluster), Arc::new(job));
        // A refusal comes before `submit` returns, unless the engine closes.
        if let Some(error) = OnceLock::<Error>::get(&refused) {
            return Err(error.clone());
        }
    }
    Ok(())
}

/// Sends the notifications of one link until none waits.
struct NotifyJob {
    link: Arc<Link>,
    limit: Duration,
    /// Why the notification was taken back, for the call that is still running.
    refused: Arc<OnceLock<Error>>,
}

impl Job for NotifyJob {
    fn run(self: Arc<Self>) {
        self.link.send_notifications(self.limit);
    }

    fn refused(self: Arc<Self>, why: Error) {
        if self.link.take_back_notification(&why) {
            let _ = self.refused.set(why);
        }
    }
}
