//! Identification of a local `Cache` object: its id, its kind and the engine that made it.
//!
//! A cache that an engine made carries a handle with all of this. Of a cache built by hand, the attributes are read (test:
//! `tests/test_values.py`, `test_a_cache_made_by_hand_names_what_its_attributes_say`).

use llm_datadist_core::{CacheId, CacheKind, End, Error, ErrorKind};
use pyo3::intern;
use pyo3::prelude::*;

use crate::cache::{LooseCache, ManagedCache};
use crate::convert::{Any, any_int, int};
use crate::engine::Engine;
use crate::error::{invalid, raise};

/// A `Cache` or `KvCache` with its handle.
pub(crate) struct LocalCache<'a, 'py> {
    cache: Borrowed<'a, 'py, PyAny>,
    handle: Any<'py>,
}

impl<'a, 'py> LocalCache<'a, 'py> {
    /// Reads the handle of `cache`. `None`, which has no handle, fails here.
    pub(crate) fn of(cache: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(LocalCache { cache, handle: cache.getattr(intern!(cache.py(), "_handle"))? })
    }

    /// Returns whether its rows are batch slots or blocks.
    pub(crate) fn kind(&self) -> PyResult<CacheKind> {
        if let Some(managed) = self.managed() {
            return Ok(managed.kind());
        }
        let blocks: bool = self.cache.getattr(intern!(self.cache.py(), "_is_blocks_cache"))?.extract()?;
        Ok(if blocks { CacheKind::Blocks } else { CacheKind::Batch })
    }

    /// Checks that its slots are its dimension 0.
    pub(crate) fn slots_first(&self) -> PyResult<()> {
        slot_dim(&self.cache.getattr(intern!(self.cache.py(), "_cache_desc"))?)
    }

    /// Returns its id if `engine` made it. Ids start again with each engine, so the id of another engine's cache means
    /// nothing here.
    pub(crate) fn id(&self, engine: &Engine) -> PyResult<Option<CacheId>> {
        if let Some(managed) = self.managed() {
            return Ok(managed.id_in(engine.number()));
        }
        let py = self.cache.py();
        let id = CacheId(int("cache_id", &self.cache.getattr(intern!(py, "_cache_id"))?)?);
        let maker = self.cache.getattr(intern!(py, "_cache_manager"))?;
        let number =
            || maker.getattr(intern!(py, "_native"))?.getattr(intern!(py, "number"))?.extract::<u64>();
        let own = maker.is_none() || number().is_ok_and(|number| number == engine.number());
        Ok(own.then_some(id))
    }

    /// Returns it as one end of a copy: by its id, or by its handle if it is a CPU cache.
    pub(crate) fn end(&self, engine: &Engine) -> PyResult<End> {
        let py = self.cache.py();
        if let Ok(loose) = self.handle.cast::<LooseCache>() {
            return loose.get().end().map_err(|error| raise(py, &error));
        }
        match self.id(engine)? {
            Some(id) => Ok(End::Managed(id)),
            None => {
                Err(raise(py, &Error::new(ErrorKind::CacheNotFound, "the cache was made by another engine")))
            }
        }
    }

    fn managed(&self) -> Option<&ManagedCache> {
        self.handle.cast::<ManagedCache>().ok().map(Bound::get)
    }
}

/// Checks that a `CacheDesc` whose slots get keys counts them in dimension 0.
pub(crate) fn slot_dim(desc: &Any<'_>) -> PyResult<()> {
    let index = any_int("batch_dim_index", &desc.getattr(intern!(desc.py(), "_batch_dim_index"))?)?;
    if index == 0 {
        Ok(())
    } else {
        Err(invalid(desc.py(), "batch_dim_index", index, "0 where slots are named"))
    }
}
