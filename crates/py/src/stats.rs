//! The engine's counters as a nested dict of numbers and strings: every field of the snapshot, under its name.

use llm_datadist_core::Snapshot;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns `snapshot` as a dict.
pub(crate) fn dict<'py>(py: Python<'py>, snapshot: &Snapshot) -> PyResult<Bound<'py, PyDict>> {
    Ok(py.import("json")?.call_method1("loads", (snapshot.to_json(),))?.cast_into::<PyDict>()?)
}
