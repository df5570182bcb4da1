//! Keys of remote caches: which class a key has, and what it names.

use llm_datadist_core::{ClusterId, Error, ErrorKind, NO_ID, Name, RemoteName};
use pyo3::exceptions::PyAttributeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::arguments::KeyArg;
use crate::convert::{self, int, only_support, shown};
use crate::error::raise;
use crate::python_types::PythonTypes;

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
    pub(crate) fn of(self, name: &str, allowed: &[KeyClass]) -> PyResult<RemoteKey<'a, 'py>> {
        let types = PythonTypes::get(self.py())?;
        for &class in allowed {
            if convert::instance(&self, class.class(types))? {
                return Ok(RemoteKey { class: Some(class), key: self });
            }
        }
        if self.is_none() {
            return Ok(RemoteKey { class: None, key: self });
        }
        Err(only_allowed(name, allowed, self))
    }

    /// The same, without `None`.
    pub(crate) fn required(self, name: &str, allowed: &[KeyClass]) -> PyResult<RemoteKey<'a, 'py>> {
        if self.is_none() { Err(only_allowed(name, allowed, self)) } else { self.of(name, allowed) }
    }

    /// Exactly one of `req_id` and `prefix_id` of a `CacheKey` must be given (contract §7).
    pub(crate) fn check_ids(self) -> PyResult<()> {
        let py = self.py();
        let request: u64 = int("req_id", &self.getattr(intern!(py, "_req_id"))?)?;
        let prefix: u64 = int("prefix_id", &self.getattr(intern!(py, "_prefix_id"))?)?;
        if (request == NO_ID) == (prefix == NO_ID) { Err(one_id(self)) } else { Ok(()) }
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
        let (py, key) = (self.key.py(), &self.key);
        let cluster = ClusterId(int("cluster_id", &key.getattr(intern!(py, "_cluster_id"))?)?);
        let name = match self.class {
            Some(KeyClass::Blocks) => Name::Key(convert::blocks_key(key)?),
            Some(KeyClass::Row) => convert::row_name(key)?,
            Some(KeyClass::Cache) => match convert::key(key)? {
                Some(key) => Name::Key(key),
                None => return Err(one_id(self.key)),
            },
            None => return Err(PyAttributeError::new_err("the key is None")),
        };
        Ok(RemoteName { cluster, name })
    }
}

#[cold]
fn only_allowed(name: &str, allowed: &[KeyClass], key: KeyArg<'_, '_>) -> PyErr {
    let names: Vec<_> = allowed.iter().map(|class| format!("'{}'", class.name())).collect();
    only_support(name, format_args!("[{}]", names.join(", ")), &key)
}

#[cold]
fn one_id(key: KeyArg<'_, '_>) -> PyErr {
    let text = format!("exactly one of req_id and prefix_id must be given: {}", shown(&key));
    raise(key.py(), &Error::new(ErrorKind::InvalidArgument, text))
}
