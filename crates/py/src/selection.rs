//! Which bytes of the blocks of a pull or push move: all, those of some tokens, or a part of every block.

use std::ops::Range;

use llm_datadist_core::{Error, ErrorKind, Rows, SubRow};
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
    pub(crate) fn pull(self, remote: Vec<i64>, local: Vec<i64>) -> Rows {
        let TokenRanges { src, dst } = self.tokens;
        rows(self.part, (remote, src), (local, dst))
    }

    /// Returns the rows of a push of blocks.
    pub(crate) fn push(self, local: Vec<i64>, remote: Vec<i64>) -> Rows {
        let TokenRanges { src, dst } = self.tokens;
        rows(self.part, (remote, dst), (local, src))
    }

    /// Refuses a selection in a pull of a slot.
    pub(crate) fn refused_for_slot(&self, py: Python<'_>) -> PyResult<()> {
        self.tokens.refused(py, "a slot")?;
        sub_rows::whole(py, self.part)
    }
}

/// Blocks of one cache, and the tokens in them that move.
type BlocksOfSide = (Vec<i64>, Option<Range<u64>>);

fn rows(part: SubRow, (remote, remote_tokens): BlocksOfSide, (local, local_tokens): BlocksOfSide) -> Rows {
    if !part.is_whole() {
        Rows::SubRows { remote, local, part }
    } else if remote_tokens.is_none() && local_tokens.is_none() {
        Rows::Blocks { remote, local }
    } else {
        Rows::Sequence { remote, local, remote_tokens, local_tokens }
    }
}
