//! Reads the arguments of `Engine(...)`. The table of options in the core says which values are allowed.

use llm_datadist_core::bindings::Config;
use llm_datadist_core::bindings::options::{OPTIONS, OptionRow, check_native_names};
use llm_datadist_core::{EngineBuilder, OptionValue};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt};

use super::errors::raise;
use super::optional_arg::OptionalArg;
use super::values::{text, wrong_type};
use crate::convert::Any;

/// The arguments of `Engine(...)` that are options, and whether each may be `None`, which is then as if it was not given.
const ARGUMENTS: [(&str, bool); 9] = [
    ("pool", true),
    ("host_pool", true),
    ("page", false),
    ("listen", true),
    ("token", true),
    ("token_file", true),
    ("accept_remote", false),
    ("timeout", false),
    ("verify", false),
];

/// The arguments of `Engine(...)` as they were given.
pub(crate) struct GivenOptions<'a, 'py> {
    /// Those that are options, in the order of [`ARGUMENTS`].
    pub(crate) arguments: [OptionalArg<'a, 'py>; ARGUMENTS.len()],
    /// Further options.
    pub(crate) options: Option<&'a Bound<'py, PyDict>>,
    /// The name of the engine.
    pub(crate) name: Option<&'a Any<'py>>,
}

impl GivenOptions<'_, '_> {
    /// Returns the configuration.
    pub(crate) fn config(&self, py: Python<'_>) -> PyResult<Config> {
        let mut builder = EngineBuilder::default();
        for (&(name, none), argument) in ARGUMENTS.iter().zip(&self.arguments) {
            if let Some(given) = argument.given().filter(|given| !none || !given.is_none()) {
                builder = builder.option(name, value(name, &given)?);
            }
        }
        for (name, given) in self.options.into_iter().flatten() {
            let name: String = name.extract()?;
            check_native_names([&*name]).map_err(|error| PyTypeError::new_err(error.reason().to_owned()))?;
            builder = builder.option(&name, value(&name, &given)?);
        }
        if let Some(given) = self.name {
            builder = builder.name(text("name", given)?);
        }
        builder.config().map_err(|error| raise(py, &error))
    }
}

/// Reads the value of an option. A wrong type is a `TypeError`; the core checks the value.
fn value(name: &str, given: &Any<'_>) -> PyResult<OptionValue> {
    let row = OPTIONS.iter().find(|row| row.native == name);
    let value = if name == "token_file" { path(given) } else { any(given) };
    let value = value.filter(|value| row.is_none_or(|row| row.takes_type_of(value)));
    value.ok_or_else(|| wrong_type(name, &row.map_or_else(String::new, OptionRow::allowed), given))
}

/// Returns the text of a path: a `str`, or an object that `os.fspath` accepts.
fn path(given: &Any<'_>) -> Option<OptionValue> {
    let path = given.py().import("os").and_then(|os| os.call_method1("fspath", (given,)));
    path.ok().and_then(|path| any(&path))
}

/// Returns a value of a type that an option may have.
fn any(given: &Any<'_>) -> Option<OptionValue> {
    if let Ok(flag) = given.cast::<PyBool>() {
        Some(OptionValue::Flag(flag.is_true()))
    } else if given.is_instance_of::<PyInt>() {
        // A number of more than 128 bits is out of range for every option.
        Some(OptionValue::Int(given.extract().unwrap_or(i128::MAX)))
    } else if let Ok(float) = given.cast::<PyFloat>() {
        Some(OptionValue::Float(float.value()))
    } else {
        given.extract().ok().map(OptionValue::Text)
    }
}
