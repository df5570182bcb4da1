//! Checks copies and swaps within this engine, and returns the bytes that move (contract §7.9 to §7.11, §9.2).

use std::fmt::Display;

use super::cache_rules::{batch_cache, blocks_cache, copy_size, on_device, row, too_long};
use super::sub_rows::{apart_or_equal, first_row};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{CacheLayout, Geometry, Placement, RowList, SubRow, Words};
use crate::plan::{Moves, Piece, Pieces, REQUEST, total_bytes};

/// The arguments of `copy_cache` as the caller gave them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyArgs {
    /// Batch slot that is written.
    pub dst_batch_index: u32,
    /// Batch slot that is read.
    pub src_batch_index: u32,
    /// Bytes to skip at the start of both slots.
    pub offset: u64,
    /// Bytes to copy in every tensor; −1 for the rest of the source slot.
    pub size: i64,
}

/// Checks a copy of one range of one slot in every tensor (contract §7.9). `Err(TensorCountMismatch)` if the caches
/// have different numbers of tensors; otherwise `Err(InvalidArgument)`.
pub fn copy_cache(src: CacheLayout, dst: CacheLayout, args: CopyArgs) -> Result<Moves> {
    let CopyArgs { dst_batch_index, src_batch_index, offset, size } = args;
    batch_cache("src", src.kind)?;
    batch_cache("dst", dst.kind)?;
    copy_size(size)?;
    let (from, to) = (src.geometry, dst.geometry);
    if from.num_tensors() != to.num_tensors() {
        let text = format!("src has {} tensors and dst has {}", from.num_tensors(), to.num_tensors());
        return Err(Error::new(ErrorKind::TensorCountMismatch, text));
    }
    let src_row = row("src_batch_index", src_batch_index, from)?;
    let dst_row = row("dst_batch_index", dst_batch_index, to)?;
    let room = from.row_bytes().min(to.row_bytes());
    if offset > 0 && offset >= room {
        return Err(Error::argument("offset", offset, format_args!("below the slot size, {room} bytes")));
    }
    // −1 means the rest of the *source* slot, so it fails if the destination slot is smaller.
    let bytes = if size == -1 { from.row_bytes() - offset } else { size.unsigned_abs() };
    if bytes > room - offset {
        let slots = format!("slots of {} and {} bytes", from.row_bytes(), to.row_bytes());
        return Err(too_long(size, bytes, room - offset, &format!("{slots} from offset {offset} on")));
    }
    let first = Piece { src: offset, dst: offset, len: bytes };
    let strides = (from.row_stride(), to.row_stride());
    Ok(Moves {
        pieces: Pieces::rows(first, strides, std::iter::once((src_row, dst_row)))?,
        num_tensors: from.num_tensors(),
        src_rows: [src_row].into(),
        dst_rows: [dst_row].into(),
        ..Moves::default()
    })
}

/// Checks a copy of the original's `CopyKvCache`: the same ranges, but only from device memory.
pub fn copy_kv_cache(src: CacheLayout, dst: CacheLayout, args: CopyArgs) -> Result<Moves> {
    on_device("src_cache", src.placement)?;
    copy_cache(src, dst, args)
}

/// Checks a copy in `KvCacheManager` mode: like [`copy_cache`], but from device to device only
/// (contract §9.2).
pub fn copy_on_device(src: CacheLayout, dst: CacheLayout, args: CopyArgs) -> Result<Moves> {
    on_device("dst", dst.placement)?;
    on_device("src", src.placement)?;
    copy_cache(src, dst, args)
}

/// Checks a copy of blocks within one cache (contract §7.10).
pub fn copy_blocks(cache: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    blocks_cache("cache", cache.kind)?;
    copy_within(Words::ORIGINAL, cache, pairs, SubRow::default())
}

/// Checks a copy of blocks in `KvCacheManager` mode: like [`copy_blocks`], but for rows of a device cache of
/// either kind (contract §9.1).
pub fn copy_rows(cache: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    on_device("cache", cache.placement)?;
    copy_within(Words::ORIGINAL, cache, pairs, SubRow::default())
}

/// Checks a swap of blocks between a host cache and a device cache (contract §7.11).
pub fn swap_blocks(src: CacheLayout, dst: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    blocks_cache(Words::ORIGINAL.src.cache, src.kind)?;
    blocks_cache(Words::ORIGINAL.dst.cache, dst.kind)?;
    swap_rows(src, dst, pairs)
}

/// Checks a swap in `KvCacheManager` mode: like [`swap_blocks`], but for rows of caches of either kind
/// (contract §9.1).
pub fn swap_rows(src: CacheLayout, dst: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    let words = Words::ORIGINAL;
    let checked = copy_between(words, src, dst, pairs, SubRow::default())?;
    if src.placement == dst.placement {
        return Err(mismatch(
            words,
            "placements (one must be host, the other device)",
            src.placement,
            dst.placement,
        ));
    }
    Ok(checked)
}

/// Checks a copy of the C++ class's `CopyKvBlocks`: rows of caches of either kind, but not from host to host
/// (contract, C++ §4).
pub fn copy_kv_blocks(src: CacheLayout, dst: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    let words = Words::ORIGINAL;
    let checked = copy_between(words, src, dst, pairs, SubRow::default())?;
    if (src.placement, dst.placement) == (Placement::Host, Placement::Host) {
        return Err(mismatch(words, "placements (one must be device)", src.placement, dst.placement));
    }
    Ok(checked)
}

/// Checks a copy of `part` of blocks between two caches, wherever their memory is.
pub fn copy_between(
    words: &Words,
    src: CacheLayout,
    dst: CacheLayout,
    pairs: &[(i64, i64)],
    part: SubRow,
) -> Result<Moves> {
    let (from, to) = (src.geometry, dst.geometry);
    if part.is_whole() && from.row_bytes() != to.row_bytes() {
        return Err(mismatch(words, "block sizes", from.row_bytes(), to.row_bytes()));
    }
    if from.num_tensors() != to.num_tensors() {
        return Err(mismatch(words, words.num_tensors, from.num_tensors(), to.num_tensors()));
    }
    block_moves(words, pairs, first_row(words, part, from, to)?, (from, to))
}

/// Checks a copy of `part` of blocks within one cache.
pub fn copy_within(words: &Words, cache: CacheLayout, pairs: &[(i64, i64)], part: SubRow) -> Result<Moves> {
    let of = cache.geometry;
    let first = first_row(words, part, of, of)?;
    apart_or_equal(words, first)?;
    block_moves(words, pairs, first, (of, of))
}

fn mismatch(words: &Words, what: &str, src: impl Display, dst: impl Display) -> Error {
    let (src_cache, dst_cache) = (words.src.cache, words.dst.cache);
    Error::invalid(format!("{src_cache} and {dst_cache} do not match: {what} {src} and {dst}"))
}

fn block_moves(
    words: &Words,
    pairs: &[(i64, i64)],
    first: Piece,
    (src, dst): (Geometry, Geometry),
) -> Result<Moves> {
    let blocks = (pairs.len() as u64).saturating_mul(u64::from(src.num_tensors()));
    total_bytes(blocks, first.len)?;
    let mut src_rows: RowList = fallible::inline_with_capacity(REQUEST, pairs.len())?;
    let mut dst_rows: RowList = fallible::inline_with_capacity(REQUEST, pairs.len())?;
    for &(from, to) in pairs {
        let at = src_rows.len();
        src_rows.push(row(words.src.block, from, src).map_err(|error| error.with("position", at))?);
        dst_rows.push(row(words.dst.block, to, dst).map_err(|error| error.with("position", at))?);
    }
    let rows = src_rows.iter().copied().zip(dst_rows.iter().copied());
    let pieces = Pieces::rows(first, (src.row_stride(), dst.row_stride()), rows)?;
    Ok(Moves { pieces, num_tensors: src.num_tensors(), src_rows, dst_rows, ..Moves::default() })
}
