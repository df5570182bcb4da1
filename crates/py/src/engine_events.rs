//! The events of an engine, and the calls for them that only `CacheManager` mode has.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{ClusterId, EnsureOptions, Grant};
use pyo3::prelude::*;

use crate::arguments::{IntArg, TextArg};
use crate::datadist::DataDist;
use crate::engine::Engine;
use crate::error::raise;
use crate::grants;
use crate::links;
use crate::notify::NotifyArg;
use crate::transfer::TransferHandle;

/// The events of an engine.
#[pyclass(frozen, name = "Events", module = "llm_datadist._core")]
pub(crate) struct EngineEvents {
    native: Py<DataDist>,
}

#[pymethods]
impl EngineEvents {
    #[new]
    fn new(native: Py<DataDist>) -> Self {
        EngineEvents { native }
    }

    fn ensure_link(
        &self,
        address: TextArg<'_, '_>,
        metadata: NotifyArg<'_, '_>,
        cluster_id: IntArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let py = address.py();
        let at = links::address(address)?;
        let metadata = metadata.bytes("metadata")?;
        let cluster = cluster_id.optional("cluster_id")?.map(ClusterId);
        let limit = validate::timeout_ms(timeout_ms.int("timeout_ms")?).map_err(|error| raise(py, &error))?;
        let options = EnsureOptions { cluster, metadata, name: None };
        let engine = self.engine();
        let transfer = engine.attached(py, |engine| engine.ensure_link(at, limit, options))?;
        self.native.get().transfers().started(py, &transfer, engine.codes())
    }

    /// Returns at most `max_events` events. If that fails, they stay in the queue.
    fn poll(&self, max_events: IntArg<'_, '_>) -> PyResult<Vec<Py<PyAny>>> {
        let (py, most) = (max_events.py(), max_events.int::<u32>("max_events")?);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let (queue, events) =
            self.engine().attached(py, |engine| Ok((engine.events().clone(), engine.poll(most)?)))?;
        let grant_ended = |grant: &Arc<Grant>, why| grants::ended(py, &self.native, grant, why);
        let handles = self.native.get().transfers();
        let made = handles.events(py, &events, self.engine().codes(), &grant_ended);
        if made.is_err() {
            queue.put_back(events.into_iter());
        }
        made
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.engine().attached(py, |engine| Ok(engine.events().descriptor()?.as_fd().as_raw_fd()))
    }

    /// Waits until no asynchronous call runs. Returns whether that is so.
    fn drain(&self, timeout_ms: IntArg<'_, '_>) -> PyResult<bool> {
        let limit = timeout_ms.optional::<u32>("timeout_ms")?;
        let limit = limit.map_or(Duration::MAX, |millis| Duration::from_millis(millis.into()));
        self.engine().enter(timeout_ms.py(), |engine| engine.drain(limit))
    }
}

impl EngineEvents {
    fn engine(&self) -> &Engine {
        self.native.get().engine()
    }
}
