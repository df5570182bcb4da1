//! A layer-wise transfer whose layers come in order, from a thread that asks for one after the other and stops at the first
//! one that does not come (contract §8.2 to §8.4).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::delivery::{Delivery, DeliveryState, LayerProgress, Outcome, ReportedLayers};
use super::executor::ExecutorHandle;
use super::layer_notice::TaskEnd;
use super::running_calls::RunningCalls;
use super::task::Task;
use super::task_state::{Awaited, TaskState};
use crate::error::{Error, ErrorKind, Result};
use crate::events::Transfer;
use crate::model::Deadline;
use crate::sync::MutexGuard;

/// A push whose layers come in order. If it is dropped, destinations that wait for a layer end.
#[derive(Debug)]
pub struct CacheTask {
    task: Arc<Task>,
    layer_timeout: Option<Duration>,
}

impl CacheTask {
    /// Starts a transfer of the layers of each delivery, out of a cache with this many layers. `running` must not be that of the
    /// asynchronous calls of the engine, because `drain` waits for those. A layer has `limit` from the start of its push. The transfer
    /// waits at most `layer_timeout` for a layer.
    pub(crate) fn start(
        running: &Arc<RunningCalls>,
        executor: &ExecutorHandle,
        (layers, deliveries): (u32, Vec<Delivery>),
        limit: Duration,
        layer_timeout: Option<Duration>,
    ) -> Result<CacheTask> {
        let transfer = Transfer::unreported();
        running.reserve(&transfer);
        let end = TaskEnd { transfer: transfer.clone(), running: running.clone() };
        let task = Task::start(executor, end, (layers, deliveries), limit, None);
        Ok(CacheTask { task: task.inspect_err(|_| running.leave(&transfer))?, layer_timeout })
    }

    /// Returns the layers that any destination needs, ascending.
    pub fn layers(&self) -> Vec<u32> {
        let state = self.state();
        let needed = state.deliveries.iter().flat_map(|delivery| delivery.range.first..delivery.range.end);
        needed.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns whether a destination that has not ended needs `layer`. If so, and if `layer` is not ready,
    /// the wait for it starts now.
    pub fn wanted(&self, layer: u32) -> bool {
        let mut state = self.state();
        let wanted = state.deliveries.iter().any(|delivery| delivery.awaits(layer));
        let layer_timeout = self.layer_timeout.map(|limit| Deadline::after(limit).named("timeout_in_millis"));
        let awaited = Awaited { layer, since: Instant::now(), layer_timeout };
        state.awaited = (wanted && !state.layers.is_reported(layer)).then_some(awaited);
        let watched = state.awaited.is_some() && layer_timeout.is_some();
        drop(state);
        if watched {
            self.task.watch();
        }
        wanted
    }

    /// Reports that `layer` may be pushed, as [`LayerTask::ready`](super::LayerTask::ready) does.
    pub fn ready(&self, layer: u32) -> Result<()> {
        self.task.ready(layer)
    }

    /// Reports that `layer` and every layer that is not ready yet will never be ready. Destinations that need `layer` or an
    /// earlier one of these fail with `error`. Destinations that begin after `layer` are never reached. Destinations whose
    /// layers are all ready continue.
    pub(crate) fn refuse(&self, layer: u32, error: &Error) {
        self.state().refuse(layer, error);
        self.task.finish_ended();
    }

    /// Refuses a layer because the code that computes it reports that it will not be ready
    /// (contract §8.3).
    pub fn not_ready(&self, layer: u32) {
        let text = format!("layer {layer} is not ready: synchronize_layer returned a false value");
        self.refuse(layer, &Error::new(ErrorKind::InvalidArgument, text));
    }

    /// Refuses a layer because the code that reports layers failed with `why` (contract §8.3,
    /// ruling for exceptions).
    pub fn broken(&self, layer: u32, why: &str) {
        let text = format!("layer {layer} will not be ready: {why}");
        self.refuse(layer, &Error::new(ErrorKind::Timeout, text));
    }

    /// Returns the record of the end of the transfer. It is no event.
    pub fn transfer(&self) -> &Arc<Transfer> {
        self.task.transfer()
    }

    /// Cancels all destinations without an outcome. Layers in transit are still pushed. Returns `false` if every destination
    /// had an outcome.
    pub fn cancel(&self) -> bool {
        let mut state = self.state();
        let any = state.deliveries.iter().any(DeliveryState::is_under_way);
        state.fail_each(|_, _| Some(Error::new(ErrorKind::Cancelled, "the transfer was cancelled")));
        drop(state);
        self.task.finish_ended();
        any
    }

    /// Whether the transfer has ended: nothing of it moves, or ever will.
    pub fn done(&self) -> bool {
        self.transfer().done()
    }

    /// Waits until the transfer is [`done`](Self::done). Returns `Ok(false)` once `deadline` has passed, and
    /// `Err` only if interrupted.
    pub fn wait(&self, deadline: Deadline) -> Result<bool> {
        self.transfer().wait(deadline)
    }

    /// Returns the outcome of each destination. An outcome never changes, but a layer of the destination may be in transit
    /// until the transfer is [`done`](Self::done).
    pub fn outcomes(&self) -> Vec<Outcome> {
        self.state().deliveries.iter().map(|delivery| delivery.outcome.clone()).collect()
    }

    /// Returns why each destination is not done: why it failed, or what it waits for. `None` for destinations
    /// that are done, and for those that were never reached.
    pub fn reasons(&self) -> Vec<Option<Error>> {
        let mut state = self.state();
        let TaskState { layers, deliveries, awaited, .. } = &mut *state;
        let reason = |delivery: &mut DeliveryState| match &delivery.outcome {
            Outcome::Unreached | Outcome::Done => None,
            Outcome::UnderWay => Some(unfinished(delivery, layers, *awaited)),
            Outcome::Failed(error) => Some(error.clone()),
        };
        deliveries.iter_mut().map(reason).collect()
    }

    /// How long the transfer may wait for one layer, if there is a limit.
    pub fn layer_timeout(&self) -> Option<Duration> {
        self.layer_timeout
    }

    /// Returns the progress of each destination.
    pub fn progress(&self) -> Vec<LayerProgress> {
        self.state().deliveries.iter().map(DeliveryState::progress).collect()
    }

    fn state(&self) -> MutexGuard<'_, TaskState> {
        self.task.state.lock()
    }
}

impl Drop for CacheTask {
    fn drop(&mut self) {
        self.task.abandon();
    }
}

/// Returns why a destination has no result yet.
fn unfinished(delivery: &mut DeliveryState, layers: &ReportedLayers, awaited: Option<Awaited>) -> Error {
    let (layer, done) = (delivery.current(layers), delivery.progress().layers);
    let error = |text: &str| {
        let error = Error::new(ErrorKind::Timeout, text).with("cluster", delivery.cluster);
        error.with("layer", layer).with("layers_done", done)
    };
    if layers.is_reported(layer) {
        return error("not done yet: the layer is being transferred");
    }
    match awaited {
        Some(awaited) if delivery.awaits(awaited.layer) => error("not done yet: waiting for the layer")
            .with("waited_ms", awaited.since.elapsed().as_millis()),
        _ => error("not done yet: the layer was not requested"),
    }
}
