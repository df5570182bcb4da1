//! A layer-wise push whose layers the caller reports, in any order and from any thread. It is one transfer for all destinations.

use std::sync::Arc;
use std::time::Duration;

use super::async_calls::AsyncCalls;
use super::delivery::Delivery;
use super::layer_notice::LayerNotice;
use super::task::{Joint, Task};
use crate::error::Result;
use crate::events::Transfer;

/// The handle of a push whose layers the caller reports.
///
/// If it is dropped, nobody can report layers any more: the transfer is cancelled unless all layers that a destination needs are
/// ready.
#[derive(Debug)]
pub struct LayerTask(Arc<Task>);

impl LayerTask {
    /// Starts one transfer of the layers of all deliveries, out of a cache with this many layers. A layer has `limit` from its
    /// report. The transfer ends once all deliveries have ended. The peer gets `notice` then.
    pub(crate) fn start(
        calls: &AsyncCalls,
        layers: u32,
        deliveries: Vec<Delivery>,
        limit: Duration,
        notice: Option<Arc<LayerNotice>>,
    ) -> Result<LayerTask> {
        let begun = calls.begin()?;
        let (end, joint) = (begun.end(), Some(Joint { notice }));
        let task = Task::start(calls.executor(), end, (layers, deliveries), limit, joint)?;
        begun.started();
        Ok(LayerTask(task))
    }

    /// Returns the transfer of all destinations.
    pub fn transfer(&self) -> &Arc<Transfer> {
        self.0.transfer()
    }

    /// Reports that `layer` of the source cache is computed. Layers may be reported in any order, and from any thread. Never
    /// waits. Returns `Err(InvalidArgument)` if the cache has no such layer, or if it was reported before; nothing changes
    /// then.
    pub fn ready(&self, layer: u32) -> Result<()> {
        self.0.ready(layer)
    }
}

impl Drop for LayerTask {
    fn drop(&mut self) {
        self.0.abandon();
    }
}
