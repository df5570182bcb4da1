//! Integers and texts, whose only error is a `TypeError`.

use llm_datadist_hixl::NO_TEXT;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

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

/// Reads a text.
pub(super) fn text(name: &str, value: &Any<'_>) -> PyResult<String> {
    let text = value.cast::<PyString>().map_err(|_| wrong_type(name, "a str", value))?;
    Ok(text.extract().unwrap_or_else(|_| NO_TEXT.to_owned()))
}

/// Reads the options of `initialize`.
pub(super) fn options(value: &Any<'_>) -> PyResult<Vec<(String, String)>> {
    let options = value.cast::<PyDict>().map_err(|_| wrong_type("options", "a dict", value))?;
    options
        .iter()
        .map(|(key, value)| Ok((text("a key of options", &key)?, text("a value of options", &value)?)))
        .collect()
}
