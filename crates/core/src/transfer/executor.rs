//! Lanes: threads that run the jobs of transfers and stay for a while when idle. One more thread, the clock,
//! runs jobs at a set time.
//!
//! One of the idle lanes polls for a short time before it sleeps. A caller who starts a call within that time does not
//! wake a thread, which takes longer than the rest of starting a call.
//!
//! A transfer whose next layer is still being computed takes no lane, so there are as many threads as layers
//! in transit, not as transfers (`tasks_that_wait_take_no_threads`). One destination cluster cannot
//! take all lanes either: jobs for a peer that stalls delay only jobs for the same peer
//! (`every_cluster_gets_a_lane_and_at_most_32`).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::model::ClusterId;
use crate::session::{CLOSE_WAIT, THREAD_STACK};
use crate::sync::{AtomicBool, Builder, Condvar, Mutex, MutexGuard, Ordering, PATIENCE, poll};

/// How long an idle lane is kept.
const KEEP: Duration = Duration::from_secs(30);
/// Maximum number of lanes of one engine. Further jobs wait, except the first one of a cluster.
const MOST: usize = 512;
/// Maximum number of lanes at work for one cluster: half of the streams of a link.
const MOST_OF_ONE: usize = 32;

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

/// Work for a lane. It is run or refused, exactly once.
pub(crate) trait Job: Send + Sync {
    /// Does the work.
    fn run(self: Arc<Self>);

    /// Called instead of [`run`](Self::run) if no lane will ever do the work.
    fn refused(self: Arc<Self>, why: Error);
}

/// What the clock calls at a set time.
pub(crate) trait Alarmed: Send + Sync {
    /// Called once, at that time or a little later. It must be short.
    fn due(self: Arc<Self>);
}

/// The lanes of one engine. Drop refuses the jobs that have not begun, and waits for the lanes to end.
#[derive(Debug)]
pub struct Executor {
    handle: ExecutorHandle,
}

/// Hands jobs to lanes. It may outlive the engine, and keeps no lane alive.
#[derive(Clone)]
pub struct ExecutorHandle(Arc<Shared>);

/// Identifies a call of the clock at a set time.
pub(crate) type Alarm = (Instant, u64);

struct Shared {
    state: Mutex<State>,
    /// How long an idle lane polls before it sleeps.
    poll: Duration,
    /// What the polling lane looks at: whether there is a job, or the executor closes. Changes under the lock.
    called: AtomicBool,
    /// Notified when there is a job, when a thread ends, and when the executor closes.
    changed: Condvar,
    /// Notified when the alarms change and when the executor closes.
    alarms_changed: Condvar,
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
    last_job: u64,
    alarms: BTreeMap<Alarm, Arc<dyn Alarmed>>,
    last_alarm: u64,
    /// Whether the clock thread runs.
    clock: bool,
    /// When the clock wakes by itself; `None` while it is awake, because it then looks at the alarms before it sleeps.
    clock_wakes: Option<Instant>,
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
}

/// A destination of jobs.
#[derive(Default)]
struct ClusterJobs {
    /// Jobs that are running or about to run.
    taken: usize,
    /// Jobs that wait until one of the others ends, by number, in order of arrival.
    waiting: BTreeMap<u64, Arc<dyn Job>>,
}

impl IdleLanes {
    /// Notes that a lane that was started or woken runs.
    fn woken(&mut self) {
        self.count -= 1;
        self.waking = false;
    }
}

impl State {
    /// Notes that a job for `cluster` has ended, and queues the job that has waited longest for this cluster.
    fn over(&mut self, cluster: LaneKey) {
        let Some(at) = self.clusters.get_mut(&cluster) else { return };
        match at.waiting.pop_first() {
            Some((_, job)) => self.jobs.push_back((cluster, job)),
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

    /// Takes every job that is not at work.
    fn all(&mut self) -> Vec<Arc<dyn Job>> {
        let ready: Vec<_> = self.jobs.drain(..).collect();
        let waiting: Vec<_> =
            self.clusters.values_mut().flat_map(|at| std::mem::take(&mut at.waiting).into_values()).collect();
        for (cluster, _) in &ready {
            self.over(*cluster);
        }
        ready.into_iter().map(|(_, job)| job).chain(waiting).collect()
    }
}

impl Executor {
    /// Creates an executor without any lane. An idle lane polls for `poll` before it sleeps.
    pub fn new(poll: Duration) -> Self {
        let shared = Shared {
            state: Mutex::default(),
            poll,
            called: AtomicBool::new(false),
            changed: Condvar::new(),
            alarms_changed: Condvar::new(),
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
    /// (`a_lane_that_cannot_be_started`). Returns the number of the job if it waits for others of its cluster.
    pub(crate) fn carry(&self, cluster: LaneKey, job: Arc<dyn Job>) -> Option<u64> {
        let mut state = self.0.state.lock();
        if state.closed {
            drop(state);
            job.refused(Error::closed());
            return None;
        }
        state.last_job += 1;
        let number = state.last_job;
        let at = state.clusters.entry(cluster).or_default();
        if at.taken == MOST_OF_ONE {
            at.waiting.insert(number, job);
            return Some(number);
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
        let wakes = self.0.call_lane(&mut state);
        drop(state);
        if wakes {
            self.0.changed.notify_one();
        }
        None
    }

    /// Returns a job that still waits for others of its cluster, and forgets it.
    pub(crate) fn withdraw(&self, cluster: LaneKey, number: u64) -> Option<Arc<dyn Job>> {
        self.0.state.lock().clusters.get_mut(&cluster)?.waiting.remove(&number)
    }

    /// Calls `alarmed` at `when`. It is dropped if the alarm is [forgotten](Self::forget) before, or if the engine
    /// closes. Returns `Err` if the engine has closed or no thread can be started.
    pub(crate) fn at(&self, when: Instant, alarmed: Arc<dyn Alarmed>) -> Result<Alarm> {
        let mut state = self.0.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        if !state.clock {
            self.start("llm-clock", Shared::run_alarms).map_err(|error| no_thread(&error))?;
            state.clock = true;
        }
        let alarm = (when, state.last_alarm);
        state.last_alarm += 1;
        state.alarms.insert(alarm, alarmed);
        // Otherwise the clock looks at the alarms in time anyway. Waking it for each call that runs alone took a third of
        // the time of starting one.
        let early = state.clock_wakes.is_some_and(|wakes| when < wakes);
        drop(state);
        if early {
            self.0.alarms_changed.notify_one();
        }
        Ok(alarm)
    }

    /// Cancels an alarm that has not come yet.
    pub(crate) fn forget(&self, alarm: Alarm) {
        let mut state = self.0.state.lock();
        let forgotten = state.alarms.remove(&alarm);
        drop(state);
        drop(forgotten);
    }

    /// Sets whether the executor behaves as if no thread could be started.
    #[cfg(feature = "testing")]
    pub fn refuse_threads(&self, refuse: bool) {
        self.0.no_threads.store(refuse, std::sync::atomic::Ordering::SeqCst);
    }

    /// Number of threads.
    #[cfg(feature = "testing")]
    pub fn threads(&self) -> usize {
        let state = self.0.state.lock();
        state.lanes + usize::from(state.clock)
    }

    /// Number of alarms that are set.
    #[cfg(feature = "testing")]
    pub fn alarms(&self) -> usize {
        self.0.state.lock().alarms.len()
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
        let (jobs, alarms) = (state.all(), std::mem::take(&mut state.alarms));
        drop(state);
        shared.changed.notify_all();
        shared.alarms_changed.notify_all();
        // Without the lock, because the jobs report their end.
        for job in jobs {
            job.refused(Error::closed());
        }
        drop(alarms);
        let until = Instant::now() + CLOSE_WAIT;
        let mut state = shared.state.lock();
        while state.lanes > 0 || state.clock {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = shared.changed.wait_timeout(state, left).0;
        }
    }
}

impl Shared {
    /// Body of a lane: runs jobs until there has been none for a while.
    fn work(&self) {
        let mut state = self.state.lock();
        state.idle.woken();
        let mut last = None;
        loop {
            if let Some((cluster, job)) = state.next(last.take()) {
                let wakes = self.call_lane(&mut state);
                drop(state);
                if wakes {
                    self.changed.notify_one();
                }
                run(job);
                state = self.state.lock();
                state.over(cluster);
                last = Some(cluster);
            } else if state.closed {
                break;
            } else {
                let (rested, waited) = self.rest(state);
                state = rested;
                if waited && state.jobs.is_empty() {
                    break;
                }
            }
        }
        // Under the same lock under which it found no work.
        state.lanes -= 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until there is a job or the executor closes, and returns `true` if neither happened for a while. Polls at
    /// first, unless another lane does.
    fn rest<'a>(&'a self, mut state: MutexGuard<'a, State>) -> (MutexGuard<'a, State>, bool) {
        if !self.poll.is_zero() && !state.idle.polling {
            (state.idle.count, state.idle.polling) = (state.idle.count + 1, true);
            self.called.store(false, Ordering::Relaxed);
            drop(state);
            poll(self.poll, || self.called.load(Ordering::Relaxed));
            state = self.state.lock();
            (state.idle.count, state.idle.polling) = (state.idle.count - 1, false);
            if !state.jobs.is_empty() || state.closed {
                return (state, false);
            }
        }
        state.idle.count += 1;
        let (mut state, waited) = self.changed.wait_timeout(state, KEEP);
        state.idle.woken();
        (state, waited)
    }

    /// Has an idle lane look at the jobs, if there are any. Returns whether the caller must wake it, without the lock.
    fn call_lane(&self, state: &mut State) -> bool {
        if state.jobs.is_empty() {
            return false;
        }
        if state.idle.polling {
            self.called.store(true, Ordering::Relaxed);
            return false;
        }
        let wakes = !state.idle.waking && state.idle.count > 0;
        state.idle.waking |= wakes;
        wakes
    }

    /// Body of the clock: runs jobs at their time, until there has been none for a while.
    fn run_alarms(&self) {
        let mut state = self.state.lock();
        while !state.closed {
            let next = state.alarms.first_key_value().map(|(&(when, _), _)| when);
            let left = next.map(|when| when.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                let due = state.alarms.pop_first();
                drop(state);
                if let Some((_, alarmed)) = due {
                    let _ = catch_unwind(AssertUnwindSafe(|| alarmed.due()));
                }
                state = self.state.lock();
                continue;
            }
            // At most `KEEP`, so that the clock ends some time after the last alarm was forgotten.
            let sleep = left.unwrap_or(KEEP).min(KEEP);
            state.clock_wakes = Some(Instant::now() + sleep);
            let (woken, waited) = self.alarms_changed.wait_timeout(state, sleep);
            state = woken;
            state.clock_wakes = None;
            if waited && left.is_none() && state.alarms.is_empty() {
                break;
            }
        }
        state.clock = false;
        drop(state);
        self.changed.notify_all();
    }
}

/// Runs a job. A job that panics reports it when it is dropped, and does not end its lane.
fn run(job: Arc<dyn Job>) {
    let _ = catch_unwind(AssertUnwindSafe(|| job.run()));
}

fn no_thread(error: &io::Error) -> Error {
    let text = format!("no thread for a transfer could be started: {error}");
    let errno = error.raw_os_error().unwrap_or(0);
    Error::new(ErrorKind::System, text).with("errno", errno)
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
