//! Plain values: integers, texts and times, with the errors of the native API.
//!
//! A wrong type is a `TypeError`. A wrong value is an `InvalidArgument` with the name of the argument.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use llm_datadist_core::bindings::keeper::link_token;
use llm_datadist_core::bindings::options::size_with_unit;
use llm_datadist_core::bindings::validate::MAX_READERS;
use llm_datadist_core::{Error, ErrorKind, MAX_SECONDS};
use llm_datadist_keeper::{KeeperAccess, KeeperOptions, MAX_LEASE, RoleTokens, read_token};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyFloat, PyInt, PyList, PyTuple};

use super::errors::{invalid, raise};
use super::optional_arg::OptionalArg;
use crate::convert::{self, Any, shown};

/// Creates the `TypeError` for an argument that must be `allowed`.
#[cold]
pub(crate) fn wrong_type(name: impl Display, allowed: &str, value: &Any<'_>) -> PyErr {
    let class = value.get_type().name();
    let class = class.as_ref().map_or("object".into(), |class| class.to_string_lossy());
    PyTypeError::new_err(format!("{name} must be {allowed}, not '{class}'"))
}

/// Returns an `int`, or what `__index__` returns for another object. A `bool` is not an integer.
pub(crate) fn index<'py>(name: impl Display, allowed: &str, value: &Any<'py>) -> PyResult<Bound<'py, PyInt>> {
    if value.is_exact_instance_of::<PyBool>() {
        return Err(wrong_type(name, allowed, value));
    }
    match value.cast::<PyInt>() {
        Ok(number) => Ok(number.clone()),
        Err(_) => as_index(value)?.ok_or_else(|| wrong_type(name, allowed, value)),
    }
}

/// Returns what `__index__` returns, or `None` for an object that is not an integer.
fn as_index<'py>(value: &Any<'py>) -> PyResult<Option<Bound<'py, PyInt>>> {
    let py = value.py();
    // numpy's arrays and `bool_` have the method too, and refuse with a `TypeError`.
    match value.get_type().getattr_opt(intern!(py, "__index__"))?.map(|method| method.call1((value,))) {
        Some(Ok(number)) => Ok(number.cast_into::<PyInt>().ok()),
        Some(Err(error)) if !error.is_instance_of::<PyTypeError>(py) => Err(error),
        Some(Err(_)) | None => Ok(None),
    }
}

/// Reads a copy of the bytes of a `bytes` or `bytearray`.
pub(crate) fn bytes(name: &str, value: &Any<'_>) -> PyResult<Vec<u8>> {
    let py = value.py();
    let copy = |bytes: &[u8]| {
        let mut copy = convert::room(py, bytes.len(), raise)?;
        copy.extend_from_slice(bytes);
        Ok(copy)
    };
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return copy(bytes.as_bytes());
    }
    let array = value.cast::<PyByteArray>().map_err(|_| wrong_type(name, "bytes", value))?;
    // The copy of a byte array cannot report a lack of memory.
    drop(convert::room::<u8>(py, array.len(), raise)?);
    Ok(array.to_vec())
}

/// Reads a `str`.
pub(crate) fn text(name: &str, value: &Any<'_>) -> PyResult<String> {
    value.extract().map_err(|_| wrong_type(name, "a str", value))
}

/// Reads the items of a list or tuple, which is one of `forms`.
pub(crate) fn items<'py>(name: &str, forms: &str, value: &Any<'py>) -> PyResult<Bound<'py, PyTuple>> {
    match (value.cast::<PyList>(), value.cast::<PyTuple>()) {
        (Ok(list), _) => Ok(list.to_tuple()),
        (_, Ok(tuple)) => Ok(tuple.clone()),
        _ => Err(wrong_type(name, forms, value)),
    }
}

/// Reads an integer in a range.
pub(crate) fn int(name: &str, value: &Any<'_>, range: RangeInclusive<u64>) -> PyResult<u64> {
    let number = index(name, "an int", value)?;
    match number.extract::<u64>() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => {
            let allowed = format!("{} to {}", range.start(), range.end());
            Err(invalid(value.py(), name, shown(&number), &allowed))
        }
    }
}

/// Reads a number of bytes: an `int` above 0, or a text, with a unit or without.
pub(crate) fn size(name: &str, value: &Any<'_>) -> PyResult<u64> {
    let allowed = "a number of bytes above 0, or a text with a unit: \"64MiB\" (KiB, MiB, GiB or TiB)";
    let bytes = match value.extract::<String>() {
        Ok(text) => size_with_unit(&text).or_else(|| digits(&text)?.parse().ok()),
        Err(_) => index(name, allowed, value)?.extract().ok(),
    };
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| invalid(value.py(), name, shown(value), allowed))
}

/// Returns a text that has only digits. `parse` would also accept a sign.
fn digits(text: &str) -> Option<&str> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then_some(text)
}

/// Reads the bytes of a value of a store or keeper; 64 KiB by default.
pub(crate) fn value_size(value: Option<&Any<'_>>) -> PyResult<u64> {
    value.map_or(Ok(64 << 10), |value| size("value", value))
}

/// Reads a truth value that may be missing.
pub(crate) fn truth_or(default: bool, name: &str, value: OptionalArg<'_, '_>) -> PyResult<bool> {
    value.given().map_or(Ok(default), |value| truth(name, &value))
}

/// Reads a truth value.
pub(crate) fn truth(name: &str, value: &Any<'_>) -> PyResult<bool> {
    // Also `numpy.bool_`.
    value.extract().map_err(|_| wrong_type(name, "a bool", value))
}

/// Reads what a client shows to a keeper, and whose keeper it trusts. No error has the token in its text.
pub(crate) fn keeper_access(
    token: Option<&Any<'_>>,
    token_file: Option<&Any<'_>>,
    keeper_user: Option<&Any<'_>>,
) -> PyResult<KeeperAccess> {
    let keeper_user = keeper_user.map(|given| int32("keeper_user", given, 0)).transpose()?;
    let token = match (token, token_file) {
        (Some(token), Some(_)) => {
            let text = "token and token_file are both given; give one of them";
            let error = Error::new(ErrorKind::InvalidArgument, text);
            return Err(raise(token.py(), &error.of_argument("token_file")));
        }
        (Some(given), None) => {
            let text = text("token", given)?;
            Some(link_token("token", &text).map_err(|error| raise(given.py(), &error))?)
        }
        (None, Some(given)) => {
            let read = read_token(&path("token_file", given)?);
            Some(read.map_err(|error| raise(given.py(), &error))?)
        }
        (None, None) => None,
    };
    Ok(KeeperAccess { token, keeper_user })
}

/// Reads what a keeper is opened with. The tokens are in the file at their path; a group is one that may connect.
pub(crate) fn keeper_options(
    memory: &Any<'_>,
    socket: &Any<'_>,
    value: Option<&Any<'_>>,
    tokens: Option<&Any<'_>>,
    group: Option<&Any<'_>>,
) -> PyResult<KeeperOptions> {
    let group = group.map(|given| int32("group", given, 0)).transpose()?;
    let tokens = tokens.map_or_else(
        || Ok(RoleTokens::default()),
        |given| RoleTokens::read(&path("tokens", given)?).map_err(|error| raise(given.py(), &error)),
    )?;
    Ok(KeeperOptions {
        memory: size("memory", memory)?,
        value: value_size(value)?,
        socket: path("socket", socket)?,
        tokens,
        group,
    })
}

/// Reads a path: a `str`, or an object that `os.fspath` accepts.
pub(crate) fn path(name: &str, value: &Any<'_>) -> PyResult<PathBuf> {
    value.extract().map_err(|_| wrong_type(name, "a path", value))
}

/// Reads an integer of 32 bits, at least `least`.
pub(crate) fn int32(name: &str, value: &Any<'_>, least: u32) -> PyResult<u32> {
    let number = int(name, value, least.into()..=u32::MAX.into())?;
    Ok(u32::try_from(number).unwrap_or(u32::MAX))
}

/// Reads the number of readers of a grant.
pub(crate) fn readers(value: &Any<'_>) -> PyResult<u32> {
    let number = int("readers", value, 1..=MAX_READERS as u64)?;
    Ok(u32::try_from(number).unwrap_or(u32::MAX))
}

/// Reads a time limit in seconds: an `int` or a `float` above 0, of at most 4,294,967.
pub(crate) fn seconds(name: &str, value: &Any<'_>) -> PyResult<Duration> {
    seconds_up_to(name, value, MAX_SECONDS)
}

/// Reads the time of a lease in seconds: like [`seconds`], but at most 10. The store checks this too. The check here names the value as
/// the caller has given it, and this range also for a time that [`seconds`] refuses.
pub(crate) fn lease_seconds(value: &Any<'_>) -> PyResult<Duration> {
    seconds_up_to("ttl", value, MAX_LEASE.as_secs())
}

fn seconds_up_to(name: &str, value: &Any<'_>, most: u64) -> PyResult<Duration> {
    let wrong = || invalid(value.py(), name, shown(value), &format!("above 0 and at most {most} seconds"));
    match number_of_seconds(name, value)? {
        // A time that rounds to 0 nanoseconds is still a time.
        Some(time) if time.is_zero() && value.gt(0)? => Ok(Duration::from_nanos(1)),
        Some(time) if !time.is_zero() && time <= Duration::from_secs(most) => Ok(time),
        _ => Err(wrong()),
    }
}

/// Reads a time to wait in seconds: as [`seconds`], or 0.
pub(crate) fn seconds_from_zero(name: &str, value: &Any<'_>) -> PyResult<Duration> {
    let wrong = || invalid(value.py(), name, shown(value), &format!("0 to {MAX_SECONDS} seconds"));
    number_of_seconds(name, value)?.ok_or_else(wrong)
}

/// Returns a number of seconds as a time; `None` if it is out of range or not finite.
fn number_of_seconds(name: &str, value: &Any<'_>) -> PyResult<Option<Duration>> {
    let time = match value.cast::<PyFloat>() {
        Ok(float) => Duration::try_from_secs_f64(float.value()).ok(),
        Err(_) => index(name, "a number of seconds", value)?.extract().ok().map(Duration::from_secs),
    };
    Ok(time.filter(|&time| time <= Duration::from_secs(MAX_SECONDS)))
}
