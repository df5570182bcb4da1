//! Conversion of the arguments of copies and swaps.
//!
//! Single values are converted in `convert`, pulls and pushes in `pull_push_arguments`.

use llm_datadist_core::{CopyArgs, End};
use pyo3::prelude::*;

use crate::arguments::IntArg;
use crate::blocks::BlocksArg;
use crate::engine::Engine;
use crate::local_cache::CacheArg;

/// Source, destination and pairs of blocks.
type Swap = (End, End, Vec<(i64, i64)>);

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
