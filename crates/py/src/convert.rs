//! Conversion of Python values to core structs. A wrong type is a `TypeError`, a wrong width a `ValueError`.
//!
//! `core::validate` checks meanings. A `bool` is never an integer. `None` in place of an object passes the type check and
//! fails where it is read, with `AttributeError` (contract §0.3).

use std::collections::BTreeMap;
use std::fmt::Display;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::{CacheDesc, DataType, Placement};
use pyo3::exceptions::{PyAttributeError, PyMemoryError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyInt, PyList, PyString, PyTuple, PyType};

use crate::error::{Raise, invalid, raise};
use crate::python_types::PythonTypes;

/// Any Python object.
pub(crate) type Any<'py> = Bound<'py, PyAny>;

/// Refuses an argument that is `None`.
pub(crate) fn not_none(name: &str, value: &Any<'_>) -> PyResult<()> {
    if value.is_none() { Err(must_not_be_none(name)) } else { Ok(()) }
}

/// Creates the `AttributeError` for an argument that is `None`.
#[cold]
pub(crate) fn must_not_be_none(name: &str) -> PyErr {
    PyAttributeError::new_err(format!("{name} must not be None"))
}

/// Creates the `TypeError` for a value of the wrong type. Clients match the words `only support`.
#[cold]
pub(crate) fn only_support(name: impl Display, allowed: impl Display, value: &Any<'_>) -> PyErr {
    PyTypeError::new_err(format!(
        "{name} only support {allowed}, but the actual type is {}",
        shown(&value.get_type())
    ))
}

/// Returns a text of `value` for messages. A long text is cut; a value whose `str` fails is shown by its class.
#[cold]
pub(crate) fn shown(value: &Any<'_>) -> String {
    const MAX_SHOWN: usize = 120;
    let Ok(text) = value.str() else {
        let class = value.get_type().name();
        let class = class.as_ref().map_or("object".into(), |name| name.to_string_lossy());
        return format!("<{class} without a text>");
    };
    let text = text.to_string_lossy();
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}

/// Creates the `TypeError` for the element `index` of the wrong type. Clients match the words `inner type only support`.
#[cold]
pub(crate) fn inner_only_support(name: &str, index: usize, allowed: impl Display, value: &Any<'_>) -> PyErr {
    PyTypeError::new_err(format!(
        "{name} inner type only support {allowed}, but the actual type of element {index} is {}{}",
        shown(&value.get_type()),
        as_plain_int(value)
    ))
}

/// Creates the `TypeError` for a value that is not an `int`.
#[cold]
pub(crate) fn not_int(name: impl Display, value: &Any<'_>) -> PyErr {
    PyTypeError::new_err(format!(
        "{name} only support ['int'], but the actual type is {}{}",
        shown(&value.get_type()),
        as_plain_int(value)
    ))
}

/// Returns what to do with a value that stands for an integer without being one, such as an integer of numpy.
#[cold]
fn as_plain_int(value: &Any<'_>) -> &'static str {
    let stands_for_int = !value.is_exact_instance_of::<PyBool>()
        && !value.is_instance_of::<PyInt>()
        && value.call_method0(intern!(value.py(), "__index__")).is_ok_and(|index| is_int(&index));
    if stands_for_int { "; convert it with int(), or a whole array with tolist()" } else { "" }
}

/// Whether `value` is an integer and not a `bool`.
pub(crate) fn is_int(value: &Any<'_>) -> bool {
    value.is_instance_of::<PyInt>() && !value.is_exact_instance_of::<PyBool>()
}

/// An integer type of the public API.
pub(crate) trait Width: for<'a, 'py> FromPyObject<'a, 'py> + Display {
    /// Its name in messages.
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

/// Reads an integer of type `T`. Anything else is a `TypeError`, and a value out of range a `ValueError`.
pub(crate) fn int<T: Width>(name: &str, value: &Any<'_>) -> PyResult<T> {
    if !is_int(value) {
        return Err(not_int(name, value));
    }
    value.extract().map_err(|_| {
        let (low, high) = (T::MIN, T::MAX);
        let value = shown(value);
        PyValueError::new_err(format!("{name} = {value} is outside {} ({low} to {high})", T::NAME))
    })
}

/// Reads an integer of type `T`, or `None`.
pub(crate) fn optional_int<T: Width>(name: &str, value: &Any<'_>) -> PyResult<Option<T>> {
    if value.is_none() { Ok(None) } else { int(name, value).map(Some) }
}

/// Reads an integer without a documented range. Anything else is a `TypeError`; a value that does not fit 64 bits is an
/// argument error.
pub(crate) fn any_int(name: &str, value: &Any<'_>) -> PyResult<i64> {
    if is_int(value) { held_int(name, value) } else { Err(not_int(name, value)) }
}

/// Reads `value`, which is an integer, as [`any_int`] does.
pub(crate) fn held_int(name: &str, value: &Any<'_>) -> PyResult<i64> {
    value.extract().map_err(|_| invalid(value.py(), name, shown(value), "between -2^63 and 2^63 - 1"))
}

/// Names the lists of a call in out-of-memory errors.
const LISTS: &str = "the lists of a call";

/// Returns an empty list with room for `count` items.
pub(crate) fn room<T>(py: Python<'_>, count: usize, raise: Raise) -> PyResult<Vec<T>> {
    fallible::with_capacity(LISTS, count).map_err(|error| raise(py, &error))
}

/// Adds one item to a list that may be full, because Python code may have made its source longer meanwhile.
pub(crate) fn push<T>(py: Python<'_>, list: &mut Vec<T>, item: T, raise: Raise) -> PyResult<()> {
    fallible::push(LISTS, list, item).map_err(|error| raise(py, &error))
}

/// Returns `error`, or the engine's out-of-memory error if `error` is a `MemoryError`.
#[cold]
pub(crate) fn short(py: Python<'_>, error: PyErr, bytes: usize, raise: Raise) -> PyErr {
    if error.is_instance_of::<PyMemoryError>(py) {
        raise(py, &fallible::out_of_memory(LISTS, bytes))
    } else {
        error
    }
}

/// Whether `value` is an instance of a class of the Python package; exact instances answer without a lookup.
pub(crate) fn instance(value: &Any<'_>, class: &Py<PyType>) -> PyResult<bool> {
    let class = class.bind(value.py());
    Ok(value.get_type().is(class) || value.is_instance(class)?)
}

/// `value` must be `None` or an instance of the `class` of the Python package called `class_name`.
pub(crate) fn typed(name: &str, value: &Any<'_>, class: &Py<PyType>, class_name: &str) -> PyResult<()> {
    if value.is_none() { Ok(()) } else { required(name, value, class, class_name) }
}

/// `value` must be an instance of the `class` of the Python package called `class_name`.
pub(crate) fn required(name: &str, value: &Any<'_>, class: &Py<PyType>, class_name: &str) -> PyResult<()> {
    if instance(value, class)? {
        Ok(())
    } else {
        Err(only_support(name, format_args!("['{class_name}']"), value))
    }
}

/// Reads a `CacheDesc`. It is read at each call, because `update_dim` may change its shape.
pub(crate) fn desc(value: &Any<'_>) -> PyResult<CacheDesc> {
    let py = value.py();
    Ok(CacheDesc {
        num_tensors: num_tensors(value)?,
        shape: shape(&value.getattr(intern!(py, "_shape"))?)?,
        data_type: data_type(&value.getattr(intern!(py, "_data_type"))?)?,
        placement: placement(&value.getattr(intern!(py, "_placement"))?)?,
        row_stride: None,
        kv_layout: None,
    })
}

/// Reads the number of tensors of a `CacheDesc`.
pub(crate) fn num_tensors(desc: &Any<'_>) -> PyResult<u32> {
    int("num_tensors", &desc.getattr(intern!(desc.py(), "_num_tensors"))?)
}

/// Reads a list or tuple of dimensions.
pub(crate) fn shape(value: &Any<'_>) -> PyResult<Vec<i64>> {
    if let Ok(list) = value.cast::<PyList>() {
        list.iter().map(|dim| int("shape", &dim)).collect()
    } else if let Ok(tuple) = value.cast::<PyTuple>() {
        tuple.iter_borrowed().map(|dim| int("shape", &dim)).collect()
    } else {
        Err(only_support("shape", "['list', 'tuple']", value))
    }
}

/// Reads a member of `DataType`. A descriptor may be created without one, but not used.
pub(crate) fn data_type(value: &Any<'_>) -> PyResult<DataType> {
    match PythonTypes::get(value.py())?.data_type(value) {
        Some(data_type) => Ok(data_type),
        None if value.is_none() => Err(invalid(value.py(), "data_type", "None", "a member of DataType")),
        None => Err(only_support("data_type", "['DataType']", value)),
    }
}

/// Reads a member of `Placement`.
pub(crate) fn placement(value: &Any<'_>) -> PyResult<Placement> {
    PythonTypes::get(value.py())?
        .placement(value)
        .ok_or_else(|| only_support("placement", "['Placement']", value))
}

/// Reads the items of a list or tuple.
pub(crate) fn listed<'py>(name: &str, value: &Any<'py>, raise: Raise) -> PyResult<Vec<Any<'py>>> {
    if let Ok(list) = value.cast::<PyList>() {
        gathered(value.py(), list.len(), list.iter().map(Ok), raise)
    } else if let Ok(tuple) = value.cast::<PyTuple>() {
        gathered(value.py(), tuple.len(), tuple.iter().map(Ok), raise)
    } else {
        Err(only_support(name, "['list', 'tuple']", value))
    }
}

/// Reads a list or tuple of unsigned integers. A wrong type anywhere is reported before a value out of range.
pub(crate) fn numbers(name: &str, value: &Any<'_>) -> PyResult<Vec<u64>> {
    let items = listed(name, value, raise)?;
    match items.iter().enumerate().find(|(_, item)| !is_int(item)) {
        Some((at, other)) => Err(inner_only_support(name, at, "['int']", other)),
        None => gathered(value.py(), items.len(), items.iter().map(|item| int(name, item)), raise),
    }
}

/// Collects `items`, about `count` of them.
pub(crate) fn gathered<T>(
    py: Python<'_>,
    count: usize,
    items: impl Iterator<Item = PyResult<T>>,
    raise: Raise,
) -> PyResult<Vec<T>> {
    let mut list = room(py, count, raise)?;
    for item in items {
        push(py, &mut list, item?, raise)?;
    }
    Ok(list)
}

/// Returns a copy of `bytes` as Python has it. There may be no memory for it.
pub(crate) fn bytes<'py>(py: Python<'py>, bytes: &[u8], raise: Raise) -> PyResult<Bound<'py, PyBytes>> {
    let copied = PyBytes::new_with(py, bytes.len(), |copy| {
        copy.copy_from_slice(bytes);
        Ok(())
    });
    copied.map_err(|error| short(py, error, bytes.len(), raise))
}

/// `value` must be a `str`.
pub(crate) fn str_object<'a, 'py>(name: &str, value: &'a Any<'py>) -> PyResult<&'a Bound<'py, PyString>> {
    value.cast::<PyString>().map_err(|_| only_support(name, "['str']", value))
}

/// Reads a `str`. The error for one that is not UTF-8 does not show it, because it may be a secret.
pub(crate) fn text(name: &str, value: &Any<'_>) -> PyResult<String> {
    let text = str_object(name, value)?;
    text.extract().map_err(|_| PyValueError::new_err(format!("{name} is not valid UTF-8")))
}

/// Reads the options: texts by key.
pub(crate) fn texts(options: &Bound<'_, PyDict>) -> PyResult<BTreeMap<String, String>> {
    let entry = |(key, value): (Any<'_>, Any<'_>)| {
        let key = text("options dict key", &key)?;
        let value = text(&key, &value)?;
        Ok((key, value))
    };
    options.iter().map(entry).collect() // nothing in here runs Python code, which could change the dict
}
