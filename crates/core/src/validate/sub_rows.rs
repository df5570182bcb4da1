//! Checks which part of a slot or of every row a call moves, and returns pieces of rows that may have gaps between them.

use super::cache_rules::{equal_blocks, too_long};
use crate::error::{Error, Result, ensure};
use crate::model::{Geometry, SideWords, SubRow, Words};
use crate::plan::{Piece, Pieces, Side};

/// Checks the end of `part` that lies in rows of the cache `of`, whose side has the `words`, and where the part starts at
/// `offset`. `Err(InvalidArgument)` unless at least one byte follows the offset, and `length` bytes do if a length is given.
pub(super) fn fits_row(part: SubRow, (words, offset): (&SideWords, u64), of: Geometry) -> Result<()> {
    let row_bytes = of.row_bytes();
    ensure(offset < row_bytes, || words.offset.out_of_range(offset, format_args!("0 to {}", row_bytes - 1)))?;
    let left = row_bytes - offset;
    match part.length {
        Some(length) if !(1..=left).contains(&length) => {
            let start = words.offset.named(offset);
            let range = format_args!("1 to {left}, the bytes of a row after {start}");
            Err(words.length.out_of_range(length, range))
        }
        _ => Ok(()),
    }
}

/// Returns which bytes of row 0 of `src` go to which bytes of row 0 of `dst`. Unless the call names a part, rows must have
/// equal sizes.
pub(super) fn first_row(words: &Words, part: SubRow, src: Geometry, dst: Geometry) -> Result<Piece> {
    let SubRow { src_offset, dst_offset, length } = part;
    fits_row(part, (&words.src, src_offset), src)?;
    fits_row(part, (&words.dst, dst_offset), dst)?;
    let rest = (src.row_bytes() - src_offset).min(dst.row_bytes() - dst_offset);
    Ok(Piece { src: src_offset, dst: dst_offset, len: length.unwrap_or(rest) })
}

/// Returns the pieces of a transfer between the `local` cache, which is the side `local_side`, and the `remote` one: `part` of
/// the rows of each pair, of which the first is local.
pub(super) fn between(
    words: &Words,
    part: SubRow,
    local_side: Side,
    (local, remote): (Geometry, Geometry),
    pairs: impl ExactSizeIterator<Item = (u64, u64)> + Clone,
) -> Result<Pieces> {
    if part.is_whole() {
        let (here, there) = (local_side.of(words.sides()), local_side.other().of(words.sides()));
        equal_blocks((here.local, local), (there.remote, remote))?;
    }
    let (src, dst) = local_side.source_first(local, remote);
    let (first, strides) = (first_row(words, part, src, dst)?, (src.row_stride(), dst.row_stride()));
    match local_side {
        Side::Source => Pieces::rows(first, strides, pairs),
        Side::Destination => Pieces::rows(first, strides, pairs.map(|(local, remote)| (remote, local))),
    }
}

/// Checks that, within one cache, the byte ranges of a block that are read and written are equal or disjoint. Otherwise the
/// order of the pairs would not fully decide the result.
pub(super) fn apart_or_equal(words: &Words, first: Piece) -> Result<()> {
    let Piece { src, dst, len } = first;
    ensure(src == dst || src.abs_diff(dst) >= len, || {
        let (start, bytes) = (words.src.offset.named(src), words.src.length.plain(len));
        let allowed = format_args!("{start}, or at least {bytes} bytes before or after it, in one cache");
        words.dst.offset.must_be(dst, allowed)
    })
}

/// Returns the bytes of a slot after the offset called `name`, at least one.
pub(super) fn after(name: &str, offset: u64, of: Geometry) -> Result<u64> {
    let slot = of.row_bytes();
    if offset < slot {
        return Ok(slot - offset);
    }
    Err(Error::argument(name, offset, format_args!("below the slot size, {slot} bytes")))
}

/// Returns the bytes for `size`, by default `room`, the rest of the local slot. They must fit into the `left`
/// bytes from `offset` on of a slot of the cache called `name`.
pub(super) fn slot_bytes(name: &str, size: i64, room: u64, (offset, left): (u64, u64)) -> Result<u64> {
    let bytes = if size == -1 { room } else { size.unsigned_abs() };
    if bytes <= left {
        return Ok(bytes);
    }
    let part = if offset == 0 { "" } else { " after the offset" };
    Err(too_long(size, bytes, left, &format!("a slot of {name}{part}")))
}

/// Returns the bytes of a slot that is pushed, which must fit into a remote one.
pub(super) fn pushed_slot_bytes(own: Geometry, peer: Geometry) -> Result<u64> {
    let (bytes, room) = (own.row_bytes(), peer.row_bytes());
    ensure(bytes <= room, || {
        Error::invalid(format!(
            "a slot of src_cache has {bytes} bytes, more than the {room} bytes of a slot of the remote cache"
        ))
    })?;
    Ok(bytes)
}
