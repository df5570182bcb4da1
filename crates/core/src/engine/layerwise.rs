//! Starts layer-wise transfers, and ends them with the engine.
//!
//! `transfer::layerwise` pushes the layers to their destinations, and the task records which layers are ready.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{DataDist, End};
use crate::cache::Cache;
use crate::error::{Error, Result, ensure};
use crate::fallible;
use crate::transfer::{Carrier, Delivery, LayerPush, LayerTask, Task, TaskLimits};
use crate::validate::{self, Destination, LayerRows, LayerwiseArgs};

/// One destination of a task whose layers the caller reports.
#[derive(Clone, Debug)]
pub struct LayerReceiver {
    /// The memory that is written, and the layers that are read.
    pub to: Destination,
    /// The blocks of this destination. The number of tensors in a layer must be the same for all destinations of a task.
    pub args: LayerwiseArgs,
}

impl DataDist {
    /// Starts to push layers of a cache to peers, each as soon as it is ready (contract §8).
    ///
    /// Returns `Err` only if the arguments alone make the call invalid; everything else is an outcome of the
    /// task. A destination fails if it waits for a layer longer than `patience`.
    ///
    /// The task holds the cache, so a deallocation takes effect only once the task has ended. Each layer has
    /// the limit `sync_kv_timeout` for itself, from the moment at which its push begins.
    pub fn transfer_async(
        &self,
        from: &End,
        args: &LayerwiseArgs,
        to: Vec<Destination>,
        patience: Option<Duration>,
    ) -> Result<Arc<Task>> {
        let source = match self.source(from) {
            Ok(local) => {
                let rows = layer_rows(&local, args)?;
                to.iter().try_for_each(|to| validate::destination(local.layout_of_first(), args, to))?;
                Ok((local, Arc::new(rows)))
            }
            Err(error) => Err(error),
        };
        let num_layers = match &source {
            Ok((local, _)) => validate::whole_layers(local.sizes_of(0), args.tensors_per_layer)?,
            Err(_) => 0,
        };
        let carrier = |to: Destination| -> Result<Arc<dyn Carrier>> {
            let (local, rows) = source.as_ref().map_err(Error::clone)?;
            self.other(to.cluster)?;
            Ok(self.layer_push(local, rows.clone(), args.tensors_per_layer, to, false))
        };
        let with_layers = |to: Destination| {
            let mut layers = to.src_layers;
            if source.is_err() {
                // Without the source, it is unknown whether these are its layers.
                layers.end = layers.first;
            }
            Delivery { cluster: to.cluster, layers, carrier: carrier(to) }
        };
        let deliveries = to.into_iter().map(with_layers).collect();
        let limits = self.layer_limits(patience);
        let task = Task::start(self.lanes.handle().clone(), num_layers, deliveries, limits)?;
        self.tasks.add(&task);
        Ok(task)
    }

    /// Starts to push layers of a cache to peers, each as soon as the caller [reports](LayerTask::ready) that it is
    /// computed. Each destination has a [`Transfer`](crate::Transfer) with an event.
    ///
    /// Returns `Err` for what the arguments and the local cache decide, and `Err(Busy)` if there is not a place for every
    /// transfer; nothing has started then. Each layer has the limit `sync_kv_timeout` from the moment at which it is
    /// reported. A destination fails if no layer that it needs becomes ready for `patience`.
    pub fn begin_layers(
        &self,
        from: &End,
        to: Vec<LayerReceiver>,
        patience: Option<Duration>,
    ) -> Result<LayerTask> {
        let first = to.first().ok_or_else(|| Error::argument("len(destinations)", 0, "at least 1"))?;
        let per_layer = first.args.tensors_per_layer;
        let local = self.source(from)?;
        let num_layers = validate::whole_layers(local.sizes_of(0), per_layer)?;
        let delivery = |LayerReceiver { to, args }: LayerReceiver| {
            ensure(args.tensors_per_layer == per_layer, || {
                Error::argument("tensors_per_layer", args.tensors_per_layer, per_layer)
            })?;
            let rows = layer_rows(&local, &args)?;
            validate::destination(local.layout_of_first(), &args, &to)?;
            self.other(to.cluster)?;
            let (cluster, layers) = (to.cluster, to.src_layers);
            let carrier = self.layer_push(&local, Arc::new(rows), per_layer, to, true);
            Ok(Delivery { cluster, layers, carrier: Ok(carrier) })
        };
        let deliveries =
            fallible::try_collect("the destinations of a transfer", to.into_iter().map(delivery))?;
        let limits = self.layer_limits(patience);
        LayerTask::begin(&self.calls, self.lanes.handle(), num_layers, deliveries, limits)
    }

    fn layer_limits(&self, patience: Option<Duration>) -> TaskLimits {
        TaskLimits { layer: self.resources.config.sync_timeout, wait: patience }
    }

    fn layer_push(
        &self,
        local: &Arc<Cache>,
        rows: Arc<LayerRows>,
        per_layer: u32,
        to: Destination,
        to_the_end: bool,
    ) -> Arc<dyn Carrier> {
        Arc::new(LayerPush {
            resources: self.resources.clone(),
            link: self.links.finder().for_later(to.cluster),
            local: local.clone(),
            rows,
            per_layer,
            to,
            to_the_end,
            found: OnceLock::new(),
        })
    }
}

/// Returns which rows of each layer move.
fn layer_rows(local: &Cache, args: &LayerwiseArgs) -> Result<LayerRows> {
    if local.mixed().is_some() {
        validate::no_block_bytes(args)?;
    }
    validate::layerwise(local.layout_of_first(), args)
}
