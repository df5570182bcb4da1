//! Checks pulls and pushes, and returns the bytes that move between the two caches as [`Moves`].
//!
//! [`pull_local`] and [`push_local`] check what needs only the local cache, before a request is sent to the
//! peer; [`pull`] and [`push`] repeat that and check the rest, in the order of contract §7.12 to §7.15.

use super::layer_ranges::{Layers, layers_given, per_layer, pull_layers, push_layers, within};
use super::{batch_cache, blocks_cache, copy_size, row, too_long};
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::fallible;
use crate::model::{CacheKind, CacheLayout, Geometry, Placement};
use crate::plan::{Moves, Piece, Pieces, REQUEST, total_bytes};

/// The rows that a pull reads and writes: `remote` rows of the peer's cache, into `local` ones.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum PullRows {
    /// The first `size` bytes of every tensor of a remote batch slot; −1 for the size of the local slot.
    Slot { local: u32, size: i64 },
    /// As `Slot`, from an offset in the remote slot to an offset in the local one (contract §9.1); a size of −1
    /// stands for the rest of the local slot.
    Part { local: u32, remote_offset: u64, local_offset: u64, size: i64 },
    /// Remote blocks into local ones, pair by pair.
    Blocks { remote: Vec<i64>, local: Vec<i64> },
    /// Like `Blocks`, for caches of either kind, because the C++ class does not distinguish them.
    Rows { remote: Vec<i64>, local: Vec<i64> },
    /// A remote batch slot, cut into local blocks from its start.
    SlotToBlocks { local: Vec<i64> },
}

/// The rows that a push reads and writes: `local` rows, into `remote` rows of the peer's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum PushRows {
    /// A whole local batch slot, into a remote one.
    Slot { local: u32 },
    /// Local blocks into remote ones, pair by pair.
    Blocks { local: Vec<i64>, remote: Vec<i64> },
    /// Like `Blocks`, for caches of either kind, because the C++ class does not distinguish them.
    Rows { local: Vec<i64>, remote: Vec<i64> },
}

/// The cache of a peer, as its owner describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteCache {
    /// Sizes, kind and placement.
    pub layout: CacheLayout,
    /// The batch slot that the key names; 0 for a blocks cache.
    pub row: u32,
    /// Whether its owner lets peers use it.
    pub accessible: bool,
}

/// Returns whether peers may use registered memory (contract §7.6).
///
/// `given` decides if there is one; `Err(InvalidArgument)` if it is `True` after `link()`. Otherwise,
/// remote-accessible mode (`one_sided`) allows device memory before `link()`. Without that mode, all memory
/// may be used, since it is only served under the key or id with which it was registered.
pub fn accessible(
    given: Option<bool>,
    placement: Placement,
    one_sided: bool,
    after_rank_link: bool,
) -> Result<bool> {
    match given {
        Some(true) if after_rank_link => {
            Err(Error::argument("remote_accessible", "True", "False or None after link()"))
        }
        Some(given) => Ok(given),
        None if one_sided => Ok(placement == Placement::Device && !after_rank_link),
        None => Ok(true),
    }
}

/// Checks that peers may use the cache called `name` (contract §12.4).
pub fn reachable(name: &str, accessible: bool) -> Result<()> {
    ensure(accessible, || Error::invalid(format!("{name} was registered with remote_accessible False")))
}

/// Checks what needs only the local cache of a pull.
pub fn pull_local(local: CacheLayout, rows: &PullRows, layers: Layers) -> Result<()> {
    let geometry = local.geometry;
    match rows {
        PullRows::Slot { local: slot, size } => {
            batch_cache("cache", local.kind)?;
            copy_size(*size)?;
            per_layer(layers)?;
            row("batch_index", *slot, geometry)?;
            slot_bytes("cache", *size, geometry, geometry)?;
        }
        PullRows::Part { local: slot, local_offset, size, .. } => {
            batch_cache("cache", local.kind)?;
            copy_size(*size)?;
            per_layer(layers)?;
            row("batch_index", *slot, geometry)?;
            let room = after("dst_cache_offset", *local_offset, geometry)?;
            part_bytes("cache", *size, room, room)?;
        }
        PullRows::Blocks { remote, local: blocks } | PullRows::Rows { remote, local: blocks } => {
            if matches!(rows, PullRows::Blocks { .. }) {
                blocks_cache("dst_cache", local.kind)?;
            }
            not_empty("dst_blocks", blocks)?;
            per_layer(layers)?;
            not_empty("src_blocks", remote)?;
            equally_many(("src_blocks", remote.len()), ("dst_blocks", blocks.len()))?;
            in_range("dst_blocks", blocks, geometry)?;
        }
        PullRows::SlotToBlocks { local: blocks } => {
            blocks_cache("dst_cache", local.kind)?;
            not_empty("dst_blocks", blocks)?;
            per_layer(layers)?;
            in_range("dst_blocks", blocks, geometry)?;
        }
    }
    pull_layers(geometry, layers).map(|_| ())
}

/// Checks a pull against the owner's description of the remote cache, and returns what moves.
/// `Err(CacheNotFound)` if the remote cache does not have the slot.
pub fn pull(local: CacheLayout, remote: RemoteCache, rows: &PullRows, layers: Layers) -> Result<Moves> {
    pull_local(local, rows, layers)?;
    let (own, peer) = (local.geometry, remote.layout.geometry);
    remote_row(remote, ErrorKind::CacheNotFound)?;
    let tensors = pull_layers(own, layers)?;
    if layers_given(layers.src).is_none() && peer.num_tensors() != tensors.count {
        return Err(Error::invalid(format!(
            "the remote cache has {} tensors, and the local range has {}",
            peer.num_tensors(),
            tensors.count
        )));
    }
    within("src_layer_range", tensors.src, tensors.count, "the remote cache", peer)?;
    match rows {
        PullRows::Blocks { .. } => blocks_cache("the remote cache", remote.layout.kind)?,
        PullRows::Rows { .. } => {}
        PullRows::Slot { .. } | PullRows::Part { .. } | PullRows::SlotToBlocks { .. } => {
            batch_cache("the remote cache", remote.layout.kind)?;
        }
    }
    reachable("the remote cache", remote.accessible)?;
    let slot = u64::from(remote.row) * peer.row_bytes();
    let (pieces, dst_rows) = match rows {
        PullRows::Slot { local: index, size } => {
            let len = slot_bytes("the remote cache", *size, own, peer)?;
            let index = u64::from(*index);
            (Pieces::Listed(vec![Piece { src: slot, dst: index * own.row_bytes(), len }]), vec![index])
        }
        PullRows::Part { local: index, remote_offset, local_offset, size } => {
            let index = u64::from(*index);
            let room = after("dst_cache_offset", *local_offset, own)?;
            let left = after("src_cache_offset", *remote_offset, peer)?;
            let len = part_bytes("the remote cache", *size, room, left)?;
            let dst = index * own.row_bytes() + local_offset;
            (Pieces::Listed(vec![Piece { src: slot + remote_offset, dst, len }]), vec![index])
        }
        PullRows::Blocks { remote: from, local: to } | PullRows::Rows { remote: from, local: to } => {
            equal_blocks(own, peer)?;
            in_range("src_blocks", from, peer)?;
            let to = numbers("dst_blocks", to, own)?;
            let pairs = from.iter().map(|index| index.cast_unsigned()).zip(to.iter().copied());
            (Pieces::blocks(own.row_bytes(), pairs)?, to)
        }
        PullRows::SlotToBlocks { local: to } => {
            let to = numbers("dst_blocks", to, own)?;
            (Pieces::Listed(cut(slot, peer.row_bytes(), &to, own.row_bytes())?), to)
        }
    };
    let whole = tensors.count == peer.num_tensors();
    Ok(Moves { dst_rows, ..tensors.moves(pieces, whole) })
}

/// Checks what needs only the local cache of a push.
pub fn push_local(local: CacheLayout, rows: &PushRows, layers: Layers) -> Result<()> {
    let geometry = local.geometry;
    match rows {
        PushRows::Slot { .. } => batch_cache("src_cache", local.kind)?,
        PushRows::Blocks { local: blocks, remote } | PushRows::Rows { local: blocks, remote } => {
            if matches!(rows, PushRows::Blocks { .. }) {
                blocks_cache("src_cache", local.kind)?;
            }
            not_empty("dst_blocks", remote)?;
            not_empty("src_blocks", blocks)?;
        }
    }
    push_layers(geometry, layers)?;
    match rows {
        PushRows::Slot { local: slot } => row("src_batch_index", *slot, geometry).map(drop),
        PushRows::Blocks { local: blocks, remote } | PushRows::Rows { local: blocks, remote } => {
            equally_many(("src_blocks", blocks.len()), ("dst_blocks", remote.len()))?;
            in_range("src_blocks", blocks, geometry)
        }
    }
}

/// Checks a push against the owner's description of the remote cache, and returns what moves.
pub fn push(local: CacheLayout, remote: RemoteCache, rows: &PushRows, layers: Layers) -> Result<Moves> {
    push_local(local, rows, layers)?;
    let (own, peer) = (local.geometry, remote.layout.geometry);
    reachable("the remote cache", remote.accessible)?;
    let tensors = push_layers(own, layers)?;
    within("dst_layer_range", tensors.dst, tensors.count, "the remote cache", peer)?;
    let (pieces, src_rows) = match rows {
        PushRows::Slot { local: index } => {
            batch_cache("the remote cache", remote.layout.kind)?;
            remote_row(remote, ErrorKind::InvalidArgument)?;
            let len = own.row_bytes();
            if len > peer.row_bytes() {
                return Err(Error::invalid(format!(
                    "a slot of src_cache has {len} bytes, more than the {} bytes of a slot of the remote cache",
                    peer.row_bytes()
                )));
            }
            let index = u64::from(*index);
            let dst = u64::from(remote.row) * peer.row_bytes();
            (Pieces::Listed(vec![Piece { src: index * len, dst, len }]), vec![index])
        }
        PushRows::Blocks { local: from, remote: to } | PushRows::Rows { local: from, remote: to } => {
            if matches!(rows, PushRows::Blocks { .. }) {
                blocks_cache("the remote cache", remote.layout.kind)?;
            }
            equal_blocks(own, peer)?;
            let from = numbers("src_blocks", from, own)?;
            in_range("dst_blocks", to, peer)?;
            let pairs = from.iter().copied().zip(to.iter().map(|index| index.cast_unsigned()));
            (Pieces::blocks(own.row_bytes(), pairs)?, from)
        }
    };
    let whole = tensors.count == own.num_tensors();
    if tensors.count == 0 {
        return Ok(tensors.moves(Pieces::default(), false));
    }
    Ok(Moves { src_rows, ..tensors.moves(pieces, whole) })
}

pub(super) fn remote_row(remote: RemoteCache, kind: ErrorKind) -> Result<()> {
    // To everything that names a slot, a blocks cache is one slot (contract §12.1).
    let rows = if remote.layout.kind == CacheKind::Batch { remote.layout.geometry.rows() } else { 1 };
    ensure(u64::from(remote.row) < rows, || {
        Error::new(kind, format!("the remote cache has no slot {}, only 0 to {}", remote.row, rows - 1))
    })
}

/// Returns the bytes for `size`, by default those of a local slot. They must fit into a slot of `of`, the
/// cache called `name`.
fn slot_bytes(name: &str, size: i64, local: Geometry, of: Geometry) -> Result<u64> {
    let bytes = if size == -1 { local.row_bytes() } else { size.unsigned_abs() };
    if bytes <= of.row_bytes() {
        return Ok(bytes);
    }
    Err(too_long(size, bytes, of.row_bytes(), &format!("a slot of {name}")))
}

/// Returns the bytes of a slot after the offset called `name`, at least one.
fn after(name: &str, offset: u64, of: Geometry) -> Result<u64> {
    let slot = of.row_bytes();
    if offset < slot {
        return Ok(slot - offset);
    }
    Err(Error::argument(name, offset, format_args!("below the slot size, {slot} bytes")))
}

/// Returns the bytes for `size`, by default `room`, the rest of the local slot. They must fit into the `left`
/// bytes that remain of a slot of the cache called `name`.
fn part_bytes(name: &str, size: i64, room: u64, left: u64) -> Result<u64> {
    let bytes = if size == -1 { room } else { size.unsigned_abs() };
    if bytes <= left {
        return Ok(bytes);
    }
    Err(too_long(size, bytes, left, &format!("a slot of {name} after the offset")))
}

/// Checks that a list of blocks is not empty.
pub fn not_empty(name: &str, blocks: &[i64]) -> Result<()> {
    if blocks.is_empty() { Err(Error::argument(name, "[]", "a list of at least one block")) } else { Ok(()) }
}

/// Checks that two lists have the same number of entries.
pub fn equally_many((src, left): (&str, usize), (dst, right): (&str, usize)) -> Result<()> {
    ensure(left == right, || Error::invalid(format!("{src} has {left} entries, and {dst} has {right}")))
}

/// Checks that every entry is a block of the cache.
fn in_range(name: &str, blocks: &[i64], of: Geometry) -> Result<()> {
    // One pass without a branch. Messages are only built if an entry is out of range.
    if blocks.iter().fold(true, |fits, &index| fits & (index.cast_unsigned() < of.rows())) {
        return Ok(());
    }
    let entry = |(at, &index): (usize, &i64)| {
        row(name, index, of).or_else(|_| row(&format!("{name}[{at}]"), index, of)).map(drop)
    };
    blocks.iter().enumerate().try_for_each(entry)
}

/// Returns the entries as block numbers of the cache.
fn numbers(name: &str, blocks: &[i64], of: Geometry) -> Result<Vec<u64>> {
    in_range(name, blocks, of)?;
    fallible::collect(REQUEST, blocks.iter().map(|index| index.cast_unsigned()))
}

pub(super) fn equal_blocks(local: Geometry, remote: Geometry) -> Result<()> {
    ensure(local.row_bytes() == remote.row_bytes(), || {
        Error::invalid(format!(
            "a block has {} bytes in the local cache and {} in the remote cache",
            local.row_bytes(),
            remote.row_bytes()
        ))
    })
}

/// Cuts the slot at byte `slot` into blocks from its start. The last piece may be shorter.
pub(super) fn cut(slot: u64, slot_bytes: u64, blocks: &[u64], block_bytes: u64) -> Result<Vec<Piece>> {
    let most = slot_bytes.div_ceil(block_bytes);
    if blocks.len() as u64 > most {
        let allowed =
            format!("at most {most}, because a slot has {slot_bytes} bytes and a block has {block_bytes}");
        return Err(Error::argument("len(dst_blocks)", blocks.len(), allowed));
    }
    total_bytes(blocks.len() as u64, block_bytes)?;
    let piece = |(at, &block): (usize, &u64)| {
        let start = at as u64 * block_bytes;
        Piece { src: slot + start, dst: block * block_bytes, len: block_bytes.min(slot_bytes - start) }
    };
    fallible::collect(REQUEST, blocks.iter().enumerate().map(piece))
}
