//! The exceptions of the native API: a class of `llm_datadist.errors` for every kind of error.
//!
//! Nothing is logged. The classes are looked up when an error is raised, so that a package that was imported again raises its own.

use llm_datadist_core::{Error, ErrorKind};
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

/// Returns `error` with the word of the caller for the argument that the core calls `from`.
#[cold]
pub(crate) fn renamed(error: Error, from: &str, to: &str) -> Error {
    if error.argument_name() != Some(from) {
        return error;
    }
    let renamed = Error::new(error.kind(), error.reason().replacen(from, to, 1)).of_argument(to);
    error.facts().fold(renamed, |renamed, (name, value)| renamed.with(name, value))
}

/// Returns the class of an error, and the word by which programs tell kinds of one class apart.
fn class_of(kind: ErrorKind) -> (&'static str, &'static str) {
    match kind {
        ErrorKind::InvalidArgument => ("InvalidArgument", "invalid_argument"),
        ErrorKind::KeyTaken => ("InvalidArgument", "name_taken"),
        ErrorKind::TensorCountMismatch => ("InvalidArgument", "tensor_count"),
        ErrorKind::CacheNotFound => ("NotFound", "not_found"),
        ErrorKind::OutOfMemory => ("OutOfMemory", "out_of_memory"),
        ErrorKind::Timeout => ("Timeout", "timeout"),
        ErrorKind::NotLinked => ("PeerLost", "not_linked"),
        ErrorKind::LinkFailed => ("PeerLost", "link_failed"),
        ErrorKind::UnlinkFailed => ("PeerLost", "unlink_failed"),
        ErrorKind::Closed => ("Closed", "closed"),
        ErrorKind::Forked => ("Closed", "forked"),
        ErrorKind::Cancelled => ("Cancelled", "cancelled"),
        ErrorKind::Busy => ("Busy", "busy"),
        ErrorKind::GrantEnded => ("GrantEnded", "grant_ended"),
        ErrorKind::VerifyFailed => ("VerifyFailed", "verify_failed"),
        ErrorKind::NotEnabled => ("Error", "not_enabled"),
        ErrorKind::AlreadyLinked | ErrorKind::LinksExist | ErrorKind::Interrupted | ErrorKind::System => {
            ("Error", "failed")
        }
    }
}

/// Returns the argument that an error is about. The key of a cache is its name.
fn argument(error: &Error) -> Option<&str> {
    if error.kind() == ErrorKind::KeyTaken { Some("name") } else { error.argument_name() }
}

/// Returns the text of an error without its facts. The core names the calls of the original's API in two texts.
fn reason(error: &Error) -> &str {
    match error.kind() {
        ErrorKind::Closed => "the engine was closed",
        ErrorKind::Forked => {
            "this process was forked after the engine was opened; the engine belongs to its parent"
        }
        _ => error.reason(),
    }
}

/// Returns the facts. The cluster of an engine of this API is its incarnation.
fn facts(error: &Error) -> impl Iterator<Item = (&'static str, &str)> {
    error.facts().map(|(name, value)| (if name == "cluster" { "incarnation" } else { name }, value))
}

/// Returns the whole text: the reason, the facts and the cause.
fn text(error: &Error) -> String {
    let facts: Vec<_> = facts(error).map(|(name, value)| format!("{name}={value}")).collect();
    let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join(", ")) };
    let cause = std::error::Error::source(error).map_or_else(String::new, |cause| format!(": {cause}"));
    format!("{}{facts}{cause}", reason(error))
}

fn made(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let (class, code) = class_of(error.kind());
    let class = py.import(intern!(py, "llm_datadist.errors"))?.getattr(class)?;
    let keywords = PyDict::new(py);
    keywords.set_item(intern!(py, "code"), code)?;
    keywords.set_item(intern!(py, "reason"), reason(error))?;
    keywords.set_item(intern!(py, "argument"), argument(error))?;
    keywords.set_item(intern!(py, "facts"), facts(error).into_py_dict(py)?)?;
    keywords.set_item(intern!(py, "arrived"), error::arrived(error))?;
    Ok(PyErr::from_value(class.call((text(error),), Some(&keywords))?))
}
