//! The only mapping of core errors to `LLMException(message, status_code=…)`.
//!
//! `convert` raises `TypeError` and `ValueError`; `core::status` chooses the codes.

use llm_datadist_core::{Error, ErrorKind, Mode, StatusCode};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

use crate::front::Front;

/// Which code a kind of error has: that depends on the mode of the engine.
pub(crate) type Codes = fn(ErrorKind) -> StatusCode;

/// The codes of an engine of `mode`.
pub(crate) fn codes_of(mode: Mode) -> Codes {
    match mode {
        Mode::CacheManager => StatusCode::from,
        Mode::KvCacheManager => StatusCode::of_kv_cache_manager,
    }
}

/// The Python exception for an error of an argument, whose code is the same in every mode.
#[cold]
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    raise_as(py, error, StatusCode::from)
}

/// The Python exception for `error`. An argument error is logged first (contract §0.3).
#[cold]
pub(crate) fn raise_as(py: Python<'_>, error: &Error, codes: Codes) -> PyErr {
    logged(py, error, codes).unwrap_or_else(|failure| failure)
}

/// The exception for an integer that no core type can carry; its sibling for values that one can is `core::validate`.
#[cold]
pub(crate) fn invalid(py: Python<'_>, name: &str, value: impl std::fmt::Display, allowed: &str) -> PyErr {
    raise(py, &Error::argument(name, value, allowed))
}

/// The same failure as a `ValueError` too, if it is an argument error: what the seed promises of `swap_blocks`
/// (contract §17.11), whose arguments have to fit each other.
#[cold]
pub(crate) fn mismatch(py: Python<'_>, error: PyErr) -> PyErr {
    let as_mismatch = || -> PyResult<Option<PyErr>> {
        let front = Front::get(py)?;
        let code = error.value(py).getattr_opt(intern!(py, "status_code"))?;
        match (code, front.status(StatusCode::ParamInvalid)) {
            (Some(code), Some(invalid)) if code.is(invalid) => {
                let text: String = error.value(py).str()?.extract()?;
                made(&front.mismatch, &text, &code).map(Some)
            }
            _ => Ok(None),
        }
    };
    as_mismatch().unwrap_or_else(Some).unwrap_or(error)
}

fn logged(py: Python<'_>, error: &Error, codes: Codes) -> PyResult<PyErr> {
    if StatusCode::from(error.kind()) == StatusCode::ParamInvalid {
        Front::get(py)?.log_error.call1(py, (error.to_string(),))?;
    }
    exception(py, error, codes)
}

/// The same without a line in the log: of what became of a part of a call.
pub(crate) fn exception(py: Python<'_>, error: &Error, codes: Codes) -> PyResult<PyErr> {
    let front = Front::get(py)?;
    let text = error.to_string();
    let code = codes(error.kind());
    let member = front.status(code).ok_or_else(|| PyRuntimeError::new_err(text.clone()))?;
    let exception = made(&front.exception, &text, member.bind(py))?;
    if !error.arrived().is_empty() {
        exception.value(py).setattr(intern!(py, "_arrived"), arrived(error))?;
    }
    Ok(exception)
}

/// Tensors of the destination, each with its rows that are complete, as half-open ranges.
fn arrived(error: &Error) -> Vec<(u32, Vec<(u64, u64)>)> {
    let rows = |rows: &[std::ops::Range<u64>]| rows.iter().map(|rows| (rows.start, rows.end)).collect();
    error.arrived().iter().map(|(tensor, ranges)| (*tensor, rows(ranges))).collect()
}

fn made(class: &Py<PyType>, text: &str, code: &Bound<'_, PyAny>) -> PyResult<PyErr> {
    let keywords = PyDict::new(code.py());
    keywords.set_item(intern!(code.py(), "status_code"), code)?;
    Ok(PyErr::from_value(class.bind(code.py()).call((text,), Some(&keywords))?))
}
