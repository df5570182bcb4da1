//! Local `Cache` objects: their class, id and kind, and the engine that made them.
//!
//! A cache that an engine made carries a handle with all of this. Of a cache built by hand, the attributes are read (test:
//! `tests/test_values.py`, `test_a_cache_made_by_hand_names_what_its_attributes_say`).

use llm_datadist_core::bindings::validate;
use llm_datadist_core::bindings::{End, Mode};
use llm_datadist_core::{CacheDesc, CacheId, CacheKind, Error, ErrorKind};
use pyo3::intern;
use pyo3::prelude::*;

use crate::arguments::{IntArg, on_device, slot_dim};
use crate::cache::{LooseCache, ManagedCache};
use crate::convert::{self, Any, int};
use crate::engine::Engine;
use crate::error::{invalid, raise};
use crate::python_types::PythonTypes;

arguments! {
    /// A `Cache` or a `KvCache`.
    CacheArg;
}

impl<'a, 'py> CacheArg<'a, 'py> {
    /// It must be a `Cache`. `None` passes, and fails where it is read.
    pub(crate) fn typed(self, name: &str) -> PyResult<()> {
        convert::typed(name, &self.0, &PythonTypes::get(self.py())?.cache, "Cache")
    }

    /// It must be a `KvCache`. `None` passes, and fails where it is read.
    pub(crate) fn kv_typed(self, name: &str) -> PyResult<()> {
        convert::typed(name, &self.0, &PythonTypes::get(self.py())?.kv_cache, "KvCache")
    }

    /// It must be a cache of the class of this mode. `None` is refused.
    pub(crate) fn required(self, name: &str, mode: Mode) -> PyResult<()> {
        let types = PythonTypes::get(self.py())?;
        let (class, class_name) = match mode {
            Mode::CacheManager => (&types.cache, "Cache"),
            Mode::KvCacheManager => (&types.kv_cache, "KvCache"),
        };
        convert::required(name, &self.0, class, class_name)
    }

    /// It must be in memory of the device.
    pub(crate) fn on_device(self, name: &str) -> PyResult<()> {
        convert::not_none(name, &self.0)?;
        on_device(name, &self.desc_object()?)
    }

    /// Its description.
    pub(crate) fn desc(self) -> PyResult<CacheDesc> {
        convert::desc(&self.desc_object()?)
    }

    fn desc_object(self) -> PyResult<Any<'py>> {
        self.0.getattr(intern!(self.py(), "_cache_desc"))
    }

    /// The index of one of its tensors.
    pub(crate) fn tensor_index(self, name: &str, index: IntArg<'_, '_>) -> PyResult<usize> {
        let (py, index) = (self.py(), index.int::<i32>("tensor_index")?);
        convert::not_none(name, &self.0)?;
        let count = convert::num_tensors(&self.desc_object()?)?;
        match u32::try_from(index) {
            Ok(at) if at < count => Ok(at as usize),
            _ => Err(invalid(py, "tensor_index", index, &format!("0 to num_tensors - 1, {count} tensors"))),
        }
    }

    /// The cache with its handle. `None`, which has no handle, fails here.
    pub(crate) fn local(self, name: &str) -> PyResult<CacheWithHandle<'a, 'py>> {
        convert::not_none(name, &self.0)?;
        Ok(CacheWithHandle { cache: self, handle: self.0.getattr(intern!(self.py(), "_handle"))? })
    }

    /// It must be a blocks cache.
    pub(crate) fn blocks(self, name: &str) -> PyResult<CacheWithHandle<'a, 'py>> {
        let local = self.local(name)?;
        validate::blocks_cache(name, local.kind()?).map_err(|error| raise(self.py(), &error))?;
        Ok(local)
    }

    /// It must be a continuous cache.
    pub(crate) fn batch(self, name: &str) -> PyResult<CacheWithHandle<'a, 'py>> {
        let local = self.local(name)?;
        validate::batch_cache(name, local.kind()?).map_err(|error| raise(self.py(), &error))?;
        Ok(local)
    }

    /// It must be a continuous cache whose slots are its dimension 0: only those are contiguous (contract §7.9, §12.1).
    pub(crate) fn slots(self, name: &str) -> PyResult<CacheWithHandle<'a, 'py>> {
        let local = self.batch(name)?;
        local.slots_first()?;
        Ok(local)
    }

    /// The cache, of either kind, as one end of a copy.
    pub(crate) fn end(self, name: &str, engine: &Engine) -> PyResult<End> {
        self.local(name)?.end(engine)
    }

    /// The same. An engine has one device, so a CPU cache of several devices is refused.
    pub(crate) fn one_device(self, name: &str, engine: &Engine) -> PyResult<End> {
        convert::not_none(name, &self.0)?;
        let devices = self.0.getattr(intern!(self.py(), "_num_devices"))?;
        if devices.extract::<usize>()? == 1 {
            return self.end(name, engine);
        }
        Err(invalid(self.py(), "num_devices of the cache", devices, "1, because an engine has one device"))
    }
}

/// A `Cache` or `KvCache` with its handle.
pub(crate) struct CacheWithHandle<'a, 'py> {
    cache: CacheArg<'a, 'py>,
    handle: Any<'py>,
}

impl CacheWithHandle<'_, '_> {
    /// Returns whether its rows are batch slots or blocks.
    pub(crate) fn kind(&self) -> PyResult<CacheKind> {
        if let Some(managed) = self.managed() {
            return Ok(managed.kind());
        }
        let blocks: bool = self.cache.0.getattr(intern!(self.cache.py(), "_is_blocks_cache"))?.extract()?;
        Ok(if blocks { CacheKind::Blocks } else { CacheKind::Batch })
    }

    /// Checks that its slots are its dimension 0.
    pub(crate) fn slots_first(&self) -> PyResult<()> {
        slot_dim(&self.cache.desc_object()?)
    }

    /// Returns its id if `engine` made it. Ids start again with each engine, so the id of another engine's cache means
    /// nothing here.
    pub(crate) fn id(&self, engine: &Engine) -> PyResult<Option<CacheId>> {
        if let Some(managed) = self.managed() {
            return Ok(managed.id_in(engine.number()));
        }
        let py = self.cache.py();
        let id = CacheId(int("cache_id", &self.cache.0.getattr(intern!(py, "_cache_id"))?)?);
        let maker = self.cache.0.getattr(intern!(py, "_cache_manager"))?;
        let number =
            || maker.getattr(intern!(py, "_datadist"))?.getattr(intern!(py, "number"))?.extract::<u64>();
        let own = maker.is_none() || number().is_ok_and(|number| number == engine.number());
        Ok(own.then_some(id))
    }

    /// Returns it as one end of a copy: by its id, or by its handle if it is a CPU cache.
    pub(crate) fn end(&self, engine: &Engine) -> PyResult<End> {
        let py = self.cache.py();
        if let Ok(loose) = self.handle.cast::<LooseCache>() {
            return loose.get().end().map_err(|error| raise(py, &error));
        }
        self.own_id(engine).map(End::Managed)
    }

    /// Returns its id. `engine` must have made it.
    pub(crate) fn own_id(&self, engine: &Engine) -> PyResult<CacheId> {
        let other = || Error::new(ErrorKind::CacheNotFound, "the cache was made by another engine");
        self.id(engine)?.ok_or_else(|| raise(self.cache.py(), &other()))
    }

    fn managed(&self) -> Option<&ManagedCache> {
        self.handle.cast::<ManagedCache>().ok().map(Bound::get)
    }
}
