//! Raw arguments → checked requests: the only place that knows what an argument may be.
//!
//! What is refused elsewhere is refused for the state things are in (a key that is taken, an address that is not mapped).
//! Handed descriptions ([`Side`]), never the table, so it stays pure: no memory, no I/O, no clock. Not for: types and
//! widths of Python values (the binding) or where bytes go (`plan`).

pub mod cpp;
mod json;
mod layer_destination;
mod layer_ranges;
mod layerwise;
mod options;
pub mod rank_table;
mod transfer;
mod values;

pub use layer_destination::{Landing, landed_layers, landing};
pub use layer_ranges::{
    ExtParam, LayerRange, Layers, ext_alone, pull_kv_layers, push_kv_alone, push_kv_blocks, push_kv_cache,
    push_size, push_spans, tensors_per_layer,
};
pub use layerwise::{
    Destination, LayerRows, LayerwiseArgs, Target, block_bytes_alone, block_lists, destination, layerwise,
    source_placement, whole_layers,
};
pub use options::config;
pub use transfer::{
    PullRows, PushRows, RemoteCache, accessible, equally_many, named, pull, pull_local, push, push_local,
    reachable,
};
pub use values::{
    copy_kernel, copy_workers, device_id, dimensions, huge_pages, link_heartbeat, link_pin_limit,
    link_remote_memory, link_retry_count, link_silence, link_streams, link_token, link_token_file,
    link_total_time, link_transport, mem_utilization, page_shift, rank_hosts, rank_port, socket_address,
    swap_in_path, sync_kv_timeout,
};

use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{CacheDesc, CacheKey, CacheKind, Geometry, Placement};
use crate::plan::{BlockPairs, CopyRange};

/// What `check` needs to know of one end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Its sizes.
    pub geometry: Geometry,
    /// How its rows are read.
    pub kind: CacheKind,
    /// Which pool it belongs to.
    pub placement: Placement,
}

/// Whether a pool is there for each placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pools {
    /// `host_mem_pool_cfg` was given.
    pub host: bool,
    /// `mem_pool_cfg` was given.
    pub device: bool,
}

/// A request for memory that makes sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocate {
    /// Sizes, kind and placement.
    pub side: Side,
    /// Which key names which row; placeholders and overwritten duplicates are gone.
    pub keys: Vec<(u64, CacheKey)>,
}

/// `copy_cache` as the caller gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyArgs {
    /// Batch slot written.
    pub dst_batch_index: u32,
    /// Batch slot read.
    pub src_batch_index: u32,
    /// Bytes skipped at the start of both slots.
    pub offset: u64,
    /// Bytes copied in every tensor; −1 for the rest of the source slot.
    pub size: i64,
}

/// A cache to take from a pool (contract §7.1, §7.3, §12.2).
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
        let text = format!("{} memory cannot be allocated: {option} was not given at init", desc.placement);
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let geometry = Geometry::new(desc)?;
    if keys.len() as u64 > geometry.rows() {
        let allowed = format!("at most one key per batch slot, {} here", geometry.rows());
        return Err(Error::argument("len(cache_keys)", keys.len(), allowed));
    }
    let side = Side { geometry, kind, placement: desc.placement };
    Ok(Allocate { side, keys: bindings(keys)? })
}

/// The row each key names: position in the list; placeholders bind nothing; of duplicates the last takes effect.
pub fn bindings(keys: &[Option<CacheKey>]) -> Result<Vec<(u64, CacheKey)>> {
    /// What the lists are for, should there be no memory for one.
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

/// Addresses of the caller's own memory (contract §7.6, §7.7, §4.3).
pub fn addresses(desc: &CacheDesc, kind: CacheKind, addrs: &[u64]) -> Result<Side> {
    if addrs.is_empty() {
        return Err(Error::argument("addrs", "[]", "one address per tensor"));
    }
    if addrs.len() as u64 != u64::from(desc.num_tensors) {
        let allowed = format!("num_tensors = {} addresses", desc.num_tensors);
        return Err(Error::argument("len(addrs)", addrs.len(), allowed));
    }
    let geometry = Geometry::new(desc)?;
    for (tensor, &addr) in addrs.iter().enumerate() {
        if addr == 0 {
            return Err(Error::argument(&format!("addrs[{tensor}]"), 0, "an address above 0"));
        }
        if addr.checked_add(geometry.tensor_bytes()).is_none() {
            let allowed = format!("{} bytes from it must stay below 2^64", geometry.tensor_bytes());
            return Err(Error::argument(&format!("addrs[{tensor}]"), addr, allowed));
        }
    }
    Ok(Side { geometry, kind, placement: desc.placement })
}

/// `name` must not be a blocks cache.
pub fn batch_cache(name: &str, kind: CacheKind) -> Result<()> {
    match kind {
        CacheKind::Batch => Ok(()),
        CacheKind::Blocks => Err(wrong_kind(name, "a blocks cache", "a continuous cache")),
    }
}

/// `name` must be a blocks cache.
pub fn blocks_cache(name: &str, kind: CacheKind) -> Result<()> {
    match kind {
        CacheKind::Blocks => Ok(()),
        CacheKind::Batch => Err(wrong_kind(name, "a continuous cache", "a blocks cache")),
    }
}

#[cold]
fn wrong_kind(name: &str, is: &str, needed: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{name} is {is}; this call needs {needed}"))
}

/// `size` must be −1 (all) or above zero.
pub fn copy_size(size: i64) -> Result<()> {
    if size == -1 || size > 0 {
        Ok(())
    } else {
        Err(Error::argument("size", size, "-1 or above 0, in bytes"))
    }
}

/// One range of one slot, in every tensor (contract §7.9).
pub fn copy_cache(src: Side, dst: Side, args: CopyArgs) -> Result<CopyRange> {
    let CopyArgs { dst_batch_index, src_batch_index, offset, size } = args;
    batch_cache("src", src.kind)?;
    batch_cache("dst", dst.kind)?;
    copy_size(size)?;
    let (from, to) = (src.geometry, dst.geometry);
    if from.num_tensors() != to.num_tensors() {
        let text = format!("src has {} tensors and dst has {}", from.num_tensors(), to.num_tensors());
        return Err(Error::new(ErrorKind::UnlikeTensors, text));
    }
    row("src_batch_index", u64::from(src_batch_index), from)?;
    row("dst_batch_index", u64::from(dst_batch_index), to)?;
    let room = from.row_bytes().min(to.row_bytes());
    if offset > 0 && offset >= room {
        return Err(Error::argument("offset", offset, format_args!("below the slot size, {room} bytes")));
    }
    // −1 means the rest of the *source* slot, so it does not fit a smaller destination.
    let bytes = if size == -1 { from.row_bytes() - offset } else { size.unsigned_abs() };
    if bytes > room - offset {
        let allowed = format!(
            "offset {offset} + {bytes} bytes must fit both slots: {} and {} bytes",
            from.row_bytes(),
            to.row_bytes()
        );
        return Err(Error::argument("size", size, allowed));
    }
    let (src_row, dst_row) = (u64::from(src_batch_index), u64::from(dst_batch_index));
    Ok(CopyRange {
        src_row,
        dst_row,
        src_offset: src_row * from.row_bytes() + offset,
        dst_offset: dst_row * to.row_bytes() + offset,
        bytes,
        num_tensors: from.num_tensors(),
    })
}

/// The seed's `CopyKvCache`: the same ranges, but only device to device and device to host.
pub fn copy_kv_cache(src: Side, dst: Side, args: CopyArgs) -> Result<CopyRange> {
    copied_from(src.placement)?;
    copy_cache(src, dst, args)
}

fn copied_from(placement: Placement) -> Result<()> {
    if placement == Placement::Device {
        return Ok(());
    }
    let text = "src_cache is in host memory; CopyKvCache copies device to device and device to host only";
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// The cache called `name` must be in memory of the device (contract §9.1).
pub fn on_device(name: &str, placement: Placement) -> Result<()> {
    match placement {
        Placement::Device => Ok(()),
        Placement::Host => {
            let text = format!("{name} is in HOST memory; this call needs DEVICE memory");
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    }
}

/// As [`copy_cache`], for the mode of the `KvCacheManager`: device to device only (contract §9.2).
pub fn copy_on_device(src: Side, dst: Side, args: CopyArgs) -> Result<CopyRange> {
    on_device("dst", dst.placement)?;
    on_device("src", src.placement)?;
    copy_cache(src, dst, args)
}

/// Blocks copied inside one cache (contract §7.10).
pub fn copy_blocks(cache: Side, pairs: &[(i64, i64)]) -> Result<BlockPairs> {
    blocks_cache("cache", cache.kind)?;
    block_pairs(pairs, cache.geometry, cache.geometry)
}

/// As [`copy_blocks`], for the mode of the `KvCacheManager`: rows of a device cache of either kind (contract §9.1).
pub fn copy_rows(cache: Side, pairs: &[(i64, i64)]) -> Result<BlockPairs> {
    on_device("cache", cache.placement)?;
    block_pairs(pairs, cache.geometry, cache.geometry)
}

/// Blocks moved between a host and a device cache (contract §7.11).
pub fn swap_blocks(src: Side, dst: Side, pairs: &[(i64, i64)]) -> Result<BlockPairs> {
    blocks_cache("src_cache", src.kind)?;
    blocks_cache("dst_cache", dst.kind)?;
    swap_rows(src, dst, pairs)
}

/// As [`swap_blocks`], for the mode of the `KvCacheManager`: rows of caches of either kind (contract §9.1).
pub fn swap_rows(src: Side, dst: Side, pairs: &[(i64, i64)]) -> Result<BlockPairs> {
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

/// The C++ class's `CopyKvBlocks`: rows of caches of either kind, and not from host to host (contract, C++ §4).
pub fn copy_kv_blocks(src: Side, dst: Side, pairs: &[(i64, i64)]) -> Result<BlockPairs> {
    let checked = equal_pairs(src, dst, pairs)?;
    if (src.placement, dst.placement) == (Placement::Host, Placement::Host) {
        return Err(mismatch("placements (one must be device)", src.placement, dst.placement));
    }
    Ok(checked)
}

fn equal_pairs(src: Side, dst: Side, pairs: &[(i64, i64)]) -> Result<BlockPairs> {
    let (from, to) = (src.geometry, dst.geometry);
    if from.row_bytes() != to.row_bytes() {
        return Err(mismatch("block sizes", from.row_bytes(), to.row_bytes()));
    }
    if from.num_tensors() != to.num_tensors() {
        return Err(mismatch("num_tensors", from.num_tensors(), to.num_tensors()));
    }
    block_pairs(pairs, from, to)
}

#[cold]
fn mismatch(what: &str, src: impl std::fmt::Display, dst: impl std::fmt::Display) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!("src_cache and dst_cache do not match: {what} {src} and {dst}"),
    )
}

fn block_pairs(pairs: &[(i64, i64)], src: Geometry, dst: Geometry) -> Result<BlockPairs> {
    let blocks = (pairs.len() as u64).saturating_mul(u64::from(src.num_tensors()));
    if blocks.checked_mul(src.row_bytes()).is_none_or(|bytes| i64::try_from(bytes).is_err()) {
        let allowed = format!("below 2^63 bytes in all, in blocks of {} bytes", src.row_bytes());
        return Err(Error::argument("the number of block pairs", pairs.len(), allowed));
    }
    let mut checked = fallible::room(crate::plan::REQUEST, pairs.len())?;
    for &(from, to) in pairs {
        checked.push((block("source block", from, src)?, block("destination block", to, dst)?));
    }
    Ok(BlockPairs { pairs: checked, block_bytes: src.row_bytes(), num_tensors: src.num_tensors() })
}

fn block(name: &str, index: i64, of: Geometry) -> Result<u64> {
    match u64::try_from(index) {
        Ok(index) if index < of.rows() => Ok(index),
        _ => Err(Error::argument(name, index, format_args!("0 to {}", of.rows() - 1))),
    }
}

fn row(name: &str, index: u64, of: Geometry) -> Result<()> {
    if index < of.rows() {
        Ok(())
    } else {
        Err(Error::argument(name, index, format_args!("0 to {}", of.rows() - 1)))
    }
}
