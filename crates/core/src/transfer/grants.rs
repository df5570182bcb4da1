//! Ends grants when their time has passed.

use std::sync::{Arc, Weak};

use super::executor::{Alarmed, ExecutorHandle};
use crate::error::Result;
use crate::grants::Grants;

/// Sets an alarm for the grant that expires first, unless there is one already.
pub(crate) fn watch_grants(lanes: &ExecutorHandle, grants: &Arc<Grants>) -> Result<()> {
    let Some(when) = grants.next_alarm() else { return Ok(()) };
    let expiry = GrantExpiry { lanes: lanes.clone(), grants: Arc::downgrade(grants) };
    lanes.at(when, Arc::new(expiry)).map(drop).inspect_err(|_| grants.alarm_failed())
}

/// Ends the grants whose time has passed.
struct GrantExpiry {
    lanes: ExecutorHandle,
    grants: Weak<Grants>,
}

impl Alarmed for GrantExpiry {
    fn due(self: Arc<Self>) {
        let Some(grants) = self.grants.upgrade() else { return };
        grants.expire();
        // Fails only while the engine closes: the clock, which calls this, exists.
        let _ = watch_grants(&self.lanes, &grants);
    }
}
