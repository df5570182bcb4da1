//! Starts the threads of an engine's links by name, counts them, and waits for them to end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, ThreadId};
use std::time::{Duration, Instant};

use hashbrown::HashSet;

use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex};

/// Stack size in bytes. Requests and their plans are on the heap.
pub(crate) const STACK: usize = 512 << 10;

/// The running threads.
#[derive(Debug, Default)]
pub(super) struct Threads {
    running: Mutex<RunningThreads>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct RunningThreads {
    count: usize,
    /// The ids of the threads that have begun to run.
    ids: HashSet<ThreadId>,
}

impl Threads {
    /// Runs `work` on a new thread. Returns `Err` with `System` if it cannot be started.
    pub(super) fn spawn(self: &Arc<Self>, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        self.running.lock().count += 1;
        let mut leaving = Leaving(self.clone(), None);
        let started = Builder::new().name(name.into()).stack_size(STACK).spawn(move || {
            leaving.begin();
            work();
        });
        started.map(|_| ()).map_err(|error| Error::no_thread(&format!("the thread {name}"), error))
    }

    /// Waits until all threads have ended, at most `limit`. A thread that closes its own engine does not wait
    /// for itself.
    pub(super) fn wait(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut running = self.running.lock();
        let own = usize::from(running.ids.contains(&std::thread::current().id()));
        while running.count > own {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            running = self.ended.wait_timeout(running, left).0;
        }
    }
}

/// Runs `work`. If it panics, logs the panic and returns `None`, so that the thread continues with other work.
pub(super) fn guarded<T>(doing: &str, work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|payload| {
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(|text| &**text)).unwrap_or("no text");
            tracing::error!(
                target: "llm_datadist::links",
                "panic while {doing}: {text}; the engine abandoned this work and continues. Please report this error"
            );
            // Dropping the payload may panic, too.
            std::mem::forget(payload);
        })
        .ok()
}

/// Removes a thread from the count when dropped, even if the thread was never started.
struct Leaving(Arc<Threads>, Option<ThreadId>);

impl Leaving {
    fn begin(&mut self) {
        let id = std::thread::current().id();
        self.0.running.lock().ids.insert(id);
        self.1 = Some(id);
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let mut running = self.0.running.lock();
        running.count -= 1;
        self.1.map(|id| running.ids.remove(&id));
        drop(running);
        self.0.ended.notify_all();
    }
}
