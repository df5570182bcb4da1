//! Grants, as Python holds them.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::DataDist;
use llm_datadist_core::bindings::native;
use llm_datadist_core::{Grant, GrantEnd, GrantToken};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::rows::NativeRows;
use super::shared::EngineShared;
use super::transfer::NativeTransfer;
use super::values;
use crate::convert::Any;

/// Blocks that are lent to readers for a limited time. ``Engine.lend`` makes it.
///
/// Dropping the object does not end the grant. Two objects are equal if they stand for the same grant.
#[pyclass(frozen, eq, hash, name = "Grant", module = "llm_datadist.native")]
pub(crate) struct NativeGrant {
    shared: Arc<EngineShared>,
    grant: Arc<Grant>,
    token: GrantToken,
    rows: Py<NativeRows>,
}

impl NativeGrant {
    /// Lends `rows` for `ttl` or until this many readers are done.
    pub(crate) fn lend(
        shared: &Arc<EngineShared>,
        rows: &Bound<'_, NativeRows>,
        ttl: Duration,
        readers: u32,
    ) -> PyResult<Py<Self>> {
        let py = rows.py();
        let lend = |engine: &DataDist| {
            let grant = native::lend(engine, &shared.name, &rows.get().rows, ttl, readers)?;
            Ok((engine.grant_token(&grant), grant))
        };
        // Attached to the interpreter until the object is known, so that nobody takes the event of its end before.
        let (token, grant) = shared.engine.attached(py, lend)?;
        let key = key(&grant);
        let made = NativeGrant { shared: shared.clone(), grant, token, rows: rows.clone().unbind() };
        let made = Py::new(py, made)?;
        shared.grants.insert(key, made.clone_ref(py).into_any());
        Ok(made)
    }

    /// Returns the object of a grant that has ended. `None` if there was no memory for one.
    pub(crate) fn of_event(py: Python<'_>, shared: &EngineShared, grant: &Grant) -> Option<Py<Self>> {
        let held = shared.grants.get(&key(grant), |grant| grant.clone_ref(py))?;
        held.into_bound(py).cast_into::<Self>().ok().map(Bound::unbind)
    }
}

/// Returns the key of a grant among those of its engine.
pub(crate) fn key(grant: &Grant) -> (u32, u64) {
    let id = grant.id();
    (id.slot, id.generation)
}

#[pymethods]
impl NativeGrant {
    /// The 48 bytes that name the grant. Send them to its readers only: nobody can guess them.
    #[getter]
    fn token<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.token.to_bytes())
    }

    /// The blocks that are lent.
    #[getter]
    fn rows(&self, py: Python<'_>) -> Py<NativeRows> {
        self.rows.clone_ref(py)
    }

    /// Why the grant has ended, or ``None`` while it lasts.
    ///
    /// ``"done"``: its readers have finished. ``"expired"``: its time is over. ``"revoked"``: ``revoke`` was called. ``"released"``: the
    /// cache was freed.
    #[getter]
    fn ended(&self) -> Option<&'static str> {
        self.grant.ended().map(GrantEnd::name)
    }

    /// Let the grant last at least until ``ttl`` seconds from now. It never becomes shorter; ``revoke`` ends it.
    ///
    /// Args:
    ///     ttl: seconds, above 0 and at most 4,294,967.
    ///
    /// Raises:
    ///     TypeError: ``ttl`` is not a number.
    ///     InvalidArgument: ``ttl`` is out of range.
    ///     GrantEnded: the grant has ended.
    ///     Closed: the engine is closed.
    #[pyo3(signature = (ttl, /))]
    fn renew(&self, py: Python<'_>, ttl: &Any<'_>) -> PyResult<()> {
        let ttl = values::seconds("ttl", ttl)?;
        self.shared.engine.attached(py, |engine| engine.renew(&self.grant, native::grant_time(ttl)?))
    }

    /// End the grant now. When the call returns, no pull under it succeeds any more, so the blocks may be written.
    ///
    /// A reader may still be reading the blocks; its pull fails. Revoking a grant that has ended does nothing.
    ///
    /// Returns:
    ///     A transfer that ends when the reads that this engine serves have ended. If it serves none, it has ended when it is
    ///     returned, and there is no ``Completed`` for it.
    ///
    /// Raises:
    ///     Busy: reads are served, and ``max_transfers`` transfers run or have an outcome that was not taken. The grant has ended.
    ///     OutOfMemory: reads are served, and there is no memory for the transfer. The grant has ended.
    ///     Closed: the engine is closed.
    fn revoke(&self, py: Python<'_>) -> PyResult<Py<NativeTransfer>> {
        let revoke = |engine: &DataDist| engine.start_revoke(&self.grant, None);
        let transfer = self.shared.engine.attached(py, revoke)?;
        NativeTransfer::started(py, &self.shared, &transfer)
    }

    fn __repr__(&self) -> String {
        let ended = self.ended().map_or("None".into(), |why| format!("'{why}'"));
        format!("Grant(ended={ended})")
    }
}

impl PartialEq for NativeGrant {
    fn eq(&self, other: &Self) -> bool {
        self.token == other.token
    }
}

impl Hash for NativeGrant {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.token.hash(state);
    }
}
