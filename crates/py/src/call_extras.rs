//! What a pull or push does beside moving bytes: the notification for the owner, the grant under which it pulls, and how
//! it checks the bytes.

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{CallExtras, Error, ErrorKind, GrantToken, GrantUse, Verify};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::FlagArg;
use crate::convert::{self, Any, only_support};
use crate::error::raise;
use crate::notify::NotifyArg;
use crate::token_ranges::{RawArg, TokenRanges};

arguments! {
    /// How a call checks the bytes that it has moved, or `None`.
    VerifyArg;
}

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

/// Reads what a push, a group, or another call without a grant of its own does beside moving bytes.
pub(crate) fn of_push(
    notify: NotifyArg<'_, '_>,
    verify: VerifyArg<'_, '_>,
    layout: RawArg<'_, '_>,
) -> PyResult<CallExtras> {
    let (notify, verify) = (notify.bytes("notify")?, verify.optional()?);
    Ok(CallExtras { notify, grant: None, verify, raw_layout: layout.raw()? })
}

/// Reads `notify`, `verify`, `layout`, `grant` and `grant_done` among the keyword arguments of a pull of blocks.
pub(crate) fn of_blocks(options: &Bound<'_, PyDict>) -> PyResult<CallExtras> {
    let mut extras = CallExtras::default();
    if options.is_empty() {
        return Ok(extras);
    }
    let py = options.py();
    if let Some(given) = options.get_item(intern!(py, "notify"))? {
        extras.notify = NotifyArg::extract(given.as_borrowed())?.bytes("notify")?;
    }
    if let Some(given) = options.get_item(intern!(py, "verify"))? {
        extras.verify = VerifyArg::extract(given.as_borrowed())?.optional()?;
    }
    if let Some(given) = options.get_item(intern!(py, "layout"))? {
        extras.raw_layout = RawArg::extract(given.as_borrowed())?.raw()?;
    }
    let done = match options.get_item(intern!(py, "grant_done"))? {
        Some(given) => FlagArg::extract(given.as_borrowed())?.required("grant_done")?,
        None => false,
    };
    if let Some(given) = options.get_item(intern!(py, "grant"))?.filter(|given| !given.is_none()) {
        extras.grant = Some(GrantUse { token: token("grant", &given)?, done });
    } else if done {
        let text = "grant_done=True needs a grant";
        return Err(raise(py, &Error::new(ErrorKind::InvalidArgument, text)));
    }
    Ok(extras)
}

/// Reads `notify`, `verify` and `layout` among the keyword arguments of a pull of a slot, which takes no grant and no
/// ranges of tokens.
pub(crate) fn of_slot(options: &Bound<'_, PyDict>) -> PyResult<CallExtras> {
    let extras = of_blocks(options)?;
    TokenRanges::of(options)?.refused(options.py(), "a slot")?;
    if extras.grant.is_none() {
        return Ok(extras);
    }
    let text = "pull_cache takes no grant: grants are for blocks";
    Err(raise(options.py(), &Error::new(ErrorKind::InvalidArgument, text)))
}

/// Reads a token.
pub(crate) fn token(name: &str, given: &Any<'_>) -> PyResult<GrantToken> {
    let bytes = given.cast::<PyBytes>().map_err(|_| only_support(name, "['bytes']", given))?;
    GrantToken::from_bytes(bytes.as_bytes()).map_err(|error| raise(given.py(), &error))
}
