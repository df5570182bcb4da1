//! Turns raw arguments into checked requests. Only this module has the rules for arguments.
//!
//! Other modules refuse a call only because of the current state, for example because a key is already bound.
//! The checks receive descriptions ([`Side`]) and never the cache table, so they are pure: no memory, no I/O,
//! no clock. They return `Err(InvalidArgument)` for what breaks their rule, unless stated otherwise.

pub mod cpp;
mod json;
mod layer_destination;
mod layer_ranges;
mod layerwise;
mod options;
pub mod rank_table;
mod transfer;
mod values;

pub use layer_destination::{LayerDestination, destination_layers, layer_moves};
pub use layer_ranges::{
    ExtParam, LayerRange, Layers, ext_alone, pull_kv_layers, push_kv_alone, push_kv_blocks, push_kv_cache,
    push_size, push_spans, tensors_per_layer,
};
pub use layerwise::{
    Destination, LayerRows, LayerwiseArgs, Target, block_bytes_alone, block_lists, destination, layerwise,
    whole_layers,
};
pub use options::config;
pub use transfer::{
    PullRows, PushRows, RemoteCache, accessible, equally_many, not_empty, pull, pull_local, push, push_local,
    reachable,
};
pub(crate) use values::link_token;
#[cfg(feature = "testing")]
pub use values::page_shift;
pub use values::{dimensions, mem_utilization, number, socket_address, text};

use std::fmt::Display;

use crate::error::{Error, ErrorKind, Result, ensure};
use crate::fallible;
use crate::model::{CacheDesc, CacheKey, CacheKind, CacheLayout, Geometry, Placement};
use crate::plan::{Moves, Piece, Pieces, REQUEST, total_bytes};

/// Which placements have a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pools {
    /// Whether `host_mem_pool_cfg` was given.
    pub host: bool,
    /// Whether `mem_pool_cfg` was given.
    pub device: bool,
}

/// A checked request for memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocate {
    /// Sizes, kind and placement of the cache.
    pub layout: CacheLayout,
    /// The row that each key names. Placeholders and overwritten duplicates are removed.
    pub keys: Vec<(u64, CacheKey)>,
}

/// The arguments of `copy_cache` as the caller gave them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyArgs {
    /// Batch slot that is written.
    pub dst_batch_index: u32,
    /// Batch slot that is read.
    pub src_batch_index: u32,
    /// Bytes to skip at the start of both slots.
    pub offset: u64,
    /// Bytes to copy in every tensor; −1 for the rest of the source slot.
    pub size: i64,
}

/// Checks the allocation of a cache from a pool (contract §7.1, §7.3, §12.2).
pub fn allocate(
    desc: &CacheDesc,
    kind: CacheKind,
    keys: &[Option<CacheKey>],
    pools: Pools,
) -> Result<Allocate> {
    if desc.num_tensors == 0 {
        return Err(Error::argument("num_tensors", 0, "at least 1"));
    }
    let (configured, option) = match desc.placement {
        Placement::Device => (pools.device, "mem_pool_cfg"),
        Placement::Host => (pools.host, "host_mem_pool_cfg"),
    };
    if !configured {
        return Err(Error::invalid(format!(
            "{} memory cannot be allocated: {option} was not given at init",
            desc.placement
        )));
    }
    let geometry = Geometry::new(desc)?;
    if keys.len() as u64 > geometry.rows() {
        let required = format_args!("at most {}, one key for each batch slot", geometry.rows());
        return Err(Error::argument("len(cache_keys)", keys.len(), required));
    }
    let layout = CacheLayout { geometry, kind, placement: desc.placement };
    Ok(Allocate { layout, keys: bindings(keys)? })
}

/// Returns the row that each key names, which is its position in the list. A placeholder (`None`) binds
/// nothing. Of equal keys, the last one takes effect. `Err(OutOfMemory)` if the list cannot be allocated.
pub fn bindings(keys: &[Option<CacheKey>]) -> Result<Vec<(u64, CacheKey)>> {
    /// Name of the lists in out-of-memory errors.
    const KEYS: &str = "the keys of a cache";
    if let [only] = keys {
        return Ok(only.iter().map(|&key| (0, key)).collect());
    }
    let mut rows = fallible::map(KEYS, keys.len())?;
    for (row, key) in keys.iter().enumerate() {
        if let Some(key) = key {
            rows.insert(*key, row as u64);
        }
    }
    let mut bound = fallible::collect(KEYS, rows.into_iter().map(|(key, row)| (row, key)))?;
    bound.sort_unstable();
    Ok(bound)
}

/// Checks the addresses of memory that the caller owns (contract §7.6, §7.7, §4.3). `Err(InvalidArgument)`
/// unless there is one address for each tensor, each is above 0, and each tensor ends below 2^64.
pub fn addresses(desc: &CacheDesc, kind: CacheKind, addrs: &[u64]) -> Result<CacheLayout> {
    if addrs.is_empty() {
        return Err(Error::argument("addrs", "[]", "a list with one address for each tensor"));
    }
    if addrs.len() as u64 != u64::from(desc.num_tensors) {
        let required = format_args!("num_tensors={}", desc.num_tensors);
        return Err(Error::argument("len(addrs)", addrs.len(), required));
    }
    let geometry = Geometry::new(desc)?;
    for (tensor, &addr) in addrs.iter().enumerate() {
        if addr == 0 {
            return Err(Error::argument(&format!("addrs[{tensor}]"), 0, "above 0"));
        }
        if addr.checked_add(geometry.tensor_bytes()).is_none() {
            let required = format_args!("low enough for {} bytes below 2^64", geometry.tensor_bytes());
            return Err(Error::argument(&format!("addrs[{tensor}]"), addr, required));
        }
    }
    Ok(CacheLayout { geometry, kind, placement: desc.placement })
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
    Error::invalid(format!("{name} is {is}; this call needs {needed}"))
}

/// Returns the error for a `size`, which stands for `bytes` bytes, that exceeds the `room` bytes of `place`.
fn too_long(size: i64, bytes: u64, room: u64, place: &str) -> Error {
    let value = if size == -1 { format!("-1 ({bytes} bytes)") } else { bytes.to_string() };
    Error::argument("size", value, format_args!("at most the {room} bytes of {place}"))
}

/// Checks that `size` is −1 (all bytes) or above 0.
pub fn copy_size(size: i64) -> Result<()> {
    ensure(size == -1 || size > 0, || Error::argument("size", size, "-1, or a number of bytes above 0"))
}

/// Checks a copy of one range of one slot in every tensor (contract §7.9). `Err(TensorCountMismatch)` if the caches
/// have different numbers of tensors; otherwise `Err(InvalidArgument)`.
pub fn copy_cache(src: CacheLayout, dst: CacheLayout, args: CopyArgs) -> Result<Moves> {
    let CopyArgs { dst_batch_index, src_batch_index, offset, size } = args;
    batch_cache("src", src.kind)?;
    batch_cache("dst", dst.kind)?;
    copy_size(size)?;
    let (from, to) = (src.geometry, dst.geometry);
    if from.num_tensors() != to.num_tensors() {
        let text = format!("src has {} tensors and dst has {}", from.num_tensors(), to.num_tensors());
        return Err(Error::new(ErrorKind::TensorCountMismatch, text));
    }
    let src_row = row("src_batch_index", src_batch_index, from)?;
    let dst_row = row("dst_batch_index", dst_batch_index, to)?;
    let room = from.row_bytes().min(to.row_bytes());
    if offset > 0 && offset >= room {
        return Err(Error::argument("offset", offset, format_args!("below the slot size, {room} bytes")));
    }
    // −1 means the rest of the *source* slot, so it fails if the destination slot is smaller.
    let bytes = if size == -1 { from.row_bytes() - offset } else { size.unsigned_abs() };
    if bytes > room - offset {
        let slots = format!("slots of {} and {} bytes", from.row_bytes(), to.row_bytes());
        return Err(too_long(size, bytes, room - offset, &format!("{slots} from offset {offset} on")));
    }
    let (src, dst) = (src_row * from.row_bytes() + offset, dst_row * to.row_bytes() + offset);
    Ok(Moves {
        pieces: Pieces::Listed(vec![Piece { src, dst, len: bytes }]),
        num_tensors: from.num_tensors(),
        src_rows: vec![src_row],
        dst_rows: vec![dst_row],
        ..Moves::default()
    })
}

/// Checks a copy of the original's `CopyKvCache`: the same ranges, but only from device memory.
pub fn copy_kv_cache(src: CacheLayout, dst: CacheLayout, args: CopyArgs) -> Result<Moves> {
    on_device("src_cache", src.placement)?;
    copy_cache(src, dst, args)
}

/// Checks that the cache called `name` is in device memory (contract §9.1).
pub fn on_device(name: &str, placement: Placement) -> Result<()> {
    match placement {
        Placement::Device => Ok(()),
        Placement::Host => {
            let text = format!("{name} is in host memory; this call needs device memory");
            Err(Error::invalid(text))
        }
    }
}

/// Checks a copy in `KvCacheManager` mode: like [`copy_cache`], but from device to device only
/// (contract §9.2).
pub fn copy_on_device(src: CacheLayout, dst: CacheLayout, args: CopyArgs) -> Result<Moves> {
    on_device("dst", dst.placement)?;
    on_device("src", src.placement)?;
    copy_cache(src, dst, args)
}

/// Checks a copy of blocks within one cache (contract §7.10).
pub fn copy_blocks(cache: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    blocks_cache("cache", cache.kind)?;
    block_moves(pairs, cache.geometry, cache.geometry)
}

/// Checks a copy of blocks in `KvCacheManager` mode: like [`copy_blocks`], but for rows of a device cache of
/// either kind (contract §9.1).
pub fn copy_rows(cache: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    on_device("cache", cache.placement)?;
    block_moves(pairs, cache.geometry, cache.geometry)
}

/// Checks a swap of blocks between a host cache and a device cache (contract §7.11).
pub fn swap_blocks(src: CacheLayout, dst: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    blocks_cache("src_cache", src.kind)?;
    blocks_cache("dst_cache", dst.kind)?;
    swap_rows(src, dst, pairs)
}

/// Checks a swap in `KvCacheManager` mode: like [`swap_blocks`], but for rows of caches of either kind
/// (contract §9.1).
pub fn swap_rows(src: CacheLayout, dst: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    let checked = equal_pairs(src, dst, pairs)?;
    if src.placement == dst.placement {
        return Err(mismatch(
            "placements (one must be host, the other device)",
            src.placement,
            dst.placement,
        ));
    }
    Ok(checked)
}

/// Checks a copy of the C++ class's `CopyKvBlocks`: rows of caches of either kind, but not from host to host
/// (contract, C++ §4).
pub fn copy_kv_blocks(src: CacheLayout, dst: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    let checked = equal_pairs(src, dst, pairs)?;
    if (src.placement, dst.placement) == (Placement::Host, Placement::Host) {
        return Err(mismatch("placements (one must be device)", src.placement, dst.placement));
    }
    Ok(checked)
}

fn equal_pairs(src: CacheLayout, dst: CacheLayout, pairs: &[(i64, i64)]) -> Result<Moves> {
    let (from, to) = (src.geometry, dst.geometry);
    if from.row_bytes() != to.row_bytes() {
        return Err(mismatch("block sizes", from.row_bytes(), to.row_bytes()));
    }
    if from.num_tensors() != to.num_tensors() {
        return Err(mismatch("num_tensors", from.num_tensors(), to.num_tensors()));
    }
    block_moves(pairs, from, to)
}

fn mismatch(what: &str, src: impl Display, dst: impl Display) -> Error {
    Error::invalid(format!("src_cache and dst_cache do not match: {what} {src} and {dst}"))
}

fn block_moves(pairs: &[(i64, i64)], src: Geometry, dst: Geometry) -> Result<Moves> {
    let blocks = (pairs.len() as u64).saturating_mul(u64::from(src.num_tensors()));
    total_bytes(blocks, src.row_bytes())?;
    let mut src_rows = fallible::with_capacity(REQUEST, pairs.len())?;
    let mut dst_rows = fallible::with_capacity(REQUEST, pairs.len())?;
    for &(from, to) in pairs {
        src_rows.push(row("source block", from, src)?);
        dst_rows.push(row("destination block", to, dst)?);
    }
    let rows = src_rows.iter().copied().zip(dst_rows.iter().copied());
    let pieces = Pieces::blocks(src.row_bytes(), rows)?;
    Ok(Moves { pieces, num_tensors: src.num_tensors(), src_rows, dst_rows, ..Moves::default() })
}

/// Returns a row of the cache, which is given as any kind of number.
fn row(name: &str, index: impl TryInto<u64> + Display + Copy, of: Geometry) -> Result<u64> {
    match index.try_into() {
        Ok(row) if row < of.rows() => Ok(row),
        _ => Err(Error::out_of_range(name, index, format_args!("0 to {}", of.rows() - 1))),
    }
}
