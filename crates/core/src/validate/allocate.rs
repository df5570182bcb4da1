//! Checks the allocation of caches from pools, and the registration of the caller's memory.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::fallible;
use crate::model::{CacheDesc, CacheKey, CacheKind, CacheLayout, KvGeometry, MixedSizes, Placement};

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
    /// Sizes, kind and placement of the cache. The sizes are those of tensor 0 if its tensors differ.
    pub layout: CacheLayout,
    /// The sizes of all tensors if they differ.
    pub mixed: Option<Arc<MixedSizes>>,
    /// The row that each key names. Placeholders and overwritten duplicates are removed.
    pub keys: Vec<(u64, CacheKey)>,
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
    let (geometry, mixed) = MixedSizes::checked(desc)?;
    if keys.len() as u64 > geometry.rows() {
        let required = format_args!("at most {}, one key for each batch slot", geometry.rows());
        return Err(Error::argument("len(cache_keys)", keys.len(), required));
    }
    KvGeometry::of(desc, &geometry)?;
    let layout = CacheLayout { geometry, kind, placement: desc.placement };
    Ok(Allocate { layout, mixed, keys: bindings(keys)? })
}

/// Returns the error for a cache that is to be one range of bytes but has tensors that differ. Their elements need different
/// alignments.
pub fn contiguous_mixed() -> Error {
    Error::argument("contiguous", "True", "False, because the tensors of the cache differ")
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
/// unless there is one address for each tensor, each is above 0, and each tensor ends below 2^64. Also returns the sizes
/// of all tensors if they differ.
pub fn addresses(
    desc: &CacheDesc,
    kind: CacheKind,
    addrs: &[u64],
) -> Result<(CacheLayout, Option<Arc<MixedSizes>>)> {
    if addrs.is_empty() {
        return Err(Error::argument("addrs", "[]", "a list with one address for each tensor"));
    }
    if addrs.len() as u64 != u64::from(desc.num_tensors) {
        let required = format_args!("num_tensors={}", desc.num_tensors);
        return Err(Error::argument("len(addrs)", addrs.len(), required));
    }
    let (geometry, mixed) = MixedSizes::checked(desc)?;
    for (tensor, &addr) in (0..).zip(addrs) {
        let geometry = mixed.as_ref().map_or(geometry, |mixed| mixed.run(tensor).geometry);
        if addr == 0 {
            return Err(Error::argument(&format!("addrs[{tensor}]"), 0, "above 0"));
        }
        if addr.checked_add(geometry.tensor_bytes()).is_none() {
            let required = format_args!("low enough for {} bytes below 2^64", geometry.tensor_bytes());
            return Err(Error::argument(&format!("addrs[{tensor}]"), addr, required));
        }
    }
    KvGeometry::of(desc, &geometry)?;
    Ok((CacheLayout { geometry, kind, placement: desc.placement }, mixed))
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
