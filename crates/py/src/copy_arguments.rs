//! Conversion of the arguments of copies and swaps.
//!
//! Single values are converted in `convert`, pulls and pushes in `pull_push_arguments`.

use llm_datadist_core::bindings::validate;
use llm_datadist_core::bindings::{CopyArgs, End};
use pyo3::prelude::*;

use crate::arguments::IntArg;
use crate::blocks::BlocksArg;
use crate::engine::Engine;
use crate::error::raise;
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

/// The numbers of `copy_cache`: slot written, slot read, offset and size.
type Numbers<'a, 'py> = (IntArg<'a, 'py>, IntArg<'a, 'py>, IntArg<'a, 'py>, IntArg<'a, 'py>);

/// Checks the arguments of `copy_cache` (contract §7.9): destination and source, their numbers, and the request.
pub(crate) fn copy_cache_args(
    engine: &Engine,
    (dst, src): (CacheArg<'_, '_>, CacheArg<'_, '_>),
    (dst_index, src_index, offset, size): Numbers<'_, '_>,
    req_id: IntArg<'_, '_>,
) -> PyResult<((End, End), CopyArgs)> {
    dst.typed("dst")?;
    src.typed("src")?;
    let args = copy_args(dst_index, src_index, offset, size)?;
    let (from, to) = (src.batch("src")?, dst.batch("dst")?);
    from.slots_first()?;
    to.slots_first()?;
    validate::copy_size(args.size).map_err(|error| raise(src.py(), &error))?;
    req_id.optional::<u64>("req_id")?;
    Ok(((to.end(engine)?, from.end(engine)?), args))
}

/// Checks the arguments of `copy_blocks` (contract §7.10).
pub(crate) fn copy_blocks_args(
    engine: &Engine,
    cache: CacheArg<'_, '_>,
    copy_block_info: BlocksArg<'_, '_>,
) -> PyResult<(End, Vec<(i64, i64)>)> {
    cache.typed("cache")?;
    let pairs = copy_block_info.lists("copy_block_info")?;
    Ok((cache.blocks("cache")?.end(engine)?, pairs))
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
