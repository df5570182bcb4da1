//! Checks pushes, and returns the bytes that move from the local cache to the remote one (contract §7.14, §7.15).

use std::borrow::Borrow;

use super::cache_rules::{
    RemoteCache, batch_cache, blocks_cache, check_accessible, equal_blocks, equally_many, in_range,
    not_empty, numbers, remote_row, row,
};
use super::layer_ranges::{Layers, TensorRun, push_layers, within};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{CacheLayout, Geometry};
use crate::plan::{Moves, Piece, Pieces};

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

/// A push that fits the local cache. It is not checked against the remote cache yet.
pub struct CheckedPush<R> {
    rows: R,
    tensors: TensorRun,
}

impl PushRows {
    /// Returns the rows of the local cache that are read.
    pub(crate) fn local_rows(&self) -> Result<Vec<u64>> {
        match self {
            PushRows::Slot { local } => Ok(vec![u64::from(*local)]),
            PushRows::Blocks { local, .. } | PushRows::Rows { local, .. } => numbers(local),
        }
    }

    /// Returns how many blocks the caller named.
    pub fn num_blocks(&self) -> usize {
        match self {
            PushRows::Slot { .. } => 0,
            PushRows::Blocks { local, .. } | PushRows::Rows { local, .. } => local.len(),
        }
    }
}

impl<R: Borrow<PushRows>> CheckedPush<R> {
    /// Checks what needs only the local cache, before a request is sent to the peer.
    pub fn new(local: CacheLayout, rows: R, layers: Layers) -> Result<Self> {
        let (geometry, given) = (local.geometry, rows.borrow());
        match given {
            PushRows::Slot { .. } => batch_cache("src_cache", local.kind)?,
            PushRows::Blocks { local: blocks, remote } | PushRows::Rows { local: blocks, remote } => {
                if matches!(given, PushRows::Blocks { .. }) {
                    blocks_cache("src_cache", local.kind)?;
                }
                not_empty("dst_blocks", remote)?;
                not_empty("src_blocks", blocks)?;
            }
        }
        let tensors = push_layers(geometry, layers)?;
        match given {
            PushRows::Slot { local: slot } => row("src_batch_index", *slot, geometry).map(drop)?,
            PushRows::Blocks { local: blocks, remote } | PushRows::Rows { local: blocks, remote } => {
                equally_many(("src_blocks", blocks.len()), ("dst_blocks", remote.len()))?;
                in_range("src_blocks", blocks, geometry)?;
            }
        }
        Ok(CheckedPush { rows, tensors })
    }

    /// Returns the rows that the caller named.
    pub fn rows(&self) -> &PushRows {
        self.rows.borrow()
    }

    /// Checks the push against the owner's description of the remote cache, and returns what moves from the `local` cache
    /// for which the push was checked.
    pub fn moves(&self, local: Geometry, remote: RemoteCache) -> Result<Moves> {
        let (tensors, peer) = (self.tensors, remote.layout.geometry);
        check_accessible("the remote cache", remote.accessible)?;
        within("dst_layer_range", tensors.dst, tensors.count, "the remote cache", peer)?;
        let (pieces, src_rows) = self.pieces(local, remote)?;
        if tensors.count == 0 {
            return Ok(tensors.moves(Pieces::default(), false));
        }
        let whole = tensors.count == local.num_tensors();
        Ok(Moves { src_rows, ..tensors.moves(pieces, whole) })
    }

    /// Returns the pieces that move in each tensor, and the local rows that they read.
    fn pieces(&self, own: Geometry, remote: RemoteCache) -> Result<(Pieces, Vec<u64>)> {
        let peer = remote.layout.geometry;
        Ok(match self.rows.borrow() {
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
                if matches!(self.rows.borrow(), PushRows::Blocks { .. }) {
                    blocks_cache("the remote cache", remote.layout.kind)?;
                }
                equal_blocks(own, peer)?;
                in_range("dst_blocks", to, peer)?;
                let from = numbers(from)?;
                let pairs = from.iter().copied().zip(to.iter().map(|index| index.cast_unsigned()));
                (Pieces::blocks(own.row_bytes(), pairs)?, from)
            }
        })
    }
}
