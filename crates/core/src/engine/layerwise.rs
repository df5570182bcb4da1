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
use crate::model::{CacheLayout, Verify, Words};
use crate::plan::Side;
use crate::session;
use crate::transfer::{
    CacheTask, Delivery, LayerNotice, LayerPush, LayerSink, LayerTask, TaskKind, TaskLimits,
};
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
        let local = match self.source(from) {
            Ok(local) => local,
            Err(error) => {
                // It is unknown which layers the source has, so none is asked for.
                let fails = |to: Destination| {
                    let layers = LayerRange { end: to.src_layers.first, ..to.src_layers };
                    Delivery { cluster: to.cluster, layers, sink: Err(error.clone()) }
                };
                let deliveries = to.into_iter().map(fails).collect();
                return CacheTask::start(&self.tasks, 0, deliveries, limit, layer_timeout);
            }
        };
        let rows = Arc::new(validate::layerwise(local.layout(), args)?);
        to.iter().try_for_each(|to| validate::destination(local.layout(), args, to))?;
        let num_layers = validate::whole_layers(local.geometry(), args.tensors_per_layer)?;
        let delivery = |to: Destination| {
            let (cluster, layers) = (to.cluster, to.src_layers);
            let beside =
                Beside { notice: None, verify: self.resources.config.verify, words: Words::ORIGINAL };
            let push = |()| self.layer_push(&local, rows.clone(), args.tensors_per_layer, to, beside);
            Delivery { cluster, layers, sink: self.other(cluster).map(push) }
        };
        let deliveries = to.into_iter().map(delivery).collect();
        CacheTask::start(&self.tasks, num_layers, deliveries, limit, layer_timeout)
    }

    /// Starts to push layers of a cache to peers, each as soon as the caller [reports](LayerTask::ready) that it is
    /// computed. Each destination has a [`Transfer`](crate::Transfer) with an event.
    ///
    /// Returns `Err` for what the arguments and the local cache decide, and `Err(Busy)` if there is not room for every
    /// transfer; nothing has started then. Each layer has the limit `sync_kv_timeout` from the moment at which it is
    /// reported. A destination fails if no layer that it needs becomes ready for `layer_timeout`.
    pub fn begin_layers(
        &self,
        from: &End,
        to: Vec<LayerReceiver>,
        layer_timeout: Option<Duration>,
    ) -> Result<LayerTask> {
        let beside = Beside { notice: None, verify: self.resources.config.verify, words: Words::ORIGINAL };
        let (num_layers, deliveries) = self.deliveries(from, to, beside, validate::layerwise)?;
        let layer = self.resources.config.sync_timeout;
        let limits = TaskLimits { kind: TaskKind::LayerTask, layer, wait: layer_timeout };
        LayerTask::begin(&self.calls, num_layers, deliveries, limits)
    }

    /// Starts to push layers of a cache as [`begin_layers`](Self::begin_layers) does, but with one [`Transfer`](crate::Transfer) for
    /// all destinations together. It succeeds once every layer is in place everywhere; then the peer gets the notification of
    /// `extras`. If one destination fails, the others are cancelled, and the error names the part, counted from 0, if there are
    /// several. The transfer ends once all destinations have ended.
    ///
    /// Each layer has the limit `limit`, by default `sync_kv_timeout`, from the moment at which it is reported. A layer may be
    /// reported however late.
    pub fn begin_push(
        &self,
        from: &End,
        to: Vec<LayerReceiver>,
        limit: Option<Duration>,
        extras: CallExtras,
    ) -> Result<LayerTask> {
        no_grant_in_push(Side::Source, extras.grant)?;
        let verify = self.verify(&extras);
        let notice = extras.notify.map(|message| layer_notice(&to, message)).transpose()?;
        let beside = Beside { notice: notice.clone(), verify, words: extras.words };
        let rows = |local, args: &LayerwiseArgs| validate::layers_of_blocks(extras.words, local, args);
        let (num_layers, deliveries) = self.deliveries(from, to, beside, rows)?;
        let layer = limit.unwrap_or(self.resources.config.sync_timeout);
        let limits = TaskLimits { kind: TaskKind::LayerTask, layer, wait: None };
        LayerTask::begin_joint(&self.calls, num_layers, deliveries, limits, notice)
    }

    /// Checks the destinations of a push. Returns the number of layers of the source as well.
    fn deliveries(
        &self,
        from: &End,
        to: Vec<LayerReceiver>,
        mut beside: Beside,
        rows: impl Fn(CacheLayout, &LayerwiseArgs) -> Result<LayerRows>,
    ) -> Result<(u32, Vec<Delivery>)> {
        let first = to.first().ok_or_else(|| Error::argument("len(destinations)", 0, "at least 1"))?;
        let per_layer = first.args.tensors_per_layer;
        let local = self.source(from)?;
        let num_layers = validate::whole_layers(local.geometry(), per_layer)?;
        let delivery = |LayerReceiver { to, args }: LayerReceiver| {
            ensure(args.tensors_per_layer == per_layer, || {
                Error::argument("tensors_per_layer", args.tensors_per_layer, per_layer)
            })?;
            let rows = rows(local.layout(), &args)?;
            validate::destination(local.layout(), &args, &to)?;
            self.other(to.cluster)?;
            let (cluster, layers) = (to.cluster, to.src_layers);
            // Only the first one reserves room for the notification.
            let beside = Beside { notice: beside.notice.take(), ..beside };
            let sink = self.layer_push(&local, Arc::new(rows), per_layer, to, beside);
            Ok(Delivery { cluster, layers, sink: Ok(sink) })
        };
        let deliveries =
            fallible::try_collect("the destinations of a transfer", to.into_iter().map(delivery))?;
        Ok((num_layers, deliveries))
    }

    fn layer_push(
        &self,
        local: &Arc<Cache>,
        rows: Arc<LayerRows>,
        per_layer: u32,
        to: Destination,
        Beside { notice, verify, words }: Beside,
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
            notice,
            found: OnceLock::new(),
        })
    }
}

/// Checks the notification of a push, which has one peer then.
fn layer_notice(to: &[LayerReceiver], message: Vec<u8>) -> Result<Arc<LayerNotice>> {
    session::check_notification(&message)?;
    let first = to.first().map(|receiver| receiver.to.cluster);
    let one_peer = to.iter().all(|receiver| Some(receiver.to.cluster) == first);
    let cluster = first.filter(|_| one_peer);
    let cluster = cluster
        .ok_or_else(|| Error::invalid("notify needs destinations of one cluster").of_argument("notify"))?;
    Ok(LayerNotice::new(cluster, message))
}
