//! Checks pulls and pushes, and returns the bytes that move between the local cache and the remote one (contract §7.12 to §7.15).

use smallvec::smallvec;

use super::cache_rules::{
    RemoteCache, batch_cache, blocks_cache, check_accessible, check_cut, copy_size, cut, equal_lists,
    in_range, not_empty, numbers, remote_row, row,
};
use super::conversion::{
    LocalCache, PlannedTransfer, TokenMove, equally_many_tokens, layouts, parts_alike, some_tokens,
};
use super::layer_ranges::{
    Layers, TensorRun, layers_given, pull_layers, push_layers, tensors_per_layer, within,
};
use super::rows::Rows;
use super::sub_rows::{after, between, fits_row, pushed_slot_bytes, slot_bytes};
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::model::{CacheLayout, Geometry, KvGeometry, SideWords, SubRow, Words};
use crate::plan::{CopyPlan, KvPart, KvSequence, Moves, Piece, Pieces, Side};

/// A pull or push that fits the local cache. It is not checked against the remote cache yet.
pub struct CheckedTransfer {
    words: &'static Words,
    rows: Rows,
    local: LocalCache,
    local_side: Side,
    tensors: TensorRun,
    /// The layers that the caller named.
    layers: Layers,
}

/// What moves between the local cache and one of several owners. By default, all that the rows name.
#[derive(Default)]
pub struct OwnerShare {
    /// The layers and heads that are pulled from the owner.
    pub parts: Option<Vec<KvPart>>,
    /// How many tokens must move between KV layouts, because as many move between the other owners and the local cache.
    pub tokens: Option<u64>,
}

impl CheckedTransfer {
    /// Checks what needs only the local cache, before a request is sent to the peer. Texts of errors have the `words` of the
    /// caller.
    pub fn new(
        words: &'static Words,
        local_side: Side,
        local: impl Into<LocalCache>,
        rows: Rows,
        layers: Layers,
    ) -> Result<Self> {
        let (local, given) = (local.into(), &rows);
        let CacheLayout { geometry, kind, .. } = local.layout;
        if local_side == Side::Source {
            given.check_push()?;
        }
        match given {
            Rows::Slot { size, .. } => {
                batch_cache(local_side.of(words.sides()).one_cache, kind)?;
                copy_size(*size)?;
            }
            Rows::AnyKind { .. } => {}
            _ => blocks_cache(local_side.of(words.sides()).cache, kind)?,
        }
        if let Rows::Sequence { local_tokens, remote_tokens, .. } = given {
            let (src, dst) = local_side.source_first(local_tokens, remote_tokens);
            let range = if dst.is_some() { words.dst.tokens } else { words.src.tokens };
            ensure(local.kv.is_some(), || {
                let text = "a range of tokens needs caches with KV layouts";
                Error::invalid(text).of_argument(range.parameter())
            })?;
            some_tokens(words.src.tokens, src.as_ref())?;
            some_tokens(words.dst.tokens, dst.as_ref())?;
        }
        let (src, dst) = local_side.source_first(given.local_blocks(), given.remote_blocks());
        dst.map_or(Ok(()), |blocks| not_empty(words.dst.blocks, blocks))?;
        let src_not_empty = || src.map_or(Ok(()), |blocks| not_empty(words.src.blocks, blocks));
        // The documented order of errors: a pull checks its rows before its layers, and a push its layers before its rows.
        let tensors = match local_side {
            Side::Destination => {
                tensors_per_layer(words, layers.tensors_per_layer)?;
                src_not_empty()?;
                check_local_rows((words, local_side), &local, given)?;
                pull_layers(words, geometry, layers)?
            }
            Side::Source => {
                src_not_empty()?;
                let tensors = push_layers(words, geometry, layers)?;
                check_local_rows((words, local_side), &local, given)?;
                tensors
            }
        };
        if let Rows::Bytes { pieces } = given {
            check_pieces(pieces, (words, local_side), geometry)?;
        }
        let SubRow { src_offset, dst_offset, .. } = given.part();
        let offset = local_side.of(((&words.src, src_offset), (&words.dst, dst_offset)));
        fits_row(given.part(), offset, geometry)?;
        Ok(CheckedTransfer { words, rows, local, local_side, tensors, layers })
    }

    /// Returns the words of the caller.
    pub fn words(&self) -> &'static Words {
        self.words
    }

    /// Returns the rows that the caller named.
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Returns the side of the transfer that the local cache is: the destination of a pull, or the source of a push.
    pub fn local_side(&self) -> Side {
        self.local_side
    }

    /// Returns the number of tensors of a layer if the local cache has fewer tensors. Then a push moves nothing, which is no
    /// error (contract §7.14).
    pub fn layer_without_tensors(&self) -> Option<u32> {
        (self.tensors.count == 0).then_some(self.layers.tensors_per_layer)
    }

    /// Checks the transfer against the owner's description of the remote cache, and plans what moves of `share`. Between
    /// different KV layouts, a push moves the layers and heads that both caches hold, and a pull all of the local cache.
    ///
    /// `Err(CacheNotFound)` if the remote cache does not have the slot of a pull. `Err(InvalidArgument)` also if the KV layouts
    /// do not fit, or if only one cache has one.
    pub fn plan(&self, remote: &RemoteCache, share: &OwnerShare) -> Result<PlannedTransfer> {
        if let Rows::Bytes { pieces } = &self.rows {
            return self.plan_bytes(pieces, remote);
        }
        if let Some(planned) = self.conversion(remote, share)? {
            return Ok(planned);
        }
        let mut moves = self.moves(remote)?;
        let plans = smallvec![CopyPlan::moves(&mut moves)?];
        Ok(PlannedTransfer { plans, read_tensors: Some((moves.src_tensor, moves.num_tensors)), tokens: None })
    }

    /// Checks pieces of bytes against the remote cache, and plans them.
    fn plan_bytes(&self, pieces: &[Piece], remote: &RemoteCache) -> Result<PlannedTransfer> {
        self.check_tensors(remote)?;
        self.check_remote(remote)?;
        check_pieces(pieces, (self.words, self.local_side.other()), remote.layout.geometry)?;
        let Moves { src_tensor, dst_tensor, num_tensors, .. } = self.tensors.moves(Pieces::default());
        let plans = smallvec![CopyPlan::of_pieces(pieces, (src_tensor, dst_tensor), num_tensors)?];
        Ok(PlannedTransfer { plans, read_tensors: Some((src_tensor, num_tensors)), tokens: None })
    }

    /// Checks the transfer against the remote cache, and returns what moves if rows move as they are.
    pub fn moves(&self, remote: &RemoteCache) -> Result<Moves> {
        self.check_tensors(remote)?;
        self.check_remote(remote)?;
        let pieces = self.pieces(remote)?;
        Ok(self.tensors.moves(if self.tensors.count == 0 { Pieces::default() } else { pieces }))
    }

    /// Checks all of a push to one of several owners that can be checked before it begins. Returns the number of tokens of the
    /// rows, if both caches have KV layouts, and an error if the caches share no layer or head, so that nothing is written
    /// there. `share` is what the owners before it allow.
    pub fn check_share(
        &self,
        remote: &RemoteCache,
        share: &OwnerShare,
    ) -> Result<(Option<u64>, Option<Error>)> {
        let mut tokens = None;
        if let Some((src, dst)) = self.layouts(remote)? {
            self.check_remote(remote)?;
            tokens = Some(self.with_tokens((src, dst), remote, |tokens| {
                tokens.is_plain(self.layers_given())?;
                let count = tokens.tokens()?;
                equally_many_tokens(count, share.tokens).map(|()| count)
            })?);
            let whole_rows = !matches!(self.rows(), Rows::SubRows { .. });
            if let Some(nothing) = KvPart::common(src.layout(), dst.layout()).err().filter(|_| whole_rows) {
                return Ok((tokens, Some(nothing)));
            }
        }
        if self.conversion(remote, share)?.is_none() {
            self.moves(remote)?.pieces.check_numbers()?;
        }
        Ok((tokens, None))
    }

    /// Plans what moves if rows do not move as they are: if the rows of the two caches have different KV layouts, or the caller
    /// named tokens. Otherwise returns `None`.
    fn conversion(&self, remote: &RemoteCache, share: &OwnerShare) -> Result<Option<PlannedTransfer>> {
        let Some((local, there)) = self.layouts(remote)? else { return Ok(None) };
        self.check_remote(remote)?;
        if let Rows::SubRows { .. } = self.rows() {
            let text = "several owners need whole blocks, or ranges of tokens";
            ensure(share.parts.is_none(), || Error::invalid(text))?;
            return parts_alike((local, there), self.layers_given()).map(|()| None);
        }
        self.with_tokens((local, there), remote, |tokens| {
            let as_many = || match share.tokens {
                Some(_) => equally_many_tokens(tokens.tokens()?, share.tokens),
                None => Ok(()),
            };
            if tokens.is_plain(self.layers_given())? && share.parts.is_none() {
                return as_many().map(|()| None);
            }
            self.rows().no_part_of_slot()?;
            let planned = match (&share.parts, self.local_side) {
                (Some(parts), _) => tokens.plan(parts),
                (None, Side::Source) => tokens.plan(&[KvPart::common(local.layout(), there.layout())?]),
                (None, Side::Destination) => tokens.plan(&[KvPart::of(local.layout())]),
            }?;
            as_many().map(|()| Some(planned))
        })
    }

    fn layouts<'a>(&'a self, remote: &'a RemoteCache) -> Result<Option<(&'a KvGeometry, &'a KvGeometry)>> {
        layouts((self.words, self.local_side), self.local.kv.as_deref(), remote)
    }

    /// Calls `work` with the tokens that move between the layouts of the local and the remote cache.
    fn with_tokens<T>(
        &self,
        (local, there): (&KvGeometry, &KvGeometry),
        remote: &RemoteCache,
        work: impl FnOnce(&TokenMove<'_>) -> Result<T>,
    ) -> Result<T> {
        let (rows, side) = (self.rows(), self.local_side);
        let remote_rows = match rows.remote_blocks() {
            Some(blocks) => {
                in_range(self.remote_words().blocks, blocks, remote.layout.geometry)?;
                numbers(blocks)?
            }
            None => [u64::from(remote.row)].into(),
        };
        let local_rows = rows.local_rows()?;
        let (local_tokens, remote_tokens) = match rows {
            Rows::Sequence { local_tokens, remote_tokens, .. } => {
                (local_tokens.clone(), remote_tokens.clone())
            }
            _ => (None, None),
        };
        let (src, dst) = side.source_first(
            KvSequence {
                geometry: local,
                blocks: &local_rows,
                tokens: local_tokens,
                words: self.local_words(),
            },
            KvSequence {
                geometry: there,
                blocks: &remote_rows,
                tokens: remote_tokens,
                words: self.remote_words(),
            },
        );
        work(&TokenMove { src, dst })
    }

    /// Checks that the remote cache has the tensors that move, and what comes before this in the documented order of errors.
    fn check_tensors(&self, remote: &RemoteCache) -> Result<()> {
        let peer = remote.layout.geometry;
        let TensorRun { src, dst, count } = self.tensors;
        match self.local_side {
            Side::Destination => {
                remote_row(remote, ErrorKind::CacheNotFound)?;
                let all = layers_given(self.layers.src).is_none();
                ensure(!all || peer.num_tensors() == count, || {
                    let (cache, range) = (self.remote_words().remote, self.words.written_range);
                    Error::invalid(format!(
                        "{cache} has {} tensors, and {range} has {count}",
                        peer.num_tensors()
                    ))
                })?;
            }
            Side::Source => check_accessible(self.words, self.remote_words().remote, remote.accessible)?,
        }
        within(self.remote_words(), self.local_side.other().of((src, dst)), count, peer)
    }

    /// Checks kind, slot and access of the remote cache, in the documented order of errors.
    fn check_remote(&self, remote: &RemoteCache) -> Result<()> {
        let name = self.remote_words().remote;
        let accessible = || check_accessible(self.words, name, remote.accessible);
        let kind = || match self.rows() {
            Rows::Slot { .. } | Rows::SlotToBlocks { .. } => batch_cache(name, remote.layout.kind),
            Rows::AnyKind { .. } => Ok(()),
            _ => blocks_cache(name, remote.layout.kind),
        };
        match self.local_side {
            Side::Destination => {
                remote_row(remote, ErrorKind::CacheNotFound)?;
                kind()?;
                accessible()
            }
            Side::Source => {
                accessible()?;
                kind()?;
                let slot = matches!(self.rows(), Rows::Slot { .. });
                if slot { remote_row(remote, ErrorKind::InvalidArgument) } else { Ok(()) }
            }
        }
    }

    /// Returns the pieces that move in each tensor.
    fn pieces(&self, remote: &RemoteCache) -> Result<Pieces> {
        let (side, own, peer) = (self.local_side, self.local.layout.geometry, remote.layout.geometry);
        match self.rows() {
            Rows::Slot { local, remote_offset, local_offset, size } => {
                let len = match side {
                    Side::Destination => {
                        let room = after("dst_cache_offset", *local_offset, own)?;
                        let left = after("src_cache_offset", *remote_offset, peer)?;
                        slot_bytes(self.remote_words().remote, *size, room, (*remote_offset, left))?
                    }
                    Side::Source => pushed_slot_bytes(own, peer)?,
                };
                let (src, dst) = side.source_first(*local_offset, *remote_offset);
                let strides = side.source_first(own.row_stride(), peer.row_stride());
                let rows = side.source_first(u64::from(*local), u64::from(remote.row));
                Pieces::rows(Piece { src, dst, len }, strides, std::iter::once(rows))
            }
            Rows::Bytes { .. } => Err(Error::invalid("several owners of one cache need blocks")),
            Rows::SlotToBlocks { local } => {
                let (slot, blocks) = (peer.row_start(remote.row.into()), numbers(local)?);
                check_cut(peer.row_bytes(), &blocks, own.row_bytes())?;
                cut(slot, peer.row_bytes(), &blocks, own.row_sizes())
            }
            Rows::Blocks { local, remote }
            | Rows::AnyKind { local, remote }
            | Rows::SubRows { local, remote, .. }
            | Rows::Sequence { local, remote, .. } => {
                in_range(self.remote_words().blocks, remote, peer)?;
                let number = |index: &i64| index.cast_unsigned();
                let pairs = local.iter().map(number).zip(remote.iter().map(number));
                between(self.words, self.rows().part(), side, (own, peer), pairs)
            }
        }
    }

    fn local_words(&self) -> &'static SideWords {
        self.local_side.of(self.words.sides())
    }

    fn remote_words(&self) -> &'static SideWords {
        self.local_side.other().of(self.words.sides())
    }

    /// Whether the caller named layers.
    fn layers_given(&self) -> bool {
        layers_given(self.layers.src).or(layers_given(self.layers.dst)).is_some()
    }
}

/// Checks that a cache with the sizes `of`, which is the side `side` of a transfer, has one block without gaps, and that `pieces` lie
/// inside it.
fn check_pieces(pieces: &[Piece], (words, side): (&Words, Side), of: Geometry) -> Result<()> {
    let (name, bytes) = (side.of(words.sides()).cache, of.tensor_bytes());
    ensure(of.rows() == 1 && of.row_bytes() == bytes, || {
        Error::invalid(format!("bytes move between caches of one block, and {name} has {} blocks", of.rows()))
    })?;
    ensure(!pieces.is_empty(), || Error::argument("pieces", "[]", "at least one piece"))?;
    let inside = |piece: &Piece| {
        let end = piece.start(side).checked_add(piece.len);
        piece.len > 0 && end.is_some_and(|end| end <= bytes)
    };
    pieces.iter().position(|piece| !inside(piece)).map_or(Ok(()), |at| {
        let required = format!("at least one byte of the {bytes} bytes of {name}");
        Err(Error::argument(&format!("pieces[{at}]"), format_args!("{:?}", pieces[at]), required))
    })
}

/// Checks the rows of the local cache, and that there are as many remote ones.
fn check_local_rows((words, local_side): (&Words, Side), local: &LocalCache, rows: &Rows) -> Result<()> {
    let geometry = local.layout.geometry;
    if let Rows::Slot { local: slot, local_offset, size, .. } = rows {
        row(local_side.of(("src_batch_index", "batch_index")), *slot, geometry)?;
        let room = after("dst_cache_offset", *local_offset, geometry)?;
        slot_bytes("cache", *size, room, (*local_offset, room))?;
    }
    let (src, dst) = local_side.source_first(rows.local_blocks(), rows.remote_blocks());
    if let (Some(src), Some(dst)) = (src, dst)
        && (local.kv.is_none() || matches!(rows, Rows::SubRows { .. }))
    {
        equal_lists(words, src, dst)?;
    }
    let list = local_side.of(words.sides()).blocks;
    rows.local_blocks().map_or(Ok(()), |blocks| in_range(list, blocks, geometry))
}
