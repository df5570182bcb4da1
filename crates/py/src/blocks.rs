//! Conversion of lists, dicts and arrays of block indices to numbers of the core.
//!
//! Plain integers are read without counting references (`raw`), and buffers and tensors in one pass (`index_arrays`).
//! Anything else is checked item by item, so that the error names the invalid item. `core::validate` decides which indices
//! are allowed.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::convert::{self, Any, held_int, inner_only_support, is_int, not_int, only_support, shown};
use crate::error::{self, invalid, raise};
use crate::numpy::import_numpy;
use crate::{engine, index_arrays, raw};

arguments! {
    /// Block indices: a list, tuple or array, or a dict or array of pairs.
    BlocksArg;
}

impl BlocksArg<'_, '_> {
    /// A list, tuple or array. `None` passes here; the call fails where it needs the length.
    pub(crate) fn listed_or_none(self, name: &str) -> PyResult<Option<Vec<i64>>> {
        if let Ok(list) = self.0.cast::<PyList>() {
            listed(name, &list).map(Some)
        } else if let Ok(tuple) = self.0.cast::<PyTuple>() {
            let words = raw::tuple_words(&tuple).map_err(|error| raise(self.py(), &error))?;
            words.map_or_else(|| one_by_one(name, tuple.len(), tuple.iter()), Ok).map(Some)
        } else if self.0.is_none() {
            Ok(None)
        } else {
            index_arrays::flat(name, &self.0)?.map(Some).ok_or_else(|| self.not_listed(name))
        }
    }

    /// Creates the error for a value that is neither a list nor a tuple nor an array.
    #[cold]
    pub(crate) fn not_listed(self, name: &str) -> PyErr {
        only_support(name, "['list', 'tuple', 'array of integers']", &self.0)
    }

    /// A list or array; a tuple is refused.
    pub(crate) fn list(self, name: &str) -> PyResult<Vec<i64>> {
        match self.0.cast::<PyList>() {
            Ok(list) => listed(name, &list),
            Err(_) if self.0.is_instance_of::<PyTuple>() => Err(only_support(name, "['list']", &self.0)),
            Err(_) => index_arrays::flat(name, &self.0)?
                .ok_or_else(|| only_support(name, "['list', 'array of integers']", &self.0)),
        }
    }

    /// A list, tuple or array of unsigned integers, or `None` for none. The error for a negative number in an array is a
    /// `ValueError` as well, because that is the error for one in a list (contract §8.1).
    pub(crate) fn unsigned(self, name: &str) -> PyResult<Vec<u64>> {
        if self.0.is_none() {
            return Ok(Vec::new());
        }
        if self.0.is_instance_of::<PyList>() || self.0.is_instance_of::<PyTuple>() {
            return convert::numbers(name, &self.0);
        }
        let py = self.py();
        let words = index_arrays::flat(name, &self.0).map_err(|error| error::mismatch(py, error))?;
        let words = words.ok_or_else(|| self.not_listed(name))?;
        let mut numbers = convert::room(py, words.len(), raise)?;
        numbers.extend(words.into_iter().map(i64::cast_unsigned));
        Ok(numbers)
    }

    /// `{source: destination}`, or an integer array of such rows.
    pub(crate) fn pairs(self, name: &str) -> PyResult<Vec<(i64, i64)>> {
        let (py, Ok(dict)) = (self.py(), self.0.cast::<PyDict>()) else { return rows(name, &self.0) };
        if let Some(pairs) = raw::dict_words(&dict).map_err(|error| raise(py, &error))? {
            return Ok(pairs);
        }
        let mut pairs = convert::room(py, dict.len(), raise)?;
        // The loop runs no Python code, so the dict cannot change.
        for (src, dst) in dict.iter() {
            pairs.push((dict_int(name, "key", &src)?, dict_int(name, "value", &dst)?));
        }
        Ok(pairs)
    }

    /// `{source: [destination, …]}`, or an integer array of `(source, destination)` rows.
    pub(crate) fn lists(self, name: &str) -> PyResult<Vec<(i64, i64)>> {
        let (py, Ok(dict)) = (self.py(), self.0.cast::<PyDict>()) else { return rows(name, &self.0) };
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
}

/// Reads a list of block indices.
fn listed(name: &str, list: &Bound<'_, PyList>) -> PyResult<Vec<i64>> {
    let words = raw::list_words(list).map_err(|error| raise(list.py(), &error))?;
    words.map_or_else(|| one_by_one(name, list.len(), list.iter()), Ok)
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

/// numpy's `asarray`. It is looked up at the first array, because calls without arrays do not need numpy.
static AS_ARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Reads the rows of an `(n, 2)` integer array of numpy, of an object that numpy can read as one, or of another buffer or
/// tensor.
fn rows(name: &str, given: &Any<'_>) -> PyResult<Vec<(i64, i64)>> {
    let py = given.py();
    convert::not_none(name, given)?;
    let wrong = || only_support(name, "['dict', 'an integer array of shape (n, 2)']", given);
    if !given.hasattr(intern!(py, "__array__"))? && !given.hasattr(intern!(py, "__array_interface__"))? {
        return index_arrays::pairs(name, given)?.ok_or_else(wrong);
    }
    let as_array = AS_ARRAY.get_or_try_init(py, || -> PyResult<_> {
        let numpy = import_numpy(py, &format!("an array as {name}"))?;
        Ok(numpy.getattr(intern!(py, "asarray"))?.unbind())
    })?;
    let array = as_array.bind(py).call1((given,));
    let array = array.map_err(|error| if index_arrays::on_other_device(given) { wrong() } else { error })?;
    let kind: char = array.getattr(intern!(py, "dtype"))?.getattr(intern!(py, "kind"))?.extract()?;
    let shape: Vec<usize> = array.getattr(intern!(py, "shape"))?.extract()?;
    let (true, [count, 2]) = (matches!(kind, 'i' | 'u'), &shape[..]) else { return Err(wrong()) };
    let as_words = (intern!(py, "<i8"), "C", "unsafe", false, false); // the last: no copy of what is so already
    let words = array.call_method1(intern!(py, "astype"), as_words);
    let bytes = words.and_then(|words| words.call_method0(intern!(py, "tobytes")));
    // A copy for which numpy has no memory is reported like any other list of the call.
    let bytes = bytes.map_err(|error| convert::short(py, error, count.saturating_mul(16), raise))?;
    let bytes = bytes.cast::<PyBytes>()?.as_bytes();
    if Some(bytes.len()) != count.checked_mul(16) {
        return Err(wrong());
    }
    let mut pairs = convert::room(py, *count, raise)?;
    engine::allow_threads(py, || words_of(bytes, kind == 'u', &mut pairs))
        .map_err(|(row, pair)| raise(py, &index_arrays::wide_pair(name, row, pair)))?;
    Ok(pairs)
}

/// Appends pairs of little-endian words to `pairs`, which has room for them. Returns `Err` with the first row that has
/// an unsigned number above `i64::MAX`.
fn words_of(bytes: &[u8], unsigned: bool, pairs: &mut Vec<(i64, i64)>) -> Result<(), (usize, [i64; 2])> {
    let (rows, _) = bytes.as_chunks::<8>().0.as_chunks::<2>();
    let rows = rows.iter().map(|row| row.map(i64::from_le_bytes));
    if unsigned && let Some(wide) = rows.clone().enumerate().find(|(_, [src, dst])| (src | dst) < 0) {
        return Err(wide);
    }
    pairs.extend(rows.map(|[src, dst]| (src, dst)));
    Ok(())
}
