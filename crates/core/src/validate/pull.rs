//! Checks pulls, and returns the bytes that move from the remote cache to the local one (contract §7.12, §7.13).

use std::borrow::Borrow;
use std::ops::Range;

use super::by_runs::{equal_rows, part_of_mixed, planned};
use super::cache_rules::{
    RemoteCache, batch_cache, blocks_cache, check_accessible, copy_size, cut, equally_many, in_range,
    not_empty, numbers, remote_row, row, too_long,
};
use super::conversion::{Conversion, LocalCache, TokenMove, equally_many_tokens, parts_alike, some_tokens};
use super::layer_ranges::{Layers, TensorRun, layers_given, pull_layers, tensors_per_layer, within};
use super::sub_rows::between;
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::model::{Geometry, SubRow};
use crate::plan::{CacheCount, KvPart, Moves, Piece, Pieces};

/// The rows that a pull reads and writes: `remote` rows of the peer's cache, into `local` ones.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum PullRows {
    /// `size` bytes of every tensor of a remote batch slot, from an offset in that slot to an offset in the local
    /// one (contract §9.1); a size of −1 stands for the rest of the local slot.
    Slot { local: u32, remote_offset: u64, local_offset: u64, size: i64 },
    /// Remote blocks into local ones, pair by pair.
    Blocks { remote: Vec<i64>, local: Vec<i64> },
    /// Like `Blocks`, for caches of either kind, because the C++ class does not distinguish them.
    Rows { remote: Vec<i64>, local: Vec<i64> },
    /// Like `Blocks`, but only a part of every block.
    SubRows { remote: Vec<i64>, local: Vec<i64>, part: SubRow },
    /// A remote batch slot, cut into local blocks from its start.
    SlotToBlocks { local: Vec<i64> },
    /// Some tokens of a sequence whose remote and local blocks are given in the order of its tokens. Both caches must
    /// have KV layouts. Without a range, as many tokens move as the other side's range has, or both lists can hold.
    Sequence {
        remote: Vec<i64>,
        local: Vec<i64>,
        remote_tokens: Option<Range<u64>>,
        local_tokens: Option<Range<u64>>,
    },
}

/// A pull that fits the local cache. It is not checked against the remote cache yet.
pub struct CheckedPull<R> {
    rows: R,
    local: LocalCache,
    /// The layers and heads that are read if rows are converted; all of the local cache if `None`.
    parts: Option<Vec<KvPart>>,
    /// How many tokens must move if rows are converted, because as many are read from the other owners.
    tokens: Option<u64>,
    tensors: TensorRun,
    /// Whether the caller named the layers that are read, and whether it named any layers.
    src_layers_given: bool,
    layers_given: bool,
}

impl PullRows {
    /// Returns the rows of a pull of the first `size` bytes of every tensor of a remote batch slot; −1 for the size
    /// of the local slot.
    pub const fn slot(local: u32, size: i64) -> PullRows {
        PullRows::Slot { local, remote_offset: 0, local_offset: 0, size }
    }

    /// Returns the part of every block that moves.
    fn part(&self) -> SubRow {
        if let PullRows::SubRows { part, .. } = self { *part } else { SubRow::default() }
    }

    /// Returns the rows of the local cache that are written.
    pub(crate) fn local_rows(&self) -> Result<Vec<u64>> {
        match self {
            PullRows::Slot { local, .. } => Ok(vec![u64::from(*local)]),
            PullRows::Blocks { local, .. }
            | PullRows::Rows { local, .. }
            | PullRows::SubRows { local, .. }
            | PullRows::Sequence { local, .. }
            | PullRows::SlotToBlocks { local } => numbers(local),
        }
    }

    /// Returns how many blocks the caller named.
    pub fn num_blocks(&self) -> usize {
        match self {
            PullRows::Slot { .. } => 0,
            PullRows::Blocks { local, .. }
            | PullRows::Rows { local, .. }
            | PullRows::SubRows { local, .. }
            | PullRows::Sequence { local, .. }
            | PullRows::SlotToBlocks { local } => local.len(),
        }
    }
}

impl PullRows {
    /// Returns `Err(InvalidArgument)` for a part of a slot, because it is not known which tokens that is.
    fn whole_slot(&self) -> Result<()> {
        let PullRows::Slot { remote_offset, local_offset, size, .. } = self else { return Ok(()) };
        ensure(self.is_whole_slot(), || {
            Error::invalid(
                "a pull between different KV layouts moves whole slots: size must be -1 and both offsets 0",
            )
            .with("size", size)
            .with("src_cache_offset", remote_offset)
            .with("dst_cache_offset", local_offset)
        })
    }

    /// Returns whether this is a slot without an offset and a size.
    fn is_whole_slot(&self) -> bool {
        matches!(self, PullRows::Slot { remote_offset: 0, local_offset: 0, size: -1, .. })
    }
}

impl<R: Borrow<PullRows>> CheckedPull<R> {
    /// Checks what needs only the local cache, before a request is sent to the peer.
    pub fn new(local: impl Into<LocalCache>, rows: R, layers: Layers) -> Result<Self> {
        let cache = local.into();
        let (local, given) = (cache.layout, rows.borrow());
        let geometry = local.geometry;
        match given {
            PullRows::Slot { local: slot, local_offset, size, .. } => {
                batch_cache("cache", local.kind)?;
                copy_size(*size)?;
                tensors_per_layer(layers.tensors_per_layer)?;
                row("batch_index", *slot, geometry)?;
                ensure(cache.mixed.is_none() || given.is_whole_slot(), || part_of_mixed(*size))?;
                let room = after("dst_cache_offset", *local_offset, geometry)?;
                slot_bytes("cache", *size, room, (*local_offset, room))?;
            }
            PullRows::Blocks { remote, local: blocks }
            | PullRows::SubRows { remote, local: blocks, .. }
            | PullRows::Rows { remote, local: blocks } => {
                if !matches!(given, PullRows::Rows { .. }) {
                    blocks_cache("dst_cache", local.kind)?;
                }
                not_empty("dst_blocks", blocks)?;
                tensors_per_layer(layers.tensors_per_layer)?;
                not_empty("src_blocks", remote)?;
                if !cache.has_sequences() || matches!(given, PullRows::SubRows { .. }) {
                    equally_many(("src_blocks", remote.len()), ("dst_blocks", blocks.len()))?;
                }
                in_range("dst_blocks", blocks, geometry)?;
            }
            PullRows::Sequence { remote, local: blocks, remote_tokens, local_tokens } => {
                check_sequence(&cache, (remote, blocks), (remote_tokens.as_ref(), local_tokens.as_ref()))?;
            }
            PullRows::SlotToBlocks { local: blocks } => {
                blocks_cache("dst_cache", local.kind)?;
                not_empty("dst_blocks", blocks)?;
                tensors_per_layer(layers.tensors_per_layer)?;
                in_range("dst_blocks", blocks, geometry)?;
            }
        }
        let tensors = pull_layers(geometry, layers)?;
        let offset = ("dst_offset", given.part().dst_offset);
        cache.fits_rows(given.part(), offset, (tensors.dst, tensors.count))?;
        let [src_layers_given, dst] = [layers.src, layers.dst].map(|range| layers_given(range).is_some());
        Ok(CheckedPull {
            rows,
            local: cache,
            parts: None,
            tokens: None,
            tensors,
            src_layers_given,
            layers_given: src_layers_given || dst,
        })
    }

    /// Returns the same pull of some layers and heads only, one of several owners. `tokens` is as for
    /// [`must_move`](Self::must_move).
    pub fn of_parts(&self, parts: Vec<KvPart>, tokens: Option<u64>) -> CheckedPull<&PullRows> {
        CheckedPull {
            rows: self.rows(),
            local: self.local.clone(),
            parts: Some(parts),
            tokens,
            tensors: self.tensors,
            src_layers_given: self.src_layers_given,
            layers_given: self.layers_given,
        }
    }

    /// Sets how many tokens move from each owner. A [`conversion`](Self::conversion) of another number fails.
    pub fn must_move(&mut self, tokens: Option<u64>) {
        self.tokens = tokens;
    }

    /// Returns what moves if it takes several plans: if the rows of the two caches have different KV layouts, the caller
    /// named tokens, or the tensors of a cache differ. `None` if one plan is enough; [`moves`](Self::moves) returns it then.
    /// `Err(InvalidArgument)` if the layouts do not fit, or if only one cache has one.
    pub fn conversion(&self, remote: &RemoteCache) -> Result<Option<Conversion>> {
        if self.local.is_mixed_with(remote) {
            return self.by_runs(remote).map(Some);
        }
        let Some((dst, src)) = self.local.layouts(remote)? else { return Ok(None) };
        let rows = self.rows();
        self.check_remote(remote)?;
        if let PullRows::SubRows { .. } = rows {
            let text = "several owners need whole blocks, or ranges of tokens";
            ensure(self.parts.is_none(), || Error::invalid(text))?;
            return parts_alike(dst, remote, self.layers_given).map(|()| None);
        }
        let src_blocks = match rows {
            PullRows::Blocks { remote: blocks, .. }
            | PullRows::SubRows { remote: blocks, .. }
            | PullRows::Rows { remote: blocks, .. }
            | PullRows::Sequence { remote: blocks, .. } => {
                in_range("src_blocks", blocks, remote.layout.geometry)?;
                numbers(blocks)?
            }
            PullRows::Slot { .. } | PullRows::SlotToBlocks { .. } => vec![u64::from(remote.row)],
        };
        let (src_tokens, dst_tokens) = match rows {
            PullRows::Sequence { remote_tokens, local_tokens, .. } => {
                (remote_tokens.clone(), local_tokens.clone())
            }
            _ => (None, None),
        };
        let dst_blocks = rows.local_rows()?;
        let tokens =
            TokenMove { src, dst, src_blocks: &src_blocks, dst_blocks: &dst_blocks, src_tokens, dst_tokens };
        if tokens.is_plain(self.layers_given)? && self.parts.is_none() {
            return Ok(None);
        }
        rows.whole_slot()?;
        let conversion = match &self.parts {
            Some(parts) => tokens.plan(parts),
            None => tokens.plan(&[KvPart::of(dst.layout())]),
        }?;
        conversion.tokens.map_or(Ok(()), |tokens| equally_many_tokens(tokens, self.tokens))?;
        Ok(Some(conversion))
    }

    /// Checks kind, slot and access of the remote cache.
    fn check_remote(&self, remote: &RemoteCache) -> Result<()> {
        remote_row(remote, ErrorKind::CacheNotFound)?;
        match self.rows() {
            PullRows::Blocks { .. } | PullRows::SubRows { .. } | PullRows::Sequence { .. } => {
                blocks_cache("the remote cache", remote.layout.kind)?;
            }
            PullRows::Rows { .. } => {}
            PullRows::Slot { .. } | PullRows::SlotToBlocks { .. } => {
                batch_cache("the remote cache", remote.layout.kind)?;
            }
        }
        check_accessible("the remote cache", remote.accessible)
    }

    /// Returns the rows that the caller named.
    pub fn rows(&self) -> &PullRows {
        self.rows.borrow()
    }

    /// Checks the pull against the owner's description of the remote cache, and returns what moves if rows move as they
    /// are.
    /// `Err(CacheNotFound)` if the remote cache does not have the slot.
    pub fn moves(&self, remote: &RemoteCache) -> Result<Moves> {
        let (tensors, peer) = (self.tensors, remote.equal_tensors()?.geometry);
        let (pieces, dst_rows) = self.checked_pieces(remote, (self.local.layout.geometry, peer))?;
        let whole = tensors.count == peer.num_tensors();
        Ok(Moves { dst_rows, ..tensors.moves(pieces, whole) })
    }

    /// Plans the moves between caches of which one or both have tensors that differ.
    fn by_runs(&self, remote: &RemoteCache) -> Result<Conversion> {
        // Neither a sequence of tokens nor a part of a group has a meaning without KV layouts.
        self.local.layouts(remote)?;
        let (tensors, rows) = (self.tensors, self.rows());
        let sides = (remote.into(), (&self.local).into());
        let planned = planned(tensors, sides, CacheCount::Two, |src, dst| {
            let (src, dst) = (src.geometry, dst.geometry);
            match rows {
                PullRows::Slot { size, .. } => {
                    ensure(rows.is_whole_slot(), || part_of_mixed(*size))?;
                    equal_rows(src, dst)?;
                }
                PullRows::Blocks { .. } | PullRows::Rows { .. } | PullRows::Sequence { .. } => {
                    equal_rows(src, dst)?;
                }
                PullRows::SubRows { .. } | PullRows::SlotToBlocks { .. } => {}
            }
            let (pieces, dst_rows) = self.checked_pieces(remote, (dst, src))?;
            Ok(Moves { dst_rows, ..tensors.moves(pieces, false) })
        })?;
        let first = u32::try_from(tensors.src).unwrap_or(u32::MAX);
        let whole_source = tensors.count == remote.layout.geometry.num_tensors();
        let read_tensors = Some((first, tensors.count));
        Ok(Conversion { plans: planned.plans, whole_source, read_tensors, tokens: None })
    }

    /// Checks the pull against a remote cache whose tensors have the sizes `peer`, and returns the pieces that move in each
    /// tensor, and the local rows that they write. Local tensors have the sizes `own`.
    fn checked_pieces(
        &self,
        remote: &RemoteCache,
        (own, peer): (Geometry, Geometry),
    ) -> Result<(Pieces, Vec<u64>)> {
        let tensors = self.tensors;
        remote_row(remote, ErrorKind::CacheNotFound)?;
        if !self.src_layers_given && peer.num_tensors() != tensors.count {
            return Err(Error::invalid(format!(
                "the remote cache has {} tensors, and the local range has {}",
                peer.num_tensors(),
                tensors.count
            )));
        }
        within("src_layer_range", tensors.src, tensors.count, "the remote cache", peer)?;
        self.check_remote(remote)?;
        self.pieces(remote, (own, peer))
    }

    /// Returns the pieces that move in each tensor, and the local rows that they write.
    fn pieces(&self, remote: &RemoteCache, (own, peer): (Geometry, Geometry)) -> Result<(Pieces, Vec<u64>)> {
        let slot = peer.row_start(remote.row.into());
        Ok(match self.rows.borrow() {
            PullRows::Slot { local: index, remote_offset, local_offset, size } => {
                let index = u64::from(*index);
                let room = after("dst_cache_offset", *local_offset, own)?;
                let left = after("src_cache_offset", *remote_offset, peer)?;
                let len = slot_bytes("the remote cache", *size, room, (*remote_offset, left))?;
                let dst = own.row_start(index) + local_offset;
                (Pieces::Listed(vec![Piece { src: slot + remote_offset, dst, len }]), vec![index])
            }
            PullRows::Blocks { remote: from, local: to }
            | PullRows::SubRows { remote: from, local: to, .. }
            | PullRows::Rows { remote: from, local: to }
            | PullRows::Sequence { remote: from, local: to, .. } => {
                in_range("src_blocks", from, peer)?;
                let to = numbers(to)?;
                let pairs = from.iter().map(|index| index.cast_unsigned()).zip(to.iter().copied());
                (between(self.rows().part(), (own, peer), (peer, own), pairs)?, to)
            }
            PullRows::SlotToBlocks { local: to } => {
                let to = numbers(to)?;
                (Pieces::Listed(cut(slot, peer.row_bytes(), &to, own.row_sizes())?), to)
            }
        })
    }
}

/// Checks a move of tokens into `blocks` of the local cache.
fn check_sequence(
    cache: &LocalCache,
    (remote, blocks): (&[i64], &[i64]),
    (src_tokens, dst_tokens): (Option<&Range<u64>>, Option<&Range<u64>>),
) -> Result<()> {
    blocks_cache("dst_cache", cache.layout.kind)?;
    cache.needs_layout()?;
    some_tokens("src_tokens", src_tokens)?;
    some_tokens("dst_tokens", dst_tokens)?;
    not_empty("dst_blocks", blocks)?;
    not_empty("src_blocks", remote)?;
    in_range("dst_blocks", blocks, cache.layout.geometry)
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
/// bytes from `offset` on of a slot of the cache called `name`.
fn slot_bytes(name: &str, size: i64, room: u64, (offset, left): (u64, u64)) -> Result<u64> {
    let bytes = if size == -1 { room } else { size.unsigned_abs() };
    if bytes <= left {
        return Ok(bytes);
    }
    let part = if offset == 0 { "" } else { " after the offset" };
    Err(too_long(size, bytes, left, &format!("a slot of {name}{part}")))
}
