//! The lock that a call holds while it asks the keeper: one call at a time, because replies do not say which request they answer.

use llm_datadist_core::bindings::keeper::{Condvar, Mutex};
use llm_datadist_core::{Deadline, ErrorKind, Result};

/// A lock for which calls wait no longer than their deadline.
#[derive(Debug, Default)]
pub(crate) struct CallLock {
    locked: Mutex<bool>,
    released: Condvar,
}

/// Holds the lock until it is dropped.
#[derive(Debug)]
pub(crate) struct CallGuard<'a>(&'a CallLock);

impl CallLock {
    /// Waits for the lock. `None` if the deadline passes before.
    pub(crate) fn lock(&self, deadline: Deadline) -> Result<Option<CallGuard<'_>>> {
        loop {
            let mut locked = self.locked.lock();
            if *locked && !deadline.passed() {
                locked = self.released.wait_timeout(locked, deadline.wait_limit()).0;
            }
            if !*locked {
                *locked = true;
                return Ok(Some(CallGuard(self)));
            }
            drop(locked);
            match deadline.waiting("waiting for other calls") {
                Err(error) if error.kind() == ErrorKind::Timeout => return Ok(None),
                other => other?,
            }
        }
    }

    /// Waits for the lock. Returns `Err(Timeout)` if the deadline passes before.
    pub(crate) fn lock_or_fail(&self, deadline: Deadline) -> Result<CallGuard<'_>> {
        self.lock(deadline)?.ok_or_else(|| deadline.error("waiting for other calls"))
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        *self.0.locked.lock() = false;
        self.0.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::scope;
    use std::time::Duration;

    use super::*;
    use crate::attachment::tests::soon;

    #[test]
    fn locked_call_lock_times_out() {
        let lock = CallLock::default();
        let guard = lock.lock(soon()).unwrap().unwrap();
        for limit in [Duration::ZERO, Duration::from_millis(2)] {
            assert!(lock.lock(Deadline::after(limit)).unwrap().is_none());
            let error = lock.lock_or_fail(Deadline::after(limit)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
        }
        drop(guard);
        assert!(lock.lock(Deadline::after(Duration::ZERO)).unwrap().is_some(), "a free lock needs no time");
    }

    #[test]
    fn waiting_calls_proceed_one_after_the_other() {
        let lock = CallLock::default();
        let guard = lock.lock(soon()).unwrap().unwrap();
        let (locked, order) = channel();
        let (release, released) = channel();
        let released = Mutex::new(released);
        scope(|scope| {
            for _ in 0..3 {
                let (lock, locked, released) = (&lock, locked.clone(), &released);
                scope.spawn(move || {
                    let _guard = lock.lock(soon()).unwrap().unwrap();
                    locked.send(()).unwrap();
                    released.lock().recv_timeout(Duration::from_secs(30)).unwrap();
                });
            }
            assert!(order.try_recv().is_err(), "the lock is not free");
            drop(guard);
            for _ in 0..3 {
                order.recv_timeout(Duration::from_secs(30)).unwrap();
                assert!(order.try_recv().is_err(), "two calls hold the lock");
                release.send(()).unwrap();
            }
        });
        assert!(lock.lock(Deadline::after(Duration::ZERO)).unwrap().is_some());
    }
}
