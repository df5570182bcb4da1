//! Checks the allocation of caches from pools, and the registration of the caller's memory.

use crate::error::{Error, Result};
use crate::fallible;
use crate::model::{CacheDesc, CacheKey, CacheKind, CacheLayout, Geometry, KvGeometry, Placement};

/// Checks the allocation of a cache from the pool of its placement, if there is one (contract §7.1, §7.3, §12.2). Returns its
/// sizes, and its keys as [`bindings`] does.
pub fn allocate(
    desc: &CacheDesc,
    kind: CacheKind,
    keys: &[Option<CacheKey>],
    has_pool: bool,
) -> Result<(CacheLayout, Vec<(u64, CacheKey)>)> {
    if desc.num_tensors == 0 {
        return Err(Error::argument("num_tensors", 0, "at least 1"));
    }
    if !has_pool {
        let option = match desc.placement {
            Placement::Device => "mem_pool_cfg",
            Placement::Host => "host_mem_pool_cfg",
        };
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
    KvGeometry::of(desc, &geometry)?;
    Ok((CacheLayout { geometry, kind, placement: desc.placement }, bindings(keys)?))
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
    for (tensor, &addr) in (0..).zip(addrs) {
        if addr == 0 {
            return Err(Error::argument(&format!("addrs[{tensor}]"), 0, "above 0"));
        }
        if addr.checked_add(geometry.tensor_bytes()).is_none() {
            let required = format_args!("low enough for {} bytes below 2^64", geometry.tensor_bytes());
            return Err(Error::argument(&format!("addrs[{tensor}]"), addr, required));
        }
    }
    KvGeometry::of(desc, &geometry)?;
    Ok(CacheLayout { geometry, kind, placement: desc.placement })
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
