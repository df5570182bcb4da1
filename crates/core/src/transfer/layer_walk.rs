//! A task whose layers come in order, from a thread that asks for one after the other and stops at the first one that
//! does not come (contract §8.2 to §8.4).

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;

use super::delivery::{Carried, Delivery, DeliveryState, Outcome, ReportedLayers, TaskLimits};
use super::executor::ExecutorHandle;
use super::task::{Outlet, Task};
use super::task_state::{Awaited, TaskState};
use crate::error::{Error, ErrorKind, Result};
use crate::memory;
use crate::model::Deadline;

impl Task {
    /// Starts a transfer of the layers of each delivery by its carrier, out of a cache with this many layers. A layer has
    /// the limit from the start of its push. If there is a limit for waits, a destination fails if the wait for its next
    /// layer takes longer. Returns `Err(System)` if there is no file descriptor left.
    pub(crate) fn start(
        lanes: ExecutorHandle,
        layers: u32,
        deliveries: Vec<Delivery>,
        limits: TaskLimits,
    ) -> Result<Arc<Task>> {
        let ended = memory::new_eventfd(EventfdFlags::empty()).map_err(|errno| {
            let what = "the event descriptor of a transfer";
            let failed = || Error::new(ErrorKind::System, format!("cannot create {what}")).errno(errno);
            memory::shortage(what, errno).unwrap_or_else(failed)
        })?;
        let task = Task::new(lanes, layers, deliveries, limits, Outlet::List(ended))?;
        if task.done() {
            task.signal_end();
        }
        task.begin();
        Ok(task)
    }

    /// Returns the layers that any destination needs, ascending.
    pub fn layers(&self) -> Vec<u32> {
        let state = self.state.lock();
        let needed = state.deliveries.iter().flat_map(|delivery| delivery.range.first..delivery.range.end);
        needed.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns whether a destination that has not ended needs `layer`. If so, and if `layer` is not ready,
    /// the wait for it starts now.
    pub fn wanted(self: &Arc<Self>, layer: u32) -> bool {
        let mut state = self.state.lock();
        let wanted = !state.over && state.deliveries.iter().any(|delivery| delivery.awaits(layer));
        let patience = self.limits.wait.map(|limit| Deadline::after(limit).named("timeout_in_millis"));
        let awaited = Awaited { layer, since: Instant::now(), patience };
        state.awaited = (wanted && !state.layers.is_reported(layer)).then_some(awaited);
        let watched = state.awaited.is_some() && patience.is_some();
        drop(state);
        if watched {
            self.watch();
        }
        wanted
    }

    /// Reports that `layer` and every layer that is not ready yet will never be ready. Destinations that need `layer` or an
    /// earlier one of these fail with `error`. Destinations that begin after `layer` are never reached. Destinations whose
    /// layers are all ready continue.
    pub(crate) fn refuse(&self, layer: u32, error: &Error) {
        self.state.lock().refuse(layer, error);
        self.settle_all();
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
        self.end(&Error::new(ErrorKind::Cancelled, "the transfer was cancelled"))
    }

    /// Ends all destinations that have not ended, because the engine closes.
    pub fn close(&self) -> bool {
        self.end(&Error::new(ErrorKind::Closed, "the engine was finalized during the transfer"))
    }

    fn end(&self, error: &Error) -> bool {
        let mut state = self.state.lock();
        state.over = true;
        // A destination that idles after a refusal has ended too: it was never reached.
        let open = |delivery: &DeliveryState| delivery.outcome.is_none() && delivery.carrier.is_some();
        let any = state.deliveries.iter().any(open);
        state.fail_each(|delivery, _| open(delivery).then(|| error.clone()));
        drop(state);
        self.settle_all();
        any
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
        self.state.lock().deliveries.iter().map(DeliveryState::outcome).collect()
    }

    /// Returns why each destination is not done: why it failed, or what it waits for. `None` for destinations
    /// that are done, and for those that were never reached.
    pub fn reasons(&self) -> Vec<Option<Arc<Error>>> {
        let mut state = self.state.lock();
        let TaskState { layers, deliveries, awaited, .. } = &mut *state;
        let reason = |delivery: &mut DeliveryState| match &delivery.outcome {
            Some(Err(error)) => Some(error.clone()),
            None if delivery.carrier.is_some() => Some(Arc::new(unfinished(delivery, layers, *awaited))),
            _ => None,
        };
        deliveries.iter_mut().map(reason).collect()
    }

    /// How long the transfer may wait for one layer, if there is a limit.
    pub fn patience(&self) -> Option<Duration> {
        self.limits.wait
    }

    /// Returns the progress of each destination.
    pub fn progress(&self) -> Vec<Carried> {
        self.state.lock().deliveries.iter().map(DeliveryState::progress).collect()
    }

    /// Returns a new descriptor that is readable once the transfer is [`done`](Self::done). The caller owns
    /// it and must not read from it. Returns `Err(System)` if there is no file descriptor left.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        let Outlet::List(ended) = &self.outlet else {
            return Err(Error::new(ErrorKind::System, "a task of transfers has no event descriptor"));
        };
        rustix::io::fcntl_dupfd_cloexec(ended, 0).map_err(|errno| {
            Error::new(ErrorKind::System, "cannot duplicate the event descriptor of a transfer")
                .because(errno)
        })
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
