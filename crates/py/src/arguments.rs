//! The arguments of a call as Python gave them, each typed by what it must be.
//!
//! Extracting an argument checks nothing, because the contract fixes the order of the checks across the
//! arguments of a call (§7, §9.1). A method checks each argument when its turn comes. `name` is its name in
//! errors.

use std::convert::Infallible;
use std::ops::Deref;

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{CacheDesc, CacheKey, CacheKind, End, Role};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::blocks;
use crate::convert::{self, Width, only_support, shown};
use crate::engine::Engine;
use crate::error::{invalid, raise};
use crate::local_cache::LocalCache;
use crate::python_types::PythonTypes;

macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name<'a, 'py>(Borrowed<'a, 'py, PyAny>);

        impl<'a, 'py> FromPyObject<'a, 'py> for $name<'a, 'py> {
            type Error = Infallible;

            fn extract(given: Borrowed<'a, 'py, PyAny>) -> Result<Self, Infallible> {
                Ok($name(given))
            }
        }

        impl<'py> Deref for $name<'_, 'py> {
            type Target = Bound<'py, PyAny>;

            fn deref(&self) -> &Self::Target {
                &self.0
            }
        })*
    };
}

arguments! {
    /// A `Cache` or a `KvCache`.
    CacheArg;
    /// A `CacheDesc`.
    DescArg;
    /// A key of a cache, of any class.
    KeyArg;
    /// Block indices: a list or tuple, or a dict or array of pairs.
    BlocksArg;
    /// An integer.
    IntArg;
    /// A member of `LLMRole`.
    RoleArg;
    /// A text.
    TextArg;
    /// A bool, or `None`.
    FlagArg;
    /// A list or tuple of keys, one for each batch slot.
    KeysArg;
    /// A list of addresses, one for each tensor.
    AddressesArg;
    /// A range of layers, or `None`.
    LayersArg;
    /// A list or tuple of `LLMClusterInfo`.
    ClustersArg;
    /// The rank of each cluster of a communicator: a dict.
    RanksArg;
    /// A `LayerSynchronizer`.
    SynchronizerArg;
    /// A list or tuple of the configs of a layer-wise transfer.
    ConfigsArg;
}

impl<'a, 'py> CacheArg<'a, 'py> {
    /// It must be a `Cache`. `None` passes, and fails at its first attribute.
    pub(crate) fn typed(self, name: &str) -> PyResult<()> {
        convert::typed(name, &self, &PythonTypes::get(self.py())?.cache, "Cache")
    }

    /// It must be a `KvCache`. `None` passes, and fails at its first attribute.
    pub(crate) fn kv_typed(self, name: &str) -> PyResult<()> {
        convert::typed(name, &self, &PythonTypes::get(self.py())?.kv_cache, "KvCache")
    }

    /// It must be in memory of the device.
    pub(crate) fn on_device(self, name: &str) -> PyResult<()> {
        on_device(name, &self.getattr(intern!(self.py(), "_cache_desc"))?)
    }

    /// The cache with its handle. `None`, which has no handle, fails here.
    pub(crate) fn local(self) -> PyResult<LocalCache<'a, 'py>> {
        LocalCache::of(self.0)
    }

    /// It must be a blocks cache.
    pub(crate) fn blocks(self, name: &str) -> PyResult<LocalCache<'a, 'py>> {
        let local = self.local()?;
        validate::blocks_cache(name, local.kind()?).map_err(|error| raise(self.py(), &error))?;
        Ok(local)
    }

    /// It must be a continuous cache.
    pub(crate) fn batch(self, name: &str) -> PyResult<LocalCache<'a, 'py>> {
        let local = self.local()?;
        validate::batch_cache(name, local.kind()?).map_err(|error| raise(self.py(), &error))?;
        Ok(local)
    }

    /// It must be a continuous cache whose slots are its dimension 0: only those are contiguous (contract §7.9, §12.1).
    pub(crate) fn slots(self, name: &str) -> PyResult<LocalCache<'a, 'py>> {
        let local = self.batch(name)?;
        local.slots_first()?;
        Ok(local)
    }

    /// The cache, of either kind, as one end of a copy.
    pub(crate) fn end(self, engine: &Engine) -> PyResult<End> {
        self.local()?.end(engine)
    }
}

impl DescArg<'_, '_> {
    /// It must be a `CacheDesc`. `None` passes, and fails at its first attribute.
    pub(crate) fn typed(self) -> PyResult<()> {
        convert::typed("cache_desc", &self, &PythonTypes::get(self.py())?.cache_desc, "CacheDesc")
    }

    /// It must be in memory of the device.
    pub(crate) fn on_device(self) -> PyResult<()> {
        on_device("cache_desc", &self)
    }

    /// Returns the description of a cache of this kind and with these keys. Keys of a continuous cache name
    /// its slots.
    pub(crate) fn read(self, kind: CacheKind, keys: &[Option<CacheKey>]) -> PyResult<CacheDesc> {
        if kind == CacheKind::Batch && !keys.is_empty() {
            crate::local_cache::slot_dim(&self)?;
        }
        convert::desc(&self)
    }
}

impl BlocksArg<'_, '_> {
    /// A list or tuple; `None` passes, and fails where its length is needed.
    pub(crate) fn listed_or_none(self, name: &str) -> PyResult<Option<Vec<i64>>> {
        blocks::listed_or_none(name, &self)
    }

    /// A list; a tuple is refused.
    pub(crate) fn list(self, name: &str) -> PyResult<Vec<i64>> {
        let list = self.cast::<PyList>().map_err(|_| only_support(name, "['list']", &self))?;
        blocks::listed(name, list)
    }

    /// `{source: destination}`, or an integer array of such rows.
    pub(crate) fn pairs(self, name: &str) -> PyResult<Vec<(i64, i64)>> {
        blocks::pairs(name, &self)
    }

    /// `{source: [destination, …]}`, or an integer array of `(source, destination)` rows.
    pub(crate) fn lists(self, name: &str) -> PyResult<Vec<(i64, i64)>> {
        blocks::lists(name, &self)
    }
}

impl IntArg<'_, '_> {
    /// An integer of this width.
    pub(crate) fn int<T: Width>(self, name: &str) -> PyResult<T> {
        convert::int(name, &self)
    }

    /// The same, or `None`.
    pub(crate) fn optional<T: Width>(self, name: &str) -> PyResult<Option<T>> {
        convert::optional_int(name, &self)
    }
}

impl RoleArg<'_, '_> {
    /// The role; it must be a member of `LLMRole`.
    pub(crate) fn role(self) -> PyResult<Role> {
        let role = PythonTypes::get(self.py())?.role(&self);
        role.ok_or_else(|| invalid(self.py(), "role", shown(&self), "a member of LLMRole"))
    }
}

fn on_device(name: &str, desc: &Bound<'_, PyAny>) -> PyResult<()> {
    let placement = convert::placement(&desc.getattr(intern!(desc.py(), "_placement"))?)?;
    validate::on_device(name, placement).map_err(|error| raise(desc.py(), &error))
}
