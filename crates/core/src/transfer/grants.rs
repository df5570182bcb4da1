//! Ends grants when their time has passed.

use std::sync::{Arc, Weak};

use super::executor::{ExecutorHandle, Job};
use crate::error::{Error, Result};
use crate::grants::Grants;

/// Sets an alarm for the grant that expires first, unless there is one already.
pub(crate) fn watch_grants(lanes: &ExecutorHandle, grants: &Arc<Grants>) -> Result<()> {
    let Some(when) = grants.next_alarm() else { return Ok(()) };
    let expiry = GrantExpiry { lanes: lanes.clone(), grants: Arc::downgrade(grants) };
    lanes.at(when, Box::new(expiry)).map(drop).inspect_err(|_| grants.alarm_failed())
}

/// Ends the grants whose time has passed.
struct GrantExpiry {
    lanes: ExecutorHandle,
    grants: Weak<Grants>,
}

impl Job for GrantExpiry {
    fn run(self: Box<Self>) {
        let Some(grants) = self.grants.upgrade() else { return };
        grants.expire();
        // Fails only while the engine closes: the clock, which runs this job, exists.
        let _ = watch_grants(&self.lanes, &grants);
    }

    fn refused(self: Box<Self>, _: Error) {}
}
