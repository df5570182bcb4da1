//! The exceptions of the native API: the class of `llm_datadist.errors` that `core::native` names.
//!
//! Nothing is logged. The classes are looked up when an error is raised, so that a package that was imported again raises its own.

use llm_datadist_core::{Error, ErrorWords};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::error;

/// Creates the exception for `error`.
#[cold]
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    made(py, error).unwrap_or_else(|failure| failure)
}

/// Creates the error for an argument that no type of the core can hold.
#[cold]
pub(crate) fn invalid(py: Python<'_>, name: &str, value: impl std::fmt::Display, allowed: &str) -> PyErr {
    raise(py, &Error::argument(name, value, allowed))
}

fn made(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let words = ErrorWords(error);
    let class = py.import(intern!(py, "llm_datadist.errors"))?.getattr(words.class().name())?;
    let keywords = PyDict::new(py);
    keywords.set_item(intern!(py, "code"), words.code())?;
    keywords.set_item(intern!(py, "reason"), error.reason())?;
    keywords.set_item(intern!(py, "argument"), words.argument())?;
    keywords.set_item(intern!(py, "errno"), error.raw_os_error())?;
    keywords.set_item(intern!(py, "facts"), error.facts().into_py_dict(py)?)?;
    keywords.set_item(intern!(py, "arrived"), error::arrived(error))?;
    Ok(PyErr::from_value(class.call((error.to_string(),), Some(&keywords))?))
}
