//! Lanes: threads that carry what is ready to go, started when there is work and kept a while for the next.
//!
//! A transfer whose next layer is still being computed takes no lane, so there are as many threads as layers on the way,
//! not as transfers. Not for: what is carried (`task`, `datadist`), or copying (`engine::workers`).

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};

/// How long a lane without work is kept.
const KEEP: Duration = Duration::from_secs(30);
/// Most lanes of one engine; more work waits its turn.
const MOST: usize = 512;
/// Enough for a request and its plan, which live on the heap.
const STACK: usize = 512 << 10;
/// How long the end of an engine waits for lanes whose links it has closed.
const FAREWELL: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// The lanes of one engine. Dropped, none takes work any more.
#[derive(Default)]
pub(crate) struct Lanes {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is work, a lane ended, or all is closed.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    lanes: usize,
    closed: bool,
}

impl Lanes {
    /// Has `job` done by the next lane that is free. Never waits for one. A job that is refused, or given up when the
    /// engine closes, is dropped.
    pub(crate) fn carry(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let mut state = self.shared.locked();
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, "the engine was finalized"));
        }
        state.jobs.push_back(Box::new(job));
        let starts = state.idle < state.jobs.len() && state.lanes < MOST;
        state.lanes += usize::from(starts);
        drop(state);
        if !starts {
            self.shared.changed.notify_one();
            return Ok(());
        }
        let leaving = Leaving(self.shared.clone());
        let lane = move || leaving.0.work();
        let started = Builder::new().name("llm-lane".into()).stack_size(STACK).spawn(lane);
        match started {
            Ok(_) => Ok(()),
            // The other lanes do it, if there are any.
            Err(_) if self.shared.locked().lanes > 0 => Ok(()),
            Err(error) => {
                let job = self.shared.locked().jobs.pop_back();
                drop(job);
                Err(Error::new(ErrorKind::System, "no thread for a transfer could be started").because(error))
            }
        }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        let mut state = self.shared.locked();
        state.closed = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        self.shared.changed.notify_all();
        // What a job held may have something to say about its end: not under the lock.
        drop(jobs);
        let until = Instant::now() + FAREWELL;
        let mut state = self.shared.locked();
        while state.lanes > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    /// Does jobs until none has come for a while.
    fn work(&self) {
        let mut state = self.locked();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.locked();
            } else if state.closed {
                return;
            } else {
                state.idle += 1;
                let (woken, waited) =
                    self.changed.wait_timeout(state, KEEP).unwrap_or_else(PoisonError::into_inner);
                state = woken;
                state.idle -= 1;
                if waited.timed_out() && state.jobs.is_empty() {
                    return;
                }
            }
        }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a lane out, however it ends; also one that was never started.
struct Leaving(Arc<Shared>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.locked().lanes -= 1;
        self.0.changed.notify_all();
    }
}

impl std::fmt::Debug for Lanes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.shared.locked();
        f.debug_struct("Lanes").field("lanes", &state.lanes).field("jobs", &state.jobs.len()).finish()
    }
}
