//! Starts threads by name, counts them, and waits for them to end.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashSet;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::engine_number::EngineNumber;
use crate::sync::{Builder, Condvar, Mutex, ThreadId, current};

/// Stack size in bytes. Requests, plans and lists are on the heap.
const STACK: usize = 512 << 10;
/// How long the end of an engine waits for threads that still work.
pub(crate) const CLOSE_WAIT: Duration = Duration::from_secs(10);

/// The running threads. They use at least the CPUs of the thread that created this, or those of the thread that starts them.
#[derive(Debug)]
pub(crate) struct Threads {
    running: Mutex<RunningThreads>,
    ended: Condvar,
    /// The CPUs of the thread that created this. `None` if the kernel does not report them.
    cpus: Option<CpuSet>,
    /// The engine for which they work, if it is one.
    engine: Option<EngineNumber>,
    /// Test only: behave as if no thread could be started.
    #[cfg(feature = "testing")]
    refused: std::sync::atomic::AtomicBool,
}

#[derive(Debug, Default)]
struct RunningThreads {
    count: usize,
    /// The ids of the threads that have begun to run.
    ids: HashSet<ThreadId>,
}

impl Threads {
    /// Counts no thread yet.
    pub(crate) fn new() -> Arc<Self> {
        Self::of(None)
    }

    /// Counts no thread yet. The threads will work for `engine`.
    pub(crate) fn of(engine: Option<EngineNumber>) -> Arc<Self> {
        Arc::new(Threads {
            engine,
            running: Mutex::default(),
            ended: Condvar::new(),
            cpus: sched_getaffinity(None).ok(),
            #[cfg(feature = "testing")]
            refused: std::sync::atomic::AtomicBool::new(false),
        })
    }

    /// Runs `work` on a new thread.
    pub(crate) fn spawn(
        self: &Arc<Self>,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        #[cfg(feature = "testing")]
        if self.refused.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        self.running.lock().count += 1;
        let mut leaving = Leaving(self.clone(), None);
        let started = Builder::new().name(name.into()).stack_size(STACK).spawn(move || {
            leaving.begin();
            leaving.0.use_cpus();
            let _engine = leaving.0.engine.map(EngineNumber::on_this_thread);
            work();
        });
        started.map(|_| ())
    }

    /// Moves the calling thread to the CPUs of the thread that created this, if it has not inherited all of them from the
    /// thread that started it (`test_a_bound_caller_does_not_bind_the_threads_that_it_starts`).
    fn use_cpus(&self) {
        let (Some(cpus), Ok(inherited)) = (self.cpus, sched_getaffinity(None)) else { return };
        // Not if it has all of them: CPUs that were set do not change when the container gets more.
        if (0..CpuSet::MAX_CPU).any(|cpu| cpus.is_set(cpu) && !inherited.is_set(cpu)) {
            // If the container has lost these CPUs, the thread stays where it is.
            let _ = sched_setaffinity(None, &cpus);
        }
    }

    /// Waits until all threads but `lost` have ended, at most [`CLOSE_WAIT`]. A thread that closes its own engine does not
    /// wait for itself.
    pub(crate) fn wait(&self, lost: usize) {
        let until = Instant::now() + CLOSE_WAIT;
        let mut running = self.running.lock();
        let own = usize::from(running.ids.contains(&current().id()));
        while running.count > lost.max(own) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            running = self.ended.wait_timeout(running, left).0;
        }
    }

    /// Whether the calling thread is one of these.
    pub(crate) fn has_current(&self) -> bool {
        self.running.lock().ids.contains(&current().id())
    }

    /// Number of threads.
    #[cfg(feature = "testing")]
    pub(crate) fn count(&self) -> usize {
        self.running.lock().count
    }

    /// Sets whether this behaves as if no thread could be started.
    #[cfg(feature = "testing")]
    pub(crate) fn refuse(&self, refuse: bool) {
        self.refused.store(refuse, std::sync::atomic::Ordering::SeqCst);
    }
}

/// Removes a thread from the count when dropped, even if the thread was never started.
struct Leaving(Arc<Threads>, Option<ThreadId>);

impl Leaving {
    fn begin(&mut self) {
        let id = current().id();
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
