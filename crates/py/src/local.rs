//! Conversion of the arguments of calls without a peer: options, allocations, copies, swaps.
//!
//! Single values are converted in `convert`, pulls and pushes in `transfer`.

use std::collections::BTreeMap;

use llm_datadist_core::{CacheKey, CacheKind, CopyArgs, End};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::blocks;
use crate::convert::{self, int, only_support};
use crate::datadist::DataDist;
use crate::local_cache::{self, LocalCache};

type Any<'py> = Bound<'py, PyAny>;

/// Source, destination and pairs of blocks.
type Swap = (End, End, Vec<(i64, i64)>);

/// Option texts by key.
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

/// Keys of a continuous cache name its slots.
pub(crate) fn named_rows(desc: &Any<'_>, kind: CacheKind, keys: &[Option<CacheKey>]) -> PyResult<()> {
    if kind == CacheKind::Batch && !keys.is_empty() { local_cache::slot_dim(desc) } else { Ok(()) }
}

/// The numbers of `copy_cache`.
pub(crate) fn copy_args(
    dst: &Any<'_>,
    src: &Any<'_>,
    offset: &Any<'_>,
    size: &Any<'_>,
) -> PyResult<CopyArgs> {
    Ok(CopyArgs {
        dst_batch_index: int("dst_batch_index", dst)?,
        src_batch_index: int("src_batch_index", src)?,
        offset: int("offset", offset)?,
        size: int("size", size)?,
    })
}

/// The arguments of `swap_blocks` (contract §7.11).
pub(crate) fn swap_args(
    engine: &Bound<'_, DataDist>,
    src: &Any<'_>,
    dst: &Any<'_>,
    src_to_dst: &Any<'_>,
) -> PyResult<Swap> {
    convert::cache_type("src_cache", src)?;
    convert::cache_type("dst_cache", dst)?;
    let (from, to) = (LocalCache::blocks("src_cache", src)?, LocalCache::blocks("dst_cache", dst)?);
    let pairs = blocks::pairs("src_to_dst", src_to_dst)?;
    Ok((from.end(engine)?, to.end(engine)?, pairs))
}
