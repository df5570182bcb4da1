//! A task whose layers the caller reports, in any order and from any thread, with a transfer for each destination.

use std::sync::{Arc, Weak};

use super::async_calls::AsyncCalls;
use super::delivery::{Delivery, TaskLimits};
use super::executor::ExecutorHandle;
use super::place_table::Place;
use super::running_calls::RunningCall;
use super::task::{Outlet, Task};
use crate::error::{Error, ErrorKind, Result};
use crate::events::{Stops, Transfer};
use crate::fallible;

/// Maximum length of the reason of a failed layer, in characters. The rest is cut.
const MOST_REASON: usize = 500;

/// The handle of a task whose layers the caller reports.
///
/// If it is dropped, nobody can report layers any more: destinations that still wait for one end with
/// [`ErrorKind::Cancelled`]. Destinations whose layers are all ready continue.
#[derive(Debug)]
pub struct LayerTask {
    task: Arc<Task>,
    layers: u32,
    transfers: Vec<Arc<Transfer>>,
}

impl LayerTask {
    /// Starts a transfer of the layers of each delivery, out of a cache with this many layers. Each layer has the limit
    /// from the moment at which it is reported. If there is a limit for waits, a destination fails if no layer that it needs
    /// becomes ready for so long.
    pub(crate) fn begin(
        calls: &AsyncCalls,
        lanes: &ExecutorHandle,
        layers: u32,
        deliveries: Vec<Delivery>,
        limits: TaskLimits,
    ) -> Result<LayerTask> {
        let transfers = calls.queue().start_all(deliveries.len())?;
        let begun = calls.running().reserve_all(transfers.len()).and_then(|places| {
            let created = create(calls, lanes, layers, deliveries, limits, (&transfers, &places));
            created.inspect_err(|_| places.iter().for_each(|place| calls.running().leave(*place)))
        });
        if begun.is_err() {
            for transfer in &transfers {
                transfer.abandon();
            }
        }
        let task = begun?;
        task.begin();
        Ok(LayerTask { task, layers, transfers })
    }

    /// Returns the number of layers of the source cache.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Returns the transfer of each destination, in the order of the destinations.
    pub fn transfers(&self) -> &[Arc<Transfer>] {
        &self.transfers
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
        let reason: String = reason.chars().take(MOST_REASON).collect();
        let mut state = self.task.state.lock();
        state.layers.report(layer)?;
        state.fail_each(|delivery, _| {
            let text = || format!("layer {layer} will not be ready: {reason}");
            delivery
                .awaits(layer)
                .then(|| Error::new(ErrorKind::InvalidArgument, text()).with("layer", layer))
        });
        drop(state);
        self.task.settle_all();
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
        self.task.settle_all();
    }
}

/// Creates the task, and connects it with its transfers.
fn create(
    calls: &AsyncCalls,
    lanes: &ExecutorHandle,
    layers: u32,
    deliveries: Vec<Delivery>,
    limits: TaskLimits,
    (transfers, places): (&[Arc<Transfer>], &[Place]),
) -> Result<Arc<Task>> {
    let running = calls.running();
    let copied = fallible::collect("the transfers of a task", transfers.iter().cloned())?;
    let kept = fallible::copied("the transfers of a task", places)?;
    let outlet = Outlet::Transfers { transfers: copied, running: running.clone(), places: kept };
    let task = Task::new(lanes.clone(), layers, deliveries, limits, outlet)?;
    let of = |(index, transfer): (usize, &Arc<Transfer>)| -> (Place, Arc<dyn RunningCall>) {
        let (transfer, task) = (transfer.clone(), task.clone());
        let delivery = Arc::new(RunningDelivery { transfer, task, index });
        let stops: Weak<RunningDelivery> = Arc::downgrade(&delivery);
        delivery.transfer.stop_with(stops);
        (places[index], delivery)
    };
    running.enter_all(transfers.iter().enumerate().map(of))?;
    task.watch();
    Ok(task)
}

/// A destination that has not ended. It keeps its task.
#[derive(Debug)]
struct RunningDelivery {
    transfer: Arc<Transfer>,
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
        self.transfer.close();
    }
}
