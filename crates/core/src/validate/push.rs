//! Checks pushes, and returns the bytes that move from the local cache to the remote one (contract §7.14, §7.15).

use std::borrow::Borrow;
use std::ops::Range;

use super::by_runs::{equal_rows, planned};
use super::cache_rules::{
    RemoteCache, batch_cache, blocks_cache, check_accessible, equally_many, in_range, not_empty, numbers,
    remote_row, row,
};
use super::conversion::{Conversion, LocalCache, TokenMove, equally_many_tokens, parts_alike, some_tokens};
use super::layer_ranges::{Layers, TensorRun, push_layers, within};
use super::sub_rows::between;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Geometry, KvGeometry, SubRow};
use crate::plan::{CacheCount, KvPart, Moves, Piece, Pieces};

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
    /// Like `Blocks`, but only a part of every block.
    SubRows { local: Vec<i64>, remote: Vec<i64>, part: SubRow },
    /// Some tokens of a sequence, as in [`PullRows::Sequence`](super::PullRows::Sequence).
    Sequence {
        local: Vec<i64>,
        remote: Vec<i64>,
        local_tokens: Option<Range<u64>>,
        remote_tokens: Option<Range<u64>>,
    },
}

/// A push that fits the local cache. It is not checked against the remote cache yet.
pub struct CheckedPush<R> {
    rows: R,
    local: LocalCache,
    /// How many tokens must move if both caches have KV layouts, because as many are written to the other owners.
    tokens: Option<u64>,
    tensors: TensorRun,
    /// Number of tensors of a layer.
    tensors_per_layer: u32,
    /// Whether the caller named layers.
    layers_given: bool,
}

/// What a push writes to one of several owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerShare {
    /// Rows as they are, because no cache has a KV layout.
    Rows,
    /// This many tokens, of the layers and heads that both caches hold.
    Tokens(u64),
    /// Nothing, because the caches have no layer or no head in common. As many tokens would move.
    Nothing(u64),
}

impl OwnerShare {
    /// Returns how many tokens move, or would.
    pub fn tokens(self) -> Option<u64> {
        match self {
            OwnerShare::Rows => None,
            OwnerShare::Tokens(tokens) | OwnerShare::Nothing(tokens) => Some(tokens),
        }
    }
}

impl PushRows {
    /// Returns the part of every block that moves.
    fn part(&self) -> SubRow {
        if let PushRows::SubRows { part, .. } = self { *part } else { SubRow::default() }
    }

    /// Returns the rows of the local cache that are read.
    pub(crate) fn local_rows(&self) -> Result<Vec<u64>> {
        match self {
            PushRows::Slot { local } => Ok(vec![u64::from(*local)]),
            PushRows::Blocks { local, .. }
            | PushRows::Rows { local, .. }
            | PushRows::SubRows { local, .. }
            | PushRows::Sequence { local, .. } => numbers(local),
        }
    }

    /// Returns the local slot that is read, if it is one.
    pub(crate) fn slot(&self) -> Option<u32> {
        if let PushRows::Slot { local } = self { Some(*local) } else { None }
    }

    /// Returns how many blocks the caller named.
    pub fn num_blocks(&self) -> usize {
        match self {
            PushRows::Slot { .. } => 0,
            PushRows::Blocks { local, .. }
            | PushRows::Rows { local, .. }
            | PushRows::SubRows { local, .. }
            | PushRows::Sequence { local, .. } => local.len(),
        }
    }
}

impl<R: Borrow<PushRows>> CheckedPush<R> {
    /// Checks what needs only the local cache, before a request is sent to the peer.
    pub fn new(local: impl Into<LocalCache>, rows: R, layers: Layers) -> Result<Self> {
        let cache = local.into();
        let (local, given) = (cache.layout, rows.borrow());
        let geometry = local.geometry;
        match given {
            PushRows::Slot { .. } => batch_cache("src_cache", local.kind)?,
            PushRows::Blocks { local: blocks, remote }
            | PushRows::SubRows { local: blocks, remote, .. }
            | PushRows::Rows { local: blocks, remote }
            | PushRows::Sequence { local: blocks, remote, .. } => {
                if !matches!(given, PushRows::Rows { .. }) {
                    blocks_cache("src_cache", local.kind)?;
                }
                if let PushRows::Sequence { local_tokens, remote_tokens, .. } = given {
                    cache.needs_layout()?;
                    some_tokens("src_tokens", local_tokens.as_ref())?;
                    some_tokens("dst_tokens", remote_tokens.as_ref())?;
                }
                not_empty("dst_blocks", remote)?;
                not_empty("src_blocks", blocks)?;
            }
        }
        let tensors = push_layers(geometry, cache.layers(layers))?;
        match given {
            PushRows::Slot { local: slot } => row("src_batch_index", *slot, geometry).map(drop)?,
            PushRows::Blocks { local: blocks, remote }
            | PushRows::SubRows { local: blocks, remote, .. }
            | PushRows::Rows { local: blocks, remote }
            | PushRows::Sequence { local: blocks, remote, .. } => {
                if !cache.has_sequences() || matches!(given, PushRows::SubRows { .. }) {
                    equally_many(("src_blocks", blocks.len()), ("dst_blocks", remote.len()))?;
                }
                in_range("src_blocks", blocks, geometry)?;
                let offset = ("src_offset", given.part().src_offset);
                cache.fits_rows(given.part(), offset, (tensors.src, tensors.count))?;
            }
        }
        let layers_given = layers.src.or(layers.dst).is_some();
        let tensors_per_layer = layers.tensors_per_layer;
        Ok(CheckedPush { rows, local: cache, tokens: None, tensors, tensors_per_layer, layers_given })
    }

    /// Returns what moves if it takes several plans, as [`CheckedPull::conversion`](super::CheckedPull::conversion) does.
    /// Between different KV layouts, these are the layers and heads that both caches hold.
    pub fn conversion(&self, remote: &RemoteCache) -> Result<Option<Conversion>> {
        if self.local.is_mixed_with(remote) {
            return self.by_runs(remote).map(Some);
        }
        let Some((src, dst)) = self.local.layouts(remote)? else { return Ok(None) };
        let rows = self.rows();
        self.check_remote(remote)?;
        if let PushRows::SubRows { .. } = rows {
            return parts_alike(src, remote, self.layers_given).map(|()| None);
        }
        self.with_tokens((src, dst), remote, |tokens| {
            let plain = tokens.is_plain(self.layers_given)?;
            if self.tokens.is_some() {
                equally_many_tokens(tokens.tokens()?, self.tokens)?;
            }
            if plain {
                return Ok(None);
            }
            let part = KvPart::common(src.layout(), dst.layout())?;
            tokens.plan(&[part]).map(Some)
        })
    }

    /// Checks everything about the push that can be checked before it begins, for one of several owners, and returns what
    /// it writes there.
    pub fn share(&self, remote: &RemoteCache) -> Result<OwnerShare> {
        let layouts = if self.local.is_mixed_with(remote) { None } else { self.local.layouts(remote)? };
        let tokens = match layouts {
            Some((src, dst)) => {
                self.check_remote(remote)?;
                let tokens = self.with_tokens((src, dst), remote, |tokens| {
                    tokens.is_plain(self.layers_given)?;
                    let count = tokens.tokens()?;
                    equally_many_tokens(count, self.tokens).map(|()| count)
                })?;
                let whole_rows = !matches!(self.rows(), PushRows::SubRows { .. });
                if whole_rows && KvPart::common(src.layout(), dst.layout()).is_err() {
                    return Ok(OwnerShare::Nothing(tokens));
                }
                Some(tokens)
            }
            None => None,
        };
        if self.conversion(remote)?.is_none() {
            self.moves(remote)?;
        }
        Ok(tokens.map_or(OwnerShare::Rows, OwnerShare::Tokens))
    }

    /// Returns the same push for one of several owners, to each of which `tokens` tokens move.
    pub fn of_owner(&self, tokens: Option<u64>) -> CheckedPush<&PushRows> {
        let local = self.local.clone();
        CheckedPush {
            rows: self.rows(),
            local,
            tokens,
            tensors: self.tensors,
            tensors_per_layer: self.tensors_per_layer,
            layers_given: self.layers_given,
        }
    }

    /// Calls `work` with the tokens that move between the layouts of the local and the remote cache.
    fn with_tokens<T>(
        &self,
        (src, dst): (&KvGeometry, &KvGeometry),
        remote: &RemoteCache,
        work: impl FnOnce(&TokenMove<'_>) -> Result<T>,
    ) -> Result<T> {
        let rows = self.rows();
        let dst_blocks = match rows {
            PushRows::Slot { .. } => vec![u64::from(remote.row)],
            PushRows::Blocks { remote: blocks, .. }
            | PushRows::SubRows { remote: blocks, .. }
            | PushRows::Rows { remote: blocks, .. }
            | PushRows::Sequence { remote: blocks, .. } => {
                in_range("dst_blocks", blocks, remote.layout.geometry)?;
                numbers(blocks)?
            }
        };
        let (src_tokens, dst_tokens) = match rows {
            PushRows::Sequence { local_tokens, remote_tokens, .. } => {
                (local_tokens.clone(), remote_tokens.clone())
            }
            _ => (None, None),
        };
        let src_blocks = rows.local_rows()?;
        work(&TokenMove {
            src,
            dst,
            src_blocks: &src_blocks,
            dst_blocks: &dst_blocks,
            src_tokens,
            dst_tokens,
        })
    }

    /// Checks kind, slot and access of the remote cache.
    fn check_remote(&self, remote: &RemoteCache) -> Result<()> {
        check_accessible("the remote cache", remote.accessible)?;
        match self.rows() {
            PushRows::Slot { .. } => {
                batch_cache("the remote cache", remote.layout.kind)?;
                remote_row(remote, ErrorKind::InvalidArgument)
            }
            PushRows::Blocks { .. } | PushRows::SubRows { .. } | PushRows::Sequence { .. } => {
                blocks_cache("the remote cache", remote.layout.kind)
            }
            PushRows::Rows { .. } => Ok(()),
        }
    }

    /// Returns the number of tensors of a layer if the local cache has fewer tensors. Then nothing moves, which is no error
    /// (contract §7.14).
    pub fn layer_without_tensors(&self) -> Option<u32> {
        (self.tensors.count == 0).then_some(self.tensors_per_layer)
    }

    /// Returns the rows that the caller named.
    pub fn rows(&self) -> &PushRows {
        self.rows.borrow()
    }

    /// Checks the push against the owner's description of the remote cache, and returns what moves if rows move as they
    /// are.
    pub fn moves(&self, remote: &RemoteCache) -> Result<Moves> {
        let (tensors, peer) = (self.tensors, remote.equal_tensors()?.geometry);
        check_accessible("the remote cache", remote.accessible)?;
        within("dst_layer_range", tensors.dst, tensors.count, "the remote cache", peer)?;
        let (pieces, src_rows) = self.pieces(remote, (self.local.layout.geometry, peer))?;
        if tensors.count == 0 {
            return Ok(tensors.moves(Pieces::default(), false));
        }
        let whole = tensors.count == self.local.layout.geometry.num_tensors();
        Ok(Moves { src_rows, ..tensors.moves(pieces, whole) })
    }

    /// Plans the moves between caches of which one or both have tensors that differ.
    fn by_runs(&self, remote: &RemoteCache) -> Result<Conversion> {
        // A sequence of tokens has no meaning without KV layouts.
        self.local.layouts(remote)?;
        let (tensors, peer) = (self.tensors, remote.layout.geometry);
        check_accessible("the remote cache", remote.accessible)?;
        within("dst_layer_range", tensors.dst, tensors.count, "the remote cache", peer)?;
        let sides = ((&self.local).into(), remote.into());
        let planned = planned(tensors, sides, CacheCount::Two, |src, dst| {
            let (src, dst) = (src.geometry, dst.geometry);
            if !matches!(self.rows(), PushRows::SubRows { .. }) {
                equal_rows(src, dst)?;
            }
            let (pieces, src_rows) = self.pieces(remote, (src, dst))?;
            Ok(Moves { src_rows, ..tensors.moves(pieces, false) })
        })?;
        let first = u32::try_from(tensors.src).unwrap_or(u32::MAX);
        let whole_source = tensors.count == self.local.layout.geometry.num_tensors();
        let read_tensors = Some((first, tensors.count));
        Ok(Conversion { plans: planned.plans, whole_source, read_tensors, tokens: None })
    }

    /// Returns the pieces that move in each tensor, and the local rows that they read. Local tensors have the sizes `own`,
    /// and remote ones `peer`.
    fn pieces(&self, remote: &RemoteCache, (own, peer): (Geometry, Geometry)) -> Result<(Pieces, Vec<u64>)> {
        self.check_remote(remote)?;
        Ok(match self.rows.borrow() {
            PushRows::Slot { local: index } => {
                let len = own.row_bytes();
                if len > peer.row_bytes() {
                    return Err(Error::invalid(format!(
                        "a slot of src_cache has {len} bytes, more than the {} bytes of a slot of the remote cache",
                        peer.row_bytes()
                    )));
                }
                let index = u64::from(*index);
                let dst = peer.row_start(remote.row.into());
                (Pieces::Listed(vec![Piece { src: own.row_start(index), dst, len }]), vec![index])
            }
            PushRows::Blocks { local: from, remote: to }
            | PushRows::SubRows { local: from, remote: to, .. }
            | PushRows::Rows { local: from, remote: to }
            | PushRows::Sequence { local: from, remote: to, .. } => {
                in_range("dst_blocks", to, peer)?;
                let from = numbers(from)?;
                let pairs = from.iter().copied().zip(to.iter().map(|index| index.cast_unsigned()));
                (between(self.rows().part(), (own, peer), (own, peer), pairs)?, from)
            }
        })
    }
}
