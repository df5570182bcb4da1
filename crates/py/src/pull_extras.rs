//! What a pull does beside moving bytes: the notification for the owner, and the grant under which it pulls.

use llm_datadist_core::{CallExtras, Error, ErrorKind, GrantToken, GrantUse};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::FlagArg;
use crate::convert::{Any, only_support};
use crate::error::raise;
use crate::notify::NotifyArg;

/// Reads `notify`, `grant` and `grant_done` among the keyword arguments of a pull of blocks.
pub(crate) fn of_blocks(options: &Bound<'_, PyDict>) -> PyResult<CallExtras> {
    let mut extras = CallExtras::default();
    if options.is_empty() {
        return Ok(extras);
    }
    let py = options.py();
    if let Some(given) = options.get_item(intern!(py, "notify"))? {
        extras.notify = NotifyArg::extract(given.as_borrowed())?.bytes("notify")?;
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

/// Reads `notify` among the keyword arguments of a pull of a slot, which takes no grant.
pub(crate) fn of_slot(options: &Bound<'_, PyDict>) -> PyResult<CallExtras> {
    let extras = of_blocks(options)?;
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
