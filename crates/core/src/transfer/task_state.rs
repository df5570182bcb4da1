//! The state of a layer-wise transfer: its layers and destinations, and which of them are late.

use std::time::Instant;

use super::clock::Alarm;
use super::delivery::{Delivery, DeliveryState, Outcome, ReportedLayers, TaskLimits};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::Deadline;

/// What the lock of a task protects.
#[derive(Debug)]
pub(super) struct TaskState {
    pub(super) layers: ReportedLayers,
    /// The layer for which the thread of a `CacheTask` waits.
    pub(super) awaited: Option<Awaited>,
    /// Alarm that checks what is late, not after the first moment at which something is; at most one.
    pub(super) alarm: Option<(Instant, Alarm)>,
    pub(super) deliveries: Vec<DeliveryState>,
    /// Number of destinations that have not ended.
    pub(super) open: usize,
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
        Ok(TaskState { layers, awaited: None, alarm: None, deliveries, open })
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

    /// Fails what is late. Returns whether there was anything, and when to check again.
    pub(super) fn fail_late(&mut self, limits: TaskLimits, begin: Instant) -> (bool, Option<Instant>) {
        let (now, mut late, mut next) = (Instant::now(), false, None::<Instant>);
        if let Some(Awaited { layer, layer_timeout: Some(layer_timeout), .. }) = self.awaited {
            if layer_timeout.passed() {
                self.refuse(layer, &layer_timeout.error(&format!("waiting for layer {layer}")));
                late = true;
            } else {
                next = Some(layer_timeout.at());
            }
        }
        let TaskState { layers, deliveries, .. } = self;
        for delivery in deliveries {
            let Some((due, doing)) = delivery.due(layers, limits, begin) else { continue };
            if due.at() <= now {
                delivery.fail(|| due.error(&doing), layers);
                late = true;
            } else {
                next = Some(next.map_or(due.at(), |next| next.min(due.at())));
            }
        }
        (late, next)
    }
}
