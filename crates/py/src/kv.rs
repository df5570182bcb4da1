//! The calls of `KvCacheManager`: types and order of checks (contract §9.1).
//!
//! The same engine carries them out. Roles are checked in the Python package; other differences are in `core::config::Mode`.

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{CacheKind, End, Error, ErrorKind, PullRows};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::blocks;
use crate::cache::{ManagedCache, TensorView};
use crate::convert::{self, int, only_support};
use crate::datadist::DataDist;
use crate::error::{self, invalid, raise};
use crate::front::Front;
use crate::local;
use crate::local_cache::{self, LocalCache};
use crate::transfer::{self, Key, LayerArgs, Pull};

type Any<'py> = Bound<'py, PyAny>;

/// The caches of an engine as a `KvCacheManager` names them.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct KvCaches {
    native: Py<DataDist>,
}

#[pymethods]
impl KvCaches {
    #[new]
    fn new(native: Py<DataDist>) -> Self {
        KvCaches { native }
    }

    fn allocate_cache(&self, desc: &Any<'_>, cache_keys: &Any<'_>, may_name: bool) -> PyResult<ManagedCache> {
        convert::desc_type(desc)?;
        let keys = convert::cache_keys(cache_keys)?;
        allocatable(desc)?;
        if !may_name && !keys.is_empty() {
            return Err(nameless(
                desc.py(),
                "cache_keys",
                "only an engine of LLMRole.PROMPT names its caches",
            ));
        }
        self.native.get().allocate(desc, CacheKind::Batch, &keys)
    }

    fn allocate_blocks_cache(&self, desc: &Any<'_>, key: &Any<'_>, may_name: bool) -> PyResult<ManagedCache> {
        convert::desc_type(desc)?;
        let key = convert::blocks_cache_key(key)?;
        allocatable(desc)?;
        if !may_name && key.is_some() {
            let why = "an engine of LLMRole.DECODER does not name its blocks caches";
            return Err(nameless(desc.py(), "blocks_cache_key", why));
        }
        self.native.get().allocate(desc, CacheKind::Blocks, key.map(Some).as_slice())
    }

    fn deallocate_cache(&self, cache: &Any<'_>) -> PyResult<()> {
        device_cache("cache", cache)?;
        self.release(cache)
    }

    fn release(&self, cache: &Any<'_>) -> PyResult<()> {
        let (py, native) = (cache.py(), &self.native);
        let id = LocalCache::of(cache)?.id(native.bind(py))?;
        native.get().engine().enter(py, |engine| id.map_or(Ok(()), |id| engine.deallocate(id)))
    }

    fn pull_cache(
        &self,
        cache_key: &Any<'_>,
        kv_cache: &Any<'_>,
        batch_index: &Any<'_>,
        size: &Any<'_>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        let native = self.native.bind(options.py());
        let pull = pull_cache(native, (cache_key, kv_cache), (batch_index, size), options)?;
        native.get().pull(native.py(), &pull)
    }

    fn pull_blocks(
        &self,
        prompt_cache_key: &Any<'_>,
        decoder_kv_cache: &Any<'_>,
        prompt_blocks: &Any<'_>,
        decoder_blocks: &Any<'_>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        let native = self.native.bind(options.py());
        let blocks = (prompt_blocks, decoder_blocks);
        let pull = pull_blocks(native, (prompt_cache_key, decoder_kv_cache), blocks, options)?;
        native.get().pull(native.py(), &pull)
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn copy_cache(
        &self,
        dst: &Any<'_>,
        src: &Any<'_>,
        dst_batch_index: &Any<'_>,
        src_batch_index: &Any<'_>,
        offset: &Any<'_>,
        size: &Any<'_>,
        req_id: &Any<'_>,
    ) -> PyResult<()> {
        let (py, native) = (dst.py(), self.native.bind(dst.py()));
        device_cache("dst", dst)?;
        device_cache("src", src)?;
        let args = local::copy_args(dst_batch_index, src_batch_index, offset, size)?;
        validate::copy_size(args.size).map_err(|error| raise(py, &error))?;
        let request: Option<u64> = convert::optional_int("req_id", req_id)?;
        let (from, to) = (LocalCache::batch("src", src)?, LocalCache::batch("dst", dst)?);
        from.slots_first()?;
        to.slots_first()?;
        let ends = (to.end(native)?, from.end(native)?);
        native.get().copy(py, &ends, args, request)
    }

    fn copy_blocks(&self, cache: &Any<'_>, copy_block_info: &Any<'_>) -> PyResult<()> {
        let (py, native) = (cache.py(), self.native.bind(cache.py()));
        convert::typed("cache", cache, &Front::get(py)?.kv_cache, "KvCache")?;
        let pairs = blocks::lists("copy_block_info", copy_block_info)?;
        on_device("cache", cache)?;
        not_negative("copy_block_info", &pairs)?;
        let end = local_cache::end(native, cache)?;
        native.get().engine().enter(py, |engine| engine.copy_blocks(&end, &pairs))
    }

    /// Every argument error of a swap is a `ValueError` as well.
    fn swap_blocks(&self, src: &Any<'_>, dst: &Any<'_>, src_to_dst: &Any<'_>) -> PyResult<()> {
        let (py, native) = (src.py(), self.native.bind(src.py()));
        let swap = || {
            kv_cache("src", src)?;
            kv_cache("dst", dst)?;
            let pairs = blocks::pairs("src_to_dst", src_to_dst)?;
            let (from, to) = (one_device(native, src)?, one_device(native, dst)?);
            native.get().engine().enter(py, |engine| engine.swap_blocks(&from, &to, &pairs))
        };
        swap().map_err(|error| error::mismatch(py, error))
    }

    fn tensor_view(&self, cache: &Any<'_>, tensor_index: &Any<'_>) -> PyResult<TensorView> {
        let (py, native) = (cache.py(), self.native.bind(cache.py()));
        kv_cache("cache", cache)?;
        let at = tensor(cache, tensor_index)?;
        let end = one_device(native, cache)?;
        native.get().engine().enter(py, |engine| match &end {
            End::Loose(loose) => TensorView::one(loose, at),
            End::Managed(id) => TensorView::one(&engine.find(*id)?, at),
        })
    }
}

/// The index of one tensor of `cache`.
fn tensor(cache: &Any<'_>, index: &Any<'_>) -> PyResult<usize> {
    let py = cache.py();
    let index: i32 = int("tensor_index", index)?;
    let desc = cache.getattr(intern!(py, "_cache_desc"))?;
    let count: u32 = int("num_tensors", &desc.getattr(intern!(py, "_num_tensors"))?)?;
    match u32::try_from(index) {
        Ok(at) if at < count => Ok(at as usize),
        _ => Err(invalid(py, "tensor_index", index, &format!("0 to num_tensors - 1, {count} tensors"))),
    }
}

/// The arguments of `pull_cache`.
fn pull_cache(
    native: &Bound<'_, DataDist>,
    (cache_key, cache): (&Any<'_>, &Any<'_>),
    (batch_index, size): (&Any<'_>, &Any<'_>),
    options: &Bound<'_, PyDict>,
) -> PyResult<Pull> {
    let py = native.py();
    let key = Key::of("cache_key", cache_key, &[Key::Cache, Key::Row])?;
    device_cache("kv_cache", cache)?;
    let size = int("size", size)?;
    let row = int("batch_index", batch_index)?;
    validate::copy_size(size).map_err(|error| raise(py, &error))?;
    let remote_offset = offset(options, "src_cache_offset")?;
    let local_offset = offset(options, "dst_cache_offset")?;
    if key == Some(Key::Cache) {
        transfer::check_cache_key(cache_key)?;
    }
    let given = LayerArgs::of(options)?;
    let per_layer = given.per_layer()?;
    let layers = given.of_pull(per_layer)?;
    let local = LocalCache::slots("kv_cache", cache)?;
    let rows = match (remote_offset, local_offset) {
        (0, 0) => PullRows::Slot { local: row, size },
        _ => PullRows::Part { local: row, remote_offset, local_offset, size },
    };
    Ok(Pull { from: transfer::far_name(key, cache_key)?, to: local.end(native)?, rows, layers })
}

/// The arguments of `pull_blocks`.
fn pull_blocks(
    native: &Bound<'_, DataDist>,
    (key, cache): (&Any<'_>, &Any<'_>),
    (prompt_blocks, decoder_blocks): (&Any<'_>, &Any<'_>),
    options: &Bound<'_, PyDict>,
) -> PyResult<Pull> {
    let py = native.py();
    let checked = |result: llm_datadist_core::Result<()>| result.map_err(|error| raise(py, &error));
    let class = Key::of("prompt_cache_key", key, &[Key::Blocks])?;
    kv_cache("decoder_kv_cache", cache)?;
    let remote = block_list("prompt_blocks", prompt_blocks)?;
    let local = block_list("decoder_blocks", decoder_blocks)?;
    on_device("decoder_kv_cache", cache)?;
    checked(validate::named("prompt_blocks", &remote))?;
    checked(validate::named("decoder_blocks", &local))?;
    checked(validate::equally_many(("prompt_blocks", remote.len()), ("decoder_blocks", local.len())))?;
    let given = LayerArgs::of(options)?;
    let per_layer = given.per_layer()?;
    let layers = given.of_pull(per_layer)?;
    let from = transfer::far_name(class, key)?;
    Ok(Pull { from, to: local_cache::end(native, cache)?, rows: PullRows::Blocks { remote, local }, layers })
}

/// The argument called `name` must be a `KvCache`. `None` passes, and fails at its first attribute.
fn kv_cache(name: &str, value: &Any<'_>) -> PyResult<()> {
    convert::typed(name, value, &Front::get(value.py())?.kv_cache, "KvCache")
}

/// The argument called `name` must be a `KvCache` in memory of the device.
fn device_cache(name: &str, cache: &Any<'_>) -> PyResult<()> {
    kv_cache(name, cache)?;
    on_device(name, cache)
}

fn on_device(name: &str, cache: &Any<'_>) -> PyResult<()> {
    placed_on_device(name, &cache.getattr(intern!(cache.py(), "_cache_desc"))?)
}

fn placed_on_device(name: &str, desc: &Any<'_>) -> PyResult<()> {
    let placement = convert::placement(&desc.getattr(intern!(desc.py(), "_placement"))?)?;
    validate::on_device(name, placement).map_err(|error| raise(desc.py(), &error))
}

/// A descriptor of at least one tensor, in memory of the device.
fn allocatable(desc: &Any<'_>) -> PyResult<()> {
    let count: u32 = int("num_tensors", &desc.getattr(intern!(desc.py(), "_num_tensors"))?)?;
    if count == 0 {
        return Err(invalid(desc.py(), "num_tensors", 0, "at least 1"));
    }
    placed_on_device("cache_desc", desc)
}

#[cold]
fn nameless(py: Python<'_>, name: &str, why: &str) -> PyErr {
    raise(py, &Error::new(ErrorKind::InvalidArgument, format!("{name} must not be given: {why}")))
}

/// The cache as one end of a copy. A CPU cache of several devices has no part in a process of one.
fn one_device(native: &Bound<'_, DataDist>, cache: &Any<'_>) -> PyResult<End> {
    let py = native.py();
    let devices = cache.getattr(intern!(py, "_num_devices"))?;
    if devices.extract::<usize>()? == 1 {
        return local_cache::end(native, cache);
    }
    Err(invalid(py, "num_devices of the cache", devices, "1, because an engine has one device"))
}

/// A byte offset: an int64 from 0 on, or `None` for 0.
fn offset(options: &Bound<'_, PyDict>, name: &str) -> PyResult<u64> {
    let Some(given) = options.get_item(name)?.filter(|given| !given.is_none()) else { return Ok(0) };
    let value: i64 = int(name, &given)?;
    u64::try_from(value).map_err(|_| negative(name, value))
}

/// A `list` of blocks; a tuple is refused.
fn block_list(name: &str, value: &Any<'_>) -> PyResult<Vec<i64>> {
    let list = value.cast::<PyList>().map_err(|_| only_support(name, "['list']", value))?;
    blocks::listed(name, list)
}

/// Indices are uint64, so a negative one is a `ValueError`.
fn not_negative(name: &str, pairs: &[(i64, i64)]) -> PyResult<()> {
    let mut indices = pairs.iter().flat_map(|&(src, dst)| [src, dst]);
    indices.find(|&index| index < 0).map_or(Ok(()), |index| Err(negative(name, index)))
}

#[cold]
fn negative(name: &str, value: i64) -> PyErr {
    PyValueError::new_err(format!("{name}: {value} is below 0"))
}
