//! Conversion of the arguments of calls without a peer: options, allocations, copies, swaps.
//!
//! Single values are converted in `convert`, pulls and pushes in `transfer`.

use std::collections::BTreeMap;

use llm_datadist_core::{CopyArgs, End};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::{BlocksArg, CacheArg, IntArg};
use crate::convert::{self, Any, only_support};
use crate::engine::Engine;

/// Source, destination and pairs of blocks.
type Swap = (End, End, Vec<(i64, i64)>);

/// Reads the options: texts by key.
pub(crate) fn texts(options: &Bound<'_, PyDict>) -> PyResult<BTreeMap<String, String>> {
    let text = |what: &str, value: &Any<'_>| match value.cast::<PyString>() {
        Ok(text) => convert::text(what, text),
        Err(_) => Err(only_support(what, "['str']", value)),
    };
    let entry = |(key, value): (Any<'_>, Any<'_>)| {
        let key = text("options dict key", &key)?;
        let value = text(&key, &value)?;
        Ok((key, value))
    };
    options.iter().map(entry).collect() // nothing in here runs Python code, which could change the dict
}

/// Reads the numbers of `copy_cache`.
pub(crate) fn copy_args(
    dst: IntArg<'_, '_>,
    src: IntArg<'_, '_>,
    offset: IntArg<'_, '_>,
    size: IntArg<'_, '_>,
) -> PyResult<CopyArgs> {
    Ok(CopyArgs {
        dst_batch_index: dst.int("dst_batch_index")?,
        src_batch_index: src.int("src_batch_index")?,
        offset: offset.int("offset")?,
        size: size.int("size")?,
    })
}

/// Checks the arguments of `swap_blocks` (contract §7.11).
pub(crate) fn swap_args(
    engine: &Engine,
    src: CacheArg<'_, '_>,
    dst: CacheArg<'_, '_>,
    src_to_dst: BlocksArg<'_, '_>,
) -> PyResult<Swap> {
    src.typed("src_cache")?;
    dst.typed("dst_cache")?;
    let (from, to) = (src.blocks("src_cache")?, dst.blocks("dst_cache")?);
    let pairs = src_to_dst.pairs("src_to_dst")?;
    Ok((from.end(engine)?, to.end(engine)?, pairs))
}
