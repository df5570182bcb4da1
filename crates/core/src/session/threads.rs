//! The threads of one engine's links: started by name, counted, waited for.
//!
//! Not for: workers that copy (`engine::workers`).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, ThreadId};
use std::time::{Duration, Instant};

use hashbrown::HashSet;

use crate::error::{Error, ErrorKind, Result};

/// Enough for a request and its plan, which live on the heap.
const STACK: usize = 512 << 10;

/// Which run.
#[derive(Debug, Default)]
pub(super) struct Threads {
    running: Mutex<Running>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Running {
    count: usize,
    /// Those that have begun.
    ids: HashSet<ThreadId>,
}

impl Threads {
    /// Runs `work` on a thread of its own.
    pub(super) fn spawn(self: &Arc<Self>, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        self.locked().count += 1;
        let mut leaving = Leaving(self.clone(), None);
        let started = Builder::new().name(name.into()).stack_size(STACK).spawn(move || {
            leaving.begin();
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
        let mut running = self.locked();
        let own = usize::from(running.ids.contains(&std::thread::current().id()));
        while running.count > own {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            running = self.ended.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn locked(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a thread out, however it ends; also one that was never started.
struct Leaving(Arc<Threads>, Option<ThreadId>);

impl Leaving {
    fn begin(&mut self) {
        let id = std::thread::current().id();
        self.0.locked().ids.insert(id);
        self.1 = Some(id);
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let mut running = self.0.locked();
        running.count -= 1;
        self.1.map(|id| running.ids.remove(&id));
        drop(running);
        self.0.ended.notify_all();
    }
}
