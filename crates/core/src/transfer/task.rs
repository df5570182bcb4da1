//! A layer-wise transfer in progress: which layers are ready, how far each destination is, and its outcome.
//!
//! The code that computes layers reports which ones are ready, in any order, and workers push ready layers to each
//! destination. Neither waits for the other, and no destination waits for another. Each destination has a [`Transfer`], which
//! ends once nothing of the destination moves. A worker that ends without a result leaves a failure
//! (`destinations_are_independent`), so a missing result never counts as success.
//!
//! `layer_task` starts a task, and `layerwise` pushes the layers.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::async_calls::AsyncCalls;
use super::clock::Alarmed;
use super::current_call::{watched, work_for};
use super::delivery::{
    DeliveryState, LayerSink, Outcome, ReadyRun, ReportedLayers, RunState, TaskKind, TaskLimits,
};
use super::executor::{ExecutorHandle, Job, JobClass};
use super::joint::Joint;
use super::run_length::RunLength;
use super::running_calls::RunningCalls;
use super::slot_map::SlotKey;
use super::task_state::TaskState;
use crate::error::{Error, ErrorKind, Result};
use crate::events::Transfer;
use crate::model::Deadline;
use crate::sync::Mutex;

/// One transfer to any number of destinations.
#[derive(Debug)]
pub(super) struct Task {
    executor: ExecutorHandle,
    pub(super) limits: TaskLimits,
    begin: Instant,
    /// The transfer of each destination, in the order of the destinations.
    pub(super) transfers: Vec<Arc<Transfer>>,
    running: Arc<RunningCalls>,
    /// The keys of the transfers in `running`.
    pub(super) keys: Vec<SlotKey>,
    /// The transfer of all destinations together, if they have one.
    pub(super) joint: Option<Arc<Joint>>,
    pub(super) state: Mutex<TaskState>,
}

impl Task {
    /// Creates a task whose transfers have these keys among the calls that run. [`begin`](Self::begin) starts it.
    pub(super) fn new(
        calls: &AsyncCalls,
        limits: TaskLimits,
        (transfers, keys): (Vec<Arc<Transfer>>, Vec<SlotKey>),
        joint: Option<Arc<Joint>>,
        state: TaskState,
    ) -> Arc<Task> {
        let (executor, running) = (calls.executor().clone(), calls.running().clone());
        let (begin, state) = (Instant::now(), Mutex::new(state));
        Arc::new(Task { executor, limits, begin, transfers, running, keys, joint, state })
    }

    /// Cancels every destination that has not ended.
    pub(super) fn cancel_all(&self) {
        for transfer in &self.transfers {
            transfer.cancel();
        }
    }

    /// Has workers find every destination.
    pub(super) fn begin(self: &Arc<Self>) {
        self.queue_all();
        // Those that cannot be reached have ended already.
        self.finish_ended();
    }

    /// Reports that `layer` may be pushed, in any order. Returns at once. Returns `Err(InvalidArgument)` if the source
    /// cache has no such layer, or if it was reported before; nothing changes then.
    pub(super) fn ready(self: &Arc<Self>, layer: u32) -> Result<()> {
        let since = Instant::now();
        let mut state = self.state.lock();
        state.layers.report(layer)?;
        state.layers.push_ready(layer, since);
        state.awaited = None;
        drop(state);
        self.queue_all();
        Ok(())
    }

    fn queue_all(self: &Arc<Self>) {
        (0..self.transfers.len()).for_each(|index| self.queue(index));
    }

    /// Hands a destination to the workers if there is something to do for it, unless they have it already.
    fn queue(self: &Arc<Self>, index: usize) {
        let mut state = self.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        let delivery = &mut deliveries[index];
        let next = delivery.next(layers);
        let idle = !delivery.is_under_way() || delivery.found && next.is_none();
        if delivery.is_busy() || idle {
            return;
        }
        let (run_state, cluster) =
            (std::mem::replace(&mut delivery.run_state, RunState::Queued), delivery.cluster);
        if let Some(next) = next.filter(|_| self.limits.kind.has_events())
            && let Err(error) = self.arm(&mut state, Deadline::since(next.since, self.limits.layer).at())
        {
            // Without the alarm, nothing would notice that the layer is late.
            drop(state);
            return self.stop(index, error);
        }
        drop(state);
        if run_state == RunState::Idle {
            let job = LayerJob { task: self.clone(), index, why: None, over: false };
            self.executor.submit(JobClass::Calls(cluster), Arc::new(job));
        }
    }

    /// Fails the destination at `index` unless it has ended. Layers in transit are still pushed.
    pub(super) fn stop(&self, index: usize, error: Error) {
        let mut state = self.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        deliveries[index].fail(|| error, layers);
        drop(state);
        self.finish_if_ended(index);
    }

    /// [Finishes](Self::finish_if_ended) every destination that has ended.
    pub(super) fn finish_ended(&self) {
        (0..self.transfers.len()).for_each(|index| self.finish_if_ended(index));
    }

    /// If a destination has its outcome and nothing of it moves, drops its sink and ends its transfer.
    fn finish_if_ended(&self, index: usize) {
        let mut state = self.state.lock();
        let delivery = &mut state.deliveries[index];
        let Some(moved) = delivery.take_end() else { return };
        let sink = delivery.sink.take();
        drop(state);
        let moved = moved.map_err(|error| match &sink {
            Some(sink) if self.limits.kind.has_events() => sink.named(error),
            _ => error,
        });
        // The sink may be the last owner of a cache, whose memory returns to a pool. So it is dropped without the lock, and
        // before anything reports that the destination has ended.
        drop(sink);
        let failed_first = self.joint.as_ref().is_some_and(|joint| joint.note(self.of_part(index, &moved)));
        self.transfers[index].finish(moved);
        self.running.leave(self.keys[index]);
        let mut state = self.state.lock();
        state.open -= 1;
        let last = state.open == 0;
        let alarm = if last { state.alarm.take() } else { None };
        drop(state);
        if let Some((_, alarm)) = alarm {
            self.executor.clock().forget(alarm);
        }
        if failed_first {
            self.cancel_all();
        }
        if let Some(joint) = self.joint.as_ref().filter(|_| last) {
            joint.finish();
        }
    }

    /// Returns the end of a destination as that of the joint transfer, whose error names the destination if there are several.
    fn of_part(&self, index: usize, end: &Result<u64>) -> Result<u64> {
        let several = self.transfers.len() > 1;
        end.clone().map_err(|error| if several { error.with("part", index) } else { error })
    }

    /// Has [`watch`](Self::watch) called at `when`, or earlier.
    fn arm(self: &Arc<Self>, state: &mut TaskState, when: Instant) -> Result<()> {
        if state.open == 0 || state.alarm.is_some_and(|(at, _)| at <= when) {
            return Ok(());
        }
        let alarm = self.executor.clock().at(when, Arc::new(Late(Arc::downgrade(self))))?;
        if let Some((_, later)) = state.alarm.replace((when, alarm)) {
            self.executor.clock().forget(later);
        }
        Ok(())
    }

    /// Fails what is late, and sets the alarm for the next moment at which something may be.
    pub(super) fn watch(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let (late, next) = state.fail_late(self.limits, self.begin);
        let armed = next.map_or(Ok(()), |next| self.arm(&mut state, next));
        if let Err(error) = &armed {
            // Without the alarm, nothing would notice what is late.
            let waits = |delivery: &DeliveryState, layers: &ReportedLayers| {
                !delivery.is_busy() || delivery.missing(layers).is_some()
            };
            state.fail_each(|delivery, layers| waits(delivery, layers).then(|| error.clone()));
        }
        drop(state);
        if late || armed.is_err() {
            self.finish_ended();
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

/// The work of a worker for one destination: pushes what is ready.
struct LayerJob {
    task: Arc<Task>,
    index: usize,
    /// Why the work was refused, if it was.
    why: Option<Error>,
    /// Whether the job has ended regularly, so that its drop need not report a failure.
    over: bool,
}

/// Next step of such a job. The moment is the one from which its limit counts; for several layers, that of the first one.
enum LayerStep {
    Find(Arc<dyn LayerSink>, Instant),
    Push(Arc<dyn LayerSink>, ReadyRun),
}

impl Job for LayerJob {
    fn run(self: Arc<Self>) {
        // The worker has the only reference, here and below.
        let Some(mut job) = Arc::into_inner(self) else { return };
        let transfer = job.task.transfers[job.index].clone();
        let _current = work_for(&transfer);
        let mut run_length = RunLength::default();
        while let Some(step) = job.next() {
            match step {
                LayerStep::Find(sink, since) => {
                    let found = sink.find(job.task.limits.kind, job.deadline(since));
                    drop(sink);
                    if let Ok(bytes) = found {
                        transfer.expect(bytes);
                        job.task.joint.iter().for_each(|joint| joint.expect(bytes));
                    }
                    job.record(found, |delivery, _, _| {
                        delivery.found = true;
                        delivery.end_if_complete();
                    });
                }
                LayerStep::Push(sink, ReadyRun { layers, since }) => {
                    let (deadline, begin) = (job.deadline(since), Instant::now());
                    let pushed = sink.push(layers, run_length.max_bytes(deadline.left()), deadline);
                    drop(sink);
                    if let Ok((_, bytes)) = pushed {
                        run_length.learn(bytes, begin.elapsed());
                        transfer.part_done(bytes);
                        job.task.joint.iter().for_each(|joint| joint.transfer.part_done(bytes));
                    }
                    job.record(pushed, |delivery, (count, bytes), layers| {
                        delivery.note_pushed(count, bytes, layers);
                    });
                }
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

impl LayerJob {
    /// Returns the deadline of a step.
    fn deadline(&self, since: Instant) -> Deadline {
        let TaskLimits { layer, kind, .. } = self.task.limits;
        match kind {
            TaskKind::CacheTask => Deadline::after(layer),
            TaskKind::LayerTask => watched(Deadline::since(since, layer)),
        }
    }

    fn next(&self) -> Option<LayerStep> {
        let mut state = self.task.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        let delivery = &mut deliveries[self.index];
        delivery.run_state = RunState::Busy;
        let next = delivery.next_run(layers);
        match (&delivery.outcome, &delivery.sink, next) {
            (Outcome::UnderWay, Some(sink), next) if !delivery.found => {
                let since = next.map_or_else(Instant::now, |ready| ready.since);
                return Some(LayerStep::Find(sink.clone(), since));
            }
            (Outcome::UnderWay, Some(sink), Some(ready)) => {
                return Some(LayerStep::Push(sink.clone(), ready));
            }
            _ => delivery.run_state = RunState::Idle,
        }
        drop(state);
        self.task.finish_if_ended(self.index);
        None
    }

    fn record<T>(&self, result: Result<T>, success: impl FnOnce(&mut DeliveryState, T, &ReportedLayers)) {
        let mut state = self.task.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        let delivery = &mut deliveries[self.index];
        match result {
            Ok(moved) => success(delivery, moved, layers),
            Err(error) => delivery.fail(|| error, layers),
        }
    }
}

impl Drop for LayerJob {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let text = "the thread of a transfer ended without a result";
        let why = self.why.take().unwrap_or_else(|| Error::new(ErrorKind::System, text));
        let mut state = self.task.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        let delivery = &mut deliveries[self.index];
        delivery.run_state = RunState::Idle;
        delivery.fail(|| why, layers);
        drop(state);
        self.task.finish_if_ended(self.index);
    }
}
