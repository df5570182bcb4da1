//! The operations that the calls of both managers perform once their arguments are checked.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::{Cache, CacheId, CacheKey, CacheKind, DataDist, Deadline, Operation, Result};
use pyo3::prelude::*;

use crate::arguments::DescArg;
use crate::cache::ManagedCache;
use crate::engine::{self, Engine};
use crate::error::raise;
use crate::pull_push_arguments::Pull;
use crate::{log, raw};

/// Calls with more blocks detach from the interpreter while they start.
const MANY_BLOCKS: usize = 4096;

impl Engine {
    /// Runs an operation. Another thread can close the engine while this one waits for a group: that ends the group.
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        operation: impl FnOnce(&DataDist) -> Operation<'_> + Send,
    ) -> PyResult<()> {
        let Some(group) = self.enter(py, |engine| operation(engine).run_or_begin())? else { return Ok(()) };
        engine::waiting(py, raise, Deadline::after(Duration::MAX), |deadline| group.join(deadline))
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
        let Pull { from, to, rows, layers, extras } = pull;
        let pulled = self.run(py, |engine| engine.pull_with(from, &to, rows, layers, extras));
        log::after_transfer(py, pulled)
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
