//! The operations that the calls of both managers perform once their arguments are checked.

use std::sync::Arc;

use llm_datadist_core::{Cache, CacheId, CacheKey, CacheKind, CopyArgs, DataDist, End, Error, Result};
use pyo3::prelude::*;

use crate::arguments::DescArg;
use crate::cache::ManagedCache;
use crate::engine::Engine;
use crate::error::raise;
use crate::pull_push_arguments::Pull;
use crate::{log, raw};

impl Engine {
    /// Makes `call`, which moves bytes. If that fails, passes the engine's log lines to Python, because they report broken links.
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&DataDist) -> Result<()> + Send,
    ) -> PyResult<()> {
        let ran = self.enter(py, call);
        if ran.is_err() {
            log::drain(py)?;
        }
        ran
    }

    /// Copies a range of a slot between the ends, of which the destination is first. The error names the
    /// request.
    pub(crate) fn copy(
        &self,
        py: Python<'_>,
        (to, from): &(End, End),
        args: CopyArgs,
        request: Option<u64>,
    ) -> PyResult<()> {
        let named = |error: Error| match request {
            Some(id) => error.with("req_id", id),
            None => error,
        };
        self.run(py, |engine| engine.copy_cache(to, from, args).run().map_err(named))
    }

    /// Pulls, and waits for the bytes.
    pub(crate) fn pull(&self, py: Python<'_>, pull: Pull) -> PyResult<()> {
        let Pull { from, to, rows, layers, extras } = pull;
        self.run(py, |engine| engine.pull_with(from, &to, rows, layers, extras).run())
    }

    /// Releases a cache that this engine made. `None` stands for a cache that it did not make.
    pub(crate) fn deallocate(&self, py: Python<'_>, id: Option<CacheId>) -> PyResult<()> {
        self.enter(py, |engine| id.map_or(Ok(()), |id| engine.deallocate(id)))
    }

    /// Allocates, as one range of bytes if `contiguous`; the descriptor and keys are of the right types.
    pub(crate) fn allocate(
        &self,
        desc: DescArg<'_, '_>,
        kind: CacheKind,
        keys: &[Option<CacheKey>],
        contiguous: bool,
    ) -> PyResult<ManagedCache> {
        let py = desc.py();
        let desc = desc.read(kind, keys)?;
        let made = |cache: Arc<Cache>| ManagedCache::of(self.number(), &cache);
        let allocate = if contiguous { DataDist::allocate_contiguous } else { DataDist::allocate };
        self.enter(py, |engine| allocate(engine, &desc, kind, keys).map(made))
    }

    /// Registers memory of the caller; the descriptor and keys are of the right types.
    pub(crate) fn register(
        &self,
        desc: DescArg<'_, '_>,
        kind: CacheKind,
        addrs: &[u64],
        keys: &[Option<CacheKey>],
        access: Option<bool>,
    ) -> PyResult<ManagedCache> {
        let py = desc.py();
        let desc = desc.read(kind, keys)?;
        let adopted = raw::adopt(&desc, kind, addrs).map_err(|error| raise(py, &error))?;
        let made = |cache: Arc<Cache>| ManagedCache::of(self.number(), &cache);
        self.enter(py, |engine| engine.register(adopted, keys, access).map(made))
    }
}
