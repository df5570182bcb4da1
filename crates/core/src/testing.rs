//! Opens the private modules to tests and benchmarks (feature `testing`); never part of a release build. The
//! tools of the tests are in `crates/testing`.

use std::sync::Arc;
use std::time::Duration;

use crate::bindings::{Cache, CacheTask};
use crate::transfer::{AsyncCalls, Delivery, ExecutorHandle, GrantClock};
use crate::{Error, EventQueue, LayerTask, LinkEnd, Result};

/// Returns the memory of a cache.
pub fn tensors(cache: &Cache) -> &Arc<crate::memory::Tensors> {
    cache.tensors()
}

/// Starts a layer-wise transfer out of a cache with this many layers, as the engine does.
pub fn start_task(
    calls: &AsyncCalls,
    layers: u32,
    to: Vec<Delivery>,
    layer_timeout: Option<Duration>,
) -> Result<CacheTask> {
    let limit = Duration::from_secs(3600);
    CacheTask::start(calls.running(), calls.executor(), (layers, to), limit, layer_timeout)
}

/// Starts a layer-wise push whose layers the caller reports, as the engine does.
pub fn begin_layer_task(
    calls: &AsyncCalls,
    layers: u32,
    to: Vec<Delivery>,
    limit: Duration,
) -> Result<LayerTask> {
    LayerTask::start(calls, layers, to, limit, None)
}

/// Reports the end of a link, as the registry of links does.
pub fn end_link(queue: &Arc<EventQueue>, end: LinkEnd) {
    queue.link_down(end);
}

/// Reports that a layer of a transfer will not be ready.
pub fn refuse_layer(task: &CacheTask, layer: u32, error: &Error) {
    task.refuse(layer, error);
}

/// Creates the clock that ends grants, as the engine does.
pub fn grant_clock(executor: &ExecutorHandle, grants: &Arc<crate::grants::Grants>) -> Arc<GrantClock> {
    GrantClock::new(executor, grants)
}

/// Sets the alarm of a clock, as the engine does after it has lent blocks.
pub fn watch_grants(clock: &Arc<GrantClock>) -> Result<()> {
    clock.watch()
}

/// Re-exports private modules of the crate under their own names.
macro_rules! internals {
    ($($module:ident)*) => {
        $(
            #[allow(missing_docs, unused_imports, reason = "the module documents itself")]
            pub mod $module {
                pub use crate::$module::*;
            }
        )*
    };
}

internals! {
    cache checksums config copy device error events fabric fallible grants huge_pages memory model net options plan pool protocol session
    stats status token_file transfer validate
}
