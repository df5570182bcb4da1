//! Conversion of Python values to core structs. A wrong type is a `TypeError`, a wrong width a `ValueError`.
//!
//! `core::validate` checks meanings. A `bool` is never an integer. `None` in place of an object passes the type check and
//! fails at the first attribute with `AttributeError` (contract §0.3).

use std::fmt::Display;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::{CacheDesc, CacheId, CacheKey, DataType, Name, Placement};
use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyString, PyTuple, PyType};

use crate::error::{invalid, raise};
use crate::front::Front;

type Any<'py> = Bound<'py, PyAny>;

/// The `TypeError` for a value of the wrong type; clients match the words `only support`.
#[cold]
pub(crate) fn only_support(name: impl Display, allowed: impl Display, value: &Any<'_>) -> PyErr {
    PyTypeError::new_err(format!(
        "{name} only support {allowed}, but the actual type is {}",
        shown(&value.get_type())
    ))
}

/// Enough of `value` for a message, whatever its own text is: a long one is cut, and one that cannot be made is named.
#[cold]
pub(crate) fn shown(value: &Any<'_>) -> String {
    const LONGEST: usize = 120;
    let Ok(text) = value.str() else {
        let class = value.get_type().name();
        let class = class.as_ref().map_or("object".into(), |name| name.to_string_lossy());
        return format!("<{class} without a text>");
    };
    let text = text.to_string_lossy();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}

/// The `TypeError` for an element of the wrong type; clients match the words `inner type only support`.
#[cold]
pub(crate) fn inner_only_support(name: &str, allowed: impl Display, value: &Any<'_>) -> PyErr {
    only_support(format_args!("{name} inner type"), allowed, value)
}

/// Whether `value` is an integer and not a `bool`.
pub(crate) fn is_int(value: &Any<'_>) -> bool {
    value.is_instance_of::<PyInt>() && !value.is_exact_instance_of::<PyBool>()
}

/// A machine width of the public API.
pub(crate) trait Width: for<'a, 'py> FromPyObject<'a, 'py> + Display {
    /// Its public name.
    const NAME: &'static str;
    /// Its least value.
    const MIN: Self;
    /// Its greatest value.
    const MAX: Self;
}

macro_rules! widths {
    ($($int:ty, $name:literal;)*) => {
        $(impl Width for $int {
            const NAME: &'static str = $name;
            const MIN: Self = <$int>::MIN;
            const MAX: Self = <$int>::MAX;
        })*
    };
}

widths! { u8, "uint8"; u16, "uint16"; u32, "uint32"; u64, "uint64"; i32, "int32"; i64, "int64"; }

/// An integer of a stated width: `TypeError` if it is none, `ValueError` beyond the width.
pub(crate) fn int<T: Width>(name: &str, value: &Any<'_>) -> PyResult<T> {
    if !is_int(value) {
        return Err(only_support(name, "['int']", value));
    }
    value.extract().map_err(|_| {
        let (low, high) = (T::MIN, T::MAX);
        let value = shown(value);
        PyValueError::new_err(format!("{name} = {value} is outside {} ({low} to {high})", T::NAME))
    })
}

/// The same, or `None`.
pub(crate) fn optional_int<T: Width>(name: &str, value: &Any<'_>) -> PyResult<Option<T>> {
    if value.is_none() { Ok(None) } else { int(name, value).map(Some) }
}

/// An integer without a stated width: `TypeError` if it is none, an argument error beyond what the engine can hold.
pub(crate) fn any_int(name: &str, value: &Any<'_>) -> PyResult<i64> {
    if is_int(value) { held_int(name, value) } else { Err(only_support(name, "['int']", value)) }
}

/// The same, of what is an integer.
pub(crate) fn held_int(name: &str, value: &Any<'_>) -> PyResult<i64> {
    value.extract().map_err(|_| invalid(value.py(), name, shown(value), "an integer of 64 bits"))
}

/// A `list` of addresses; a tuple is refused (contract §4.3, §7.6).
pub(crate) fn addresses(name: &str, value: &Any<'_>) -> PyResult<Vec<u64>> {
    let list = value.cast::<PyList>().map_err(|_| only_support(name, "['list']", value))?;
    if let Some(other) = list.iter().find(|item| !is_int(item)) {
        return Err(inner_only_support(name, "['int']", &other));
    }
    gathered(value.py(), list.len(), list.iter().map(|item| int(name, &item)))
}

/// What a list of a call is for, should there be no memory for it.
const LISTS: &str = "the lists of a call";

/// An empty list with room for `count`.
pub(crate) fn room<T>(py: Python<'_>, count: usize) -> PyResult<Vec<T>> {
    fallible::with_capacity(LISTS, count).map_err(|error| raise(py, &error))
}

/// Adds one item to a list: the code of Python that gave it may have made it longer than it was.
pub(crate) fn push<T>(py: Python<'_>, list: &mut Vec<T>, item: T) -> PyResult<()> {
    fallible::push(LISTS, list, item).map_err(|error| raise(py, &error))
}

/// `error`, which is the engine's own if Python had no memory for `bytes`.
#[cold]
pub(crate) fn short(py: Python<'_>, error: PyErr, bytes: usize) -> PyErr {
    if error.is_instance_of::<PyMemoryError>(py) {
        raise(py, &fallible::out_of_memory(LISTS, bytes))
    } else {
        error
    }
}

/// Whether `value` is an instance of a class of the front; exact instances answer without a lookup.
pub(crate) fn instance(value: &Any<'_>, class: &Py<PyType>) -> PyResult<bool> {
    let class = class.bind(value.py());
    Ok(value.get_type().is(class) || value.is_instance(class)?)
}

/// `value` must be `None` or an instance of the `class` of the front called `class_name`.
pub(crate) fn typed(name: &str, value: &Any<'_>, class: &Py<PyType>, class_name: &str) -> PyResult<()> {
    if value.is_none() || instance(value, class)? {
        Ok(())
    } else {
        Err(only_support(name, format_args!("['{class_name}']"), value))
    }
}

/// What a `CacheDesc` says at this moment (`update_dim` may have changed its shape).
pub(crate) fn desc(value: &Any<'_>) -> PyResult<CacheDesc> {
    let py = value.py();
    Ok(CacheDesc {
        num_tensors: int("num_tensors", &value.getattr(intern!(py, "_num_tensors"))?)?,
        shape: shape(&value.getattr(intern!(py, "_shape"))?)?,
        data_type: data_type(&value.getattr(intern!(py, "_data_type"))?)?,
        placement: placement(&value.getattr(intern!(py, "_placement"))?)?,
    })
}

/// A list or tuple of dimensions.
pub(crate) fn shape(value: &Any<'_>) -> PyResult<Vec<i64>> {
    if let Ok(list) = value.cast::<PyList>() {
        list.iter().map(|dim| int("shape", &dim)).collect()
    } else if let Ok(tuple) = value.cast::<PyTuple>() {
        tuple.iter_borrowed().map(|dim| int("shape", &dim)).collect()
    } else {
        Err(only_support("shape", "['list', 'tuple']", value))
    }
}

/// A member of `DataType`. A descriptor may be built without one; it is missed where a size is needed.
pub(crate) fn data_type(value: &Any<'_>) -> PyResult<DataType> {
    match Front::get(value.py())?.data_type(value) {
        Some(data_type) => Ok(data_type),
        None if value.is_none() => Err(invalid(value.py(), "data_type", "None", "a member of DataType")),
        None => Err(only_support("data_type", "['DataType']", value)),
    }
}

/// A member of `Placement`.
pub(crate) fn placement(value: &Any<'_>) -> PyResult<Placement> {
    Front::get(value.py())?.placement(value).ok_or_else(|| only_support("placement", "['Placement']", value))
}

/// `cache_key` must be a `CacheKey`.
pub(crate) fn cache_key(value: &Any<'_>) -> PyResult<Option<CacheKey>> {
    typed("cache_key", value, &Front::get(value.py())?.cache_key, "CacheKey")?;
    key(value)
}

/// `cache_keys` must be a list or tuple of `CacheKey`; a placeholder becomes `None`.
pub(crate) fn cache_keys(value: &Any<'_>) -> PyResult<Vec<Option<CacheKey>>> {
    let class = &Front::get(value.py())?.cache_key;
    let one = |item: Any<'_>| {
        if instance(&item, class)? {
            key(&item)
        } else {
            Err(inner_only_support("cache_keys", "['CacheKey']", &item))
        }
    };
    if let Ok(tuple) = value.cast::<PyTuple>() {
        gathered(value.py(), tuple.len(), tuple.iter().map(one))
    } else if let Ok(list) = value.cast::<PyList>() {
        gathered(value.py(), list.len(), list.iter().map(one))
    } else {
        Err(only_support("cache_keys", "['list', 'tuple']", value))
    }
}

/// The list of what `items` give, about `count` of them.
pub(crate) fn gathered<T>(
    py: Python<'_>,
    count: usize,
    items: impl Iterator<Item = PyResult<T>>,
) -> PyResult<Vec<T>> {
    let mut list = room(py, count)?;
    for item in items {
        push(py, &mut list, item?)?;
    }
    Ok(list)
}

/// What a `CacheKey` names; `None` for a placeholder.
pub(crate) fn key(value: &Any<'_>) -> PyResult<Option<CacheKey>> {
    let py = value.py();
    Ok(CacheKey::new(
        int("req_id", &value.getattr(intern!(py, "_req_id"))?)?,
        int("prefix_id", &value.getattr(intern!(py, "_prefix_id"))?)?,
        int("model_id", &value.getattr(intern!(py, "_model_id"))?)?,
    ))
}

/// `blocks_cache_key` must be a `BlocksCacheKey` or `None`.
pub(crate) fn blocks_cache_key(value: &Any<'_>) -> PyResult<Option<CacheKey>> {
    typed("blocks_cache_key", value, &Front::get(value.py())?.blocks_cache_key, "BlocksCacheKey")?;
    if value.is_none() { Ok(None) } else { blocks_key(value).map(Some) }
}

/// What a `BlocksCacheKey` names.
pub(crate) fn blocks_key(value: &Any<'_>) -> PyResult<CacheKey> {
    let model = int("model_id", &value.getattr(intern!(value.py(), "_model_id"))?)?;
    Ok(CacheKey::Blocks { model })
}

/// What a `CacheKeyByIdAndIndex` names.
pub(crate) fn row_name(value: &Any<'_>) -> PyResult<Name> {
    let py = value.py();
    let cache = CacheId(int("cache_id", &value.getattr(intern!(py, "_cache_id"))?)?);
    Ok(Name::Row { cache, row: int("batch_index", &value.getattr(intern!(py, "_batch_index"))?)? })
}

/// `remote_accessible` must be a `bool` or `None`.
pub(crate) fn remote_accessible(value: &Any<'_>) -> PyResult<Option<bool>> {
    if value.is_none() {
        return Ok(None);
    }
    let flag = value.cast::<PyBool>().map_err(|_| only_support("remote_accessible", "['bool']", value))?;
    Ok(Some(flag.is_true()))
}

/// A text of Python's as one of Rust's. One that is not UTF-8 is refused without being shown: it may be a secret.
pub(crate) fn text(name: &str, value: &Bound<'_, PyString>) -> PyResult<String> {
    value.extract().map_err(|_| PyValueError::new_err(format!("{name} is no UTF-8 text")))
}
