//! Starts layer-wise transfers, and ends them with the engine.
//!
//! `transfer::layerwise` pushes the layers to their destinations, and the task records which layers are ready.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::transfer::{CallExtras, no_grant_in_push};
use super::{DataDist, End};
use crate::cache::Cache;
use crate::error::{Error, Result, ensure};
use crate::fallible;
use crate::model::{Verify, Words};
use crate::plan::Side;
use crate::session;
use crate::transfer::{CacheTask, Delivery, LayerNotice, LayerPush, LayerSink, LayerTask};
use crate::validate::{self, Destination, LayerRange, LayerRows, LayerwiseArgs};

/// One destination of a task whose layers the caller reports.
#[derive(Clone, Debug)]
pub struct LayerReceiver {
    /// The memory that is written, and the layers that are read.
    pub to: Destination,
    /// The blocks of this destination. The number of tensors in a layer must be the same for all destinations of a task.
    pub args: LayerwiseArgs,
}

/// What a push does beside moving layers.
struct Beside {
    to_the_end: bool,
    notice: Option<Arc<LayerNotice>>,
    verify: Verify,
    words: &'static Words,
}

impl DataDist {
    /// Starts to push layers of a cache to peers, each as soon as it is ready (contract §8).
    ///
    /// Returns `Err` only if the arguments alone make the call invalid, if there is no memory, or once the engine closes;
    /// everything else is an outcome of the task. A destination fails if it waits for a layer longer than `layer_timeout`.
    ///
    /// The task holds the cache, so a deallocation takes effect only once the task has ended. Each layer has
    /// the limit `sync_kv_timeout` for itself, from the moment at which its push begins.
    pub fn transfer_async(
        &self,
        from: &End,
        args: &LayerwiseArgs,
        to: Vec<Destination>,
        layer_timeout: Option<Duration>,
    ) -> Result<CacheTask> {
        let limit = self.resources.config.sync_timeout;
        let local = match self.own_cache(from) {
            Ok(local) => local,
            Err(error) => {
                // It is unknown which layers the source has, so none is asked for.
                let fails = |to: Destination| {
                    let layers = LayerRange { end: to.src_layers.first, ..to.src_layers };
                    Delivery { cluster: to.cluster, layers, sink: Err(error.clone()) }
                };
                let deliveries = to.into_iter().map(fails).collect();
                return self.start_task((0, deliveries), limit, layer_timeout);
            }
        };
        let rows = Arc::new(validate::layerwise(local.layout(), args)?);
        to.iter().try_for_each(|to| validate::destination(local.layout(), args, to))?;
        let num_layers = validate::whole_layers(local.geometry(), args.tensors_per_layer)?;
        let verify = self.resources.config.verify;
        let delivery = |to: Destination| {
            let (cluster, layers) = (to.cluster, to.src_layers);
            let beside = Beside { to_the_end: false, notice: None, verify, words: Words::ORIGINAL };
            let push = |()| self.layer_push(&local, rows.clone(), args.tensors_per_layer, to, beside);
            Delivery { cluster, layers, sink: self.other(cluster).map(push) }
        };
        let deliveries = to.into_iter().map(delivery).collect();
        self.start_task((num_layers, deliveries), limit, layer_timeout)
    }

    fn start_task(
        &self,
        pushes: (u32, Vec<Delivery>),
        limit: Duration,
        layer_timeout: Option<Duration>,
    ) -> Result<CacheTask> {
        CacheTask::start(&self.tasks, self.executor.handle(), pushes, limit, layer_timeout)
    }

    /// Starts to push layers of a cache to peers, each as soon as the caller [reports](LayerTask::ready) that it is computed. There is
    /// one [`Transfer`](crate::Transfer) for all destinations. It succeeds once every layer is in place everywhere; then the peer gets
    /// the notification of `extras`. If one destination fails, the others are cancelled, and the error names the part, counted from 0,
    /// if there are several. The transfer ends once all destinations have ended.
    ///
    /// Returns `Err` for what the arguments and the local cache decide, and `Err(Busy)` as [`Operation::start`](super::Operation::start)
    /// does; nothing has started then. Each layer has the limit `limit`, by default `sync_kv_timeout`, from the moment at which it is
    /// reported. A layer may be reported however late.
    pub fn begin_push(
        &self,
        from: &End,
        to: Vec<LayerReceiver>,
        limit: Option<Duration>,
        extras: CallExtras,
    ) -> Result<LayerTask> {
        no_grant_in_push(Side::Source, extras.grant)?;
        let (verify, words) = (self.verify(&extras), extras.words);
        let notice = extras.notify.map(|message| layer_notice(&to, message)).transpose()?;
        // Only the first destination reserves room for the notification.
        let mut of_first = notice.clone();
        let first = to.first().ok_or_else(|| Error::argument("len(destinations)", 0, "at least 1"))?;
        let per_layer = first.args.tensors_per_layer;
        let local = self.own_cache(from)?;
        let num_layers = validate::whole_layers(local.geometry(), per_layer)?;
        let delivery = |LayerReceiver { to, args }: LayerReceiver| {
            ensure(args.tensors_per_layer == per_layer, || {
                Error::argument("tensors_per_layer", args.tensors_per_layer, per_layer)
            })?;
            let rows = validate::layers_of_blocks(words, local.layout(), &args)?;
            validate::destination(local.layout(), &args, &to)?;
            self.other(to.cluster)?;
            let (cluster, layers) = (to.cluster, to.src_layers);
            let beside = Beside { to_the_end: true, notice: of_first.take(), verify, words };
            let sink = self.layer_push(&local, Arc::new(rows), per_layer, to, beside);
            Ok(Delivery { cluster, layers, sink: Ok(sink) })
        };
        let deliveries =
            fallible::try_collect("the destinations of a transfer", to.into_iter().map(delivery))?;
        let limit = limit.unwrap_or(self.resources.config.sync_timeout);
        LayerTask::start(&self.calls, num_layers, deliveries, limit, notice)
    }

    fn layer_push(
        &self,
        local: &Arc<Cache>,
        rows: Arc<LayerRows>,
        per_layer: u32,
        to: Destination,
        Beside { to_the_end, notice, verify, words }: Beside,
    ) -> Arc<dyn LayerSink> {
        Arc::new(LayerPush {
            resources: self.resources.clone(),
            link: self.links.finder().for_later(to.cluster),
            local: local.clone(),
            rows,
            per_layer,
            to,
            words,
            verify,
            to_the_end,
            notice,
            found: OnceLock::new(),
        })
    }
}

/// Checks the notification of a push, which has one peer then.
fn layer_notice(to: &[LayerReceiver], message: Vec<u8>) -> Result<Arc<LayerNotice>> {
    session::check_notification("notify", &message)?;
    let first = to.first().map(|receiver| receiver.to.cluster);
    let one_peer = to.iter().all(|receiver| Some(receiver.to.cluster) == first);
    let cluster = first.filter(|_| one_peer);
    let cluster = cluster
        .ok_or_else(|| Error::invalid("notify needs destinations of one peer").of_argument("notify"))?;
    Ok(LayerNotice::new(cluster, message))
}
