//! Checks that Python calls: those of `llm_datadist.utils.utils`, and the rules that value classes share with `init`.
//!
//! Types and widths are checked by `convert`, meanings by `core::validate`.

use llm_datadist_core::Result;
use llm_datadist_core::bindings::validate;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyType};

use crate::convert::{self, Any, inner_only_support, int, only_support};
use crate::error::raise;
use crate::keys::KeyArg;
use crate::pull_push_arguments;

/// Reads an argument that is one class, or a list or tuple of classes.
fn classes<'py>(given: &Any<'py>) -> PyResult<Vec<Bound<'py, PyType>>> {
    match given.cast::<PyType>() {
        Ok(class) => Ok(vec![class.clone()]),
        Err(_) => given.extract(),
    }
}

/// Returns the names of `classes` as `['A', 'B']`.
fn names(classes: &[Bound<'_, PyType>]) -> PyResult<String> {
    let names: Vec<String> =
        classes.iter().map(|class| Ok(format!("'{}'", class.name()?))).collect::<PyResult<_>>()?;
    Ok(format!("[{}]", names.join(", ")))
}

/// Whether `value` is an instance of one of `classes`. A `bool` does not count as an `int`.
fn belongs(value: &Any<'_>, classes: &[Bound<'_, PyType>]) -> PyResult<bool> {
    let int_class = value.py().get_type::<PyInt>();
    let is_bool = value.is_exact_instance_of::<PyBool>();
    for class in classes {
        if !(is_bool && class.is(&int_class)) && value.is_instance(class)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns `arg_value` unchanged if it belongs to `classes`, and its elements to `inner_class` if that is given.
#[pyfunction]
#[pyo3(signature = (arg_name, arg_value, classes, inner_class=None, extra_fmt="", allow_none=true))]
pub(crate) fn check_isinstance<'py>(
    arg_name: &str,
    arg_value: Any<'py>,
    classes: &Any<'py>,
    inner_class: Option<&Any<'py>>,
    extra_fmt: &str,
    allow_none: bool,
) -> PyResult<Any<'py>> {
    if arg_value.is_none() && allow_none {
        return Ok(arg_value);
    }
    let allowed = self::classes(classes)?;
    if !belongs(&arg_value, &allowed)? {
        return Err(only_support(format_args!("{extra_fmt}{arg_name}"), names(&allowed)?, &arg_value));
    }
    if let Some(inner_class) = inner_class {
        check_inner(arg_name, &arg_value, inner_class)?;
    }
    Ok(arg_value)
}

/// Checks that every element of an iterable belongs to `inner_class`.
#[pyfunction]
pub(crate) fn check_inner(arg_name: &str, arg_value: &Any<'_>, inner_class: &Any<'_>) -> PyResult<()> {
    let allowed = classes(inner_class)?;
    for (at, item) in arg_value.try_iter()?.enumerate() {
        let item = item?;
        if !belongs(&item, &allowed)? {
            return Err(inner_only_support(arg_name, at, names(&allowed)?, &item));
        }
    }
    Ok(())
}

/// Checks the classes of the keys and values of a dict, and of the elements of its values if `v_inner_class` is given.
#[pyfunction]
#[pyo3(signature = (arg_name, arg_value, k_class, v_class, v_inner_class=None))]
pub(crate) fn check_dict(
    arg_name: &str,
    arg_value: &Any<'_>,
    k_class: &Any<'_>,
    v_class: &Any<'_>,
    v_inner_class: Option<&Any<'_>>,
) -> PyResult<()> {
    convert::not_none(arg_name, arg_value)?;
    let dict = arg_value.cast::<PyDict>().map_err(|_| only_support(arg_name, "['dict']", arg_value))?;
    let (keys, values) = (classes(k_class)?, classes(v_class)?);
    // A copy of the items, because the checks may run Python code that changes the dict.
    for item in dict.items() {
        let (key, value): (Any<'_>, Any<'_>) = item.extract()?;
        if !belongs(&key, &keys)? {
            return Err(only_support(format_args!("{arg_name} dict key"), names(&keys)?, &key));
        }
        if !belongs(&value, &values)? {
            return Err(only_support(format_args!("{arg_name} dict value"), names(&values)?, &value));
        }
        if let Some(inner) = v_inner_class {
            check_inner("dict value", &value, inner)?;
        }
    }
    Ok(())
}

macro_rules! scalar_checks {
    ($($(#[$doc:meta])* $name:ident: $int:ty;)*) => {
        $($(#[$doc])*
        #[pyfunction]
        pub(crate) fn $name(arg_name: &str, arg_value: &Any<'_>) -> PyResult<()> {
            int::<$int>(arg_name, arg_value).map(drop)
        })*
    };
}

scalar_checks! {
    /// An integer from 0 to 2^8 - 1.
    check_uint8: u8;
    /// An integer from 0 to 2^16 - 1.
    check_uint16: u16;
    /// An integer from 0 to 2^32 - 1.
    check_uint32: u32;
    /// An integer from 0 to 2^64 - 1.
    check_uint64: u64;
    /// An integer from -2^31 to 2^31 - 1.
    check_int32: i32;
    /// An integer from -2^63 to 2^63 - 1.
    check_int64: i64;
}

macro_rules! list_checks {
    ($($(#[$doc:meta])* $name:ident: $int:ty;)*) => {
        $($(#[$doc])*
        #[pyfunction]
        pub(crate) fn $name(arg_name: &str, arg_values: &Any<'_>) -> PyResult<()> {
            for value in arg_values.try_iter()? {
                int::<$int>(arg_name, &value?)?;
            }
            Ok(())
        })*
    };
}

list_checks! {
    /// An iterable of integers from -2^31 to 2^31 - 1.
    check_list_int32: i32;
    /// An iterable of integers from -2^63 to 2^63 - 1.
    check_list_int64: i64;
    /// An iterable of integers from 0 to 2^64 - 1.
    check_list_uint64: u64;
}

/// Returns `default` for `None`, and otherwise the value, an integer from 0 to 2^63 - 1.
#[pyfunction]
#[pyo3(signature = (arg_name, arg_value, default=-1), text_signature = "(arg_name, arg_value, default=-1)")]
pub(crate) fn check_positive_or_set_default(
    arg_name: &str,
    arg_value: &Any<'_>,
    default: i64,
) -> PyResult<i64> {
    if arg_value.is_none() {
        return Ok(default);
    }
    let value: i64 = int(arg_name, arg_value)?;
    if value < 0 {
        return Err(PyValueError::new_err(format!("{arg_name} = {value} is negative")));
    }
    Ok(value)
}

/// Returns the value, or raises the error.
pub(crate) fn checked<T>(py: Python<'_>, result: Result<T>) -> PyResult<T> {
    result.map_err(|error| raise(py, &error))
}

/// Checks the dimension indices of a `CacheDesc` of `rank` dimensions.
#[pyfunction]
pub(crate) fn check_dimensions(
    rank: usize,
    batch_dim_index: &Any<'_>,
    seq_len_dim_index: i64,
) -> PyResult<()> {
    let index = convert::any_int("batch_dim_index", batch_dim_index)?;
    checked(batch_dim_index.py(), validate::dimensions(rank, index, seq_len_dim_index))
}

/// Returns the bytes of one tensor.
#[pyfunction]
pub(crate) fn tensor_bytes(shape: &Any<'_>, data_type: &Any<'_>) -> PyResult<u64> {
    let bytes =
        llm_datadist_core::bindings::tensor_bytes(&convert::shape(shape)?, convert::data_type(data_type)?);
    checked(shape.py(), bytes)
}

/// Exactly one of `req_id` and `prefix_id` of a `CacheKey`.
#[pyfunction]
pub(crate) fn check_cache_key(cache_key: KeyArg<'_, '_>) -> PyResult<()> {
    cache_key.check_ids()
}

/// A `range` of step 1 over at least one layer, none below 0; `None` where that is allowed.
#[pyfunction]
#[pyo3(signature = (name, layer_range, allow_none=true))]
pub(crate) fn check_layer_range(name: &str, layer_range: &Any<'_>, allow_none: bool) -> PyResult<()> {
    pull_push_arguments::check_layer_range(name, layer_range, allow_none)
}
