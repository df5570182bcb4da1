//! Lanes: threads that run the jobs of transfers and stay for a while when idle.
//!
//! A lane ends when it has had no job for 30 s, whatever the other lanes do. The lane that fell asleep last takes the next
//! job, so that lanes which are not needed end (`work_of_one_lane_keeps_no_other_lane`).
//!
//! One of the idle lanes polls for a short time before it sleeps
//! (`the_polling_lane_takes_the_next_job_and_no_lane_is_woken`). A caller who starts a call meanwhile wakes no thread.
//! Waking one takes longer than the rest of starting a call.
//!
//! A transfer whose next layer is still being computed takes no lane, so there are as many threads as layers
//! in transit, not as transfers (`tasks_that_wait_take_no_threads`). One destination cluster cannot
//! take all lanes either: jobs for a peer that stalls delay only jobs for the same peer
//! (`every_cluster_gets_a_lane_and_at_most_32`).

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::clock::{Clock, no_thread};
use super::place_table::{Place, PlaceTable};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::ClusterId;
use crate::session::{CLOSE_WAIT, THREAD_STACK};
use crate::sync::{
    AtomicBool, Builder, Condvar, Mutex, MutexGuard, Ordering, PATIENCE, Sleeper, Sleepers, poll,
};

/// How long a lane is kept after its last job.
const KEEP: Duration = Duration::from_secs(30);
/// Maximum number of lanes of one engine. Further jobs wait, except the first one of a cluster.
const MOST: usize = 512;
/// Maximum number of lanes at work for one cluster: half of the streams of a link.
const MOST_OF_ONE: usize = 32;
/// Number of withdrawn jobs of a cluster that are never worth removing from its queue.
const SPARE: usize = 64;
/// Name of these lists in out-of-memory errors.
const JOBS: &str = "the jobs of an engine";

/// What jobs wait for: jobs of one key share lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LaneKey {
    /// Calls to one cluster; the engine's own for copies.
    Calls(ClusterId),
    /// The notifications for one cluster. Calls may wait for them.
    Notifications(ClusterId),
    /// Links on demand. Peers that cannot be reached take no lanes of calls, and delay few of the other links: addresses
    /// are spread over 16 keys.
    Links(u8),
    /// Calls to several clusters. They may wait for each of them, so none of these lends its lanes.
    SeveralClusters,
}

/// Work for a lane. It is run or refused, exactly once. The executor keeps no other reference then.
pub(crate) trait Job: Send + Sync {
    /// Does the work.
    fn run(self: Arc<Self>);

    /// Called instead of [`run`](Self::run) if no lane will ever do the work.
    fn refused(self: Arc<Self>, why: Error);
}

/// The lanes and the clock of one engine. Drop refuses the jobs that have not begun, drops the alarms, and waits for the
/// threads to end.
#[derive(Debug)]
pub struct Executor {
    handle: ExecutorHandle,
}

/// Hands jobs to lanes. It may outlive the engine, and keeps no lane alive.
#[derive(Clone)]
pub struct ExecutorHandle(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// How long an idle lane polls before it sleeps.
    poll: Duration,
    /// How long a lane is kept after its last job.
    keep: Duration,
    /// What the polling lane looks at: whether there is a job, or the executor closes. Changes under the lock.
    called: AtomicBool,
    /// Notified when a lane ends.
    ended: Condvar,
    clock: Clock,
    /// Test only: behave as if no thread could be started.
    #[cfg(feature = "testing")]
    no_threads: std::sync::atomic::AtomicBool,
}

#[derive(Default)]
struct State {
    /// Jobs that may run now, each with its cluster.
    jobs: VecDeque<(LaneKey, Arc<dyn Job>)>,
    clusters: HashMap<LaneKey, ClusterJobs>,
    idle: IdleLanes,
    lanes: usize,
    /// Jobs that wait until one of the others of their cluster ends.
    waiting: PlaceTable<Arc<dyn Job>>,
    closed: bool,
}

/// Lanes that wait for jobs.
#[derive(Default)]
struct IdleLanes {
    /// Number of them, including those that are only starting.
    count: usize,
    /// Whether one of them polls. It takes a job, and wakes another lane if there are more.
    polling: bool,
    /// Whether one was woken that does not run yet. It wakes the next one if there are more jobs, so that a caller who
    /// hands over many jobs wakes only one lane.
    waking: bool,
    /// Those that sleep. They are woken one at a time, or all together when the executor closes.
    asleep: Sleepers,
}

/// A destination of jobs.
#[derive(Default)]
struct ClusterJobs {
    /// Jobs that are running or about to run.
    taken: usize,
    /// Where the jobs are that wait until one of the others ends, in order of arrival; also jobs that were withdrawn.
    queue: VecDeque<Place>,
    /// Number of the jobs that wait.
    waiting: usize,
}

impl IdleLanes {
    /// Records that a started or woken lane now runs.
    fn woken(&mut self) {
        self.count -= 1;
        self.waking = false;
    }
}

impl State {
    /// Notes that a job for `cluster` has ended, and queues the job that has waited longest for this cluster.
    fn over(&mut self, cluster: LaneKey) {
        let Some(at) = self.clusters.get_mut(&cluster) else { return };
        let mut jobs = std::iter::from_fn(|| at.queue.pop_front());
        match jobs.find_map(|place| self.waiting.remove(place)) {
            Some(job) => {
                at.waiting -= 1;
                self.jobs.push_back((cluster, job));
            }
            None => at.taken -= 1,
        }
        if at.taken == 0 {
            self.clusters.remove(&cluster);
        }
    }

    /// Takes the next job for the lane whose last job was for `last`: another one for that cluster if no other
    /// lane works for it. So a cluster keeps its lane as long as it has work
    /// (`every_cluster_gets_a_lane_and_at_most_32`).
    fn next(&mut self, last: Option<LaneKey>) -> Option<(LaneKey, Arc<dyn Job>)> {
        let alone = |cluster: &LaneKey| {
            let queued = self.jobs.iter().filter(|(to, _)| to == cluster).count();
            self.clusters.get(cluster).is_some_and(|at| at.taken == queued)
        };
        let own = last.filter(alone).and_then(|cluster| self.jobs.iter().position(|(to, _)| *to == cluster));
        self.jobs.remove(own.unwrap_or(0))
    }

    /// Makes a place for a job that waits until another one for `cluster` ends.
    fn place_to_wait(&mut self, cluster: LaneKey) -> Result<Place> {
        let at = self.clusters.entry(cluster).or_default();
        let room = at.queue.try_reserve(1);
        room.map_err(|_| fallible::out_of_memory(JOBS, at.queue.len() * size_of::<Place>()))?;
        let place = self.waiting.reserve(JOBS)?;
        at.queue.push_back(place);
        at.waiting += 1;
        Ok(place)
    }

    /// Takes a job that waits for others of its cluster.
    fn withdraw(&mut self, cluster: LaneKey, place: Place) -> Option<Arc<dyn Job>> {
        let job = self.waiting.remove(place)?;
        let State { waiting, clusters, .. } = self;
        if let Some(at) = clusters.get_mut(&cluster) {
            at.waiting -= 1;
            // Half of the entries or more are removed, so that the time for each job is constant.
            if at.queue.len() > 2 * at.waiting + SPARE {
                at.queue.retain(|place| waiting.contains(*place));
            }
        }
        Some(job)
    }

    /// Takes every job that is not at work.
    fn all(&mut self) -> Vec<Arc<dyn Job>> {
        let ready: Vec<_> = self.jobs.drain(..).collect();
        let mut waiting = Vec::new();
        for at in self.clusters.values_mut() {
            at.waiting = 0;
            waiting.extend(at.queue.drain(..).filter_map(|place| self.waiting.remove(place)));
        }
        for (cluster, _) in &ready {
            self.over(*cluster);
        }
        ready.into_iter().map(|(_, job)| job).chain(waiting).collect()
    }
}

impl Executor {
    /// Creates an executor without any lane. An idle lane polls for `poll` before it sleeps.
    pub fn new(poll: Duration) -> Self {
        Executor::keeping(poll, KEEP)
    }

    /// Creates an executor whose lanes end when they have had no job for `keep`.
    fn keeping(poll: Duration, keep: Duration) -> Self {
        let shared = Shared {
            state: Mutex::default(),
            poll,
            keep,
            called: AtomicBool::new(false),
            ended: Condvar::new(),
            clock: Clock::default(),
            #[cfg(feature = "testing")]
            no_threads: std::sync::atomic::AtomicBool::new(false),
        };
        Executor { handle: ExecutorHandle(Arc::new(shared)) }
    }

    /// Returns the handle that hands jobs to the lanes.
    pub fn handle(&self) -> &ExecutorHandle {
        &self.handle
    }
}

impl ExecutorHandle {
    /// Has the next free lane run `job`, which is for `cluster`. Never waits for a lane. If no thread can be
    /// started, the existing lanes run the job; without any lane, it is refused
    /// (`a_lane_that_cannot_be_started`). Returns the place of the job if it waits for others of its cluster.
    pub(crate) fn carry(&self, cluster: LaneKey, job: Arc<dyn Job>) -> Option<Place> {
        let mut state = self.0.state.lock();
        if state.closed {
            drop(state);
            job.refused(Error::closed());
            return None;
        }
        let at = state.clusters.entry(cluster).or_default();
        if at.taken == MOST_OF_ONE {
            return match state.place_to_wait(cluster) {
                Ok(place) => {
                    state.waiting.fill(place, job);
                    Some(place)
                }
                Err(error) => {
                    drop(state);
                    job.refused(error);
                    None
                }
            };
        }
        at.taken += 1;
        // A cluster without a lane gets one, however many others stall
        // (`every_cluster_gets_a_lane_and_at_most_32`).
        let first = at.taken == 1;
        if first {
            state.jobs.push_front((cluster, job));
        } else {
            state.jobs.push_back((cluster, job));
        }
        if state.idle.count < state.jobs.len() && (state.lanes < MOST || first) {
            // Under the lock, so that a lane that is counted does exist.
            match self.start("llm-lane", Shared::work) {
                Ok(()) => (state.lanes, state.idle.count) = (state.lanes + 1, state.idle.count + 1),
                Err(error) if state.lanes == 0 => {
                    let jobs = state.all();
                    drop(state);
                    for job in jobs {
                        job.refused(no_thread(&error));
                    }
                    return None;
                }
                Err(_) => {}
            }
        }
        let woken = self.0.call_lane(&mut state);
        drop(state);
        wake(woken);
        None
    }

    /// Returns a job that still waits for others of its cluster, and forgets it.
    pub(crate) fn withdraw(&self, cluster: LaneKey, place: Place) -> Option<Arc<dyn Job>> {
        self.0.state.lock().withdraw(cluster, place)
    }

    /// Returns the clock.
    pub(crate) fn clock(&self) -> &Clock {
        &self.0.clock
    }

    /// Sets whether the executor behaves as if no thread could be started.
    #[cfg(feature = "testing")]
    pub fn refuse_threads(&self, refuse: bool) {
        self.0.no_threads.store(refuse, std::sync::atomic::Ordering::SeqCst);
        self.0.clock.refuse_threads(refuse);
    }

    /// Number of threads.
    #[cfg(feature = "testing")]
    pub fn threads(&self) -> usize {
        self.0.state.lock().lanes + usize::from(self.0.clock.running())
    }

    /// Number of alarms that are set.
    #[cfg(feature = "testing")]
    pub fn alarms(&self) -> usize {
        self.0.clock.alarms()
    }

    /// Starts a thread that runs `body`.
    fn start(&self, name: &str, body: fn(&Shared)) -> io::Result<()> {
        #[cfg(feature = "testing")]
        if self.0.no_threads.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let shared = self.0.clone();
        Builder::new().name(name.into()).stack_size(THREAD_STACK).spawn(move || body(&shared)).map(|_| ())
    }
}

impl Default for Executor {
    fn default() -> Self {
        Executor::new(PATIENCE)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let shared = &self.handle.0;
        let mut state = shared.state.lock();
        state.closed = true;
        shared.called.store(true, Ordering::Relaxed);
        let jobs = state.all();
        let sleepers = std::mem::take(&mut state.idle.asleep);
        drop(state);
        sleepers.wake_all();
        // Without the lock, because the jobs report their end.
        for job in jobs {
            job.refused(Error::closed());
        }
        shared.clock.close();
        let until = Instant::now() + CLOSE_WAIT;
        let mut state = shared.state.lock();
        while state.lanes > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = shared.ended.wait_timeout(state, left).0;
        }
        drop(state);
        shared.clock.join(until);
    }
}

impl Shared {
    /// Body of a lane: runs jobs until there has been none for a while.
    fn work(&self) {
        let mut state = self.state.lock();
        state.idle.woken();
        let (mut last, sleeper, mut until) = (None, Arc::default(), Instant::now() + self.keep);
        loop {
            if let Some((cluster, job)) = state.next(last.take()) {
                let woken = self.call_lane(&mut state);
                drop(state);
                wake(woken);
                run(job);
                until = Instant::now() + self.keep;
                state = self.state.lock();
                state.over(cluster);
                last = Some(cluster);
            } else if state.closed {
                break;
            } else {
                let (rested, called) = self.rest(state, &sleeper, until);
                state = rested;
                if !called && state.jobs.is_empty() {
                    break;
                }
            }
        }
        // Under the same lock under which it found no work.
        state.lanes -= 1;
        drop(state);
        self.ended.notify_all();
    }

    /// Waits until this lane is called or the executor closes, and returns `false` if neither happened before `until`. Polls
    /// at first, unless another lane does.
    fn rest<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        sleeper: &Arc<Sleeper>,
        until: Instant,
    ) -> (MutexGuard<'a, State>, bool) {
        if !self.poll.is_zero() && !state.idle.polling {
            (state.idle.count, state.idle.polling) = (state.idle.count + 1, true);
            self.called.store(false, Ordering::Relaxed);
            drop(state);
            poll(self.poll, || self.called.load(Ordering::Relaxed));
            state = self.state.lock();
            (state.idle.count, state.idle.polling) = (state.idle.count - 1, false);
            if !state.jobs.is_empty() || state.closed {
                return (state, true);
            }
        }
        state.idle.count += 1;
        let (mut state, called) = sleeper.sleep(state, |state| &mut state.idle.asleep, until);
        state.idle.count -= 1;
        if called {
            state.idle.waking = false;
        }
        (state, called)
    }

    /// Tells an idle lane that there are jobs, if there are any. Returns the lane that the caller must wake after it has
    /// released the lock.
    fn call_lane(&self, state: &mut State) -> Option<Arc<Sleeper>> {
        if state.jobs.is_empty() {
            return None;
        }
        if state.idle.polling {
            self.called.store(true, Ordering::Relaxed);
            return None;
        }
        if state.idle.waking {
            return None;
        }
        let woken = state.idle.asleep.pop();
        state.idle.waking = woken.is_some();
        woken
    }
}

/// Wakes a lane that was called.
fn wake(lane: Option<Arc<Sleeper>>) {
    if let Some(lane) = lane {
        lane.wake();
    }
}

/// Runs a job. A job that panics reports it when it is dropped, and does not end its lane.
fn run(job: Arc<dyn Job>) {
    let _ = catch_unwind(AssertUnwindSafe(|| job.run()));
}

impl std::fmt::Debug for ExecutorHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.0.state.lock();
        f.debug_struct("ExecutorHandle")
            .field("lanes", &state.lanes)
            .field("jobs", &state.jobs.len())
            .finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
