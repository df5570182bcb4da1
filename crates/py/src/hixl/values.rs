//! Integers, truth values and texts, whose only error is a `TypeError`.

use llm_datadist_core::Error;
use llm_datadist_core::bindings::fallible;
use llm_datadist_hixl::{MAX_TEXT, NO_TEXT};
use pyo3::exceptions::{PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBoolMethods, PyDict, PyString};

use crate::convert::{Any, shown};
use crate::native::{index, wrong_type};

/// Reads an integer of the type `T`.
pub(super) fn integer<'py, T>(name: &str, value: &Any<'py>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let number = index(name, "an int", value)?;
    number.extract().map_err(|_| {
        let width = 8 * size_of::<T>();
        PyTypeError::new_err(format!("{name}={} does not fit {width} bits", shown(&number)))
    })
}

/// Reads a truth value.
pub(super) fn flag(name: &str, value: &Any<'_>) -> PyResult<bool> {
    value.cast::<PyBool>().map(PyBoolMethods::is_true).map_err(|_| wrong_type(name, "a bool", value))
}

/// Copies a text of at most `most` characters. Returns `None` if it is longer, or not valid Unicode.
pub(super) fn bounded(text: &Bound<'_, PyString>, most: usize) -> Option<String> {
    if text.len().is_ok_and(|count| count <= most) { text.extract().ok() } else { None }
}

/// Reads a text. Returns [`NO_TEXT`] if it is not valid Unicode, or longer than any limit.
pub(super) fn text(name: &str, value: &Any<'_>) -> PyResult<String> {
    let text = value.cast::<PyString>().map_err(|_| wrong_type(name, "a str", value))?;
    Ok(bounded(text, MAX_TEXT).unwrap_or_else(|| NO_TEXT.to_owned()))
}

/// Reads the options of `initialize`.
pub(super) fn options(value: &Any<'_>) -> PyResult<Vec<(String, String)>> {
    let options = value.cast::<PyDict>().map_err(|_| wrong_type("options", "a dict", value))?;
    let mut given = Vec::new();
    for (key, value) in options.iter() {
        let option = (text("a key of options", &key)?, text("a value of options", &value)?);
        fallible::push("the options of an engine", &mut given, option).map_err(out_of_memory)?;
    }
    Ok(given)
}

/// Returns the exception for a failed allocation.
#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
pub(super) fn out_of_memory(error: Error) -> PyErr {
    PyMemoryError::new_err(error.to_string())
}
