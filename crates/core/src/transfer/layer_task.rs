//! A task whose layers the caller reports, in any order and from any thread, with a transfer for each destination, or one for all.

use std::slice;
use std::sync::{Arc, Weak};

use super::async_calls::AsyncCalls;
use super::delivery::{Delivery, TaskKind, TaskLimits};
use super::joint::{Joint, LayerNotice};
use super::running_calls::RunningCall;
use super::slot_map::SlotKey;
use super::task::Task;
use super::task_state::TaskState;
use crate::error::{Error, ErrorKind, Result};
use crate::events::{Stops, Transfer};
use crate::model::ClusterId;

/// Maximum length of the reason of a failed layer, in characters. The rest is cut.
const MAX_REASON: usize = 500;

/// The handle of a task whose layers the caller reports.
///
/// If it is dropped, nobody can report layers any more: destinations that still wait for one end with
/// [`ErrorKind::Cancelled`]. Destinations whose layers are all ready continue.
#[derive(Debug)]
pub struct LayerTask {
    pub(super) task: Arc<Task>,
    layers: u32,
}

impl LayerTask {
    /// Starts a transfer of the layers of each delivery, out of a cache with this many layers.
    pub(crate) fn begin(
        calls: &AsyncCalls,
        layers: u32,
        deliveries: Vec<Delivery>,
        limits: TaskLimits,
    ) -> Result<LayerTask> {
        Self::start(calls, layers, deliveries, limits, None)
    }

    /// Starts one transfer of the layers of all deliveries, which ends once all of them have ended. The peer gets `notice` then.
    pub(crate) fn begin_joint(
        calls: &AsyncCalls,
        layers: u32,
        deliveries: Vec<Delivery>,
        limits: TaskLimits,
        notice: Option<Arc<LayerNotice>>,
    ) -> Result<LayerTask> {
        let transfer = calls.queue().start(true)?;
        let started = calls.running().reserve().and_then(|key| {
            let joint = Joint::new(calls, (&transfer, key), notice, limits.layer);
            let started = Self::start(calls, layers, deliveries, limits, Some(joint));
            started.inspect_err(|_| calls.running().leave(key))
        });
        started.inspect_err(|_| transfer.abandon())
    }

    fn start(
        calls: &AsyncCalls,
        layers: u32,
        deliveries: Vec<Delivery>,
        limits: TaskLimits,
        joint: Option<Arc<Joint>>,
    ) -> Result<LayerTask> {
        let state = TaskState::new(layers, deliveries)?;
        let events = limits.kind.has_events() && joint.is_none();
        let transfers = calls.queue().start_all(state.deliveries.len(), events)?;
        let abandon = |transfers: &[Arc<Transfer>]| transfers.iter().for_each(|transfer| transfer.abandon());
        let keys = calls.running().reserve_all(transfers.len()).inspect_err(|_| abandon(&transfers))?;
        let task = Task::new(calls, limits, (transfers, keys), joint, state);
        let joint = task.joint.iter().map(|joint| {
            let running = Arc::new(RunningJoint { task: task.clone(), transfer: joint.transfer.clone() });
            let stops: Weak<RunningJoint> = Arc::downgrade(&running);
            joint.transfer.stop_with(stops);
            let entry: (SlotKey, Arc<dyn RunningCall>) = (joint.key, running);
            entry
        });
        let entered =
            calls.running().enter_all(joint.chain(task.keys.iter().enumerate().map(|(index, key)| {
                let delivery = Arc::new(RunningDelivery { task: task.clone(), index });
                let stops: Weak<RunningDelivery> = Arc::downgrade(&delivery);
                task.transfers[index].stop_with(stops);
                let entry: (SlotKey, Arc<dyn RunningCall>) = (*key, delivery);
                entry
            })));
        if let Err(error) = entered {
            task.keys.iter().for_each(|key| calls.running().leave(*key));
            abandon(&task.transfers);
            return Err(error);
        }
        task.watch();
        task.begin();
        Ok(LayerTask { task, layers })
    }

    /// Returns the number of layers of the source cache.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Returns the transfer of each destination, in the order of the destinations, or the one of all of them.
    pub fn transfers(&self) -> &[Arc<Transfer>] {
        self.task.joint.as_ref().map_or(&self.task.transfers, |joint| slice::from_ref(&joint.transfer))
    }

    /// Reports that `layer` of the source cache is computed. Layers may be reported in any order, and from any thread. Never
    /// waits. Returns `Err(InvalidArgument)` if the cache has no such layer, or if it was reported before; nothing changes
    /// then.
    pub fn ready(&self, layer: u32) -> Result<()> {
        self.task.ready(layer)
    }

    /// Reports that `layer` will never be computed. Destinations that need it end with
    /// [`ErrorKind::InvalidArgument`]; the others continue. Returns `Err` as [`ready`](Self::ready) does.
    pub fn fail(&self, layer: u32, reason: &str) -> Result<()> {
        let reason: String = reason.chars().take(MAX_REASON).collect();
        let mut state = self.task.state.lock();
        state.layers.report(layer)?;
        state.fail_each(|delivery, _| {
            let text = || format!("layer {layer} will not be ready: {reason}");
            delivery
                .awaits(layer)
                .then(|| Error::new(ErrorKind::InvalidArgument, text()).with("layer", layer))
        });
        drop(state);
        self.task.finish_ended();
        Ok(())
    }
}

impl Drop for LayerTask {
    fn drop(&mut self) {
        let mut state = self.task.state.lock();
        state.fail_each(|delivery, layers| {
            let layer = delivery.missing(layers)?;
            let text = format!("the task was dropped before layer {layer} was ready");
            Some(Error::new(ErrorKind::Cancelled, text).with("layer", layer))
        });
        drop(state);
        self.task.finish_ended();
    }
}

/// A destination that has not ended. It keeps its task.
#[derive(Debug)]
struct RunningDelivery {
    task: Arc<Task>,
    index: usize,
}

impl Stops for RunningDelivery {
    fn stop(&self, why: Error) {
        self.task.stop(self.index, why);
    }
}

impl RunningCall for RunningDelivery {
    fn close(&self) {
        match self.task.limits.kind {
            TaskKind::CacheTask => self.stop(Error::closed()),
            // Also ends a push in transit.
            TaskKind::LayerTask => self.task.transfers[self.index].close(),
        }
    }

    fn transfer_with(&self, cluster: ClusterId) -> Option<&Arc<Transfer>> {
        let events = self.task.limits.kind.has_events() && self.task.joint.is_none();
        let uses = events && self.task.state.lock().deliveries[self.index].cluster == cluster;
        uses.then_some(&self.task.transfers[self.index])
    }

    /// A push of several destinations is one transfer with the peers that are linked when it starts. The other tasks find the
    /// peer of each destination when its first layer is ready.
    fn waits_with(&self, cluster: ClusterId) -> bool {
        self.task.joint.is_some() && self.task.state.lock().deliveries[self.index].cluster == cluster
    }

    fn link_ended(&self) {
        self.stop(Error::new(ErrorKind::NotLinked, "the link ended before all layers were pushed"));
    }
}

/// The transfer of all destinations among the calls that run. It keeps its task.
#[derive(Debug)]
struct RunningJoint {
    task: Arc<Task>,
    transfer: Arc<Transfer>,
}

impl Stops for RunningJoint {
    /// Stops every destination. Their ends end the transfer.
    fn stop(&self, _: Error) {
        self.task.cancel_all();
    }
}

impl RunningCall for RunningJoint {
    fn close(&self) {
        self.transfer.close();
    }

    fn transfer_with(&self, cluster: ClusterId) -> Option<&Arc<Transfer>> {
        let state = self.task.state.lock();
        state.deliveries.iter().any(|delivery| delivery.cluster == cluster).then_some(&self.transfer)
    }
}
