//! The only mapping of core errors to `LLMException(message, status_code=…)`. `native::errors` has the exceptions of the native API.
//!
//! `convert` raises `TypeError` and `ValueError`; `core::status` chooses the codes.

use llm_datadist_core::bindings::{Mode, StatusCode};
use llm_datadist_core::{Error, ErrorKind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

use crate::python_types::PythonTypes;

/// Gives the status code of an error kind, which depends on the mode of the engine.
pub(crate) type Codes = fn(ErrorKind) -> StatusCode;

/// Creates the Python exception for an error, as one API has it.
pub(crate) type Raise = fn(Python<'_>, &Error) -> PyErr;

/// Returns the codes of an engine in `mode`.
pub(crate) fn codes_of(mode: Mode) -> Codes {
    match mode {
        Mode::CacheManager => StatusCode::from,
        Mode::KvCacheManager => StatusCode::of_kv_cache_manager,
    }
}

/// Returns how calls of an engine in `mode` fail.
pub(crate) fn raise_of(mode: Mode) -> Raise {
    match mode {
        Mode::CacheManager => raise,
        Mode::KvCacheManager => |py, error| raise_as(py, error, codes_of(Mode::KvCacheManager)),
    }
}

/// Creates the Python exception for an argument error, whose code is the same in every mode.
#[cold]
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    raise_as(py, error, StatusCode::from)
}

/// Creates the Python exception for `error`. An argument error is logged first (contract §0.3).
#[cold]
fn raise_as(py: Python<'_>, error: &Error, codes: Codes) -> PyErr {
    logged(py, error, codes).unwrap_or_else(|failure| failure)
}

/// Creates the argument error for a value that no type of the core can hold. `core::validate` checks the others.
#[cold]
pub(crate) fn invalid(py: Python<'_>, name: &str, value: impl std::fmt::Display, allowed: &str) -> PyErr {
    raise(py, &Error::argument(name, value, allowed))
}

/// Makes an argument error a `ValueError` as well, as `swap_blocks` promises (contract §17.11).
#[cold]
pub(crate) fn mismatch(py: Python<'_>, error: PyErr) -> PyErr {
    let as_mismatch = || -> PyResult<Option<PyErr>> {
        let types = PythonTypes::get(py)?;
        let code = error.value(py).getattr_opt(intern!(py, "status_code"))?;
        match (code, types.status(StatusCode::ParamInvalid)) {
            (Some(code), Some(invalid)) if code.is(invalid) => {
                let text: String = error.value(py).str()?.extract()?;
                made(&types.mismatch, &text, &code).map(Some)
            }
            _ => Ok(None),
        }
    };
    as_mismatch().unwrap_or_else(Some).unwrap_or(error)
}

fn logged(py: Python<'_>, error: &Error, codes: Codes) -> PyResult<PyErr> {
    if StatusCode::from(error.kind()) == StatusCode::ParamInvalid {
        PythonTypes::get(py)?.log_error.call1(py, (error.original().to_string(),))?;
    }
    exception(py, error, codes)
}

/// Creates the exception without logging it, for one part of a call.
pub(crate) fn exception(py: Python<'_>, error: &Error, codes: Codes) -> PyResult<PyErr> {
    let types = PythonTypes::get(py)?;
    let text = error.original().to_string();
    let code = codes(error.kind());
    let member = types.status(code).ok_or_else(|| PyRuntimeError::new_err(text.clone()))?;
    let exception = made(&types.exception, &text, member.bind(py))?;
    if !error.arrived().is_empty() {
        exception.value(py).setattr(intern!(py, "_arrived"), arrived(error))?;
    }
    Ok(exception)
}

/// Returns the tensors of the destination, each with its complete rows as half-open ranges.
pub(crate) fn arrived(error: &Error) -> Vec<(u32, Vec<(u64, u64)>)> {
    let rows = |rows: &[std::ops::Range<u64>]| rows.iter().map(|rows| (rows.start, rows.end)).collect();
    error.arrived().iter().map(|arrived| (arrived.tensor, rows(&arrived.rows))).collect()
}

fn made(class: &Py<PyType>, text: &str, code: &Bound<'_, PyAny>) -> PyResult<PyErr> {
    let keywords = PyDict::new(code.py());
    keywords.set_item(intern!(code.py(), "status_code"), code)?;
    Ok(PyErr::from_value(class.bind(code.py()).call((text,), Some(&keywords))?))
}
