//! The layer-wise transfer: what finds a destination, and brings it one layer after the other.
//!
//! A layer is a push like any other, of the same plan in other tensors: planned once, resolved once, and from then on
//! the remote cache is named by its id, so that a transfer never spreads over two caches. Not for: which layers are ready
//! (`task`), or how bytes get there (`transfer`).

use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use super::{DataDist, End};
use crate::error::{Error, Result};
use crate::transfer::{Carrier, LayerPush, Leg, Refused, Task};
use crate::validate::{self, Destination, LayerwiseArgs};

impl DataDist {
    /// Starts to bring layers of a cache to peers, each as soon as it is ready (contract §8, seed
    /// `transfer_cache_async.md`). `Err` for what the arguments alone decide; all else is an outcome of the task. Layers
    /// that keep a destination waiting for longer than `patience` fail it.
    ///
    /// The task holds the cache: to deallocate it takes effect once the task has ended. Each layer has `sync_kv_timeout`
    /// for itself, from the moment it is begun.
    pub fn transfer_async(
        &self,
        from: &End,
        args: &LayerwiseArgs,
        to: Vec<Destination>,
        patience: Option<Duration>,
    ) -> Result<Arc<Task>> {
        let source = match self.source(from) {
            Ok(local) => {
                let rows = validate::layerwise(local.side(), args)?;
                to.iter().try_for_each(|to| validate::destination(local.side(), args, to))?;
                Ok((local, Arc::new(rows)))
            }
            Err(error) => Err(error),
        };
        let carrier = |to: Destination| -> Result<Arc<dyn Carrier>> {
            let (local, rows) = source.as_ref().map_err(Error::again)?;
            self.other(to.cluster)?;
            Ok(Arc::new(LayerPush::new(
                self.cluster.clone(),
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
                // Nobody could say whether these are layers of it.
                layers.end = layers.first;
            }
            let refused = |error| -> Arc<dyn Carrier> { Arc::new(Refused::new(error)) };
            Leg { cluster: to.cluster, layers, carrier: carrier(to).unwrap_or_else(refused) }
        };
        let task =
            Task::start(self.lanes.porter().clone(), to.into_iter().map(with_layers).collect(), patience)?;
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.retain(|task| task.strong_count() > 0);
        tasks.push(Arc::downgrade(&task));
        Ok(task)
    }

    /// Ends the transfers under way.
    pub(super) fn close_tasks(&self) {
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        for task in tasks.iter().filter_map(Weak::upgrade) {
            task.close();
        }
    }
}
