//! The part of every block that a call moves: `src_offset`, `dst_offset` and `length`, in bytes.

use llm_datadist_core::{Error, ErrorKind, SubRow};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::convert::{self, only_support};
use crate::error::{invalid, raise};

arguments! {
    /// A tuple `(src_offset, dst_offset, length)`, or `None` for whole blocks.
    SubRowArg;
}

impl SubRowArg<'_, '_> {
    /// Returns the part. A length of `None` is the rest of the smaller block.
    pub(crate) fn part(self) -> PyResult<SubRow> {
        if self.0.is_none() {
            return Ok(SubRow::default());
        }
        let tuple = self.0.cast::<PyTuple>().map_err(|_| only_support("part", "['tuple']", &self.0))?;
        if tuple.len() != 3 {
            return Err(invalid(self.py(), "len(part)", tuple.len(), "3: src_offset, dst_offset and length"));
        }
        Ok(SubRow {
            src_offset: convert::int("src_offset", &tuple.get_item(0)?)?,
            dst_offset: convert::int("dst_offset", &tuple.get_item(1)?)?,
            length: convert::optional_int("length", &tuple.get_item(2)?)?,
        })
    }
}

/// Refuses a part of blocks in a pull of a slot.
pub(crate) fn whole(py: Python<'_>, part: SubRow) -> PyResult<()> {
    if part.is_whole() {
        return Ok(());
    }
    let text = "src_offset, dst_offset and length need a BlocksCacheKey";
    Err(raise(py, &Error::new(ErrorKind::InvalidArgument, text)))
}
