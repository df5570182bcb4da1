//! Which bytes of the blocks of a pull or push move: all, those of some tokens, or a part of every block.

use llm_datadist_core::{Error, ErrorKind, PullRows, PushRows, SubRow};
use pyo3::prelude::*;

use crate::error::raise;
use crate::sub_rows::{self, SubRowArg};
use crate::token_ranges::{TokenRanges, TokensArg};

/// The tokens, or the part of every block, that a call moves.
#[derive(Clone, Default)]
pub(crate) struct Selection {
    tokens: TokenRanges,
    part: SubRow,
}

/// The unchecked `src_tokens` and `dst_tokens`, and the part of every block.
pub(crate) type GivenSelection<'a, 'py> = (TokensArg<'a, 'py>, TokensArg<'a, 'py>, SubRowArg<'a, 'py>);

impl Selection {
    /// Reads the arguments of a pull or push.
    pub(crate) fn of((src, dst, part): GivenSelection<'_, '_>) -> PyResult<Self> {
        Selection { tokens: TokenRanges::given((src, dst))?, part: part.part()? }.checked(part.py())
    }

    fn checked(self, py: Python<'_>) -> PyResult<Self> {
        if self.part.is_whole() || self.tokens.is_all() {
            return Ok(self);
        }
        let text =
            "src_tokens and dst_tokens must not be given together with src_offset, dst_offset or length";
        Err(raise(py, &Error::new(ErrorKind::InvalidArgument, text)))
    }

    /// Returns the rows of a pull of blocks.
    pub(crate) fn pull(self, remote: Vec<i64>, local: Vec<i64>) -> PullRows {
        let part = self.part;
        if part.is_whole() {
            self.tokens.pull(remote, local)
        } else {
            PullRows::SubRows { remote, local, part }
        }
    }

    /// Returns the rows of a push of blocks.
    pub(crate) fn push(self, local: Vec<i64>, remote: Vec<i64>) -> PushRows {
        let part = self.part;
        if part.is_whole() {
            self.tokens.push(local, remote)
        } else {
            PushRows::SubRows { local, remote, part }
        }
    }

    /// Refuses a selection in a pull of a slot.
    pub(crate) fn refused_for_slot(&self, py: Python<'_>) -> PyResult<()> {
        self.tokens.refused(py, "a slot")?;
        sub_rows::whole(py, self.part)
    }
}
