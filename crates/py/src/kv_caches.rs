//! The calls of `KvCacheManager`: types and order of checks (contract §9.1).
//!
//! The same engine carries them out. Roles are checked in the Python package; other differences are in `core::config::Mode`.

use llm_datadist_core::bindings::validate;
use llm_datadist_core::bindings::{End, Layers, Rows};
use llm_datadist_core::{CacheKind, Error, ErrorKind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::{DescArg, IntArg};
use crate::blocks::BlocksArg;
use crate::cache::{ManagedCache, TensorView};
use crate::copy_arguments;
use crate::datadist::DataDist;
use crate::engine::Engine;
use crate::error::{self, raise};
use crate::keys::{KeyArg, KeyClass, KeysArg};
use crate::local_cache::CacheArg;
use crate::pull_push_arguments::{self, GivenLayers, LayersArg, PeerRows};

/// The caches of an engine as a `KvCacheManager` names them.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct KvCaches {
    datadist: Py<DataDist>,
}

#[pymethods]
impl KvCaches {
    #[new]
    fn new(datadist: Py<DataDist>) -> Self {
        KvCaches { datadist }
    }

    fn allocate_cache(
        &self,
        desc: DescArg<'_, '_>,
        cache_keys: KeysArg<'_, '_>,
        may_name: bool,
    ) -> PyResult<ManagedCache> {
        desc.typed()?;
        let keys = cache_keys.keys()?;
        desc.allocatable()?;
        if !may_name && !keys.is_empty() {
            let why = "only an engine of LLMRole.PROMPT names its caches";
            return Err(nameless(desc.py(), "cache_keys", why));
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
        let key = key.blocks_cache_key()?;
        desc.allocatable()?;
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
        self.engine().deallocate(cache.py(), cache.local("cache")?.id(self.engine())?)
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_cache(
        &self,
        cache_key: KeyArg<'_, '_>,
        kv_cache: CacheArg<'_, '_>,
        batch_index: IntArg<'_, '_>,
        size: IntArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
        src_cache_offset: IntArg<'_, '_>,
        dst_cache_offset: IntArg<'_, '_>,
    ) -> PyResult<()> {
        let (ends, slot) = ((cache_key, kv_cache), (batch_index, size));
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let pull = pull_cache(self.engine(), ends, slot, layers, (src_cache_offset, dst_cache_offset))?;
        self.engine().pull(kv_cache.py(), pull)
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_blocks(
        &self,
        prompt_cache_key: KeyArg<'_, '_>,
        decoder_kv_cache: CacheArg<'_, '_>,
        prompt_blocks: BlocksArg<'_, '_>,
        decoder_blocks: BlocksArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
    ) -> PyResult<()> {
        let (ends, blocks) = ((prompt_cache_key, decoder_kv_cache), (prompt_blocks, decoder_blocks));
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let pull = pull_blocks(self.engine(), ends, blocks, layers)?;
        self.engine().pull(decoder_kv_cache.py(), pull)
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
        engine.copy_cache(py, (to.end(engine)?, from.end(engine)?), args, request)
    }

    fn copy_blocks(&self, cache: CacheArg<'_, '_>, copy_block_info: BlocksArg<'_, '_>) -> PyResult<()> {
        let (py, engine) = (cache.py(), self.engine());
        cache.kv_typed("cache")?;
        let pairs = copy_block_info.lists("copy_block_info")?;
        cache.on_device("cache")?;
        not_negative("copy_block_info", &pairs)?;
        let end = cache.end("cache", engine)?;
        engine.run(py, |engine| engine.copy_blocks(&end, &pairs))
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
            let (from, to) = (src.one_device("src", engine)?, dst.one_device("dst", engine)?);
            engine.run(py, |engine| engine.swap_blocks(&from, &to, &pairs))
        };
        swap().map_err(|error| error::mismatch(py, error))
    }

    fn tensor_view(&self, cache: CacheArg<'_, '_>, tensor_index: IntArg<'_, '_>) -> PyResult<TensorView> {
        let (py, engine) = (cache.py(), self.engine());
        cache.kv_typed("cache")?;
        let at = cache.tensor_index("cache", tensor_index)?;
        let end = cache.one_device("cache", engine)?;
        engine.enter(py, |engine| match &end {
            End::Loose(loose) => TensorView::one(loose, at, raise),
            End::Managed(id) => TensorView::one(&engine.find(*id)?, at, raise),
        })
    }
}

impl KvCaches {
    fn engine(&self) -> &Engine {
        self.datadist.get().engine()
    }
}

/// Checks the arguments of `pull_cache` (contract §9.1).
fn pull_cache(
    engine: &Engine,
    (cache_key, cache): (KeyArg<'_, '_>, CacheArg<'_, '_>),
    (batch_index, size): (IntArg<'_, '_>, IntArg<'_, '_>),
    given: GivenLayers<'_, '_>,
    (src_cache_offset, dst_cache_offset): (IntArg<'_, '_>, IntArg<'_, '_>),
) -> PyResult<PeerRows> {
    let py = cache.py();
    let key = cache_key.of("cache_key", &[KeyClass::Cache, KeyClass::Row])?;
    device_cache("kv_cache", cache)?;
    let size = size.int("size")?;
    let row = batch_index.int("batch_index")?;
    validate::copy_size(size).map_err(|error| raise(py, &error))?;
    let remote_offset = offset(src_cache_offset, "src_cache_offset")?;
    let local_offset = offset(dst_cache_offset, "dst_cache_offset")?;
    key.check_ids()?;
    let layers = layers(given)?;
    let local = cache.slots("kv_cache")?;
    let rows = Rows::Slot { local: row, remote_offset, local_offset, size };
    Ok(PeerRows { remote: key.name()?, local: local.end(engine)?, rows, layers })
}

/// Checks the arguments of `pull_blocks` (contract §9.1).
fn pull_blocks(
    engine: &Engine,
    (key, cache): (KeyArg<'_, '_>, CacheArg<'_, '_>),
    (prompt_blocks, decoder_blocks): (BlocksArg<'_, '_>, BlocksArg<'_, '_>),
    given: GivenLayers<'_, '_>,
) -> PyResult<PeerRows> {
    let py = cache.py();
    let checked = |result: llm_datadist_core::Result<()>| result.map_err(|error| raise(py, &error));
    let key = key.of("prompt_cache_key", &[KeyClass::Blocks])?;
    cache.kv_typed("decoder_kv_cache")?;
    let remote = prompt_blocks.list("prompt_blocks")?;
    let local = decoder_blocks.list("decoder_blocks")?;
    cache.on_device("decoder_kv_cache")?;
    checked(validate::not_empty("prompt_blocks", &remote))?;
    checked(validate::not_empty("decoder_blocks", &local))?;
    checked(validate::equally_many(("prompt_blocks", remote.len()), ("decoder_blocks", local.len())))?;
    let layers = layers(given)?;
    let (name, rows) = (key.name()?, Rows::Blocks { remote, local });
    Ok(PeerRows { remote: name, local: cache.end("decoder_kv_cache", engine)?, rows, layers })
}

/// Reads which layers a pull moves.
fn layers(given: GivenLayers<'_, '_>) -> PyResult<Layers> {
    pull_push_arguments::pull_layers(given, pull_push_arguments::per_layer(given.2)?)
}

/// The argument called `name` must be a `KvCache` in memory of the device.
fn device_cache(name: &str, cache: CacheArg<'_, '_>) -> PyResult<()> {
    cache.kv_typed(name)?;
    cache.on_device(name)
}

#[cold]
fn nameless(py: Python<'_>, name: &str, why: &str) -> PyErr {
    raise(py, &Error::new(ErrorKind::InvalidArgument, format!("{name} must not be given: {why}")))
}

/// Reads a byte offset: an int64 of 0 or above, or `None` for 0.
fn offset(given: IntArg<'_, '_>, name: &str) -> PyResult<u64> {
    let value: i64 = given.optional(name)?.unwrap_or(0);
    u64::try_from(value).map_err(|_| negative(name, value))
}

/// Refuses negative indices with a `ValueError`, because the contract types them as uint64.
fn not_negative(name: &str, pairs: &[(i64, i64)]) -> PyResult<()> {
    let Some(row) = pairs.iter().position(|&(src, dst)| (src | dst) < 0) else { return Ok(()) };
    let (src, dst) = pairs[row];
    Err(negative(&format!("{name} pair {row}"), if src < 0 { src } else { dst }))
}

#[cold]
fn negative(name: &str, value: i64) -> PyErr {
    PyValueError::new_err(format!("{name}: {value} is below 0"))
}
