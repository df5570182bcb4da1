//! Counters as a nested dict of numbers and strings: every field of a snapshot, under its name.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns an object of JSON as a dict.
pub(crate) fn dict<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyDict>> {
    Ok(py.import("json")?.call_method1("loads", (json,))?.cast_into::<PyDict>()?)
}
