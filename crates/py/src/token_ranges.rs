//! The ranges of tokens of a pull or push, and whether it moves rows as they are.

use std::ops::Range;

use llm_datadist_core::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::convert::{self, Any};
use crate::error::{invalid, raise};

arguments! {
    /// A range of tokens: a `range`, a pair, or `None`.
    TokensArg;
    /// `"raw"`, or `None`.
    RawArg;
}

/// The tokens of a pull or push. `None` stands for all.
#[derive(Clone, Default)]
pub(crate) struct TokenRanges {
    pub(crate) src: Option<Range<u64>>,
    pub(crate) dst: Option<Range<u64>>,
}

impl TokenRanges {
    /// Reads the two arguments of a pull or push.
    pub(crate) fn given((src, dst): (TokensArg<'_, '_>, TokensArg<'_, '_>)) -> PyResult<Self> {
        Ok(TokenRanges { src: optional("src_tokens", &src.0)?, dst: optional("dst_tokens", &dst.0)? })
    }

    /// Whether no range is given.
    pub(crate) fn is_all(&self) -> bool {
        self.src.is_none() && self.dst.is_none()
    }

    /// Refuses ranges where they have no meaning. `what` says what moves there.
    pub(crate) fn refused(&self, py: Python<'_>, what: &str) -> PyResult<()> {
        if self.is_all() {
            return Ok(());
        }
        let text = format!("src_tokens and dst_tokens are for blocks, and must not be given for {what}");
        Err(raise(py, &Error::new(ErrorKind::InvalidArgument, text)))
    }
}

impl RawArg<'_, '_> {
    /// Whether rows move as they are.
    pub(crate) fn raw(self) -> PyResult<bool> {
        if self.0.is_none() {
            return Ok(false);
        }
        match convert::text("layout", &self.0)?.as_str() {
            "raw" => Ok(true),
            other => Err(invalid(self.py(), "layout", format_args!("{other:?}"), "None or \"raw\"")),
        }
    }
}

fn optional(name: &str, value: &Any<'_>) -> PyResult<Option<Range<u64>>> {
    if value.is_none() { Ok(None) } else { convert::range(name, value).map(Some) }
}
