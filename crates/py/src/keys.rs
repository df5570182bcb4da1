//! Keys of caches: which class a key has, and what it names.

use llm_datadist_core::bindings::{CacheKey, NO_ID, Name, RemoteName};
use llm_datadist_core::{CacheId, ClusterId, Error, ErrorKind};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::convert::{self, Any, inner_only_support, int, only_support, shown};
use crate::error::raise;
use crate::python_types::PythonTypes;

arguments! {
    /// A key of a cache, of any class.
    KeyArg;
    /// A list or tuple of keys, one for each batch slot.
    KeysArg;
}

/// The classes of keys.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyClass {
    /// `CacheKey`.
    Cache,
    /// `CacheKeyByIdAndIndex`.
    Row,
    /// `BlocksCacheKey`.
    Blocks,
}

/// A key of one of the classes that a call allows, or `None`.
pub(crate) struct RemoteKey<'a, 'py> {
    class: Option<KeyClass>,
    name: &'static str,
    key: KeyArg<'a, 'py>,
}

impl KeyClass {
    const fn name(self) -> &'static str {
        match self {
            KeyClass::Cache => "CacheKey",
            KeyClass::Row => "CacheKeyByIdAndIndex",
            KeyClass::Blocks => "BlocksCacheKey",
        }
    }

    const fn class(self, types: &PythonTypes) -> &Py<PyType> {
        match self {
            KeyClass::Cache => &types.cache_key,
            KeyClass::Row => &types.cache_key_by_id,
            KeyClass::Blocks => &types.blocks_cache_key,
        }
    }
}

impl<'a, 'py> KeyArg<'a, 'py> {
    /// It must belong to one of the `allowed` classes. `None` passes, and fails where the key is read.
    pub(crate) fn of(self, name: &'static str, allowed: &[KeyClass]) -> PyResult<RemoteKey<'a, 'py>> {
        let types = PythonTypes::get(self.py())?;
        for &class in allowed {
            if convert::instance(&self.0, class.class(types))? {
                return Ok(RemoteKey { class: Some(class), name, key: self });
            }
        }
        if self.0.is_none() {
            return Ok(RemoteKey { class: None, name, key: self });
        }
        Err(only_allowed(name, allowed, self))
    }

    /// The same, without `None`.
    pub(crate) fn required(self, name: &'static str, allowed: &[KeyClass]) -> PyResult<RemoteKey<'a, 'py>> {
        if self.0.is_none() { Err(only_allowed(name, allowed, self)) } else { self.of(name, allowed) }
    }

    /// Exactly one of `req_id` and `prefix_id` of a `CacheKey` must be given (contract §7).
    pub(crate) fn check_ids(self) -> PyResult<()> {
        let py = self.py();
        let request: u64 = int("req_id", &self.0.getattr(intern!(py, "_req_id"))?)?;
        let prefix: u64 = int("prefix_id", &self.0.getattr(intern!(py, "_prefix_id"))?)?;
        if (request == NO_ID) == (prefix == NO_ID) { Err(one_id(self)) } else { Ok(()) }
    }

    /// The key of a local cache, which must be a `CacheKey`. A placeholder is `None`.
    pub(crate) fn cache_key(self) -> PyResult<Option<CacheKey>> {
        convert::typed("cache_key", &self.0, &PythonTypes::get(self.py())?.cache_key, "CacheKey")?;
        convert::not_none("cache_key", &self.0)?;
        cache_key(&self.0)
    }

    /// The key of a local blocks cache, which must be a `BlocksCacheKey` or `None`.
    pub(crate) fn blocks_cache_key(self) -> PyResult<Option<CacheKey>> {
        let class = &PythonTypes::get(self.py())?.blocks_cache_key;
        convert::typed("blocks_cache_key", &self.0, class, "BlocksCacheKey")?;
        if self.0.is_none() { Ok(None) } else { blocks_key(&self.0).map(Some) }
    }
}

impl KeysArg<'_, '_> {
    /// The keys, each of which must be a `CacheKey`. A placeholder is `None`.
    pub(crate) fn keys(self) -> PyResult<Vec<Option<CacheKey>>> {
        let class = &PythonTypes::get(self.py())?.cache_key;
        let key = |(at, item): (usize, &Any<'_>)| {
            if convert::instance(item, class)? {
                cache_key(item)
            } else {
                Err(inner_only_support("cache_keys", at, "['CacheKey']", item))
            }
        };
        let items = convert::listed("cache_keys", &self.0, raise)?;
        convert::gathered(self.py(), items.len(), items.iter().enumerate().map(key), raise)
    }
}

impl RemoteKey<'_, '_> {
    /// Whether it belongs to `class`.
    pub(crate) fn is(&self, class: KeyClass) -> bool {
        self.class == Some(class)
    }

    /// Of a `CacheKey`, exactly one of its ids must be given.
    pub(crate) fn check_ids(&self) -> PyResult<()> {
        if self.is(KeyClass::Cache) { self.key.check_ids() } else { Ok(()) }
    }

    /// What it names, and where. A key that is `None` fails here.
    pub(crate) fn name(&self) -> PyResult<RemoteName> {
        let (py, key) = (self.key.py(), &self.key.0);
        convert::not_none(self.name, key)?;
        let cluster = ClusterId(int("cluster_id", &key.getattr(intern!(py, "_cluster_id"))?)?);
        let name = match self.class {
            Some(KeyClass::Blocks) => Name::Key(blocks_key(key)?),
            Some(KeyClass::Row) => row_name(key)?,
            Some(KeyClass::Cache) => match cache_key(key)? {
                Some(key) => Name::Key(key),
                None => return Err(one_id(self.key)),
            },
            None => return Err(convert::must_not_be_none(self.name)),
        };
        Ok(RemoteName { cluster, name })
    }
}

/// Reads a `CacheKey`. A placeholder is `None`.
fn cache_key(value: &Any<'_>) -> PyResult<Option<CacheKey>> {
    let py = value.py();
    Ok(CacheKey::new(
        int("req_id", &value.getattr(intern!(py, "_req_id"))?)?,
        int("prefix_id", &value.getattr(intern!(py, "_prefix_id"))?)?,
        int("model_id", &value.getattr(intern!(py, "_model_id"))?)?,
    ))
}

/// Reads a `BlocksCacheKey`.
fn blocks_key(value: &Any<'_>) -> PyResult<CacheKey> {
    let model = int("model_id", &value.getattr(intern!(value.py(), "_model_id"))?)?;
    Ok(CacheKey::Blocks { model })
}

/// Reads a `CacheKeyByIdAndIndex`.
fn row_name(value: &Any<'_>) -> PyResult<Name> {
    let py = value.py();
    let cache = CacheId(int("cache_id", &value.getattr(intern!(py, "_cache_id"))?)?);
    Ok(Name::Row { cache, row: int("batch_index", &value.getattr(intern!(py, "_batch_index"))?)? })
}

#[cold]
fn only_allowed(name: &str, allowed: &[KeyClass], key: KeyArg<'_, '_>) -> PyErr {
    let names: Vec<_> = allowed.iter().map(|class| format!("'{}'", class.name())).collect();
    only_support(name, format_args!("[{}]", names.join(", ")), &key.0)
}

#[cold]
fn one_id(key: KeyArg<'_, '_>) -> PyErr {
    let text = format!("exactly one of req_id and prefix_id must be given: {}", shown(&key.0));
    raise(key.py(), &Error::new(ErrorKind::InvalidArgument, text))
}
