//! What two [`BlockRows`] say together: which blocks and which part of them a call of the core moves.

use std::ops::Range;

use super::block_rows::BlockRows;
use super::cache_names::RowsCache;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::SubRow;
use crate::plan::Side;
use crate::validate::{LayerRange, Layers, Rows};

/// Name of the lists in out-of-memory errors.
const LISTS: &str = "the lists of a call";

/// Returns the rows and the layers of a pull or push. `local` is of this engine, is the side `local_side`, and has
/// `tensors_per_layer` tensors in each layer; `remote` is of a peer. The core checks them against both caches.
pub(super) fn with_peer(
    local_side: Side,
    local: &BlockRows,
    remote: &BlockRows,
    tensors_per_layer: u32,
) -> Result<(Rows, Layers)> {
    let (src, dst) = local_side.source_first(local, remote);
    let layers = Layers { src: layers_of(src), dst: layers_of(dst), tensors_per_layer };
    let part = sub_row(dst, src)?;
    let (local_tokens, remote_tokens) = (local.part().tokens.clone(), remote.part().tokens.clone());
    let (written, read) = (dst.blocks().len(), src.blocks().len());
    if local_tokens.is_none() && remote_tokens.is_none() && written != read && written > 0 && read > 0 {
        let required = format!("{read} blocks, as many as src has, or rows with tokens");
        return Err(Error::argument("dst", format!("{written} blocks"), required));
    }
    let (local, remote) = (copied(local)?, copied(remote)?);
    let rows = if !part.is_whole() {
        Rows::SubRows { remote, local, part }
    } else if local_tokens.is_some() || remote_tokens.is_some() {
        Rows::Sequence { remote, local, remote_tokens, local_tokens }
    } else {
        Rows::Blocks { remote, local }
    };
    Ok((rows, layers))
}

/// Returns the pairs of a copy within this engine, each with its source first, and the part of every block. A copy moves
/// whole layers, and no tokens.
pub(super) fn within_engine(dst: &BlockRows, src: &BlockRows) -> Result<(Vec<(i64, i64)>, SubRow)> {
    for (name, rows) in [("dst", dst), ("src", src)] {
        if rows.part().layers.is_some() || rows.part().tokens.is_some() {
            return Err(Error::argument(name, rows, "rows without layers and tokens in a copy"));
        }
    }
    let (written, read) = (dst.blocks(), src.blocks());
    if written.len() != read.len() {
        let (many, required) =
            (format!("{} blocks", written.len()), format!("{}, as many as src has", read.len()));
        return Err(Error::argument("dst", many, required));
    }
    let pairs = read.iter().copied().zip(written.iter().copied());
    Ok((fallible::collect(LISTS, pairs)?, sub_row(dst, src)?))
}

fn layers_of(rows: &BlockRows) -> Option<LayerRange> {
    rows.part().layers.as_ref().map(layer_range)
}

/// Returns layers as the engine counts them. `BlockRows::with_part` has checked that they fit.
pub(super) fn layer_range(layers: &Range<u64>) -> LayerRange {
    let narrow = |layer: u64| u32::try_from(layer).unwrap_or(u32::MAX);
    LayerRange { first: narrow(layers.start), end: narrow(layers.end) }
}

/// Returns the part of every block. Both sides must have as many bytes of each block; rows without a range have all bytes.
fn sub_row(dst: &BlockRows, src: &BlockRows) -> Result<SubRow> {
    if dst.part().bytes.is_none() && src.part().bytes.is_none() {
        return Ok(SubRow::default());
    }
    if dst.part().tokens.is_some() || src.part().tokens.is_some() {
        let text = "one end is narrowed by bytes and the other one by tokens";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let (written, read) = (bytes_of("dst", dst)?, bytes_of("src", src)?);
    let length = written.end - written.start;
    if length != read.end - read.start {
        let (many, required) =
            (format!("{length} bytes of a block"), format!("{}, as many as src has", read.end - read.start));
        return Err(Error::argument("dst", many, required));
    }
    Ok(SubRow { src_offset: read.start, dst_offset: written.start, length: Some(length) })
}

/// Returns which bytes of each block move. How many bytes the blocks of a peer have is not known here.
fn bytes_of(name: &str, rows: &BlockRows) -> Result<Range<u64>> {
    match (&rows.part().bytes, rows.cache()) {
        (Some(bytes), _) => Ok(bytes.clone()),
        (None, RowsCache::Own(cache)) => Ok(0..cache.row_bytes),
        (None, RowsCache::Peer(_)) => {
            Err(Error::argument(name, rows, "narrowed by bytes, as the other end is"))
        }
    }
}

fn copied(rows: &BlockRows) -> Result<Vec<i64>> {
    fallible::collect(LISTS, rows.blocks().iter().copied())
}
