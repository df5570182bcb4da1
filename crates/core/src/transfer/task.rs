//! A layer-wise transfer in progress: which layers are ready, how far each destination is, and its outcome.
//!
//! This module only keeps records. The code that computes layers reports which ones are ready, and lanes push
//! ready layers to each destination. Neither waits for the other, and no destination waits for another. A
//! destination has a result only once it has ended. A carrier that ends without a result leaves a failure
//! (`destinations_are_independent`), so a missing result never counts as success. `transfer::layerwise`
//! pushes the layers.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::executor::{Alarm, ExecutorHandle, Job, LaneKey};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::validate::LayerRange;

/// Pushes layers to one destination.
pub trait Carrier: Send + Sync {
    /// Finds the destination. Called once, before the first layer, and usually before that layer is ready.
    fn find(&self) -> Result<()>;

    /// Pushes one layer and returns the number of its bytes, which are in place then.
    fn layer(&self, layer: u32) -> Result<u64>;
}

/// One destination of a task that is to start.
pub struct Delivery {
    /// Cluster of the destination.
    pub cluster: ClusterId,
    /// Layers that it receives.
    pub layers: LayerRange,
    /// Carrier that pushes them, or why the destination can never be reached.
    pub carrier: Result<Arc<dyn Carrier>>,
}

/// Outcome of a destination.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The transfer ended before any layer for it was ready.
    Unreached,
    /// Layers are still to be pushed, or in transit.
    UnderWay,
    /// Every layer is in place.
    Done,
    /// It ended early. Layers that were pushed before are in place.
    Failed(Arc<Error>),
}

/// Progress of a destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Layers in place.
    pub layers: u32,
    /// Layers in total.
    pub of_layers: u32,
    /// Bytes in place.
    pub bytes: u64,
}

/// One transfer to any number of destinations.
#[derive(Debug)]
pub struct Task {
    lanes: ExecutorHandle,
    /// How long the transfer may wait for one layer.
    patience: Option<Duration>,
    state: Mutex<State>,
    /// Notified when the transfer has ended.
    changed: Condvar,
    /// Readable once the transfer has ended.
    ended: OwnedFd,
}

#[derive(Debug)]
struct State {
    /// Layers below this number are ready.
    ready: u32,
    /// No further layer will be ready.
    over: bool,
    /// The layer that the transfer waits for.
    awaited: Option<Awaited>,
    /// Alarm that checks whether that wait is too long; at most one.
    alarm: Option<Alarm>,
    deliveries: Vec<DeliveryState>,
    /// Number of calls that are dropping the carriers of destinations.
    dropping: usize,
    ended: bool,
}

/// A layer that was asked for.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    layer: u32,
    since: Instant,
    /// When the wait is too long.
    patience: Option<Deadline>,
}

/// One destination.
struct DeliveryState {
    /// `None` once the destination has ended; the memory that the carrier held is released with it.
    carrier: Option<Arc<dyn Carrier>>,
    cluster: ClusterId,
    range: LayerRange,
    /// The next layer to push.
    next: u32,
    found: bool,
    /// Whether it is queued for the lanes and none has begun it.
    queued: bool,
    /// Whether a lane works on it.
    busy: bool,
    outcome: Option<Result<(), Arc<Error>>>,
    bytes: u64,
}

impl Task {
    /// Starts a transfer of the layers of each delivery by its carrier. With `patience`, a destination fails if
    /// the wait for its next layer takes longer. Returns `Err(System)` if there is no file descriptor left.
    pub(crate) fn start(
        lanes: ExecutorHandle,
        deliveries: Vec<Delivery>,
        patience: Option<Duration>,
    ) -> Result<Arc<Task>> {
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            Error::new(ErrorKind::System, "cannot create the event descriptor of a transfer").because(errno)
        })?;
        let state_of = |Delivery { cluster, layers, carrier }| {
            let (carrier, outcome) = match carrier {
                Ok(carrier) => (Some(carrier), None),
                Err(error) => (None, Some(Err(Arc::new(error)))),
            };
            DeliveryState {
                queued: carrier.is_some(),
                carrier,
                cluster,
                range: layers,
                next: layers.first,
                found: false,
                busy: false,
                outcome,
                bytes: 0,
            }
        };
        let deliveries: Vec<_> = deliveries.into_iter().map(state_of).collect();
        let queued: Vec<_> = (0..deliveries.len()).filter(|&index| deliveries[index].queued).collect();
        let state = State {
            ready: 0,
            over: false,
            awaited: None,
            alarm: None,
            deliveries,
            dropping: 0,
            ended: false,
        };
        let task =
            Arc::new(Task { lanes, patience, state: Mutex::new(state), changed: Condvar::new(), ended });
        task.finish_ended(task.state.lock());
        task.send(queued);
        Ok(task)
    }

    /// Returns the layers that any destination needs, ascending.
    pub fn layers(&self) -> Vec<u32> {
        let state = self.state.lock();
        let needed = state.deliveries.iter().flat_map(|delivery| delivery.range.first..delivery.range.end);
        needed.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    }

    /// Returns whether a destination that has not ended needs `layer`. If so, and if `layer` is not ready,
    /// the wait for it starts now.
    pub fn wanted(self: &Arc<Self>, layer: u32) -> bool {
        let mut state = self.state.lock();
        let wanted = !state.over && state.deliveries.iter().any(|delivery| delivery.awaits(layer));
        let patience = self.patience.map(|limit| Deadline::after(limit).named("timeout_in_millis"));
        let awaited = Awaited { layer, since: Instant::now(), patience };
        state.awaited = (wanted && layer >= state.ready).then_some(awaited);
        self.watch(state);
        wanted
    }

    /// Reports that `layer` and all layers before it may be pushed. Returns at once.
    pub fn ready(self: &Arc<Self>, layer: u32) {
        let mut state = self.state.lock();
        if state.over {
            return;
        }
        state.ready = state.ready.max(layer.saturating_add(1));
        state.awaited = None;
        let ready = state.ready;
        let mut moving = Vec::new();
        for (index, delivery) in state.deliveries.iter_mut().enumerate() {
            if !delivery.busy && !delivery.queued && delivery.outcome.is_none() && delivery.next < ready {
                delivery.queued = true;
                moving.push(index);
            }
        }
        drop(state);
        self.send(moving);
    }

    /// Reports that `layer`, every later layer and every earlier layer that is not ready yet will never be
    /// ready. Destinations that need one of those up to `layer` fail with `error`. Destinations that begin
    /// after `layer` are never reached. Destinations whose layers are all ready continue.
    pub(crate) fn refuse(&self, layer: u32, error: &Error) {
        self.refused(self.state.lock(), layer, error);
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

    /// Ends all destinations that have not ended. Layers in transit are still pushed. Returns `false` if
    /// there was nothing to end.
    pub fn cancel(&self) -> bool {
        self.end(|| Error::new(ErrorKind::Cancelled, "the transfer was cancelled"))
    }

    /// Ends all destinations that have not ended, because the engine closes.
    pub fn close(&self) -> bool {
        self.end(|| Error::new(ErrorKind::Closed, "the engine was finalized during the transfer"))
    }

    /// Whether the transfer has ended: nothing of it moves, or ever will.
    pub fn done(&self) -> bool {
        self.state.lock().ended
    }

    /// Waits until the transfer is [`done`](Self::done). Returns `Ok(false)` once `deadline` has passed, and
    /// `Err` only if interrupted.
    pub fn wait(&self, deadline: Deadline) -> Result<bool> {
        let mut state = self.state.lock();
        while !state.ended {
            drop(self.changed.wait_timeout(state, deadline.nap()));
            deadline.interruption("waiting for a transfer")?;
            state = self.state.lock();
            if deadline.passed() {
                break;
            }
        }
        Ok(state.ended)
    }

    /// Returns the outcome of each destination.
    pub fn outcomes(&self) -> Vec<Outcome> {
        let state = self.state.lock();
        let outcome = |delivery: &DeliveryState| match &delivery.outcome {
            Some(Ok(())) => Outcome::Done,
            Some(Err(error)) => Outcome::Failed(error.clone()),
            None if delivery.carrier.is_none() => Outcome::Unreached,
            None => Outcome::UnderWay,
        };
        state.deliveries.iter().map(outcome).collect()
    }

    /// Returns why each destination is not done: why it failed, or what it waits for. `None` for destinations
    /// that are done, and for those that were never reached.
    pub fn reasons(&self) -> Vec<Option<Arc<Error>>> {
        let state = self.state.lock();
        let reason = |delivery: &DeliveryState| match &delivery.outcome {
            Some(Err(error)) => Some(error.clone()),
            None if delivery.carrier.is_some() => {
                Some(Arc::new(delivery.unfinished(state.awaited, state.ready)))
            }
            _ => None,
        };
        state.deliveries.iter().map(reason).collect()
    }

    /// How long the transfer may wait for one layer, if there is a limit.
    pub fn patience(&self) -> Option<Duration> {
        self.patience
    }

    /// Returns the progress of each destination.
    pub fn progress(&self) -> Vec<Carried> {
        let carried = |delivery: &DeliveryState| Carried {
            layers: delivery.next - delivery.range.first,
            of_layers: delivery.range.end.saturating_sub(delivery.range.first),
            bytes: delivery.bytes,
        };
        self.state.lock().deliveries.iter().map(carried).collect()
    }

    /// Returns a new descriptor that is readable once the transfer is [`done`](Self::done). The caller owns
    /// it and must not read from it. Returns `Err(System)` if there is no file descriptor left.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        rustix::io::fcntl_dupfd_cloexec(&self.ended, 0).map_err(|errno| {
            Error::new(ErrorKind::System, "cannot duplicate the event descriptor of a transfer")
                .because(errno)
        })
    }

    fn end(&self, error: impl Fn() -> Error) -> bool {
        let mut state = self.state.lock();
        let mut any = false;
        state.over = true;
        // A destination that idles after a refusal has ended too: it was never reached.
        let open = |delivery: &&mut DeliveryState| delivery.outcome.is_none() && delivery.carrier.is_some();
        for delivery in state.deliveries.iter_mut().filter(open) {
            delivery.outcome = Some(Err(Arc::new(error().with("cluster", delivery.cluster))));
            any = true;
        }
        self.finish_ended(state);
        any
    }

    /// Hands the destinations at `indices`, which are marked as queued, to lanes.
    fn send(self: &Arc<Self>, indices: impl IntoIterator<Item = usize>) {
        for index in indices {
            let cluster = self.state.lock().deliveries[index].cluster;
            let job = CarryJob { task: self.clone(), index, why: None, over: false };
            self.lanes.carry(LaneKey::Calls(cluster), Box::new(job));
        }
    }

    /// Fails the destinations of a layer whose wait took too long, or sets an alarm for the time when it
    /// would.
    fn watch(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let open = !state.over && !state.ended;
        let awaited = state.awaited.filter(|_| open);
        let Some((layer, patience)) = awaited.and_then(|at| Some((at.layer, at.patience?))) else { return };
        if patience.passed() {
            return self.refused(state, layer, &patience.error(&format!("waiting for layer {layer}")));
        }
        if state.alarm.is_some() {
            return;
        }
        match self.lanes.at(Instant::now() + patience.left(), Box::new(Late(Arc::downgrade(self)))) {
            Ok(alarm) => state.alarm = Some(alarm),
            // Without the alarm, nothing would notice that the layer is late.
            Err(error) => self.refused(state, layer, &error),
        }
    }

    fn refused(&self, mut state: MutexGuard<'_, State>, layer: u32, error: &Error) {
        if state.over {
            return;
        }
        state.over = true;
        let ready = state.ready;
        for delivery in state.deliveries.iter_mut().filter(|delivery| delivery.lacks(layer, ready)) {
            let error = error.clone().with("cluster", delivery.cluster).with("layer", layer);
            delivery.outcome = Some(Err(Arc::new(error)));
        }
        self.finish_ended(state);
    }

    /// Drops the carriers of destinations that have ended, and records the end of the transfer once all have
    /// ended.
    fn finish_ended(&self, mut state: MutexGuard<'_, State>) {
        let (over, ready) = (state.over, state.ready);
        // A queued destination with ready layers ends once they are pushed, or once it has failed.
        let waits = |delivery: &DeliveryState| delivery.queued && delivery.next < ready;
        let ended = |delivery: &&mut DeliveryState| {
            !delivery.busy && (delivery.outcome.is_some() || over && !waits(delivery))
        };
        let gone: Vec<_> = state
            .deliveries
            .iter_mut()
            .filter(ended)
            .filter_map(|delivery| delivery.carrier.take())
            .collect();
        state.dropping += 1;
        drop(state);
        // A carrier may be the last owner of a cache, whose memory returns to a pool. So it is dropped
        // without the lock, and before anything reports that the transfer has ended.
        drop(gone);
        let mut state = self.state.lock();
        state.dropping -= 1;
        if state.ended
            || state.dropping > 0
            || state.deliveries.iter().any(|delivery| delivery.carrier.is_some())
        {
            return;
        }
        state.ended = true;
        // Fails only if the counter is full, and it is written once.
        let _ = rustix::io::write(&self.ended, &1u64.to_ne_bytes());
        self.changed.notify_all();
        let alarm = state.alarm.take();
        drop(state);
        if let Some(alarm) = alarm {
            self.lanes.forget(alarm);
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let alarm = self.state.lock().alarm.take();
        if let Some(alarm) = alarm {
            self.lanes.forget(alarm);
        }
    }
}

/// Checks whether a layer is late.
struct Late(Weak<Task>);

impl Job for Late {
    fn run(self: Box<Self>) {
        let Some(task) = self.0.upgrade() else { return };
        let mut state = task.state.lock();
        state.alarm = None;
        task.watch(state);
    }

    fn refused(self: Box<Self>, _: Error) {}
}

impl DeliveryState {
    fn awaits(&self, layer: u32) -> bool {
        self.outcome.is_none() && (self.range.first..self.range.end).contains(&layer)
    }

    /// Returns why it has no result yet.
    fn unfinished(&self, awaited: Option<Awaited>, ready: u32) -> Error {
        let error = |text: &str| {
            let error = Error::new(ErrorKind::Timeout, text).with("cluster", self.cluster);
            error.with("layer", self.next).with("layers_done", self.next - self.range.first)
        };
        match awaited {
            _ if self.next < ready => error("not done yet: the layer is being transferred"),
            Some(awaited) if self.awaits(awaited.layer) => error("not done yet: waiting for the layer")
                .with("waited_ms", awaited.since.elapsed().as_millis()),
            _ => error("not done yet: the layer was not requested"),
        }
    }

    /// Whether it needs `layer`, or an earlier layer that is not ready.
    fn lacks(&self, layer: u32, ready: u32) -> bool {
        let LayerRange { first, end } = self.range;
        self.outcome.is_none() && first < end && first <= layer && end > ready.min(layer)
    }
}

/// The work of a lane for one destination: pushes what is ready.
struct CarryJob {
    task: Arc<Task>,
    index: usize,
    /// Why the work was refused, if it was.
    why: Option<Error>,
    /// Whether the job has ended regularly, so that its drop need not report a failure.
    over: bool,
}

/// Next step of such a job.
enum CarryStep {
    Find(Arc<dyn Carrier>),
    Layer(Arc<dyn Carrier>, u32),
    Rest,
}

impl Job for CarryJob {
    fn run(mut self: Box<Self>) {
        loop {
            let moved = match self.next() {
                CarryStep::Find(carrier) => carrier.find().map(|()| None),
                CarryStep::Layer(carrier, layer) => carrier.layer(layer).map(Some),
                CarryStep::Rest => break,
            };
            self.record(moved);
        }
        self.over = true;
    }

    fn refused(mut self: Box<Self>, why: Error) {
        self.why = Some(why);
    }
}

impl CarryJob {
    fn next(&self) -> CarryStep {
        let mut state = self.task.state.lock();
        let ready = state.ready;
        let delivery = &mut state.deliveries[self.index];
        (delivery.queued, delivery.busy) = (false, true);
        match (&delivery.outcome, &delivery.carrier) {
            (None, Some(carrier)) if !delivery.found => return CarryStep::Find(carrier.clone()),
            (None, Some(carrier)) if delivery.next < ready => {
                return CarryStep::Layer(carrier.clone(), delivery.next);
            }
            _ => delivery.busy = false,
        }
        self.task.finish_ended(state);
        CarryStep::Rest
    }

    fn record(&self, moved: Result<Option<u64>>) {
        let mut state = self.task.state.lock();
        let delivery = &mut state.deliveries[self.index];
        match moved {
            Ok(None) => delivery.found = true,
            Ok(Some(bytes)) => {
                delivery.next += 1;
                delivery.bytes += bytes;
            }
            Err(error) => {
                let error = error.with("cluster", delivery.cluster).with("layer", delivery.next);
                delivery.outcome.get_or_insert(Err(Arc::new(error)));
            }
        }
        if delivery.next >= delivery.range.end {
            delivery.outcome.get_or_insert(Ok(()));
        }
    }
}

impl Drop for CarryJob {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let text = "the lane of a transfer ended without a result";
        let why = self.why.take().unwrap_or_else(|| Error::new(ErrorKind::System, text));
        let mut state = self.task.state.lock();
        let delivery = &mut state.deliveries[self.index];
        (delivery.queued, delivery.busy) = (false, false);
        delivery.outcome.get_or_insert_with(|| Err(Arc::new(why)));
        self.task.finish_ended(state);
    }
}

impl std::fmt::Debug for DeliveryState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeliveryState")
            .field("range", &self.range)
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}
