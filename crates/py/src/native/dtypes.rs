//! The names of element types, as numpy and torch have them.

use llm_datadist_core::DataType;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};

use super::errors::invalid;
use super::values::wrong_type;
use crate::convert::{Any, shown};

/// The element types of the native API by name. The first name of a type is the one that is shown.
const NAMES: [(&str, DataType); 14] = [
    ("float16", DataType::Float16),
    ("bfloat16", DataType::Bf16),
    ("float32", DataType::Float),
    ("float64", DataType::Double),
    ("int8", DataType::Int8),
    ("int16", DataType::Int16),
    ("int32", DataType::Int32),
    ("int64", DataType::Int64),
    ("uint8", DataType::Uint8),
    ("uint16", DataType::Uint16),
    ("uint32", DataType::Uint32),
    ("uint64", DataType::Uint64),
    ("bool", DataType::Bool),
    ("bool_", DataType::Bool), // the class of numpy 1
];

/// What torch writes before the name of a type.
const TORCH: &str = "torch.";

/// The names of all types, for errors.
const ALLOWED: &str = "\"float16\", \"bfloat16\", \"float32\", \"float64\", \"int8\" to \"int64\", \"uint8\" to \"uint64\" or \"bool\"";

/// Returns the name of a type; that of the original's API for a type that the native API does not have.
pub(crate) fn name(data_type: DataType) -> &'static str {
    NAMES.iter().find(|(_, of)| *of == data_type).map_or(data_type.name(), |(name, _)| name)
}

/// Reads a type: its name, or an object with such a name, such as a type of numpy or torch, or a member of `DataType`.
pub(crate) fn read(argument: &str, value: &Any<'_>) -> PyResult<DataType> {
    let named = text_of(value)?.ok_or_else(|| wrong_type(argument, "the name of an element type", value))?;
    let text = named.to_string_lossy();
    let word = text.strip_prefix(TORCH).unwrap_or(&text);
    let found = NAMES.iter().find(|(name, of)| *name == word || of.name() == word).map(|(_, of)| *of);
    found.ok_or_else(|| invalid(value.py(), argument, format_args!("\"{}\"", shown(&named)), ALLOWED))
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
