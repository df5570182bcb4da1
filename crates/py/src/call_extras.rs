//! What a pull or push does beside moving bytes: the notification for the owner, the grant under which it pulls, and how
//! it checks the bytes. Also the time limit of a call.

use std::time::Duration;

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{CallExtras, Error, ErrorKind, GrantToken, GrantUse, Verify};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{FlagArg, IntArg};
use crate::convert::{self, Any, only_support};
use crate::error::raise;
use crate::notify::NotifyArg;
use crate::token_ranges::RawArg;

arguments! {
    /// How a call checks the bytes that it has moved, or `None`.
    VerifyArg;
    /// The token of a grant, a list of tokens if a call has several keys, or `None`.
    GrantArg;
}

/// The unchecked `notify`, `verify` and `layout` of a call.
pub(crate) type GivenExtras<'a, 'py> = (NotifyArg<'a, 'py>, VerifyArg<'a, 'py>, RawArg<'a, 'py>);

/// The unchecked `grant` and `grant_done` of a pull of blocks.
pub(crate) type GivenGrant<'a, 'py> = (GrantArg<'a, 'py>, FlagArg<'a, 'py>);

impl VerifyArg<'_, '_> {
    /// `"off"`, `"sample"`, `"full"` or `None`, which means the option of the engine.
    fn optional(self) -> PyResult<Option<Verify>> {
        if self.0.is_none() {
            return Ok(None);
        }
        let text = convert::text("verify", &self.0)?;
        validate::verify(&text).map(Some).map_err(|error| raise(self.py(), &error))
    }
}

impl<'py> GrantArg<'_, 'py> {
    /// Returns one token, or `None`.
    fn token(self, name: &str) -> PyResult<Option<GrantToken>> {
        if self.0.is_none() { Ok(None) } else { token(name, &self.0).map(Some) }
    }

    /// Returns a list with one object for each key, or `None`.
    pub(crate) fn tokens(self, name: &str) -> PyResult<Option<Vec<Any<'py>>>> {
        if self.0.is_none() { Ok(None) } else { convert::listed(name, &self.0).map(Some) }
    }
}

/// Reads what a call without a grant of its own does beside moving bytes.
pub(crate) fn without_grant((notify, verify, layout): GivenExtras<'_, '_>) -> PyResult<CallExtras> {
    let (notify, verify) = (notify.bytes("notify")?, verify.optional()?);
    Ok(CallExtras { notify, verify, raw_layout: layout.raw()?, ..CallExtras::default() })
}

/// Reads what a pull of blocks does beside moving bytes.
pub(crate) fn of_blocks(
    given: GivenExtras<'_, '_>,
    (grant, done): GivenGrant<'_, '_>,
) -> PyResult<CallExtras> {
    let mut extras = without_grant(given)?;
    let (py, done) = (done.py(), done.required("grant_done")?);
    extras.grant = grant.token("grant")?.map(|token| GrantUse { token, done });
    if done && extras.grant.is_none() {
        return Err(done_without_grant(py));
    }
    Ok(extras)
}

#[cold]
pub(crate) fn done_without_grant(py: Python<'_>) -> PyErr {
    raise(py, &Error::new(ErrorKind::InvalidArgument, "grant_done=True needs a grant"))
}

/// Reads a token.
pub(crate) fn token(name: &str, given: &Any<'_>) -> PyResult<GrantToken> {
    let bytes = given.cast::<PyBytes>().map_err(|_| only_support(name, "['bytes']", given))?;
    GrantToken::from_bytes(bytes.as_bytes()).map_err(|error| raise(given.py(), &error))
}

/// Reads the time limit and the extras of a call without a grant of its own.
pub(crate) fn limited(
    timeout_ms: IntArg<'_, '_>,
    given: GivenExtras<'_, '_>,
) -> PyResult<(Option<Duration>, CallExtras)> {
    Ok((limit(timeout_ms)?, without_grant(given)?))
}

/// Reads the time limit of a call in milliseconds; `None` for `sync_kv_timeout`.
pub(crate) fn limit(timeout_ms: IntArg<'_, '_>) -> PyResult<Option<Duration>> {
    let limit = timeout_ms.optional::<u32>("timeout_ms")?.map(validate::timeout_ms).transpose();
    limit.map_err(|error| raise(timeout_ms.py(), &error))
}
