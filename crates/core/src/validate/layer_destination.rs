//! Checks where the bytes of a layer are written at a peer, once the peer has described the destination
//! (contract §8.2).
//!
//! `layerwise` has the checks that need only local data.

use super::cache_rules::{
    RemoteCache, batch_cache, blocks_cache, check_accessible, check_cut, cut, equal_blocks, remote_row, row,
};
use super::layerwise::LayerRows;
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::fallible;
use crate::model::{CacheKind, CacheLayout, Geometry, KvGeometry, RowList, RowSizes, Words};
use crate::plan::{Moves, Piece, Pieces, REQUEST, total_bytes};

/// Memory of a peer into which a tensor of the local cache is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerDestination {
    /// A tensor of a cache: the slot named by the key, or the blocks named by the call.
    Cache(RemoteCache),
    /// An address inside a tensor of a cache.
    Memory {
        /// Bytes from the start of the tensor.
        offset: u64,
        /// Bytes of the tensor.
        tensor_bytes: u64,
        /// Where the rows of the tensor lie. If there are gaps between them, blocks go to one row each, from the row of
        /// the address on.
        rows: RowSizes,
    },
}

/// Returns what moves of one tensor of the local cache. The result holds for every tensor with an equal
/// destination. `Err(InvalidArgument)` if the destination does not fit the source.
pub fn layer_moves(
    words: &Words,
    local: CacheLayout,
    rows: &LayerRows,
    src_row: u32,
    to: &LayerDestination,
) -> Result<Moves> {
    let here = local.geometry;
    if let LayerDestination::Cache(remote) = to {
        let there = remote.layout.geometry;
        let equal_sizes = || equal_blocks((words.src.local, here), (words.dst.remote, there));
        check_accessible(words, words.dst.remote, remote.accessible)?;
        match rows {
            LayerRows::Slot => {
                match (local.kind, remote.layout.kind) {
                    (CacheKind::Batch, kind) => batch_cache(words.dst.remote, kind)?,
                    (CacheKind::Blocks, CacheKind::Blocks) => equal_sizes()?,
                    (CacheKind::Blocks, CacheKind::Batch) => {}
                }
                remote_row(remote, ErrorKind::InvalidArgument)?;
            }
            LayerRows::Blocks { .. } => {
                blocks_cache(words.dst.remote, remote.layout.kind)?;
                equal_sizes()?;
            }
            LayerRows::SlotToBlocks { block_bytes, .. } => {
                blocks_cache(words.dst.remote, remote.layout.kind)?;
                whole_blocks(*block_bytes, there)?;
            }
        }
    }
    let (first, room) = match (to, rows) {
        (LayerDestination::Memory { offset, tensor_bytes, .. }, _) => {
            (*offset, tensor_bytes.saturating_sub(*offset))
        }
        (LayerDestination::Cache(remote), LayerRows::Slot) => {
            let geometry = remote.layout.geometry;
            (geometry.row_start(remote.row.into()), geometry.row_bytes())
        }
        (LayerDestination::Cache(remote), _) => (0, remote.layout.geometry.tensor_bytes()),
    };
    let (pieces, src_rows) = pieces(here, rows, src_row, (dst_stride(to), room))?;
    let block_bytes =
        if let LayerRows::SlotToBlocks { block_bytes, .. } = rows { *block_bytes } else { u64::MAX };
    let longest = here.row_bytes().min(block_bytes);
    if let LayerDestination::Memory { offset, rows, .. } = to {
        ensure(rows.hold(*offset, longest), || beyond_row(*rows, *offset, longest))?;
    }
    let pieces = pieces.shifted(first);
    Ok(Moves { pieces, num_tensors: 1, src_rows, ..Moves::default() })
}

/// Checks that the layers to be written are in the remote cache: `layers` layers of `per_layer` tensors each,
/// from layer `first`. `Err(InvalidArgument)` if they are not.
pub fn destination_layers(
    words: &Words,
    remote: &RemoteCache,
    first: u32,
    layers: u32,
    per_layer: u32,
) -> Result<()> {
    let tensors = remote.layout.geometry.num_tensors();
    let end = (u64::from(first) + u64::from(layers)).saturating_mul(u64::from(per_layer));
    if end <= u64::from(tensors) {
        return Ok(());
    }
    let value = format!("{first}..{}", u64::from(first) + u64::from(layers));
    let required = format!("within the {} layers of {}", tensors / per_layer.max(1), words.dst.remote);
    Err(words.dst.layers.must_be(value, required).with("remote_num_tensors", tensors))
}

/// Returns the layer of the remote cache that is the same layer of the model as `layer` of the local cache. Without layouts, it has
/// the same number. `Err(InvalidArgument)` if the remote cache does not hold it.
pub fn equal_layers(local: Option<&KvGeometry>, remote: &RemoteCache, layer: u32) -> Result<u32> {
    let (Some(local), Some(there)) = (local, remote.kv.as_deref()) else { return Ok(layer) };
    let of_model = local.layout().layers.start + layer;
    let held = &there.layout().layers;
    of_model.checked_sub(held.start).ok_or_else(|| {
        let text = format!("the remote cache has the layers {held:?} of the model, and not layer {of_model}");
        Error::new(ErrorKind::InvalidArgument, text)
    })
}

/// Returns the bytes from one written block to the next; `None` if blocks follow each other.
fn dst_stride(to: &LayerDestination) -> Option<u64> {
    match to {
        LayerDestination::Cache(remote) => Some(remote.layout.geometry.row_stride()),
        LayerDestination::Memory { rows, .. } => rows.has_gaps().then_some(rows.stride()),
    }
}

/// Returns the error for `bytes` bytes from `offset` of a tensor on, which exceed their row.
fn beyond_row(rows: RowSizes, offset: u64, bytes: u64) -> Error {
    Error::invalid("a destination address plus the bytes of a row exceeds the row of the remote cache")
        .with("offset_in_row", rows.offset_in_row(offset))
        .with("bytes", bytes)
        .with("row_bytes", rows.bytes())
        .with("row_stride", rows.stride())
}

/// Returns the pieces, with destinations counted from the start of the remote memory, and the local rows they
/// read. Blocks are written `dst_stride` bytes apart, into the `room` bytes that the peer has.
fn pieces(
    here: Geometry,
    rows: &LayerRows,
    src_row: u32,
    (dst_stride, room): (Option<u64>, u64),
) -> Result<(Pieces, RowList)> {
    let (slot, len) = (u64::from(src_row), here.row_bytes());
    match rows {
        LayerRows::Slot => {
            row("src_batch_index", slot, here)?;
            ensure(len <= room, || too_small(rows, 0, len, room))?;
            let first = Piece { src: 0, dst: 0, len };
            let pieces = Pieces::rows(first, (here.row_stride(), 0), std::iter::once((slot, 0)))?;
            Ok((pieces, [slot].into()))
        }
        LayerRows::Blocks { src, dst } => {
            numbered("src_block_indices", src, here.rows())?;
            let stride = dst_stride.unwrap_or(len);
            numbered("dst_block_indices", dst, u64::MAX / stride.max(1))?;
            total_bytes(dst.len() as u64, len)?;
            fit(rows, dst, (stride, room), |_| len)?;
            let pairs = src.iter().copied().zip(dst.iter().copied());
            let pieces = Pieces::rows(Piece { src: 0, dst: 0, len }, (here.row_stride(), stride), pairs)?;
            Ok((pieces, fallible::collect_inline(REQUEST, src.iter().copied())?))
        }
        LayerRows::SlotToBlocks { dst, block_bytes } => {
            row("src_batch_index", slot, here)?;
            let whole = here.rows() * len;
            if *block_bytes == 0 || *block_bytes >= whole {
                let range = format_args!("1 to {}, less than a tensor of src_cache", whole - 1);
                return Err(Error::out_of_range("dst_block_memory_size", block_bytes, range));
            }
            let blocks = RowSizes::new(*block_bytes, dst_stride.unwrap_or(*block_bytes));
            numbered("dst_block_indices", dst, u64::MAX / blocks.stride())?;
            check_cut(len, dst, *block_bytes)?;
            fit(rows, dst, (blocks.stride(), room), |at| (*block_bytes).min(len - at as u64 * block_bytes))?;
            Ok((cut(here.row_start(slot), len, dst, blocks)?, [slot].into()))
        }
    }
}

/// Checks that blocks `stride` bytes apart lie in the `room` bytes that the peer has. `len` returns the bytes of the block at an
/// index of the list.
fn fit(rows: &LayerRows, dst: &[u64], (stride, room): (u64, u64), len: impl Fn(usize) -> u64) -> Result<()> {
    let beyond = |(at, block): (usize, &u64)| {
        (block * stride).checked_add(len(at)).is_none_or(|end| end > room).then_some(at)
    };
    let outside = dst.iter().enumerate().find_map(beyond);
    outside.map_or(Ok(()), |at| Err(too_small(rows, at, len(at), room)))
}

fn numbered(name: &str, blocks: &[u64], count: u64) -> Result<()> {
    match blocks.iter().position(|&block| block >= count) {
        None => Ok(()),
        Some(at) => {
            let range = format_args!("0 to {}", count - 1);
            Err(Error::out_of_range(&format!("{name}[{at}]"), blocks[at], range))
        }
    }
}

fn whole_blocks(block_bytes: u64, remote: Geometry) -> Result<()> {
    if block_bytes == remote.row_bytes() {
        return Ok(());
    }
    let allowed = format!("{}, the size of a block of the remote cache", remote.row_bytes());
    Err(Error::argument("dst_block_memory_size", block_bytes, allowed))
}

/// Returns the error for piece `at` of `len` bytes, which does not fit into the `room` bytes that the peer has.
fn too_small(rows: &LayerRows, at: usize, len: u64, room: u64) -> Error {
    let error = match rows {
        LayerRows::Slot => {
            let text = "the memory of the peer is too small for a slot";
            Error::invalid(text)
        }
        LayerRows::Blocks { dst, .. } | LayerRows::SlotToBlocks { dst, .. } => {
            let block = len.max(1);
            let allowed = format!("a block of {block} bytes within the {room} bytes that the peer has there");
            let value = dst.get(at).copied().unwrap_or_default();
            Error::argument(&format!("dst_block_indices[{at}]"), value, allowed)
        }
    };
    error.with("bytes", len).with("room_bytes", room)
}
