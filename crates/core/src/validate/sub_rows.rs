//! Checks which part of every row a call moves, and returns it as pieces of rows that may have gaps between them.

use super::cache_rules::equal_blocks;
use crate::error::{Error, Result, ensure};
use crate::model::{Geometry, SubRow};
use crate::plan::{Piece, Pieces};

/// Checks the end of `part` that lies in rows of the cache `of`: the argument called `name` is its `offset`.
/// `Err(InvalidArgument)` unless at least one byte follows the offset, and `length` bytes do if a length is given.
pub(super) fn fits_row(part: SubRow, (name, offset): (&str, u64), of: Geometry) -> Result<()> {
    let row_bytes = of.row_bytes();
    ensure(offset < row_bytes, || Error::out_of_range(name, offset, format_args!("0 to {}", row_bytes - 1)))?;
    let left = row_bytes - offset;
    match part.length {
        Some(length) if !(1..=left).contains(&length) => {
            let range = format_args!("1 to {left}, the bytes of a row after {name}={offset}");
            Err(Error::out_of_range("length", length, range))
        }
        _ => Ok(()),
    }
}

/// Returns which bytes of row 0 of `src` go to which bytes of row 0 of `dst`. Unless the call names a part, rows must have
/// equal sizes.
pub(super) fn first_row(part: SubRow, src: Geometry, dst: Geometry) -> Result<Piece> {
    let SubRow { src_offset, dst_offset, length } = part;
    fits_row(part, ("src_offset", src_offset), src)?;
    fits_row(part, ("dst_offset", dst_offset), dst)?;
    let rest = (src.row_bytes() - src_offset).min(dst.row_bytes() - dst_offset);
    Ok(Piece { src: src_offset, dst: dst_offset, len: length.unwrap_or(rest) })
}

/// Returns the pieces of a transfer between the `local` and the `remote` cache: `part` of each row of `pairs`, from `src`
/// to `dst`, which are the same two caches.
pub(super) fn between(
    part: SubRow,
    (local, remote): (Geometry, Geometry),
    (src, dst): (Geometry, Geometry),
    pairs: impl ExactSizeIterator<Item = (u64, u64)> + Clone,
) -> Result<Pieces> {
    if part.is_whole() {
        equal_blocks(local, remote)?;
    }
    Pieces::rows(first_row(part, src, dst)?, (src.row_stride(), dst.row_stride()), pairs)
}

/// Checks that, within one cache, the byte ranges of a block that are read and written are equal or disjoint. Otherwise the
/// order of the pairs would not fully decide the result.
pub(super) fn apart_or_equal(first: Piece) -> Result<()> {
    let Piece { src, dst, len } = first;
    ensure(src == dst || src.abs_diff(dst) >= len, || {
        let allowed =
            format_args!("src_offset={src}, or at least length={len} bytes before or after it, in one cache");
        Error::argument("dst_offset", dst, allowed)
    })
}
