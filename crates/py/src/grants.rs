//! Grants as Python holds them.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::{Grant, GrantEnd, GrantToken};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::IntArg;
use crate::blocks::BlocksArg;
use crate::call_extras;
use crate::datadist::DataDist;
use crate::local_cache::CacheArg;

arguments! {
    /// The token of a grant.
    TokenArg;
}

/// The calls of one engine about grants.
#[pyclass(frozen, name = "Grants", module = "llm_datadist._core")]
pub(crate) struct GrantMethods {
    native: Py<DataDist>,
}

/// A grant of this engine. Dropping it does not end the grant.
#[pyclass(frozen, eq, hash, name = "Grant", module = "llm_datadist.events")]
pub(crate) struct GrantHandle {
    native: Py<DataDist>,
    grant: Arc<Grant>,
    token: GrantToken,
}

/// The event that a grant of this engine has ended.
#[pyclass(frozen, name = "GrantEnded", module = "llm_datadist.events")]
pub(crate) struct GrantEndedEvent {
    #[pyo3(get)]
    grant: Py<GrantHandle>,
    #[pyo3(get)]
    reason: &'static str,
}

#[pymethods]
impl GrantMethods {
    #[new]
    fn new(native: Py<DataDist>) -> Self {
        GrantMethods { native }
    }

    fn grant(
        &self,
        cache: CacheArg<'_, '_>,
        blocks: BlocksArg<'_, '_>,
        ttl_ms: IntArg<'_, '_>,
        readers: IntArg<'_, '_>,
    ) -> PyResult<Py<GrantHandle>> {
        let (py, engine) = (cache.py(), self.native.get().engine());
        cache.typed("cache")?;
        let rows = blocks.listed_or_none("blocks")?.ok_or_else(|| blocks.not_listed("blocks"))?;
        let ttl = Duration::from_millis(ttl_ms.int::<u32>("ttl_ms")?.into());
        let readers = readers.int::<u32>("readers")?;
        let end = cache.blocks("cache")?.end(engine)?;
        let lend = |engine: &llm_datadist_core::DataDist| {
            let grant = engine.grant(&end, &rows, ttl, usize::try_from(readers).unwrap_or(usize::MAX))?;
            Ok((engine.grant_token(&grant), grant))
        };
        let (token, grant) = engine.enter(py, lend)?;
        Py::new(py, GrantHandle { native: self.native.clone_ref(py), grant, token })
    }

    fn release(&self, token: TokenArg<'_, '_>) -> PyResult<()> {
        let (py, token) = (token.py(), call_extras::token("token", &token.0)?);
        self.native.get().engine().enter(py, |engine| engine.release_grant(&token))
    }
}

#[pymethods]
impl GrantHandle {
    #[getter]
    fn token<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.token.to_bytes())
    }

    #[getter]
    fn ended(&self) -> Option<&'static str> {
        self.grant.ended().map(GrantEnd::name)
    }

    #[pyo3(signature = (*, wait=true))]
    fn revoke(&self, py: Python<'_>, wait: bool) -> PyResult<()> {
        self.native.get().engine().enter(py, |engine| engine.revoke(&self.grant, wait))
    }

    fn __repr__(&self) -> String {
        let (cache, ended) =
            (self.grant.cache(), self.ended().map_or("None".into(), |why| format!("'{why}'")));
        format!("Grant(cache_id={cache}, ended={ended})")
    }
}

impl PartialEq for GrantHandle {
    fn eq(&self, other: &Self) -> bool {
        self.token == other.token
    }
}

impl Hash for GrantHandle {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.token.hash(state);
    }
}

#[pymethods]
impl GrantEndedEvent {
    #[classattr]
    fn __match_args__() -> (&'static str, &'static str) {
        ("grant", "reason")
    }

    fn __repr__(&self) -> String {
        format!("GrantEnded({}, '{}')", self.grant.get().__repr__(), self.reason)
    }
}

/// Returns the event that a grant of the engine `native` has ended.
pub(crate) fn ended(
    py: Python<'_>,
    native: &Py<DataDist>,
    grant: &Arc<Grant>,
    why: GrantEnd,
) -> PyResult<Py<PyAny>> {
    let token = native.get().engine().attached(py, |engine| Ok(engine.grant_token(grant)))?;
    let handle = GrantHandle { native: native.clone_ref(py), grant: grant.clone(), token };
    let event = GrantEndedEvent { grant: Py::new(py, handle)?, reason: why.name() };
    Ok(Py::new(py, event)?.into_any())
}
