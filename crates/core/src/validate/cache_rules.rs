//! Rules that calls of several kinds share: kind, placement and rows of a cache, sizes, lists of blocks, and
//! the owner's description of a remote cache.

use std::fmt::Display;
use std::sync::Arc;

use super::text_names::cache_name;
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::fallible;
use crate::model::{
    Argument, CacheKind, CacheLayout, Geometry, KvGeometry, Name, Placement, RemoteCacheName, RowList,
    RowSizes, Words,
};
use crate::plan::{Piece, Pieces, REQUEST, total_bytes};

/// The cache of a peer, as its owner describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteCache {
    /// Sizes, kind and placement.
    pub layout: CacheLayout,
    /// What its rows mean, if its owner described it.
    pub kv: Option<Arc<KvGeometry>>,
    /// The batch slot that the key names; 0 for a blocks cache.
    pub row: u32,
    /// Whether its owner lets peers use it.
    pub accessible: bool,
}

impl RemoteCache {
    /// Returns the same cache with the batch slot `row`, if it is given.
    #[must_use]
    pub fn with_row(&self, row: Option<u32>) -> RemoteCache {
        RemoteCache { row: row.unwrap_or(self.row), ..self.clone() }
    }
}

/// Checks that the cache called `name` is not a blocks cache.
pub fn batch_cache(name: &str, kind: CacheKind) -> Result<()> {
    match kind {
        CacheKind::Batch => Ok(()),
        CacheKind::Blocks => Err(wrong_kind(name, "a blocks cache", "a continuous cache")),
    }
}

/// Checks that the cache called `name` is a blocks cache.
pub fn blocks_cache(name: &str, kind: CacheKind) -> Result<()> {
    match kind {
        CacheKind::Blocks => Ok(()),
        CacheKind::Batch => Err(wrong_kind(name, "a continuous cache", "a blocks cache")),
    }
}

fn wrong_kind(name: &str, is: &str, needed: &str) -> Error {
    Error::invalid(format!("{name} is {is}; this call needs {needed}")).of_argument(name)
}

/// Returns the error for a `size`, which stands for `bytes` bytes, that exceeds the `room` bytes of `container`.
pub(super) fn too_long(size: i64, bytes: u64, room: u64, container: &str) -> Error {
    let value = if size == -1 { format!("-1 ({bytes} bytes)") } else { bytes.to_string() };
    Error::argument("size", value, format_args!("at most the {room} bytes of {container}"))
}

/// Checks that `size` is −1 (all bytes) or above 0.
pub fn copy_size(size: i64) -> Result<()> {
    ensure(size == -1 || size > 0, || Error::argument("size", size, "-1, or a number of bytes above 0"))
}

/// Checks that the cache called `name` is in device memory (contract §9.1).
pub fn on_device(name: &str, placement: Placement) -> Result<()> {
    match placement {
        Placement::Device => Ok(()),
        Placement::Host => {
            let text = format!("{name} is in host memory; this call needs device memory");
            Err(Error::invalid(text).of_argument(name))
        }
    }
}

/// Returns a row of the cache, which is given as any kind of number.
pub(super) fn row<'a>(
    argument: impl Into<Argument<'a>>,
    index: impl TryInto<u64> + Display + Copy,
    of: Geometry,
) -> Result<u64> {
    match index.try_into() {
        Ok(row) if row < of.rows() => Ok(row),
        _ => Err(argument.into().out_of_range(index, format_args!("0 to {}", of.rows() - 1))),
    }
}

/// Checks that a list of blocks is not empty.
pub fn not_empty<'a>(list: impl Into<Argument<'a>>, blocks: &[i64]) -> Result<()> {
    ensure(!blocks.is_empty(), || list.into().whole().must_be("[]", "a list of at least one block"))
}

/// Checks that two lists have the same number of entries.
pub fn equally_many((src, left): (&str, usize), (dst, right): (&str, usize)) -> Result<()> {
    let (words, lists) = (Words::ORIGINAL, (src.into(), dst.into()));
    ensure(left == right, || different_lists(words, lists, (left, right)))
}

/// Checks that the lists of blocks of a transfer have the same number of blocks.
pub(super) fn equal_lists(words: &Words, src: &[i64], dst: &[i64]) -> Result<()> {
    let lists = (words.src.blocks, words.dst.blocks);
    ensure(src.len() == dst.len(), || different_lists(words, lists, (src.len(), dst.len())))
}

#[cold]
fn different_lists(
    words: &Words,
    (src, dst): (Argument<'_>, Argument<'_>),
    (left, right): (usize, usize),
) -> Error {
    Error::invalid(format!("{src} has {left} {}, and {dst} has {right}", words.entries))
}

/// Checks that every entry is a block of the cache.
pub(super) fn in_range<'a>(list: impl Into<Argument<'a>>, blocks: &[i64], of: Geometry) -> Result<()> {
    // One pass without a branch. Messages are only built if an entry is out of range.
    if blocks.iter().fold(true, |fits, &index| fits & (index.cast_unsigned() < of.rows())) {
        return Ok(());
    }
    let list = list.into();
    let entry = |(at, &index): (usize, &i64)| {
        let range = format_args!("0 to {}", of.rows() - 1);
        ensure(index.cast_unsigned() < of.rows(), || list.entry_out_of_range(at, index, range))
    };
    blocks.iter().enumerate().try_for_each(entry)
}

/// Returns blocks that [`in_range`] accepted as numbers without a sign.
pub(super) fn numbers(blocks: &[i64]) -> Result<RowList> {
    fallible::collect_inline(REQUEST, blocks.iter().map(|index| index.cast_unsigned()))
}

/// Checks that a slot of `slot_bytes` bytes has as many `blocks` of `block_bytes` bytes, of which the last may be cut.
pub(super) fn check_cut(slot_bytes: u64, blocks: &[u64], block_bytes: u64) -> Result<()> {
    let most = slot_bytes.div_ceil(block_bytes);
    ensure(blocks.len() as u64 <= most, || {
        let allowed =
            format!("at most {most}, because a slot has {slot_bytes} bytes and a block has {block_bytes}");
        Error::argument("len(dst_blocks)", blocks.len(), allowed)
    })?;
    total_bytes(blocks.len() as u64, block_bytes)
}

/// Cuts the slot of `slot_bytes` bytes at byte `slot` into `blocks` from its start, which have the sizes `block`. The last
/// piece may be shorter. The number of blocks was checked ([`check_cut`]).
pub(super) fn cut(slot: u64, slot_bytes: u64, blocks: &[u64], block: RowSizes) -> Result<Pieces> {
    let (len, stride) = (block.bytes(), block.stride());
    let whole = usize::try_from(slot_bytes / len).unwrap_or(usize::MAX).min(blocks.len());
    let (whole, last) = blocks.split_at(whole);
    let pairs = whole.iter().enumerate().map(|(at, &block)| (at as u64, block));
    let pieces = Pieces::rows(Piece { src: slot, dst: 0, len }, (len, stride), pairs)?;
    let short = slot_bytes % len;
    let cut = |&block: &u64| Piece { src: slot + (slot_bytes - short), dst: block * stride, len: short };
    Ok(pieces.with_last(last.first().map(cut)))
}

/// Checks that peers may use the cache called `name` (contract §12.4).
pub fn check_accessible(words: &Words, name: &str, accessible: bool) -> Result<()> {
    ensure(accessible, || Error::invalid(format!("{name} {}", words.not_accessible)).of_argument(name))
}

/// Checks the name that a caller gives the remote cache. A grant is not such a name: a pull takes it beside the name.
pub fn caller_name(name: &RemoteCacheName) -> Result<()> {
    match name {
        RemoteCacheName::Name(Name::Grant(_)) => {
            Err(Error::invalid("a grant does not name a remote cache: pass it as the grant of a pull"))
        }
        RemoteCacheName::Name(_) => Ok(()),
        RemoteCacheName::Text(text) => cache_name(text),
    }
}

/// Checks that the remote cache has the slot that its key names. Otherwise returns an error of this `kind`.
pub(super) fn remote_row(remote: &RemoteCache, kind: ErrorKind) -> Result<()> {
    // Wherever a call names a slot, a blocks cache counts as one slot (contract §12.1).
    let rows = if remote.layout.kind == CacheKind::Batch { remote.layout.geometry.rows() } else { 1 };
    ensure(u64::from(remote.row) < rows, || {
        Error::new(kind, format!("the remote cache has no slot {}, only 0 to {}", remote.row, rows - 1))
    })
}

/// Checks that blocks of both caches, the local one first, have the same size.
pub(super) fn equal_blocks((local, here): (&str, Geometry), (remote, there): (&str, Geometry)) -> Result<()> {
    let (own, peer) = (here.row_bytes(), there.row_bytes());
    ensure(own == peer, || {
        Error::invalid(format!("a block has {own} bytes in {local} and {peer} in {remote}"))
    })
}
