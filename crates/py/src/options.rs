//! The table of options for Python, and the checks of single options that the setters of `LlmConfig` call.

use llm_datadist_core::bindings::options::{self, OPTIONS, OptionRow};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::checks::checked;
use crate::convert::{self, Any, int};

/// One row of the table, in the order of `option_table.Row` (`test_options_prints_every_option_with_type_default_and_meaning`).
type Fields = (
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static str,
    &'static str,
    bool,
    &'static str,
    &'static str,
    String,
);

/// Returns every option of an engine.
#[pyfunction]
#[pyo3(name = "options")]
pub(crate) fn option_rows() -> Vec<Fields> {
    let fields = |row: &OptionRow| {
        let &OptionRow { name, key, types, default, meaning, own, variable, native, .. } = row;
        (name, key, types, default, meaning, own, variable, native, row.allowed())
    };
    OPTIONS.iter().map(fields).collect()
}

/// Checks the property `name` of an `LlmConfig`: a whole number, or a text with a rule of its own.
#[pyfunction]
pub(crate) fn check_option(name: &str, arg_value: &Any<'_>) -> PyResult<()> {
    let py = arg_value.py();
    let value = match (name, arg_value.cast::<PyString>()) {
        // The original has these as int32. A list of devices may hold anything.
        ("device_id" | "sync_kv_timeout", _) => int::<i32>(name, arg_value)?.into(),
        // Their errors do not show the value.
        ("link_token" | "link_token_file", Ok(text)) => {
            return checked(py, options::check_text(name, &convert::text(name, text)?));
        }
        (_, Ok(text)) => return checked(py, options::check_text(name, &text.to_string_lossy())),
        (_, Err(_)) => convert::any_int(name, arg_value)?,
    };
    checked(py, options::check_number(name, value))
}

/// Returns the known name that is nearest to `name` and at most two edits away. The case of letters does not count.
#[pyfunction]
pub(crate) fn nearest(name: &Bound<'_, PyString>, known: &Any<'_>) -> PyResult<Option<String>> {
    let known: Vec<String> = known.try_iter()?.map(|known| known?.extract()).collect::<PyResult<_>>()?;
    Ok(options::nearest(&name.to_string_lossy(), known.iter().map(String::as_str)).map(str::to_owned))
}

/// A share: 0.0 to 1.0.
#[pyfunction]
pub(crate) fn check_mem_utilization(py: Python<'_>, arg_value: f64) -> PyResult<()> {
    checked(py, options::mem_utilization(arg_value))
}
