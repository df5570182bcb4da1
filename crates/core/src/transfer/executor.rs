//! Lanes: a pool of threads that run the jobs of transfers.
//!
//! One of the idle lanes polls for a short time before it sleeps, so a caller who starts a call meanwhile wakes no thread.
//! A caller who hands over many jobs wakes one lane, which wakes the next.
//!
//! A transfer whose next layer is still being computed takes no lane, so there are as many threads as layers
//! in transit, not as transfers (`tasks_that_wait_take_no_threads`). One destination cluster cannot
//! take all lanes either: jobs for a peer that stalls delay only jobs for the same peer
//! (`every_cluster_gets_a_lane_and_at_most_32`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use super::clock::{Clock, no_thread};
use super::place_table::{Place, PlaceTable};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::ClusterId;
use crate::sync::PATIENCE;
use crate::threads::{JobQueue, PollLimits, ThreadPool};

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
    lanes: ThreadPool<LaneQueue>,
    clock: Clock,
}

/// The jobs of an engine that no lane has taken.
#[derive(Default)]
struct LaneQueue {
    /// Jobs that may run now, each with its cluster.
    jobs: VecDeque<(LaneKey, Arc<dyn Job>)>,
    clusters: HashMap<LaneKey, ClusterJobs>,
    /// Jobs that wait until one of the others of their cluster ends.
    waiting: PlaceTable<Arc<dyn Job>>,
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

impl LaneQueue {
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
        let LaneQueue { waiting, clusters, .. } = self;
        if let Some(at) = clusters.get_mut(&cluster) {
            at.waiting -= 1;
            // Half of the entries or more are removed, so that the time for each job is constant.
            if at.queue.len() > 2 * at.waiting + SPARE {
                at.queue.retain(|place| waiting.contains(*place));
            }
        }
        Some(job)
    }
}

impl JobQueue for LaneQueue {
    type Job = Arc<dyn Job>;
    type Key = LaneKey;

    fn ready(&self) -> usize {
        self.jobs.len()
    }

    /// Takes another job for the cluster of the job that has ended if no other lane works for it. So a cluster keeps its lane
    /// as long as it has work (`every_cluster_gets_a_lane_and_at_most_32`).
    fn next(&mut self, ended: Option<LaneKey>) -> Option<(LaneKey, Arc<dyn Job>)> {
        if let Some(cluster) = ended {
            self.over(cluster);
        }
        let alone = |cluster: &LaneKey| {
            let queued = self.jobs.iter().filter(|(to, _)| to == cluster).count();
            self.clusters.get(cluster).is_some_and(|at| at.taken == queued)
        };
        let own = ended.filter(alone).and_then(|cluster| self.jobs.iter().position(|(to, _)| *to == cluster));
        self.jobs.remove(own.unwrap_or(0))
    }

    fn take_all(&mut self) -> Vec<Arc<dyn Job>> {
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

    /// Runs a job. A job that panics reports it when it is dropped.
    fn run(job: Arc<dyn Job>) {
        job.run();
    }
}

impl Executor {
    /// Creates an executor without any lane. An idle lane polls for `poll` before it sleeps.
    pub fn new(poll: Duration) -> Self {
        let lanes = ThreadPool::new("llm-lane", MOST, PollLimits { threads: 1, time: poll });
        let clock = Clock::new(lanes.threads().clone());
        Executor { handle: ExecutorHandle(Arc::new(Shared { lanes, clock })) }
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
        let mut state = self.0.lanes.lock();
        if state.is_closed() {
            drop(state);
            job.refused(Error::closed());
            return None;
        }
        let queue = &mut state.queue;
        let at = queue.clusters.entry(cluster).or_default();
        if at.taken == MOST_OF_ONE {
            return match queue.place_to_wait(cluster) {
                Ok(place) => {
                    queue.waiting.fill(place, job);
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
            queue.jobs.push_front((cluster, job));
        } else {
            queue.jobs.push_back((cluster, job));
        }
        if let Err((error, jobs)) = self.0.lanes.dispatch(state, 1, first) {
            for job in jobs {
                job.refused(no_thread(&error));
            }
        }
        None
    }

    /// Returns a job that still waits for others of its cluster, and forgets it.
    pub(crate) fn withdraw(&self, cluster: LaneKey, place: Place) -> Option<Arc<dyn Job>> {
        self.0.lanes.lock().queue.withdraw(cluster, place)
    }

    /// Returns the clock.
    pub(crate) fn clock(&self) -> &Clock {
        &self.0.clock
    }

    /// Sets whether the executor behaves as if no thread could be started.
    #[cfg(feature = "testing")]
    pub fn refuse_threads(&self, refuse: bool) {
        self.0.lanes.threads().refuse(refuse);
    }

    /// Number of threads.
    #[cfg(feature = "testing")]
    pub fn threads(&self) -> usize {
        self.0.lanes.threads().count()
    }

    /// Number of alarms that are set.
    #[cfg(feature = "testing")]
    pub fn alarms(&self) -> usize {
        self.0.clock.alarms()
    }
}

impl Default for Executor {
    fn default() -> Self {
        Executor::new(PATIENCE)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let Shared { lanes, clock } = &*self.handle.0;
        // Without the lock, because the jobs report their end.
        lanes.close().into_iter().for_each(|job| job.refused(Error::closed()));
        clock.close();
        lanes.threads().wait(0);
    }
}

impl std::fmt::Debug for ExecutorHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ExecutorHandle").field(&self.0.lanes).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
