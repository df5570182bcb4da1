//! Reads element types, which numpy and torch name in several ways.

use llm_datadist_core::{DataType, ElementTypes};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};

use super::errors::invalid;
use super::values::wrong_type;
use crate::convert::{Any, shown};

/// What torch writes before the name of a type.
const TORCH: &str = "torch.";

/// Reads a type: its name, or an object with such a name, such as a type of numpy or torch, or a member of `DataType`.
pub(crate) fn read(argument: &str, value: &Any<'_>) -> PyResult<DataType> {
    let named = text_of(value)?.ok_or_else(|| wrong_type(argument, "the name of an element type", value))?;
    let text = named.to_string_lossy();
    let word = text.strip_prefix(TORCH).unwrap_or(&text);
    let allowed = ElementTypes::ALLOWED;
    let unknown = || invalid(value.py(), argument, format_args!("\"{}\"", shown(&named)), allowed);
    ElementTypes::find(word).ok_or_else(unknown)
}

/// Returns the name of what was given as a type; `None` if it has none.
fn text_of<'py>(value: &Any<'py>) -> PyResult<Option<Bound<'py, PyString>>> {
    let py = value.py();
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Some(text.clone()));
    }
    if let Ok(class) = value.cast::<PyType>() {
        return class.name().map(Some);
    }
    if let Some(name) = value.getattr_opt(intern!(py, "name"))?
        && let Ok(name) = name.cast_into::<PyString>()
    {
        return Ok(Some(name));
    }
    // Types of torch have only a text.
    let text = value.str()?;
    Ok(text.to_string_lossy().starts_with(TORCH).then_some(text))
}
