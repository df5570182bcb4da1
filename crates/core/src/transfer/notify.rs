//! Sends notifications on a lane, so that `notify` does not wait.

use std::sync::Arc;
use std::time::Duration;

use super::executor::{ExecutorHandle, Job, LaneKey};
use crate::error::{Error, Result};
use crate::session::Link;

/// Accepts a notification for the peer of `link`, and returns. A lane sends it behind those that were accepted before.
pub(crate) fn notify(
    lanes: &ExecutorHandle,
    link: &Arc<Link>,
    message: Vec<u8>,
    limit: Duration,
) -> Result<()> {
    if link.accept_notification(message)? {
        lanes
            .carry(LaneKey::Notifications(link.cluster()), Arc::new(NotifyJob { link: link.clone(), limit }));
    }
    Ok(())
}

/// Sends the notifications of one link until none waits.
struct NotifyJob {
    link: Arc<Link>,
    limit: Duration,
}

impl Job for NotifyJob {
    fn run(self: Arc<Self>) {
        self.link.send_notifications(self.limit);
    }

    fn refused(self: Arc<Self>, why: Error) {
        self.link.give_up_notifications(&why);
    }
}
