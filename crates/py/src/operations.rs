//! The operations that the calls of both managers perform once their arguments are checked.

use std::sync::Arc;

use llm_datadist_core::{Cache, CacheId, CacheKey, CacheKind, CallExtras, DataDist, Operation, Result};
use pyo3::prelude::*;

use crate::arguments::DescArg;
use crate::cache::ManagedCache;
use crate::engine::Engine;
use crate::error::raise;
use crate::pull_push_arguments::{Pull, Push};
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
    pub(crate) fn pull(&self, py: Python<'_>, pull: Pull) -> PyResult<()> {
        let Pull { from, to, rows, layers } = pull;
        let pulled = self.run(py, |engine| engine.pull_with(from, &to, rows, layers, CallExtras::default()));
        log::after_transfer(py, pulled)
    }

    /// Pushes, and waits for the bytes.
    pub(crate) fn push(&self, py: Python<'_>, push: Push) -> PyResult<()> {
        let Push { from, to, rows, layers } = push;
        let pushed = self.run(py, |engine| engine.push_with(&from, to, rows, layers, CallExtras::default()));
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
