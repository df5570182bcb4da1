//! Conversion of lists and dicts of block indices to numbers of the core.
//!
//! Plain integers are read without counting references (`raw`). Anything else is checked item by item, so that the error names
//! the invalid item. `core::validate` decides which indices are allowed.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::convert::{self, Any, held_int, inner_only_support, is_int, not_int, only_support, shown};
use crate::error::{invalid, raise};
use crate::raw;

arguments! {
    /// Block indices: a list, a tuple or a dict.
    BlocksArg;
}

impl<'a, 'py> BlocksArg<'a, 'py> {
    /// A list or tuple. `None` passes here; the call fails where it needs the length.
    pub(crate) fn listed_or_none(self, name: &str) -> PyResult<Option<Vec<i64>>> {
        if let Ok(list) = self.0.cast::<PyList>() {
            listed(name, &list).map(Some)
        } else if let Ok(tuple) = self.0.cast::<PyTuple>() {
            let numbers = raw::tuple_numbers(&tuple).map_err(|error| raise(self.py(), &error))?;
            numbers.map_or_else(|| one_by_one(name, tuple.len(), tuple.iter()), Ok).map(Some)
        } else if self.0.is_none() {
            Ok(None)
        } else {
            Err(self.not_listed(name))
        }
    }

    /// Creates the error for a value that is neither a list nor a tuple.
    #[cold]
    pub(crate) fn not_listed(self, name: &str) -> PyErr {
        only_support(name, "['list', 'tuple']", &self.0)
    }

    /// A list; a tuple is refused.
    pub(crate) fn list(self, name: &str) -> PyResult<Vec<i64>> {
        let list = self.0.cast::<PyList>().map_err(|_| only_support(name, "['list']", &self.0))?;
        listed(name, &list)
    }

    /// A list or tuple of unsigned integers, or `None` for none.
    pub(crate) fn unsigned(self, name: &str) -> PyResult<Vec<u64>> {
        if self.0.is_none() { Ok(Vec::new()) } else { convert::numbers(name, &self.0) }
    }

    /// `{source: destination}`.
    pub(crate) fn pairs(self, name: &str) -> PyResult<Vec<(i64, i64)>> {
        let (py, dict) = (self.py(), self.dict(name)?);
        if let Some(pairs) = raw::dict_numbers(&dict).map_err(|error| raise(py, &error))? {
            return Ok(pairs);
        }
        let mut pairs = convert::room(py, dict.len(), raise)?;
        // The loop runs no Python code, so the dict cannot change.
        for (src, dst) in dict.iter() {
            pairs.push((dict_int(name, "key", &src)?, dict_int(name, "value", &dst)?));
        }
        Ok(pairs)
    }

    /// `{source: [destination, …]}`.
    pub(crate) fn lists(self, name: &str) -> PyResult<Vec<(i64, i64)>> {
        let (py, dict) = (self.py(), self.dict(name)?);
        if let Some(pairs) = raw::dict_lists(&dict).map_err(|error| raise(py, &error))? {
            return Ok(pairs);
        }
        let mut pairs = convert::room(py, dict.len(), raise)?;
        // The loop runs no Python code, so the dict cannot change.
        for (src, list) in dict.iter() {
            let src = dict_int(name, "key", &src)?;
            let list = list
                .cast::<PyList>()
                .map_err(|_| only_support(format_args!("{name} dict value"), "['list']", &list))?;
            for (at, dst) in list.iter().enumerate() {
                if !is_int(&dst) {
                    return Err(inner_only_support("dict value", at, "['int']", &dst));
                }
                let dst = held_int(name, &dst)?;
                convert::push(py, &mut pairs, (src, dst), raise)?;
            }
        }
        Ok(pairs)
    }

    fn dict(self, name: &str) -> PyResult<Borrowed<'a, 'py, PyDict>> {
        convert::not_none(name, &self.0)?;
        self.0.cast().map_err(|_| only_support(name, "['dict']", &self.0))
    }
}

/// Reads a list of block indices.
fn listed(name: &str, list: &Bound<'_, PyList>) -> PyResult<Vec<i64>> {
    let numbers = raw::list_numbers(list).map_err(|error| raise(list.py(), &error))?;
    numbers.map_or_else(|| one_by_one(name, list.len(), list.iter()), Ok)
}

/// Reads the items one after the other. A wrong type anywhere is reported before a value out of range.
fn one_by_one<'py>(name: &str, count: usize, items: impl Iterator<Item = Any<'py>>) -> PyResult<Vec<i64>> {
    let mut indices: Option<Vec<i64>> = None;
    let mut wide = None;
    for (at, item) in items.enumerate() {
        let indices = match &mut indices {
            Some(indices) => indices,
            // Allocated at the first item, because an error needs an interpreter, which an item has.
            none => none.insert(convert::room(item.py(), count, raise)?),
        };
        if !is_int(&item) {
            return Err(inner_only_support(name, at, "['int']", &item));
        }
        match item.extract() {
            Ok(index) => indices.push(index),
            Err(_) => wide = wide.or(Some(item)),
        }
    }
    match wide {
        Some(item) => Err(invalid(item.py(), name, shown(&item), "between -2^63 and 2^63 - 1")),
        None => Ok(indices.unwrap_or_default()),
    }
}

/// Reads a key or value of the dict called `name`; `part` says which.
fn dict_int(name: &str, part: &str, value: &Any<'_>) -> PyResult<i64> {
    if is_int(value) {
        held_int(name, value)
    } else {
        Err(not_int(format_args!("{name} dict {part}"), value))
    }
}
