//! What a layer-wise transfer knows of its layers and of each destination.
//!
//! This module only keeps records. `task` changes them when layers are reported and when workers have pushed layers.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{ClusterId, Deadline};
use crate::validate::LayerRange;

/// Name of these lists in out-of-memory errors.
const LAYERS: &str = "the layers of a transfer";

/// Pushes layers to one destination.
pub trait LayerSink: Send + Sync {
    /// Finds the destination, and returns the number of bytes of all its layers. Called once, before the first layer, and
    /// usually before that layer is ready.
    fn find(&self, deadline: Deadline) -> Result<u64>;

    /// Pushes with one request the first of the `ready` layers, and those after it that it can also push if they have at most
    /// `max_bytes` bytes together. Returns the number of layers and of their bytes, which are in place then.
    fn push(&self, ready: LayerRange, max_bytes: u64, deadline: Deadline) -> Result<(u32, u64)>;

    /// Adds to the error of a joint transfer what is known of the peer.
    fn named(&self, error: Error) -> Error {
        error
    }
}

/// One destination of a task that is to start.
pub struct Delivery {
    /// Cluster of the destination.
    pub cluster: ClusterId,
    /// Layers that it receives.
    pub layers: LayerRange,
    /// What pushes them, or why the destination can never be reached.
    pub sink: Result<Arc<dyn LayerSink>>,
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
    Failed(Error),
}

/// Progress of a destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerProgress {
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

/// Consecutive layers that may be pushed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadyRun {
    /// Range of the layers, never empty.
    pub(super) layers: LayerRange,
    /// When the first of them was reported.
    pub(super) since: Instant,
}

/// The layers of the source cache: which ones were reported as ready, and in which order. Reporting a layer takes no memory.
pub(super) struct ReportedLayers {
    /// Number of layers of the cache.
    count: u32,
    /// One bit per layer: whether it was reported.
    reported: Vec<u64>,
    ready: Vec<ReadyLayer>,
}

impl ReportedLayers {
    pub(super) fn new(count: u32) -> Result<Self> {
        let reported = fallible::filled(LAYERS, 0, count.div_ceil(u64::BITS) as usize)?;
        Ok(ReportedLayers { count, reported, ready: fallible::with_capacity(LAYERS, count as usize)? })
    }

    /// Notes that `layer` may be pushed. Returns `Err(InvalidArgument)` if there is no such layer, or if it was reported before.
    pub(super) fn report(&mut self, layer: u32, since: Instant) -> Result<()> {
        let range = format_args!("0 to {}, each layer once", i64::from(self.count) - 1);
        if layer >= self.count {
            return Err(Error::out_of_range("layer", layer, range));
        }
        if self.is_reported(layer) {
            let text = format!("layer={layer} was reported before; allowed: {range}");
            return Err(Error::invalid(text).of_argument("layer"));
        }
        self.reported[(layer / u64::BITS) as usize] |= 1 << (layer % u64::BITS);
        self.ready.push(ReadyLayer { layer, since });
        Ok(())
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

/// Whether a worker works on a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunState {
    Idle,
    /// It was handed to the workers, and none has begun it.
    Queued,
    Busy,
}

/// One destination.
pub(super) struct DeliveryState {
    /// `None` once the destination has ended; the memory that the sink held is released with it.
    pub(super) sink: Option<Arc<dyn LayerSink>>,
    pub(super) cluster: ClusterId,
    pub(super) range: LayerRange,
    pub(super) found: bool,
    pub(super) run_state: RunState,
    /// How it ends.
    pub(super) outcome: Outcome,
    /// Whether somebody reports the outcome, or has done so.
    reported: bool,
    /// Position, in the order in which layers became ready, before which it needs no layer any more.
    at: usize,
    /// Number and bytes of the layers in place.
    pushed: (u32, u64),
}

impl DeliveryState {
    pub(super) fn new(Delivery { cluster, layers, sink }: Delivery) -> Self {
        let (sink, outcome) = match sink {
            Ok(sink) => (Some(sink), Outcome::UnderWay),
            Err(error) => (None, Outcome::Failed(error)),
        };
        DeliveryState {
            run_state: RunState::Idle,
            sink,
            cluster,
            range: layers,
            found: false,
            outcome,
            reported: false,
            at: 0,
            pushed: (0, 0),
        }
    }

    /// Whether a worker works on it.
    pub(super) fn is_busy(&self) -> bool {
        self.run_state == RunState::Busy
    }

    /// Whether it has no outcome yet.
    pub(super) fn is_under_way(&self) -> bool {
        matches!(self.outcome, Outcome::UnderWay)
    }

    fn needs(&self, layer: u32) -> bool {
        (self.range.first..self.range.end).contains(&layer)
    }

    /// Whether it has not ended and needs `layer`.
    pub(super) fn awaits(&self, layer: u32) -> bool {
        self.is_under_way() && self.needs(layer)
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

    /// Returns the next layer to push, and the consecutive ones that became ready after it in ascending order.
    pub(super) fn next_run(&mut self, layers: &ReportedLayers) -> Option<ReadyRun> {
        let ReadyLayer { layer: first, since } = self.next(layers)?;
        let needed =
            layers.ready.get(self.at..)?.iter().map(|ready| ready.layer).filter(|&layer| self.needs(layer));
        let run = needed.zip(first..self.range.end).take_while(|(ready, next)| ready == next);
        let end = run.last().map_or(first, |(last, _)| last) + 1;
        Some(ReadyRun { layers: LayerRange { first, end }, since })
    }

    /// Returns the first layer that it needs and that was not reported.
    pub(super) fn missing(&self, layers: &ReportedLayers) -> Option<u32> {
        layers.first_missing(self.range)
    }

    /// Notes that the next `count` layers are in place, with this many bytes.
    pub(super) fn note_pushed(&mut self, count: u32, bytes: u64, layers: &ReportedLayers) {
        for _ in 0..count {
            // Skips ready layers that this destination does not need.
            self.next(layers);
            self.at += 1;
        }
        self.pushed = (self.pushed.0 + count, self.pushed.1 + bytes);
        self.end_if_complete();
    }

    /// Ends the destination with success if every layer is in place.
    pub(super) fn end_if_complete(&mut self) {
        if self.is_under_way() && self.pushed.0 >= self.num_layers() {
            self.outcome = Outcome::Done;
        }
    }

    /// Ends the destination with a failure, unless it has ended.
    pub(super) fn fail(&mut self, error: impl FnOnce() -> Error, layers: &ReportedLayers) {
        if self.is_under_way() {
            let layer = self.current(layers);
            let error = error().with("cluster", self.cluster);
            let error = if error.fact("layer").is_some() { error } else { error.with("layer", layer) };
            self.outcome = Outcome::Failed(error);
        }
    }

    /// Returns the layer that it pushes, or waits for.
    pub(super) fn current(&mut self, layers: &ReportedLayers) -> u32 {
        let next = self.next(layers).map(|ready| ready.layer);
        next.or_else(|| self.missing(layers)).unwrap_or(self.range.first)
    }

    /// Returns the number of bytes moved, or the failure, once the destination has ended and nothing of it moves. Returns it
    /// only once.
    pub(super) fn take_end(&mut self) -> Option<Result<u64>> {
        if self.is_busy() || self.reported {
            return None;
        }
        let text = "the transfer ended before any layer of this destination was ready";
        let end = match &self.outcome {
            Outcome::UnderWay => return None,
            Outcome::Unreached => Err(Error::new(ErrorKind::Cancelled, text).with("cluster", self.cluster)),
            Outcome::Done => Ok(self.pushed.1),
            Outcome::Failed(error) => Err(error.clone()),
        };
        self.reported = true;
        Some(end)
    }

    pub(super) fn progress(&self) -> LayerProgress {
        LayerProgress { layers: self.pushed.0, of_layers: self.num_layers(), bytes: self.pushed.1 }
    }

    fn num_layers(&self) -> u32 {
        self.range.end.saturating_sub(self.range.first)
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
        let sink = Err(Error::new(ErrorKind::NotLinked, "none"));
        let state = DeliveryState::new(Delivery { cluster: ClusterId(1), layers, sink });
        DeliveryState { outcome: Outcome::UnderWay, ..state }
    }

    /// Layers become ready in any order. Each request pushes some of the layers of its run.
    #[test]
    fn next_run_follows_the_order_of_readiness() {
        let order = Just((0..LAYERS).collect::<Vec<_>>()).prop_shuffle();
        // Half of the orders are rotations, so that long runs occur.
        let rotated = (0..LAYERS).prop_map(|at| (at..LAYERS).chain(0..at).collect());
        let range = (0..LAYERS).prop_flat_map(|first| (Just(first), first + 1..=LAYERS));
        let requests = prop::collection::vec((1..5u32, 0..4usize), 100);
        TestRunner::default()
            .run(&(prop_oneof![order, rotated], range, requests), |(order, (first, end), requests)| {
                let (mut layers, mut state) = (ReportedLayers::new(LAYERS).unwrap(), delivery(first, end));
                // The model: the layers that it needs, in the order in which they become ready.
                let needed: Vec<_> =
                    order.iter().copied().filter(|layer| (first..end).contains(layer)).collect();
                let (mut reported, mut pushed) = (0, Vec::new());
                for (takes, reports) in requests {
                    for &layer in order.iter().skip(reported).take(reports) {
                        layers.report(layer, Instant::now()).unwrap();
                        reported += 1;
                    }
                    let ready = |layer: &&u32| needed[pushed.len()..].contains(layer);
                    let waiting: Vec<_> = order[..reported].iter().filter(ready).copied().collect();
                    let run = state.next_run(&layers);
                    let Some(&start) = waiting.first() else {
                        assert!(run.is_none());
                        continue;
                    };
                    let length = (1..=LAYERS)
                        .find(|&next| waiting.get(next as usize) != Some(&(start + next)))
                        .unwrap();
                    assert_eq!(run.unwrap().layers, LayerRange { first: start, end: start + length });
                    let takes = takes.min(length);
                    state.note_pushed(takes, u64::from(takes), &layers);
                    pushed.extend(start..start + takes);
                    let progress = state.progress();
                    assert_eq!(
                        (progress.layers as usize, progress.bytes),
                        (pushed.len(), pushed.len() as u64)
                    );
                    assert_eq!(!state.is_under_way(), pushed.len() == needed.len());
                }
                assert!(needed.starts_with(&pushed));
                Ok(())
            })
            .unwrap();
    }
}
