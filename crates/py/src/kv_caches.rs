//! The calls of `KvCacheManager`: types and order of checks (contract §9.1).
//!
//! The same engine carries them out. Roles are checked in the Python package; other differences are in `core::config::Mode`.

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{CacheKind, End, Error, ErrorKind, PullRows};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{BlocksArg, CacheArg, DescArg, IntArg, KeyArg, KeysArg};
use crate::cache::{ManagedCache, TensorView};
use crate::convert::{self, int};
use crate::copy_arguments;
use crate::datadist::DataDist;
use crate::engine::Engine;
use crate::error::{self, invalid, raise};
use crate::pull_push_arguments::{LayerArgs, Pull};
use crate::remote_key::KeyClass;

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

    fn allocate_cache(
        &self,
        desc: DescArg<'_, '_>,
        cache_keys: KeysArg<'_, '_>,
        may_name: bool,
    ) -> PyResult<ManagedCache> {
        desc.typed()?;
        let keys = convert::cache_keys(&cache_keys)?;
        allocatable(desc)?;
        if !may_name && !keys.is_empty() {
            return Err(nameless(
                desc.py(),
                "cache_keys",
                "only an engine of LLMRole.PROMPT names its caches",
            ));
        }
        self.engine().allocate(desc, CacheKind::Batch, &keys)
    }

    fn allocate_blocks_cache(
        &self,
        desc: DescArg<'_, '_>,
        key: KeyArg<'_, '_>,
        may_name: bool,
    ) -> PyResult<ManagedCache> {
        desc.typed()?;
        let key = convert::blocks_cache_key(&key)?;
        allocatable(desc)?;
        if !may_name && key.is_some() {
            let why = "an engine of LLMRole.DECODER does not name its blocks caches";
            return Err(nameless(desc.py(), "blocks_cache_key", why));
        }
        self.engine().allocate(desc, CacheKind::Blocks, key.map(Some).as_slice())
    }

    fn deallocate_cache(&self, cache: CacheArg<'_, '_>) -> PyResult<()> {
        device_cache("cache", cache)?;
        self.release(cache)
    }

    fn release(&self, cache: CacheArg<'_, '_>) -> PyResult<()> {
        self.engine().deallocate(cache.py(), cache.local()?.id(self.engine())?)
    }

    fn pull_cache(
        &self,
        cache_key: KeyArg<'_, '_>,
        kv_cache: CacheArg<'_, '_>,
        batch_index: IntArg<'_, '_>,
        size: IntArg<'_, '_>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        let pull = pull_cache(self.engine(), (cache_key, kv_cache), (batch_index, size), options)?;
        self.engine().pull(options.py(), &pull)
    }

    fn pull_blocks(
        &self,
        prompt_cache_key: KeyArg<'_, '_>,
        decoder_kv_cache: CacheArg<'_, '_>,
        prompt_blocks: BlocksArg<'_, '_>,
        decoder_blocks: BlocksArg<'_, '_>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        let blocks = (prompt_blocks, decoder_blocks);
        let pull = pull_blocks(self.engine(), (prompt_cache_key, decoder_kv_cache), blocks, options)?;
        self.engine().pull(options.py(), &pull)
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn copy_cache(
        &self,
        dst: CacheArg<'_, '_>,
        src: CacheArg<'_, '_>,
        dst_batch_index: IntArg<'_, '_>,
        src_batch_index: IntArg<'_, '_>,
        offset: IntArg<'_, '_>,
        size: IntArg<'_, '_>,
        req_id: IntArg<'_, '_>,
    ) -> PyResult<()> {
        let (py, engine) = (dst.py(), self.engine());
        device_cache("dst", dst)?;
        device_cache("src", src)?;
        let args = copy_arguments::copy_args(dst_batch_index, src_batch_index, offset, size)?;
        validate::copy_size(args.size).map_err(|error| raise(py, &error))?;
        let request: Option<u64> = req_id.optional("req_id")?;
        let (from, to) = (src.batch("src")?, dst.batch("dst")?);
        from.slots_first()?;
        to.slots_first()?;
        let ends = (to.end(engine)?, from.end(engine)?);
        engine.copy(py, &ends, args, request)
    }

    fn copy_blocks(&self, cache: CacheArg<'_, '_>, copy_block_info: BlocksArg<'_, '_>) -> PyResult<()> {
        let (py, engine) = (cache.py(), self.engine());
        cache.kv_typed("cache")?;
        let pairs = copy_block_info.lists("copy_block_info")?;
        cache.on_device("cache")?;
        not_negative("copy_block_info", &pairs)?;
        let end = cache.end(engine)?;
        engine.enter(py, |engine| engine.copy_blocks(&end, &pairs))
    }

    /// Every argument error of a swap is a `ValueError` as well.
    fn swap_blocks(
        &self,
        src: CacheArg<'_, '_>,
        dst: CacheArg<'_, '_>,
        src_to_dst: BlocksArg<'_, '_>,
    ) -> PyResult<()> {
        let (py, engine) = (src.py(), self.engine());
        let swap = || {
            src.kv_typed("src")?;
            dst.kv_typed("dst")?;
            let pairs = src_to_dst.pairs("src_to_dst")?;
            let (from, to) = (one_device(engine, src)?, one_device(engine, dst)?);
            engine.enter(py, |engine| engine.swap_blocks(&from, &to, &pairs))
        };
        swap().map_err(|error| error::mismatch(py, error))
    }

    fn tensor_view(&self, cache: CacheArg<'_, '_>, tensor_index: IntArg<'_, '_>) -> PyResult<TensorView> {
        let (py, engine) = (cache.py(), self.engine());
        cache.kv_typed("cache")?;
        let at = tensor(cache, tensor_index)?;
        let end = one_device(engine, cache)?;
        engine.enter(py, |engine| match &end {
            End::Loose(loose) => TensorView::one(loose, at),
            End::Managed(id) => TensorView::one(&engine.find(*id)?, at),
        })
    }
}

impl KvCaches {
    fn engine(&self) -> &Engine {
        self.native.get().engine()
    }
}

/// Reads the index of one tensor of `cache`.
fn tensor(cache: CacheArg<'_, '_>, index: IntArg<'_, '_>) -> PyResult<usize> {
    let py = cache.py();
    let index: i32 = index.int("tensor_index")?;
    let desc = cache.getattr(intern!(py, "_cache_desc"))?;
    let count: u32 = int("num_tensors", &desc.getattr(intern!(py, "_num_tensors"))?)?;
    match u32::try_from(index) {
        Ok(at) if at < count => Ok(at as usize),
        _ => Err(invalid(py, "tensor_index", index, &format!("0 to num_tensors - 1, {count} tensors"))),
    }
}

/// Checks the arguments of `pull_cache` (contract §9.1).
fn pull_cache(
    engine: &Engine,
    (cache_key, cache): (KeyArg<'_, '_>, CacheArg<'_, '_>),
    (batch_index, size): (IntArg<'_, '_>, IntArg<'_, '_>),
    options: &Bound<'_, PyDict>,
) -> PyResult<Pull> {
    let py = options.py();
    let key = cache_key.of("cache_key", &[KeyClass::Cache, KeyClass::Row])?;
    device_cache("kv_cache", cache)?;
    let size = size.int("size")?;
    let row = batch_index.int("batch_index")?;
    validate::copy_size(size).map_err(|error| raise(py, &error))?;
    let remote_offset = offset(options, "src_cache_offset")?;
    let local_offset = offset(options, "dst_cache_offset")?;
    key.check_ids()?;
    let given = LayerArgs::of(options)?;
    let per_layer = given.per_layer()?;
    let layers = given.of_pull(per_layer)?;
    let local = cache.slots("kv_cache")?;
    let rows = PullRows::Slot { local: row, remote_offset, local_offset, size };
    Ok(Pull { from: key.name()?, to: local.end(engine)?, rows, layers })
}

/// Checks the arguments of `pull_blocks` (contract §9.1).
fn pull_blocks(
    engine: &Engine,
    (key, cache): (KeyArg<'_, '_>, CacheArg<'_, '_>),
    (prompt_blocks, decoder_blocks): (BlocksArg<'_, '_>, BlocksArg<'_, '_>),
    options: &Bound<'_, PyDict>,
) -> PyResult<Pull> {
    let py = options.py();
    let checked = |result: llm_datadist_core::Result<()>| result.map_err(|error| raise(py, &error));
    let key = key.of("prompt_cache_key", &[KeyClass::Blocks])?;
    cache.kv_typed("decoder_kv_cache")?;
    let remote = prompt_blocks.list("prompt_blocks")?;
    let local = decoder_blocks.list("decoder_blocks")?;
    cache.on_device("decoder_kv_cache")?;
    checked(validate::not_empty("prompt_blocks", &remote))?;
    checked(validate::not_empty("decoder_blocks", &local))?;
    checked(validate::equally_many(("prompt_blocks", remote.len()), ("decoder_blocks", local.len())))?;
    let given = LayerArgs::of(options)?;
    let per_layer = given.per_layer()?;
    let layers = given.of_pull(per_layer)?;
    let from = key.name()?;
    Ok(Pull { from, to: cache.end(engine)?, rows: PullRows::Blocks { remote, local }, layers })
}

/// The argument called `name` must be a `KvCache` in memory of the device.
fn device_cache(name: &str, cache: CacheArg<'_, '_>) -> PyResult<()> {
    cache.kv_typed(name)?;
    cache.on_device(name)
}

/// The descriptor must have at least one tensor, in memory of the device.
fn allocatable(desc: DescArg<'_, '_>) -> PyResult<()> {
    let count: u32 = int("num_tensors", &desc.getattr(intern!(desc.py(), "_num_tensors"))?)?;
    if count == 0 {
        return Err(invalid(desc.py(), "num_tensors", 0, "at least 1"));
    }
    desc.on_device()
}

#[cold]
fn nameless(py: Python<'_>, name: &str, why: &str) -> PyErr {
    raise(py, &Error::new(ErrorKind::InvalidArgument, format!("{name} must not be given: {why}")))
}

/// Returns the cache as one end of a copy. An engine has one device, so a CPU cache of several devices is refused.
fn one_device(engine: &Engine, cache: CacheArg<'_, '_>) -> PyResult<End> {
    let py = cache.py();
    let devices = cache.getattr(intern!(py, "_num_devices"))?;
    if devices.extract::<usize>()? == 1 {
        return cache.end(engine);
    }
    Err(invalid(py, "num_devices of the cache", devices, "1, because an engine has one device"))
}

/// Reads a byte offset: an int64 of 0 or above, or `None` for 0.
fn offset(options: &Bound<'_, PyDict>, name: &str) -> PyResult<u64> {
    let Some(given) = options.get_item(name)?.filter(|given| !given.is_none()) else { return Ok(0) };
    let value: i64 = int(name, &given)?;
    u64::try_from(value).map_err(|_| negative(name, value))
}

/// Refuses negative indices with a `ValueError`, because the contract types them as uint64.
fn not_negative(name: &str, pairs: &[(i64, i64)]) -> PyResult<()> {
    let mut indices = pairs.iter().flat_map(|&(src, dst)| [src, dst]);
    indices.find(|&index| index < 0).map_or(Ok(()), |index| Err(negative(name, index)))
}

#[cold]
fn negative(name: &str, value: i64) -> PyErr {
    PyValueError::new_err(format!("{name}: {value} is below 0"))
}
