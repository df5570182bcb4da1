//! A layer-wise transfer in progress: which layers are ready, how far each destination is, and its outcome.
//!
//! The code that computes layers reports which ones are ready, in any order, and workers push ready layers to each
//! destination. Neither waits for the other, and no destination waits for another. The [`Transfer`] ends once nothing of any
//! destination moves. A worker that ends without a result leaves a failure (`destinations_are_independent`), so a missing result
//! never counts as success.
//!
//! `layer_task` and `cache_task` have the handles of a task, and `layerwise` pushes the layers.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::clock::Alarmed;
use super::current_call::{watched, work_for};
use super::delivery::{Delivery, DeliveryState, LayerSink, Outcome, ReadyRun, ReportedLayers, RunState};
use super::executor::{ExecutorHandle, Job, JobClass};
use super::layer_notice::{LayerNotice, NoticeJob, TaskEnd};
use super::running_calls::RunningCall;
use super::task_state::TaskState;
use crate::error::{Error, ErrorKind, Result};
use crate::events::{Stops, Transfer};
use crate::model::{ClusterId, Deadline};
use crate::sync::Mutex;

/// Maximum number of bytes of a request that pushes several layers: more bytes save no time. All its layers are reported together, at
/// its end.
const MAX_JOINED_BYTES: u64 = 32 << 20;
/// Maximum number of these bytes for each millisecond that is left for the first of the layers. So a link of 8 MiB/s moves them in time
/// (`requests_for_several_layers_are_bounded`).
const JOINED_BYTES_PER_MS: u64 = 8 << 10;

/// One push to any number of destinations.
pub(super) struct Task {
    executor: ExecutorHandle,
    end: TaskEnd,
    /// How long a layer may take to be in place.
    limit: Duration,
    joint: Option<Joint>,
    pub(super) state: Mutex<TaskState>,
}

/// What a task has whose destinations succeed or fail as one (`LayerTask`). The limit of a layer counts from its report, a push ends
/// early if the transfer is stopped, and a failure names the peer.
///
/// The destinations of the other tasks (`CacheTask`) are independent. The limit of a layer counts from the start of its push, which ends
/// by itself (contract §8.2).
pub(super) struct Joint {
    /// What the peer gets when all layers are in place.
    pub(super) notice: Option<Arc<LayerNotice>>,
}

impl Task {
    /// Starts to push the layers of each delivery, out of a cache with this many layers. On failure, the caller gives back what is
    /// reserved in `end`.
    pub(super) fn start(
        executor: &ExecutorHandle,
        end: TaskEnd,
        (layers, deliveries): (u32, Vec<Delivery>),
        limit: Duration,
        joint: Option<Joint>,
    ) -> Result<Arc<Task>> {
        let state = Mutex::new(TaskState::new(layers, deliveries)?);
        let task = Arc::new(Task { executor: executor.clone(), end, limit, joint, state });
        let stops: Weak<Self> = Arc::downgrade(&task);
        task.end.transfer.stop_with(stops);
        task.end.running.enter(&task.end.transfer, task.clone())?;
        if task.count() == 0 {
            task.end(Ok(0));
        }
        task.queue_all();
        // Those that cannot be reached have ended already.
        task.finish_ended();
        Ok(task)
    }

    /// Returns the transfer of all destinations. It ends once nothing of them moves.
    pub(super) fn transfer(&self) -> &Arc<Transfer> {
        &self.end.transfer
    }

    fn count(&self) -> usize {
        self.state.lock().deliveries.len()
    }

    /// Ends destinations that wait for a layer, because nobody can report it any more. Destinations whose layers are all ready
    /// continue.
    pub(super) fn abandon(&self) {
        self.state.lock().fail_each(|delivery, layers| {
            let layer = delivery.missing(layers)?;
            let text = format!("the task was dropped before layer {layer} was ready");
            Some(Error::new(ErrorKind::Cancelled, text).with("layer", layer))
        });
        self.finish_ended();
    }

    /// Reports that `layer` may be pushed, in any order. Returns at once. Returns `Err(InvalidArgument)` if the source
    /// cache has no such layer, or if it was reported before; nothing changes then.
    pub(super) fn ready(self: &Arc<Self>, layer: u32) -> Result<()> {
        let since = Instant::now();
        let mut state = self.state.lock();
        state.layers.report(layer, since)?;
        state.awaited = None;
        drop(state);
        self.queue_all();
        Ok(())
    }

    fn queue_all(self: &Arc<Self>) {
        (0..self.count()).for_each(|index| self.queue(index));
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
        if let Some((next, limit)) = next.zip(self.report_limit())
            && let Err(error) = self.arm(&mut state, Deadline::since(next.since, limit).at())
        {
            // Without the alarm, nothing would notice that the layer is late.
            drop(state);
            return self.fail(index, error);
        }
        drop(state);
        if run_state == RunState::Idle {
            let job = LayerJob { task: self.clone(), index, why: None, over: false };
            self.executor.submit(JobClass::Calls(cluster), Arc::new(job));
        }
    }

    /// Returns the limit of a layer if it counts from the report.
    fn report_limit(&self) -> Option<Duration> {
        self.joint.as_ref().map(|_| self.limit)
    }

    /// Fails the destination at `index` unless it has ended. Layers in transit are still pushed.
    fn fail(&self, index: usize, error: Error) {
        let mut state = self.state.lock();
        let TaskState { layers, deliveries, .. } = &mut *state;
        deliveries[index].fail(|| error, layers);
        drop(state);
        self.finish_if_ended(index);
    }

    /// Fails every destination that has not ended.
    fn fail_all(&self, error: &Error) {
        (0..self.count()).for_each(|index| self.fail(index, error.clone()));
    }

    /// [Finishes](Self::finish_if_ended) every destination that has ended.
    pub(super) fn finish_ended(&self) {
        (0..self.count()).for_each(|index| self.finish_if_ended(index));
    }

    /// If a destination has its outcome and nothing of it moves, drops its sink. Ends the transfer after the last destination.
    fn finish_if_ended(&self, index: usize) {
        let mut state = self.state.lock();
        let delivery = &mut state.deliveries[index];
        let Some(moved) = delivery.take_end() else { return };
        let sink = delivery.sink.take();
        drop(state);
        let moved = moved.map_err(|error| match &sink {
            Some(sink) if self.joint.is_some() => sink.named(error),
            _ => error,
        });
        // The sink may be the last owner of a cache, whose memory returns to a pool. So it is dropped without the lock, and
        // before anything reports that the destination has ended.
        drop(sink);
        let mut state = self.state.lock();
        let failed_first = state.note_end(index, moved);
        let outcome = (state.open == 0).then(|| state.outcome());
        let alarm = if outcome.is_some() { state.alarm.take() } else { None };
        drop(state);
        if let Some((_, alarm)) = alarm {
            self.executor.clock().forget(alarm);
        }
        if let Some(outcome) = outcome {
            self.end(outcome);
        } else if failed_first && self.joint.is_some() {
            self.transfer().interrupt();
            self.fail_all(&Error::new(ErrorKind::Cancelled, "another destination has failed"));
        }
    }

    /// Ends the transfer, whose destinations have all ended. A notification is delivered first, by a worker.
    fn end(&self, outcome: Result<u64>) {
        let notice = self.joint.as_ref().and_then(|joint| joint.notice.as_ref());
        match (notice, outcome) {
            (Some(notice), Ok(bytes)) => {
                let (end, limit) = (self.end.clone(), self.limit);
                let job = NoticeJob { notice: notice.clone(), end, limit, bytes };
                self.executor.submit(JobClass::Calls(notice.cluster), Arc::new(job));
            }
            (notice, outcome) => {
                if let Some(notice) = notice {
                    notice.give_back();
                }
                self.end.finish(outcome);
            }
        }
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
        let (late, next) = state.fail_late(self.report_limit());
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

impl Stops for Task {
    fn stop(&self, why: Error) {
        self.fail_all(&why);
    }
}

impl RunningCall for Task {
    fn close(&self) {
        self.transfer().close();
    }

    fn transfer_with(&self, cluster: ClusterId) -> Option<&Arc<Transfer>> {
        self.waits_with(cluster).then(|| self.transfer())
    }

    /// A push to several destinations is one transfer with the peers that are linked when it starts. The other tasks find the
    /// peer of each destination when its first layer is ready.
    fn waits_with(&self, cluster: ClusterId) -> bool {
        let to = |delivery: &DeliveryState| delivery.cluster == cluster;
        self.joint.is_some() && self.state.lock().deliveries.iter().any(to)
    }

    fn link_ended(&self, cluster: ClusterId) {
        let error = Error::new(ErrorKind::NotLinked, "the link ended before all layers were pushed");
        self.state.lock().fail_each(|delivery, _| (delivery.cluster == cluster).then(|| error.clone()));
        self.finish_ended();
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
        let transfer = job.task.transfer().clone();
        let _current = work_for(&transfer);
        // The first request pushes one layer, so a destination that fails at once fails with one layer.
        let mut max_bytes = 0;
        while let Some(step) = job.next() {
            match step {
                LayerStep::Find(sink, since) => {
                    let found = sink.find(job.deadline(since));
                    drop(sink);
                    if let Ok(bytes) = found {
                        transfer.expect(bytes);
                    }
                    job.record(found, |delivery, _, _| {
                        delivery.found = true;
                        delivery.end_if_complete();
                    });
                }
                LayerStep::Push(sink, ReadyRun { layers, since }) => {
                    let deadline = job.deadline(since);
                    let pushed = sink.push(layers, max_bytes.min(joined_bytes(deadline.left())), deadline);
                    drop(sink);
                    if let Ok((_, bytes)) = pushed {
                        max_bytes = MAX_JOINED_BYTES;
                        transfer.part_done(bytes);
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

/// Returns the maximum number of bytes of a request for several layers of which the first must be in place when `left` has passed.
fn joined_bytes(left: Duration) -> u64 {
    let in_time = u64::try_from(left.as_millis()).unwrap_or(u64::MAX).saturating_mul(JOINED_BYTES_PER_MS);
    in_time.min(MAX_JOINED_BYTES)
}

impl LayerJob {
    /// Returns the deadline of a step.
    fn deadline(&self, since: Instant) -> Deadline {
        let since_report = self.task.report_limit().map(|limit| watched(Deadline::since(since, limit)));
        since_report.unwrap_or_else(|| Deadline::after(self.task.limit))
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

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task").field("transfer", &self.end.transfer).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, joined_bytes};

    #[test]
    fn requests_for_several_layers_are_bounded() {
        let expected = [
            (Duration::ZERO, 0),
            (Duration::from_micros(999), 0),
            (Duration::from_millis(1), 8 << 10),
            (Duration::from_secs(1), 8_192_000),
            (Duration::from_secs(5), 32 << 20),
            (Duration::MAX, 32 << 20),
        ];
        for (left, bytes) in expected {
            assert_eq!(joined_bytes(left), bytes, "{left:?}");
        }
    }
}
