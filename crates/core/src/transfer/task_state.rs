//! The state of a layer-wise transfer: its layers and destinations, and which of them are late.

use std::time::Instant;

use super::clock::Alarm;
use super::delivery::{DeliveryState, ReportedLayers, TaskLimits};
use crate::error::Error;
use crate::model::Deadline;

/// What the lock of a task protects.
#[derive(Debug)]
pub(super) struct TaskState {
    pub(super) layers: ReportedLayers,
    /// No further layer will be ready.
    pub(super) over: bool,
    /// The layer for which the thread of a list task waits.
    pub(super) awaited: Option<Awaited>,
    /// Alarm that checks what is late, not after the first moment at which something is; at most one.
    pub(super) alarm: Option<(Instant, Alarm)>,
    pub(super) deliveries: Vec<DeliveryState>,
    /// Number of destinations that have not ended, or whose carrier is being dropped.
    pub(super) open: usize,
    pub(super) ended: bool,
}

/// A layer that was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    pub(super) layer: u32,
    pub(super) since: Instant,
    /// When the wait is too long.
    pub(super) patience: Option<Deadline>,
}

impl TaskState {
    /// Fails every destination for which `fails` returns an error, unless it has ended. The caller settles them.
    pub(super) fn fail_each(&mut self, fails: impl Fn(&DeliveryState, &ReportedLayers) -> Option<Error>) {
        for delivery in &mut self.deliveries {
            if let Some(error) = fails(delivery, &self.layers) {
                delivery.fail(|| error, &self.layers);
            }
        }
    }

    /// Fails the destinations that need `layer` or an earlier layer, and that lack a layer. No layer will be ready any more.
    pub(super) fn refuse(&mut self, layer: u32, error: &Error) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        self.fail_each(|delivery, layers| {
            let lacks = delivery.range.first <= layer && delivery.missing(layers).is_some();
            lacks.then(|| error.clone().with("cluster", delivery.cluster).with("layer", layer))
        });
    }

    /// Refuses the layer of a list task whose wait took too long. Returns whether it did, and when to check again.
    pub(super) fn late_wait(&mut self) -> (bool, Option<Instant>) {
        let awaited = self.awaited.filter(|_| !self.over && !self.ended);
        let Some((layer, patience)) = awaited.and_then(|at| Some((at.layer, at.patience?))) else {
            return (false, None);
        };
        if !patience.passed() {
            return (false, Some(patience.at()));
        }
        self.refuse(layer, &patience.error(&format!("waiting for layer {layer}")));
        (true, None)
    }

    /// Fails the destinations that are late. Returns whether there were any, and when to check again.
    pub(super) fn late_deliveries(&mut self, limits: TaskLimits, begin: Instant) -> (bool, Option<Instant>) {
        let (now, mut late, mut next) = (Instant::now(), false, None::<Instant>);
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
