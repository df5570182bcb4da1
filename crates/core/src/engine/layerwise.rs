//! Starts layer-wise transfers, and ends them with the engine.
//!
//! `transfer::layerwise` pushes the layers to their destinations, and the [`Task`] records which layers are
//! ready.

use std::sync::Arc;
use std::time::Duration;

use super::{DataDist, End};
use crate::error::{Error, Result};
use crate::transfer::{Carrier, Delivery, LayerPush, Task};
use crate::validate::{self, Destination, LayerwiseArgs};

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
                let rows = validate::layerwise(local.layout(), args)?;
                to.iter().try_for_each(|to| validate::destination(local.layout(), args, to))?;
                Ok((local, Arc::new(rows)))
            }
            Err(error) => Err(error),
        };
        let carrier = |to: Destination| -> Result<Arc<dyn Carrier>> {
            let (local, rows) = source.as_ref().map_err(Error::clone)?;
            self.other(to.cluster)?;
            Ok(Arc::new(LayerPush::new(
                self.resources.clone(),
                self.links.finder(),
                local.clone(),
                rows.clone(),
                args.tensors_per_layer,
                to,
            )))
        };
        let with_layers = |to: Destination| {
            let mut layers = to.src_layers;
            if source.is_err() {
                // Without the source, it is unknown whether these are its layers.
                layers.end = layers.first;
            }
            Delivery { cluster: to.cluster, layers, carrier: carrier(to) }
        };
        let task =
            Task::start(self.lanes.handle().clone(), to.into_iter().map(with_layers).collect(), patience)?;
        self.tasks.add(&task);
        Ok(task)
    }
}
