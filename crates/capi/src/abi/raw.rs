//! Converts pointers of C to Rust values. Nothing else in the crate dereferences a pointer that C passes.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::ptr::NonNull;
use std::slice;

use llm_datadist_core::bindings::cpp;
use llm_datadist_core::bindings::{Cache, CacheIndex, DataDist, End, ExtParam, PeerAddress};
use llm_datadist_core::{Adopted, CacheDesc, CacheId, CacheKind, ClusterId, Error, ErrorKind, Result};

use super::types::{
    LlmDatadistBlocks, LlmDatadistCache, LlmDatadistCacheDesc, LlmDatadistCacheIndex, LlmDatadistCluster,
    LlmDatadistExtParam, LlmDatadistIp, LlmDatadistOption, LlmDatadistRegisterCfg, Reserved,
};
use crate::calls;

#[cold]
pub(super) fn refused(name: &str, what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{name} is {what}")).of_argument(name)
}

/// Returns `Err` if no list of `count` values can be at `first`.
fn readable<T>(name: &str, first: *const T, count: usize) -> Result<()> {
    if first.is_null() {
        return Err(refused(name, "null"));
    }
    if !first.is_aligned() {
        return Err(refused(name, "not aligned"));
    }
    let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
    bytes.map(|_| ()).ok_or_else(|| refused(name, "too long to be a list"))
}

/// Returns the list of `count` values at `first`. Null is the empty list.
///
/// # Safety
/// `first` is null, or points to `count` values that do not change during `'a`.
pub(super) unsafe fn list<'a, T: Copy>(name: &str, first: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    readable(name, first, count)?;
    // SAFETY: not null, aligned and below the largest length, checked above; the rest is the caller's promise.
    Ok(unsafe { slice::from_raw_parts(first, count) })
}

/// Returns a copy of the value at `at`.
///
/// # Safety
/// `at` is null, or points to a value.
pub(super) unsafe fn value<T: Copy>(name: &str, at: *const T) -> Result<T> {
    readable(name, at, 1)?;
    // SAFETY: not null and aligned, checked above; the rest is the caller's promise.
    Ok(unsafe { at.read() })
}

/// Returns a copy of the structure at `at`, if it uses nothing that only a later version of the library knows.
///
/// # Safety
/// See [`value`].
pub(super) unsafe fn whole<T: Copy + Reserved>(name: &str, at: *const T) -> Result<T> {
    // SAFETY: the caller's promise.
    let structure = unsafe { value(name, at) }?;
    known(name, &structure)?;
    Ok(structure)
}

pub(super) fn known(name: &str, structure: &impl Reserved) -> Result<()> {
    if structure.reserved().iter().all(|&word| word == 0) {
        return Ok(());
    }
    Err(refused(name, "of a later version of the interface: its reserved words are not 0"))
}

/// Returns a text that ends in a null byte.
///
/// # Safety
/// `text` is null, or such a text that does not change during `'a`.
pub(super) unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<&'a str> {
    readable(name, text, 1)?;
    // SAFETY: not null, checked above; that it ends is the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| refused(name, "not valid UTF-8"))
}

/// Space for `count` values.
pub(super) struct Out<T> {
    first: *mut T,
    count: usize,
}

impl<T: Copy> Out<T> {
    /// Takes the space for `count` values at `first`, without accessing it yet.
    ///
    /// # Safety
    /// `first` is null, or points to space for `count` values that nothing else accesses while this exists.
    pub(super) unsafe fn new(name: &str, first: *mut T, count: usize) -> Result<Self> {
        readable(name, first.cast_const(), count)?;
        Ok(Out { first, count })
    }

    /// Does the same for a list, which may be null if it is empty.
    ///
    /// # Safety
    /// See [`new`](Self::new).
    pub(super) unsafe fn of_list(name: &str, first: *mut T, count: usize) -> Result<Self> {
        if count == 0 {
            return Ok(Out { first: NonNull::dangling().as_ptr(), count });
        }
        // SAFETY: the caller's promise.
        unsafe { Self::new(name, first, count) }
    }

    /// Writes as many of `values` as fit.
    pub(super) fn put(&self, values: &[T]) {
        let count = self.count.min(values.len());
        // SAFETY: `first` is not null, is aligned, and has space for `count` values: `new` has checked this, and its caller
        // has promised it. The two do not overlap, because nothing else accesses the space.
        unsafe { self.first.copy_from_nonoverlapping(values.as_ptr(), count) };
    }

    /// Writes as many of `values` as fit, and returns their number. Needs no memory.
    pub(super) fn put_each(&self, values: impl Iterator<Item = T>) -> usize {
        let mut written = 0;
        for value in values.take(self.count) {
            // SAFETY: the place is inside the space for `count` values, of which `new` has checked what can be checked, and
            // which its caller has promised.
            let target = unsafe { self.first.add(written) };
            // SAFETY: as above.
            unsafe { target.write(value) };
            written += 1;
        }
        written
    }
}

/// Returns the texts of options, by key.
///
/// # Safety
/// See [`list`], and [`text`] for each text.
pub(super) unsafe fn options(
    first: *const LlmDatadistOption,
    count: usize,
) -> Result<BTreeMap<String, String>> {
    // SAFETY: the caller's promise.
    let given = unsafe { list("options", first, count) }?;
    let mut texts = BTreeMap::new();
    for option in given {
        // SAFETY: the caller's promise.
        let key = unsafe { text("the key of an option", option.key) }?;
        // SAFETY: the caller's promise.
        let value = unsafe { text(key, option.value) }?;
        if texts.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(refused(key, "given twice"));
        }
    }
    Ok(texts)
}

/// # Safety
/// See [`list`] for the dimensions.
pub(super) unsafe fn desc(of: &LlmDatadistCacheDesc) -> Result<CacheDesc> {
    known("cache_desc", of)?;
    // SAFETY: the caller's promise.
    let shape = unsafe { list("shape", of.shape, of.num_dims as usize) }?;
    cpp::desc(of.placement, of.num_tensors, of.data_type, shape)
}

/// Returns the cache that a structure names by its id, or by addresses.
///
/// # Safety
/// `at` is null, or a structure whose lists are valid (see [`list`]). With the id -1, a tensor of `desc` is at each of
/// `addrs`, and stays readable and writable while the result is used.
pub(super) unsafe fn end(engine: &DataDist, name: &str, at: *const LlmDatadistCache) -> Result<End> {
    // SAFETY: the caller's promise.
    let cache = unsafe { self::cache(name, at) }?;
    // SAFETY: the caller's promise.
    let addrs = unsafe { list(name, cache.addrs, cache.num_addrs) }?;
    let of = &cache.desc;
    if cache.cache_id != -1 {
        // SAFETY: the caller's promise.
        let shape = unsafe { list("shape", of.shape, of.num_dims as usize) }?;
        let given = cpp::Stated {
            placement: of.placement,
            addrs,
            num_tensors: of.num_tensors,
            data_type: of.data_type,
            shape,
        };
        return calls::named(engine, cache.cache_id, given);
    }
    // SAFETY: the caller's promise.
    let desc = unsafe { desc(of) }?;
    // SAFETY: the caller's promise.
    unsafe { adopt(&desc, addrs) }.map(|adopted| End::Loose(Cache::loose(adopted)))
}

/// # Safety
/// At each address, one tensor of `desc` stays readable and writable while the result is used. The callers of
/// `RegisterKvCache`, and of calls with `cache_id` -1, promise this.
pub(super) unsafe fn adopt(desc: &CacheDesc, addrs: &[u64]) -> Result<Adopted> {
    // SAFETY: the caller's promise. `new` checks the numbers.
    unsafe { Adopted::new(desc, CacheKind::Batch, addrs) }
}

/// Returns a copy of the structure of a cache, without accessing its lists.
///
/// # Safety
/// See [`value`].
pub(super) unsafe fn cache(name: &str, at: *const LlmDatadistCache) -> Result<LlmDatadistCache> {
    // SAFETY: the caller's promise.
    let cache = unsafe { whole(name, at) }?;
    known(name, &cache.desc)?;
    Ok(cache)
}

/// Returns the id in the structure of a cache, of which nothing else is used.
///
/// # Safety
/// See [`value`].
pub(super) unsafe fn id(name: &str, at: *const LlmDatadistCache) -> Result<CacheId> {
    // SAFETY: the caller's promise.
    unsafe { cache(name, at) }.map(|cache| CacheId(cache.cache_id))
}

/// Returns the id of the source of a push, which must not be in host memory.
///
/// # Safety
/// See [`value`].
pub(super) unsafe fn push_source(at: *const LlmDatadistCache) -> Result<CacheId> {
    // SAFETY: the caller's promise.
    let cache = unsafe { cache("src_cache", at) }?;
    cpp::pushed(cache.desc.placement)?;
    Ok(CacheId(cache.cache_id))
}

/// Checks the settings of a registration. Null stands for the defaults.
///
/// # Safety
/// See [`value`].
pub(super) unsafe fn register_cfg(at: *const LlmDatadistRegisterCfg) -> Result<()> {
    // SAFETY: the caller's promise.
    if at.is_null() { Ok(()) } else { unsafe { whole("cfg", at) }.map(|_| ()) }
}

/// # Safety
/// See [`value`].
pub(super) unsafe fn index(name: &str, at: *const LlmDatadistCacheIndex) -> Result<CacheIndex> {
    // SAFETY: the caller's promise.
    let index = unsafe { whole(name, at) }?;
    Ok(CacheIndex {
        cluster: ClusterId(index.cluster_id),
        cache: CacheId(index.cache_id),
        row: index.batch_index,
    })
}

/// # Safety
/// See [`value`].
pub(super) unsafe fn ext_param(at: *const LlmDatadistExtParam) -> Result<ExtParam> {
    // SAFETY: the caller's promise.
    let ext = unsafe { whole("ext_param", at) }?;
    Ok(ExtParam {
        src_layer_range: (ext.src_first, ext.src_last),
        dst_layer_range: (ext.dst_first, ext.dst_last),
        tensor_num_per_layer: ext.tensor_num_per_layer,
    })
}

/// # Safety
/// See [`list`], also for every list of addresses, and [`text`] for each text.
pub(super) unsafe fn peers(first: *const LlmDatadistCluster, count: usize) -> Result<Vec<PeerAddress>> {
    // SAFETY: the caller's promise.
    let given = unsafe { list("clusters", first, count) }?;
    cpp::clusters(given.len())?;
    let peer = |cluster: &LlmDatadistCluster| {
        known("clusters", cluster)?;
        Ok(PeerAddress {
            cluster: ClusterId(cluster.remote_cluster_id),
            // SAFETY: the caller's promise.
            remote: unsafe { addresses("remote_ip_infos", cluster.remote, cluster.num_remote) }?,
            // SAFETY: the caller's promise.
            local: unsafe { addresses("local_ip_infos", cluster.local, cluster.num_local) }?,
        })
    };
    given.iter().map(peer).collect()
}

/// # Safety
/// See [`list`], and [`text`] for each text.
unsafe fn addresses(
    name: &str,
    first: *const LlmDatadistIp,
    count: usize,
) -> Result<Vec<std::net::SocketAddr>> {
    // SAFETY: the caller's promise.
    let given = unsafe { list(name, first, count) }?;
    let address = |info: &LlmDatadistIp| {
        known(name, info)?;
        // SAFETY: the caller's promise.
        let ip = unsafe { text("ip", info.ip) }?;
        cpp::ip_info(ip, info.port)
    };
    given.iter().map(address).collect()
}

/// # Safety
/// See [`list`] for both.
pub(super) unsafe fn two_lists<'a>(
    src: LlmDatadistBlocks,
    dst: LlmDatadistBlocks,
) -> Result<(&'a [u64], &'a [u64])> {
    // SAFETY: the caller's promise.
    let src = unsafe { list("src_blocks", src.blocks, src.count) }?;
    // SAFETY: the caller's promise.
    let dst = unsafe { list("dst_blocks", dst.blocks, dst.count) }?;
    Ok((src, dst))
}

/// # Safety
/// See [`list`], also for every list of blocks.
pub(super) unsafe fn block_lists<'a>(
    first: *const LlmDatadistBlocks,
    count: usize,
) -> Result<Vec<&'a [u64]>> {
    // SAFETY: the caller's promise.
    let lists = unsafe { list("dst_blocks_list", first, count) }?;
    // SAFETY: the caller's promise.
    let blocks = |of: &LlmDatadistBlocks| unsafe { list("dst_blocks_list", of.blocks, of.count) };
    lists.iter().map(blocks).collect()
}
