//! A layer-wise transfer in progress: which layers are ready, how far each destination is, and its outcome.
//!
//! The code that computes layers reports which ones are ready, in any order, and lanes push ready layers to each
//! destination. Neither waits for the other, and no destination waits for another. A destination has a result only once
//! it has ended. A carrier that ends without a result leaves a failure (`destinations_are_independent`), so a missing
//! result never counts as success.
//!
//! The outcome of a destination goes into the list of the task (`layer_walk`: the layers come in order, from a thread
//! that asks for them), or into a [`Transfer`] of its own (`layer_task`: the caller reports layers as it likes).
//! `layerwise` pushes the layers.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::clock::Alarmed;
use super::delivery::{Carrier, Delivery, DeliveryState, ReadyRun, ReportedLayers, TaskLimits};
use super::executor::{ExecutorHandle, Job, LaneKey};
use super::on_lane::OnLane;
use super::place_table::Place;
use super::run_length::RunLength;
use super::running_calls::RunningCalls;
use super::task_state::TaskState;
use crate::error::{Error, ErrorKind, Result};
use crate::events::Transfer;
use crate::fallible;
use crate::model::Deadline;
use crate::sync::{Condvar, Mutex};
use crate::validate::LayerRange;

/// One transfer to any number of destinations.
#[derive(Debug)]
pub struct Task {
    lanes: ExecutorHandle,
    pub(super) limits: TaskLimits,
    begin: Instant,
    pub(super) outlet: Outlet,
    /// Number of destinations.
    count: usize,
    pub(super) state: Mutex<TaskState>,
    /// Notified when the transfer has ended.
    pub(super) changed: Condvar,
}

/// Where the outcomes of the destinations go.
#[derive(Debug)]
pub(super) enum Outlet {
    /// They stay in the task. The descriptor is readable once all destinations have ended.
    List(OwnedFd),
    /// Into a transfer of each destination.
    Transfers {
        /// In the order of the destinations.
        transfers: Vec<Arc<Transfer>>,
        running: Arc<RunningCalls>,
        /// The places of these transfers in `running`.
        places: Vec<Place>,
    },
}

impl Task {
    /// Creates a transfer of the layers of each delivery, out of a cache with this many layers. [`begin`](Self::begin)
    /// starts it.
    pub(super) fn new(
        lanes: ExecutorHandle,
        layers: u32,
        deliveries: Vec<Delivery>,
        limits: TaskLimits,
        outlet: Outlet,
    ) -> Result<Arc<Task>> {
        let deliveries = deliveries.into_iter().map(DeliveryState::new);
        let deliveries = fallible::collect("the destinations of a transfer", deliveries)?;
        let (count, open) = (deliveries.len(), deliveries.iter().filter(|one| one.carrier.is_some()).count());
        let state = TaskState {
            layers: ReportedLayers::new(layers)?,
            over: false,
            awaited: None,
            alarm: None,
            deliveries,
            open,
            ended: open == 0,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Ok(Arc::new(Task { lanes, limits, begin: Instant::now(), outlet, count, state, changed }))
    }

    /// Has lanes find every destination.
    pub(super) fn begin(self: &Arc<Self>) {
        for index in 0..self.count {
            let state = self.state.lock();
            let delivery = &state.deliveries[index];
            let (queued, cluster) = (delivery.queued, delivery.cluster);
            drop(state);
            if queued {
                self.send(index, LaneKey::Calls(cluster));
            }
        }
    }

    /// Reports that `layer` may be pushed, in any order. Returns at once. Returns `Err(InvalidArgument)` if the source
    /// cache has no such layer, or if it was reported before; nothing changes then.
    pub fn ready(self: &Arc<Self>, layer: u32) -> Result<()> {
        let since = Instant::now();
        let mut state = self.state.lock();
        state.layers.report(layer)?;
        if state.over {
            return Ok(());
        }
        state.layers.push_ready(layer, since);
        state.awaited = None;
        drop(state);
        for index in 0..self.count {
            self.queue(index, layer);
        }
        Ok(())
    }

    /// Hands a destination that needs `layer`, which is ready now, to the lanes, unless they have it already.
    fn queue(self: &Arc<Self>, index: usize, layer: u32) {
        let mut state = self.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        let delivery = &mut deliveries[index];
        if delivery.busy || !delivery.awaits(layer) {
            return;
        }
        // A lane may have pushed the layer meanwhile.
        let Some(next) = delivery.next(layers) else { return };
        let (queued, cluster) = (std::mem::replace(&mut delivery.queued, true), delivery.cluster);
        if matches!(self.outlet, Outlet::Transfers { .. }) {
            let due = Deadline::since(next.since, self.limits.layer).at();
            if let Err(error) = self.arm(&mut state, due) {
                // Without the alarm, nothing would notice that the layer is late.
                let TaskState { layers, deliveries, .. } = &mut *state;
                deliveries[index].fail(|| error, layers);
                drop(state);
                return self.settle(index);
            }
        }
        drop(state);
        if !queued {
            self.send(index, LaneKey::Calls(cluster));
        }
    }

    /// Hands a destination, which is marked as queued, to the lanes.
    fn send(self: &Arc<Self>, index: usize, lanes: LaneKey) {
        let job = CarryJob { task: self.clone(), index, why: None, over: false };
        self.lanes.carry(lanes, Arc::new(job));
    }

    /// Fails the destination at `index` unless it has ended. Layers in transit are still pushed.
    pub(super) fn stop(&self, index: usize, error: Error) {
        let mut state = self.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        deliveries[index].fail(|| error, layers);
        drop(state);
        self.settle(index);
    }

    /// [Settles](Self::settle) every destination.
    pub(super) fn settle_all(&self) {
        (0..self.count).for_each(|index| self.settle(index));
    }

    /// If nothing of a destination moves or will move, drops its carrier and reports its outcome.
    fn settle(&self, index: usize) {
        let mut state = self.state.lock();
        let TaskState { layers, deliveries, over, .. } = &mut *state;
        let delivery = &mut deliveries[index];
        // After a refusal, a destination still gets the layers that are ready.
        let ends = delivery.outcome.is_some() || *over && delivery.next(layers).is_none();
        if delivery.busy || !ends {
            return;
        }
        let Some(carrier) = delivery.carrier.take() else { return };
        let moved = delivery.moved();
        drop(state);
        let moved = moved.map_err(|error| carrier.named(error));
        // The carrier may be the last owner of a cache, whose memory returns to a pool. So it is dropped without the
        // lock, and before anything reports that the destination has ended.
        drop(carrier);
        if let Outlet::Transfers { transfers, running, places } = &self.outlet {
            transfers[index].finish(moved);
            running.leave(places[index]);
        }
        self.close_one();
    }

    /// Notes that one more destination has ended, and so perhaps the transfer.
    fn close_one(&self) {
        let mut state = self.state.lock();
        state.open -= 1;
        if state.open > 0 {
            return;
        }
        state.ended = true;
        self.signal_end();
        self.changed.notify_all();
        let alarm = state.alarm.take();
        drop(state);
        if let Some((_, alarm)) = alarm {
            self.lanes.clock().forget(alarm);
        }
    }

    /// Makes the descriptor of the end readable.
    pub(super) fn signal_end(&self) {
        if let Outlet::List(descriptor) = &self.outlet {
            // Fails only if the counter is full, and it is written once.
            let _ = rustix::io::write(descriptor, &1u64.to_ne_bytes());
        }
    }

    /// Has [`watch`](Self::watch) called at `when`, or earlier.
    pub(super) fn arm(self: &Arc<Self>, state: &mut TaskState, when: Instant) -> Result<()> {
        if state.ended || state.alarm.is_some_and(|(at, _)| at <= when) {
            return Ok(());
        }
        let alarm = self.lanes.clock().at(when, Arc::new(Late(Arc::downgrade(self))))?;
        if let Some((_, later)) = state.alarm.replace((when, alarm)) {
            self.lanes.clock().forget(later);
        }
        Ok(())
    }

    /// Fails what is late, and sets the alarm for the next moment at which something may be.
    pub(super) fn watch(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let (late, next) = match &self.outlet {
            Outlet::List(_) => state.late_wait(),
            Outlet::Transfers { .. } => state.late_deliveries(self.limits, self.begin),
        };
        let armed = next.map_or(Ok(()), |next| self.arm(&mut state, next));
        if let Err(error) = &armed {
            // Without the alarm, nothing would notice what is late.
            let waits = |delivery: &DeliveryState, layers: &ReportedLayers| {
                !delivery.busy || delivery.missing(layers).is_some()
            };
            state.fail_each(|delivery, layers| waits(delivery, layers).then(|| error.clone()));
        }
        drop(state);
        if late || armed.is_err() {
            self.settle_all();
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let alarm = self.state.lock().alarm.take();
        if let Some((_, alarm)) = alarm {
            self.lanes.clock().forget(alarm);
        }
    }
}

/// Checks what is late.
struct Late(Weak<Task>);

impl Alarmed for Late {
    fn due(self: Arc<Self>) {
        let Some(task) = self.0.upgrade() else { return };
        // If another alarm has replaced this one, it was for an earlier moment, and comes at once.
        task.state.lock().alarm = None;
        task.watch();
    }
}

/// The work of a lane for one destination: pushes what is ready.
struct CarryJob {
    task: Arc<Task>,
    index: usize,
    /// Why the work was refused, if it was.
    why: Option<Error>,
    /// Whether the job has ended regularly, so that its drop need not report a failure.
    over: bool,
}

/// Next step of such a job. The moment is the one from which its limit counts; for several layers, that of the first one.
enum CarryStep {
    Find(Arc<dyn Carrier>, Instant),
    Layers(Arc<dyn Carrier>, ReadyRun),
    Rest,
}

impl Job for CarryJob {
    fn run(self: Arc<Self>) {
        // The lane has the only reference, here and below.
        let Some(mut job) = Arc::into_inner(self) else { return };
        let task = job.task.clone();
        let transfer = match &task.outlet {
            Outlet::List(_) => None,
            Outlet::Transfers { transfers, .. } => Some(&transfers[job.index]),
        };
        let _lane = transfer.map(OnLane::of);
        let mut run_length = RunLength::default();
        loop {
            match job.next() {
                CarryStep::Find(carrier, since) => {
                    let found = carrier.find(job.deadline(since));
                    drop(carrier);
                    job.note_found(found, transfer);
                }
                CarryStep::Layers(carrier, ReadyRun { layers: ready, since }) => {
                    let most_bytes = run_length.most_bytes(job.deadline(since).left());
                    let count =
                        carrier.layers_of_request(ready, most_bytes).clamp(1, ready.end - ready.first);
                    let layers = LayerRange { end: ready.first + count, ..ready };
                    let begin = Instant::now();
                    let pushed = carrier.push(layers, job.deadline(since));
                    drop(carrier);
                    if let Ok(bytes) = pushed {
                        run_length.learn(bytes, begin.elapsed());
                    }
                    job.note_pushed(count, pushed, transfer);
                }
                CarryStep::Rest => break,
            }
        }
        job.over = true;
    }

    fn refused(self: Arc<Self>, why: Error) {
        if let Some(mut job) = Arc::into_inner(self) {
            job.why = Some(why);
        }
    }
}

impl CarryJob {
    /// Returns the deadline of a step. In a list task, the limit counts from the step (contract §8.2).
    fn deadline(&self, since: Instant) -> Deadline {
        let limit = self.task.limits.layer;
        match self.task.outlet {
            Outlet::List(_) => Deadline::after(limit),
            Outlet::Transfers { .. } => OnLane::watched(Deadline::since(since, limit)),
        }
    }

    fn next(&self) -> CarryStep {
        let mut state = self.task.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        let delivery = &mut deliveries[self.index];
        (delivery.queued, delivery.busy) = (false, true);
        let next = delivery.next_run(layers);
        match (&delivery.outcome, &delivery.carrier, next) {
            (None, Some(carrier), next) if !delivery.found => {
                let since = next.map_or_else(Instant::now, |ready| ready.since);
                return CarryStep::Find(carrier.clone(), since);
            }
            (None, Some(carrier), Some(ready)) => return CarryStep::Layers(carrier.clone(), ready),
            _ => delivery.busy = false,
        }
        drop(state);
        self.task.settle(self.index);
        CarryStep::Rest
    }

    fn note_found(&self, found: Result<u64>, transfer: Option<&Arc<Transfer>>) {
        if let (Ok(bytes), Some(transfer)) = (&found, transfer) {
            transfer.expect(*bytes);
        }
        self.record(found, |delivery, _, _| {
            delivery.found = true;
            delivery.end_if_complete();
        });
    }

    fn note_pushed(&self, count: u32, pushed: Result<u64>, transfer: Option<&Arc<Transfer>>) {
        if let (Ok(bytes), Some(transfer)) = (&pushed, transfer) {
            transfer.part_done(*bytes);
        }
        self.record(pushed, |delivery, bytes, layers| delivery.carried(count, bytes, layers));
    }

    fn record(&self, result: Result<u64>, success: impl FnOnce(&mut DeliveryState, u64, &ReportedLayers)) {
        let mut state = self.task.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        let delivery = &mut deliveries[self.index];
        match result {
            Ok(bytes) => success(delivery, bytes, layers),
            Err(error) => delivery.fail(|| error, layers),
        }
    }
}

impl Drop for CarryJob {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let text = "the lane of a transfer ended without a result";
        let why = self.why.take().unwrap_or_else(|| Error::new(ErrorKind::System, text));
        let mut state = self.task.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        let delivery = &mut deliveries[self.index];
        (delivery.queued, delivery.busy) = (false, false);
        delivery.fail(|| why, layers);
        drop(state);
        self.task.settle(self.index);
    }
}
