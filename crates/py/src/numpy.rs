//! numpy, which only some calls need.

use pyo3::exceptions::{PyImportError, PyModuleNotFoundError};
use pyo3::intern;
use pyo3::prelude::*;

/// Returns numpy for `call`, which cannot do without it.
#[pyfunction]
pub(crate) fn import_numpy<'py>(py: Python<'py>, call: &str) -> PyResult<Bound<'py, PyModule>> {
    py.import(intern!(py, "numpy")).map_err(|error| missing(py, call, &error).unwrap_or(error))
}

/// Returns the error for a numpy that is not installed. A numpy that cannot be loaded has given its own reason.
fn missing(py: Python<'_>, call: &str, error: &PyErr) -> Option<PyErr> {
    let name = error.value(py).getattr(intern!(py, "name"));
    let absent = error.is_instance_of::<PyModuleNotFoundError>(py)
        && name.is_ok_and(|name| name.eq("numpy").unwrap_or(false));
    let text = format!("{call} needs numpy: pip install llm-datadist[numpy]");
    absent.then(|| PyImportError::new_err(text))
}
