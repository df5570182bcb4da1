//! The state of a layer-wise transfer: its layers and destinations, and which of them are late.

use std::time::{Duration, Instant};

use super::clock::Alarm;
use super::delivery::{Delivery, DeliveryState, Outcome, ReadyLayer, ReportedLayers};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::Deadline;

/// What the lock of a task protects.
pub(super) struct TaskState {
    pub(super) layers: ReportedLayers,
    /// The layer for which the thread of a `CacheTask` waits.
    pub(super) awaited: Option<Awaited>,
    /// Alarm that checks what is late, not after the first moment at which something is; at most one.
    pub(super) alarm: Option<(Instant, Alarm)>,
    pub(super) deliveries: Vec<DeliveryState>,
    /// Number of destinations that have not ended.
    pub(super) open: usize,
    /// Bytes of the destinations that have succeeded.
    bytes: u64,
    /// The first failure.
    failed: Option<Error>,
}

/// A layer that was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    pub(super) layer: u32,
    pub(super) since: Instant,
    /// When the wait is too long.
    pub(super) layer_timeout: Option<Deadline>,
}

impl TaskState {
    /// Returns the state of a transfer of the layers of each delivery, out of a cache with this many layers.
    pub(super) fn new(layers: u32, deliveries: Vec<Delivery>) -> Result<Self> {
        let deliveries = deliveries.into_iter().map(DeliveryState::new);
        let deliveries = fallible::collect("the destinations of a transfer", deliveries)?;
        let (layers, open) = (ReportedLayers::new(layers)?, deliveries.len());
        Ok(TaskState { layers, awaited: None, alarm: None, deliveries, open, bytes: 0, failed: None })
    }

    /// Notes how a destination has ended. An error names the destination if there are several. Returns whether it is the first one
    /// that has failed.
    pub(super) fn note_end(&mut self, index: usize, end: Result<u64>) -> bool {
        self.open -= 1;
        match end {
            Ok(bytes) => self.bytes += bytes,
            Err(error) if self.failed.is_none() => {
                let several = self.deliveries.len() > 1;
                self.failed = Some(if several { error.with("part", index) } else { error });
                return true;
            }
            Err(_) => {}
        }
        false
    }

    /// Returns the number of bytes moved, or the first failure.
    pub(super) fn outcome(&self) -> Result<u64> {
        self.failed.clone().map_or(Ok(self.bytes), Err)
    }

    /// Fails every destination for which `fails` returns an error, unless it has ended. The caller finishes them.
    pub(super) fn fail_each(&mut self, fails: impl Fn(&DeliveryState, &ReportedLayers) -> Option<Error>) {
        for delivery in &mut self.deliveries {
            if let Some(error) = fails(delivery, &self.layers) {
                delivery.fail(|| error, &self.layers);
            }
        }
    }

    /// Ends every destination that lacks a layer, because none will be ready any more. Those that need `layer` or an earlier
    /// one fail with `error`; the others were never reached.
    pub(super) fn refuse(&mut self, layer: u32, error: &Error) {
        self.awaited = None;
        let TaskState { layers, deliveries, .. } = self;
        let lacks =
            |delivery: &&mut DeliveryState| delivery.is_under_way() && delivery.missing(layers).is_some();
        for delivery in deliveries.iter_mut().filter(lacks) {
            if delivery.range.first <= layer {
                let error = error.clone().with("cluster", delivery.cluster).with("layer", layer);
                delivery.fail(|| error, layers);
            } else {
                delivery.outcome = Outcome::Unreached;
            }
        }
    }

    /// Fails what is late: the layer that is awaited, and layers that wait for a worker for `limit` since their report. Returns
    /// whether there was anything, and when to check again.
    pub(super) fn fail_late(&mut self, limit: Option<Duration>) -> (bool, Option<Instant>) {
        let (now, mut late, mut next) = (Instant::now(), false, None::<Instant>);
        if let Some(Awaited { layer, layer_timeout: Some(layer_timeout), .. }) = self.awaited {
            if layer_timeout.passed() {
                self.refuse(layer, &layer_timeout.error(&format!("waiting for layer {layer}")));
                late = true;
            } else {
                next = Some(layer_timeout.at());
            }
        }
        let Some(limit) = limit else { return (late, next) };
        let TaskState { layers, deliveries, .. } = self;
        // A worker that works on a destination has the deadline of its layer.
        let waits = |delivery: &&mut DeliveryState| delivery.is_under_way() && !delivery.is_busy();
        for delivery in deliveries.iter_mut().filter(waits) {
            let Some(ReadyLayer { layer, since }) = delivery.next(layers) else { continue };
            let due = Deadline::since(since, limit);
            if due.at() <= now {
                delivery.fail(|| due.error(&format!("layer {layer} was waiting for a thread")), layers);
                late = true;
            } else {
                next = Some(next.map_or(due.at(), |next| next.min(due.at())));
            }
        }
        (late, next)
    }
}
