//! Executor: threads that carry what is ready to go, started when there is work and kept a while for the next; and one that
//! wakes what waits for a moment.
//!
//! A transfer whose next layer is still being computed takes no lane, so there are as many threads as layers on the way,
//! not as transfers (`tasks_that_wait_take_no_threads`). Nor does one place take all of them: what is carried to a peer
//! that stands still waits behind its own kind only (`one_place_does_not_take_all_lanes`). Not for: what is carried (`task`,
//! `datadist`), or copying (`engine::workers`).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::model::ClusterId;
use crate::sync::{Builder, Condvar, Mutex, MutexGuard};

/// How long a lane without work is kept.
const KEEP: Duration = Duration::from_secs(30);
/// Most lanes of one engine; more work waits its turn.
const MOST: usize = 512;
/// Most lanes at work for one place: half of the streams a link has.
const MOST_OF_ONE: usize = 32;
/// Enough for a request and its plan, which live on the heap.
const STACK: usize = 512 << 10;
/// How long the end of an engine waits for lanes whose links it has closed.
const FAREWELL: Duration = Duration::from_secs(10);

/// Something to be done by a lane: it is run or refused, once.
pub(crate) trait Job: Send {
    /// Does it.
    fn run(self: Box<Self>);

    /// No lane ever will.
    fn refused(self: Box<Self>, why: Error);
}

/// The lanes of one engine, and their end: dropped, none takes work any more, and those at work have ended.
#[derive(Debug, Default)]
pub(crate) struct Executor {
    porter: ExecutorHandle,
}

/// Hands work to lanes, for whoever may outlive the engine: it keeps no lane.
#[derive(Clone, Default)]
pub(crate) struct ExecutorHandle(pub(crate) Arc<Shared>);

/// Names what was to be done at a moment.
pub(crate) type Alarm = (Instant, u64);

#[derive(Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    /// There is work, a thread ended, or all is closed.
    changed: Condvar,
    /// There is one alarm more, or all is closed.
    rung: Condvar,
    /// As if the system had no thread to give.
    #[cfg(all(test, not(loom)))]
    pub(crate) no_threads: std::sync::atomic::AtomicBool,
}

#[derive(Default)]
struct State {
    /// What may be done now, and where it goes.
    jobs: VecDeque<(ClusterId, Box<dyn Job>)>,
    places: HashMap<ClusterId, Place>,
    /// Executor that wait for work, those that are only starting among them.
    idle: usize,
    lanes: usize,
    alarms: BTreeMap<Alarm, Box<dyn Job>>,
    alarms_ever: u64,
    /// A thread looks after the alarms.
    clock: bool,
    closed: bool,
}

/// Where work goes.
#[derive(Default)]
struct Place {
    /// Jobs at work, or about to be.
    taken: usize,
    /// Those that wait for one of these to end.
    waiting: VecDeque<Box<dyn Job>>,
}

impl State {
    /// Lets the job that waited longest for its place be done, now that one is over.
    fn over(&mut self, place: ClusterId) {
        let Some(at) = self.places.get_mut(&place) else { return };
        match at.waiting.pop_front() {
            Some(job) => self.jobs.push_back((place, job)),
            None => at.taken -= 1,
        }
        if at.taken == 0 {
            self.places.remove(&place);
        }
    }

    /// What the lane that did a job for `last` does next: another for it if no other lane is there, so that a place keeps
    /// the lane it was given for as long as it has work (`a_place_keeps_its_lane`).
    fn next(&mut self, last: Option<ClusterId>) -> Option<(ClusterId, Box<dyn Job>)> {
        let alone = |place: &ClusterId| {
            let queued = self.jobs.iter().filter(|(to, _)| to == place).count();
            self.places.get(place).is_some_and(|at| at.taken == queued)
        };
        let own = last.filter(alone).and_then(|place| self.jobs.iter().position(|(to, _)| *to == place));
        self.jobs.remove(own.unwrap_or(0))
    }

    /// Every job that is not at work.
    fn all(&mut self) -> Vec<Box<dyn Job>> {
        let ready: Vec<_> = self.jobs.drain(..).collect();
        let waiting: Vec<_> = self.places.values_mut().flat_map(|place| place.waiting.drain(..)).collect();
        for (place, _) in &ready {
            self.over(*place);
        }
        ready.into_iter().map(|(_, job)| job).chain(waiting).collect()
    }
}

impl Executor {
    /// What hands work to them.
    pub(crate) fn porter(&self) -> &ExecutorHandle {
        &self.porter
    }
}

impl ExecutorHandle {
    /// Has `job`, which goes to `place`, done by the next lane that is free. Never waits for one. Where no thread can be
    /// started, those that there are do it (`a_lane_that_cannot_be_started`).
    pub(crate) fn carry(&self, place: ClusterId, job: Box<dyn Job>) {
        let mut state = self.0.locked();
        if state.closed {
            drop(state);
            return job.refused(closed());
        }
        let at = state.places.entry(place).or_default();
        if at.taken == MOST_OF_ONE {
            return at.waiting.push_back(job);
        }
        at.taken += 1;
        // A place that has no lane gets one, however many others stand still (`a_place_without_a_lane_gets_one`).
        let first = at.taken == 1;
        if first {
            state.jobs.push_front((place, job));
        } else {
            state.jobs.push_back((place, job));
        }
        if state.idle < state.jobs.len() && (state.lanes < MOST || first) {
            // Under the lock: whoever sees a lane counted may rely on it.
            match self.start(Shared::work) {
                Ok(()) => (state.lanes, state.idle) = (state.lanes + 1, state.idle + 1),
                Err(error) if state.lanes == 0 => {
                    let jobs = state.all();
                    drop(state);
                    for job in jobs {
                        job.refused(no_thread(&error));
                    }
                    return;
                }
                Err(_) => {}
            }
        }
        drop(state);
        self.0.changed.notify_one();
    }

    /// Has `job` run at `when`, unless it is [forgotten](Self::forget) before or the engine closes: then it is dropped. It
    /// must be short.
    pub(crate) fn at(&self, when: Instant, job: Box<dyn Job>) -> Result<Alarm> {
        let mut state = self.0.locked();
        if state.closed {
            return Err(closed());
        }
        if !state.clock {
            self.start(Shared::tell_time).map_err(|error| no_thread(&error))?;
            state.clock = true;
        }
        let alarm = (when, state.alarms_ever);
        state.alarms_ever += 1;
        state.alarms.insert(alarm, job);
        drop(state);
        self.0.rung.notify_one();
        Ok(alarm)
    }

    /// Takes back what was to be done at a moment, if it has not come.
    pub(crate) fn forget(&self, alarm: Alarm) {
        let forgotten = self.0.locked().alarms.remove(&alarm);
        drop(forgotten);
        // The clock sleeps until the next, or goes when there is none for a while.
        self.0.rung.notify_one();
    }

    /// How many threads there are.
    #[cfg(test)]
    pub(crate) fn threads(&self) -> usize {
        let state = self.0.locked();
        state.lanes + usize::from(state.clock)
    }

    /// How many alarms are set.
    #[cfg(test)]
    pub(crate) fn alarms(&self) -> usize {
        self.0.locked().alarms.len()
    }

    /// A thread that has the life of `body`.
    fn start(&self, body: fn(&Shared)) -> io::Result<()> {
        #[cfg(all(test, not(loom)))]
        if self.0.no_threads.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let shared = self.0.clone();
        Builder::new().name("llm-lane".into()).stack_size(STACK).spawn(move || body(&shared)).map(|_| ())
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let shared = &self.porter.0;
        let mut state = shared.locked();
        state.closed = true;
        let (jobs, alarms) = (state.all(), std::mem::take(&mut state.alarms));
        drop(state);
        shared.changed.notify_all();
        shared.rung.notify_all();
        // Not under the lock: they have something to say about their end.
        for job in jobs {
            job.refused(closed());
        }
        drop(alarms);
        let until = Instant::now() + FAREWELL;
        let mut state = shared.locked();
        while state.lanes > 0 || state.clock {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    /// A lane: does jobs until none has come for a while.
    fn work(&self) {
        let mut state = self.locked();
        state.idle -= 1;
        let mut last = None;
        loop {
            if let Some((place, job)) = state.next(last.take()) {
                drop(state);
                run(job);
                state = self.locked();
                state.over(place);
                last = Some(place);
            } else if state.closed {
                break;
            } else {
                state.idle += 1;
                let (woken, waited) =
                    self.changed.wait_timeout(state, KEEP).unwrap_or_else(PoisonError::into_inner);
                state = woken;
                state.idle -= 1;
                if waited.timed_out() && state.jobs.is_empty() {
                    break;
                }
            }
        }
        // Under the lock under which it found no work.
        state.lanes -= 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Runs what was to be run at a moment, until there has been nothing for a while.
    fn tell_time(&self) {
        let mut state = self.locked();
        while !state.closed {
            let next = state.alarms.first_key_value().map(|(&(when, _), _)| when);
            let left = next.map(|when| when.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                let due = state.alarms.pop_first();
                drop(state);
                if let Some((_, job)) = due {
                    run(job);
                }
                state = self.locked();
                continue;
            }
            let (woken, waited) =
                self.rung.wait_timeout(state, left.unwrap_or(KEEP)).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            if waited.timed_out() && left.is_none() && state.alarms.is_empty() {
                break;
            }
        }
        state.clock = false;
        drop(state);
        self.changed.notify_all();
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A job that panics says so by what it drops, and takes no lane with it.
fn run(job: Box<dyn Job>) {
    let _ = catch_unwind(AssertUnwindSafe(|| job.run()));
}

#[cold]
fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the engine was finalized")
}

#[cold]
fn no_thread(error: &io::Error) -> Error {
    let text = format!("no thread for a transfer could be started: {error}");
    let errno = error.raw_os_error().unwrap_or(0);
    Error::new(ErrorKind::System, text).with("errno", errno)
}

impl std::fmt::Debug for ExecutorHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.0.locked();
        f.debug_struct("Porter").field("lanes", &state.lanes).field("jobs", &state.jobs.len()).finish()
    }
}
