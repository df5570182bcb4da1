//! The operations that the calls of both managers perform once their arguments are checked.

use std::sync::Arc;

use llm_datadist_core::bindings::{Cache, CacheKey, CopyArgs, DataDist, End, Operation};
use llm_datadist_core::{CacheId, CacheKind, Result};
use pyo3::prelude::*;

use crate::arguments::DescArg;
use crate::cache::ManagedCache;
use crate::engine::Engine;
use crate::error::raise;
use crate::pull_push_arguments::PeerRows;
use crate::{log, raw};

/// Calls with more blocks detach from the interpreter while they start.
const MANY_BLOCKS: usize = 4096;

impl Engine {
    /// Runs an operation, and waits for its end.
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        operation: impl FnOnce(&DataDist) -> Operation<'_> + Send,
    ) -> PyResult<()> {
        self.enter(py, |engine| operation(engine).run())
    }

    /// Copies a range of a slot. An error names the request `req_id`, if there is one.
    pub(crate) fn copy_cache(
        &self,
        py: Python<'_>,
        (dst, src): (End, End),
        args: CopyArgs,
        req_id: Option<u64>,
    ) -> PyResult<()> {
        self.enter(py, |engine| {
            let copied = engine.copy_cache(&dst, &src, args).run();
            copied.map_err(|error| req_id.into_iter().fold(error, |error, id| error.with("req_id", id)))
        })
    }

    /// Starts a call on `blocks` blocks. It detaches from the interpreter only if they are many.
    pub(crate) fn start<T: Send>(
        &self,
        py: Python<'_>,
        blocks: usize,
        call: impl FnOnce(&DataDist) -> Result<T> + Send,
    ) -> PyResult<T> {
        if blocks > MANY_BLOCKS { self.enter(py, call) } else { self.attached(py, call) }
    }

    /// Pulls, and waits for the bytes.
    pub(crate) fn pull(&self, py: Python<'_>, pull: PeerRows) -> PyResult<()> {
        let PeerRows { remote, local, rows, layers } = pull;
        let pulled = self.run(py, |engine| engine.pull(remote, &local, rows, layers));
        log::after_transfer(py, pulled)
    }

    /// Pushes, and waits for the bytes.
    pub(crate) fn push(&self, py: Python<'_>, push: PeerRows) -> PyResult<()> {
        let PeerRows { remote, local, rows, layers } = push;
        let pushed = self.run(py, |engine| engine.push(&local, remote, rows, layers));
        log::after_transfer(py, pushed)
    }

    /// Releases a cache that this engine made. `None` stands for a cache that it did not make.
    pub(crate) fn deallocate(&self, py: Python<'_>, id: Option<CacheId>) -> PyResult<()> {
        self.enter(py, |engine| id.map_or(Ok(()), |id| engine.deallocate(id)))
    }

    /// Allocates; the descriptor and keys are of the right types.
    pub(crate) fn allocate(
        &self,
        desc: DescArg<'_, '_>,
        kind: CacheKind,
        keys: &[Option<CacheKey>],
    ) -> PyResult<ManagedCache> {
        let py = desc.py();
        let desc = desc.read(kind, keys)?;
        let made = |cache: Arc<Cache>| ManagedCache::of(self.number(), &cache);
        self.enter(py, |engine| engine.allocate(&desc, kind, keys).map(made))
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
