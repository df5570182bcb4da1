//! Ends grants when their time has passed.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::clock::{Alarm, Alarmed};
use super::executor::ExecutorHandle;
use crate::error::Result;
use crate::grants::Grants;
use crate::sync::Mutex;

/// The clock of the grants of one engine: one alarm, for the grant that expires first.
pub struct GrantClock {
    executor: ExecutorHandle,
    grants: Arc<Grants>,
    /// When the alarm is set, and for which time.
    alarm: Mutex<Option<(Instant, Alarm)>>,
}

impl GrantClock {
    pub(crate) fn new(executor: &ExecutorHandle, grants: &Arc<Grants>) -> Arc<GrantClock> {
        Arc::new(GrantClock { executor: executor.clone(), grants: grants.clone(), alarm: Mutex::default() })
    }

    /// Sets the alarm, unless it is set for an earlier time. Called after a grant was lent. Returns `Err(System)` if no
    /// thread can be started.
    pub(crate) fn watch(self: &Arc<Self>) -> Result<()> {
        let mut alarm = self.alarm.lock();
        let Some(when) = self.grants.next_expiry() else { return Ok(()) };
        if alarm.is_some_and(|(set, _)| set <= when) {
            return Ok(());
        }
        let expiry = GrantExpiry { clock: Arc::downgrade(self), when };
        let replaced = alarm.replace((when, self.executor.clock().at(when, Arc::new(expiry))?));
        if let Some((_, replaced)) = replaced {
            self.executor.clock().forget(replaced);
        }
        Ok(())
    }
}

/// Ends the grants whose time has passed.
struct GrantExpiry {
    clock: Weak<GrantClock>,
    when: Instant,
}

impl Alarmed for GrantExpiry {
    fn due(self: Arc<Self>) {
        let Some(clock) = self.clock.upgrade() else { return };
        clock.grants.expire();
        // An alarm that was replaced while it went off is not the one that is set.
        clock.alarm.lock().take_if(|(set, _)| *set == self.when);
        // Fails only while the engine closes: the thread that runs this job exists.
        let _ = clock.watch();
    }
}
