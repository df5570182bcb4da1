//! What a layer-wise transfer knows of its layers and of each destination.
//!
//! This module only keeps records. `task` changes them when layers are reported and when lanes have pushed layers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{ClusterId, Deadline};
use crate::validate::LayerRange;

/// Name of these lists in out-of-memory errors.
const LAYERS: &str = "the layers of a transfer";

/// Pushes layers to one destination.
pub trait Carrier: Send + Sync {
    /// Finds the destination, and returns the number of bytes of all its layers. Called once, before the first layer, and
    /// usually before that layer is ready.
    fn find(&self, deadline: Deadline) -> Result<u64>;

    /// Pushes the first of these layers, and as many of the next ones as the same request can push. Returns those that are in
    /// place then.
    fn layers(&self, ready: LayerRange, deadline: Deadline) -> Result<PushedLayers>;

    /// Adds to an error what is known of the peer.
    fn named(&self, error: Error) -> Error {
        error
    }
}

/// The first layers of a range, which are in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushedLayers {
    /// Number of them, at least one.
    pub layers: u32,
    /// Bytes of all of them.
    pub bytes: u64,
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

/// A layer that may be pushed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadyLayer {
    pub(super) layer: u32,
    /// When it was reported.
    pub(super) since: Instant,
}

/// Layers that follow each other and may be pushed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadyRun {
    /// Never empty.
    pub(super) layers: LayerRange,
    /// When the first of them was reported.
    pub(super) since: Instant,
}

/// The layers of the source cache: which ones were reported, and in which order they became ready. Reporting a layer
/// takes no memory.
#[derive(Debug)]
pub(super) struct ReportedLayers {
    /// Number of layers of the cache.
    count: u32,
    /// One bit per layer: whether it was reported, as ready or as failed.
    reported: Vec<u64>,
    ready: Vec<ReadyLayer>,
}

impl ReportedLayers {
    pub(super) fn new(count: u32) -> Result<Self> {
        let reported = fallible::filled(LAYERS, 0, count.div_ceil(u64::BITS) as usize)?;
        Ok(ReportedLayers { count, reported, ready: fallible::with_capacity(LAYERS, count as usize)? })
    }

    /// Notes that `layer` was reported. Returns `Err(InvalidArgument)` if there is no such layer, or if it was
    /// reported before.
    pub(super) fn report(&mut self, layer: u32) -> Result<()> {
        let range = format_args!("0 to {}, each layer once", i64::from(self.count) - 1);
        if layer >= self.count {
            return Err(Error::out_of_range("layer", layer, range));
        }
        if self.is_reported(layer) {
            let before = self.ready.iter().any(|ready| ready.layer == layer);
            let state = if before { "ready" } else { "failed" };
            let text = format!("layer={layer} was reported before, as {state}; allowed: {range}");
            return Err(Error::invalid(text));
        }
        self.reported[(layer / u64::BITS) as usize] |= 1 << (layer % u64::BITS);
        Ok(())
    }

    /// Notes that a reported layer may be pushed.
    pub(super) fn push_ready(&mut self, layer: u32, since: Instant) {
        self.ready.push(ReadyLayer { layer, since });
    }

    pub(super) fn is_reported(&self, layer: u32) -> bool {
        let word = self.reported.get((layer / u64::BITS) as usize);
        word.is_some_and(|word| word >> (layer % u64::BITS) & 1 == 1)
    }

    /// Returns the first layer of `range` that was not reported.
    fn first_missing(&self, range: LayerRange) -> Option<u32> {
        (range.first..range.end).find(|&layer| !self.is_reported(layer))
    }
}

/// Time limits of a task.
#[derive(Clone, Copy, Debug)]
pub struct TaskLimits {
    /// How long a layer may take to be in place.
    pub layer: Duration,
    /// How long the task, or each destination, may wait for the next layer to be ready.
    pub wait: Option<Duration>,
}

/// One destination.
pub(super) struct DeliveryState {
    /// `None` once the destination has ended; the memory that the carrier held is released with it.
    pub(super) carrier: Option<Arc<dyn Carrier>>,
    pub(super) cluster: ClusterId,
    pub(super) range: LayerRange,
    pub(super) found: bool,
    /// Whether it is queued for the lanes and none has begun it.
    pub(super) queued: bool,
    /// Whether a lane works on it.
    pub(super) busy: bool,
    pub(super) outcome: Option<Result<(), Arc<Error>>>,
    /// Position, in the order in which layers became ready, before which it needs no layer any more.
    at: usize,
    /// Number and bytes of the layers in place.
    pushed: (u32, u64),
}

impl DeliveryState {
    pub(super) fn new(Delivery { cluster, layers, carrier }: Delivery) -> Self {
        let (carrier, outcome) = match carrier {
            Ok(carrier) => (Some(carrier), None),
            Err(error) => (None, Some(Err(Arc::new(error)))),
        };
        DeliveryState {
            queued: carrier.is_some(),
            carrier,
            cluster,
            range: layers,
            found: false,
            busy: false,
            outcome,
            at: 0,
            pushed: (0, 0),
        }
    }

    fn needs(&self, layer: u32) -> bool {
        (self.range.first..self.range.end).contains(&layer)
    }

    /// Whether it has not ended and needs `layer`.
    pub(super) fn awaits(&self, layer: u32) -> bool {
        self.outcome.is_none() && self.needs(layer)
    }

    /// Returns the next layer to push: of those that are ready, the one that has been so for longest.
    pub(super) fn next(&mut self, layers: &ReportedLayers) -> Option<ReadyLayer> {
        while let Some(&ready) = layers.ready.get(self.at) {
            if self.needs(ready.layer) {
                return Some(ready);
            }
            self.at += 1;
        }
        None
    }

    /// Returns the next layer to push, and at most `most` layers in all: those that became ready after it in ascending order.
    pub(super) fn next_run(&mut self, layers: &ReportedLayers, most: u32) -> Option<ReadyRun> {
        let ReadyLayer { layer: first, since } = self.next(layers)?;
        let needed =
            layers.ready.get(self.at..)?.iter().map(|ready| ready.layer).filter(|&layer| self.needs(layer));
        let run =
            needed.zip(first..first.saturating_add(most.max(1))).take_while(|(ready, next)| ready == next);
        let end = run.last().map_or(first, |(last, _)| last) + 1;
        Some(ReadyRun { layers: LayerRange { first, end }, since })
    }

    /// Returns the first layer that it needs and that was not reported.
    pub(super) fn missing(&self, layers: &ReportedLayers) -> Option<u32> {
        layers.first_missing(self.range)
    }

    /// Notes that the next layers are in place.
    pub(super) fn carried(&mut self, pushed: PushedLayers, layers: &ReportedLayers) {
        for _ in 0..pushed.layers {
            // Passes over layers for other destinations, which may lie between these.
            self.next(layers);
            self.at += 1;
        }
        self.pushed = (self.pushed.0 + pushed.layers, self.pushed.1 + pushed.bytes);
        self.end_if_complete();
    }

    /// Ends the destination with success if every layer is in place.
    pub(super) fn end_if_complete(&mut self) {
        if self.pushed.0 >= self.num_layers() {
            self.outcome.get_or_insert(Ok(()));
        }
    }

    /// Ends the destination with a failure, unless it has ended.
    pub(super) fn fail(&mut self, error: impl FnOnce() -> Error, layers: &ReportedLayers) {
        if self.outcome.is_none() {
            let layer = self.current(layers);
            let error = error().with("cluster", self.cluster);
            let error = if error.fact("layer").is_some() { error } else { error.with("layer", layer) };
            self.outcome = Some(Err(Arc::new(error)));
        }
    }

    /// Returns the layer that it pushes, or waits for.
    pub(super) fn current(&mut self, layers: &ReportedLayers) -> u32 {
        let next = self.next(layers).map(|ready| ready.layer);
        next.or_else(|| self.missing(layers)).unwrap_or(self.range.first)
    }

    /// Returns the number of bytes moved, or the failure, once it has ended.
    pub(super) fn moved(&self) -> Result<u64> {
        match &self.outcome {
            Some(Ok(())) => Ok(self.pushed.1),
            Some(Err(error)) => Err((**error).clone()),
            None => Err(Error::new(ErrorKind::System, "a destination ended without a result")),
        }
    }

    pub(super) fn outcome(&self) -> Outcome {
        match &self.outcome {
            Some(Ok(())) => Outcome::Done,
            Some(Err(error)) => Outcome::Failed(error.clone()),
            None if self.carrier.is_none() => Outcome::Unreached,
            None => Outcome::UnderWay,
        }
    }

    pub(super) fn progress(&self) -> Carried {
        Carried { layers: self.pushed.0, of_layers: self.num_layers(), bytes: self.pushed.1 }
    }

    fn num_layers(&self) -> u32 {
        self.range.end.saturating_sub(self.range.first)
    }

    /// Returns when it is late, and the error for that: a ready layer that no lane has begun is not in place within its
    /// limit, or no further layer became ready within the limit since `begin` and since the last one.
    pub(super) fn due(
        &mut self,
        layers: &ReportedLayers,
        limits: TaskLimits,
        begin: Instant,
    ) -> Option<(Deadline, String)> {
        if self.outcome.is_some() {
            return None;
        }
        // A lane that works on it has the deadline of its layer.
        let queued = self.next(layers).filter(|_| !self.busy).map(|ReadyLayer { layer, since }| {
            let text = format!("layer {layer} was waiting for a thread");
            (Deadline::since(since, limits.layer), text)
        });
        let waits = self.missing(layers).zip(limits.wait).map(|(layer, limit)| {
            let last = layers.ready.iter().rev().find(|ready| self.needs(ready.layer));
            let since = last.map_or(begin, |ready| ready.since.max(begin));
            let text = format!("waiting for layer {layer} to be ready");
            (Deadline::since(since, limit).named("layer_timeout_ms"), text)
        });
        match (queued, waits) {
            (Some(queued), Some(waits)) if waits.0.at() < queued.0.at() => Some(waits),
            (queued, waits) => queued.or(waits),
        }
    }
}

impl std::fmt::Debug for DeliveryState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeliveryState")
            .field("range", &self.range)
            .field("pushed", &self.pushed)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;

    use super::*;

    const LAYERS: u32 = 12;

    fn delivery(first: u32, end: u32) -> DeliveryState {
        let layers = LayerRange { first, end };
        let carrier = Err(Error::new(ErrorKind::NotLinked, "none"));
        DeliveryState {
            outcome: None,
            ..DeliveryState::new(Delivery { cluster: ClusterId(1), layers, carrier })
        }
    }

    /// Layers become ready in any order, and requests push any number of those that they may push.
    #[test]
    fn runs_take_the_layers_in_the_order_in_which_they_became_ready() {
        let order = Just((0..LAYERS).collect::<Vec<_>>()).prop_shuffle();
        // Often almost ascending, so that there are runs.
        let order = prop_oneof![order, (0..LAYERS).prop_map(|at| (at..LAYERS).chain(0..at).collect())];
        let range = (0..LAYERS).prop_flat_map(|first| (Just(first), first + 1..=LAYERS));
        let requests = prop::collection::vec((1..5u32, 1..5u32, 0..4usize), 100);
        TestRunner::default()
            .run(&(order, range, requests), |(order, (first, end), requests)| {
                let (mut layers, mut state) = (ReportedLayers::new(LAYERS).unwrap(), delivery(first, end));
                // The model: the layers that it needs, in the order in which they become ready.
                let needed: Vec<_> =
                    order.iter().copied().filter(|layer| (first..end).contains(layer)).collect();
                let (mut reported, mut pushed) = (0, Vec::new());
                for (most, takes, reports) in requests {
                    for &layer in order.iter().skip(reported).take(reports) {
                        layers.push_ready(layer, Instant::now());
                        reported += 1;
                    }
                    let waiting: Vec<_> = order[..reported]
                        .iter()
                        .filter(|layer| needed[pushed.len()..].contains(layer))
                        .collect();
                    let run = state.next_run(&layers, most);
                    let Some(&&start) = waiting.first() else {
                        assert!(run.is_none());
                        continue;
                    };
                    let follows = |&(next, waiting): &(u32, &&u32)| **waiting == start + next;
                    let length =
                        (0..most).zip(&waiting).take_while(follows).map(|(next, _)| next + 1).last().unwrap();
                    assert_eq!(run.unwrap().layers, LayerRange { first: start, end: start + length });
                    let takes = takes.min(length);
                    state.carried(PushedLayers { layers: takes, bytes: u64::from(takes) }, &layers);
                    pushed.extend(start..start + takes);
                    assert_eq!(
                        (state.progress().layers as usize, state.pushed.1),
                        (pushed.len(), pushed.len() as u64)
                    );
                    assert_eq!(state.outcome.is_some(), pushed.len() == needed.len());
                }
                assert!(needed.starts_with(&pushed));
                Ok(())
            })
            .unwrap();
    }
}
