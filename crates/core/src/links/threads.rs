//! The threads of one engine's links: started by name, counted, waited for.
//!
//! Not for: workers that copy (`engine::workers`).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};

/// Enough for a request and its plan, which live on the heap.
const STACK: usize = 512 << 10;

/// How many run.
#[derive(Debug, Default)]
pub(super) struct Threads {
    running: Mutex<usize>,
    ended: Condvar,
}

impl Threads {
    /// Runs `work` on a thread of its own.
    pub(super) fn spawn(self: &Arc<Self>, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        *self.locked() += 1;
        let leaving = Leaving(self.clone());
        let started = Builder::new().name(name.into()).stack_size(STACK).spawn(move || {
            let _leaving = leaving;
            work();
        });
        started.map(|_| ()).map_err(|error| {
            let text = format!("the thread {name} could not be started");
            Error::new(ErrorKind::System, text).because(error)
        })
    }

    /// Waits until all have ended, at most `limit`. A thread that closes its own engine does not wait for itself.
    pub(super) fn wait(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let own = usize::from(std::thread::current().name().is_some_and(|name| name.starts_with("llm-")));
        let mut running = self.locked();
        while *running > own {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            running = self.ended.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn locked(&self) -> MutexGuard<'_, usize> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a thread out, however it ends; also one that was never started.
struct Leaving(Arc<Threads>);

impl Drop for Leaving {
    fn drop(&mut self) {
        *self.0.locked() -= 1;
        self.0.ended.notify_all();
    }
}
