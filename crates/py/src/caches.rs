//! The calls of `CacheManager`: types and order of checks (contract §7).

use llm_datadist_core::{CacheId, CacheKind};
use pyo3::prelude::*;

use crate::arguments::{AddressesArg, DescArg, FlagArg, IntArg};
use crate::blocks::BlocksArg;
use crate::cache::ManagedCache;
use crate::copy_arguments;
use crate::datadist::DataDist;
use crate::engine::Engine;
use crate::error;
use crate::keys::{KeyArg, KeysArg};
use crate::local_cache::CacheArg;
use crate::pull_push_arguments::{self, LayersArg};

/// The caches of an engine as a `CacheManager` names them.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct CacheCalls {
    datadist: Py<DataDist>,
}

#[pymethods]
impl CacheCalls {
    #[new]
    fn new(datadist: Py<DataDist>) -> Self {
        CacheCalls { datadist }
    }

    fn allocate_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        cache_keys: KeysArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let keys = cache_keys.keys()?;
        self.engine().allocate(cache_desc, CacheKind::Batch, &keys)
    }

    fn allocate_blocks_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        blocks_cache_key: KeyArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let key = blocks_cache_key.blocks_cache_key()?.map(Some);
        self.engine().allocate(cache_desc, CacheKind::Blocks, key.as_slice())
    }

    fn deallocate_cache(&self, cache: CacheArg<'_, '_>) -> PyResult<()> {
        cache.typed("cache")?;
        let id = cache.batch("cache")?.id(self.engine())?;
        self.engine().deallocate(cache.py(), id)
    }

    fn deallocate_blocks_cache(&self, cache: CacheArg<'_, '_>) -> PyResult<()> {
        cache.typed("cache")?;
        let id = cache.blocks("cache")?.id(self.engine())?;
        self.engine().deallocate(cache.py(), id)
    }

    fn register_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        addrs: AddressesArg<'_, '_>,
        cache_keys: KeysArg<'_, '_>,
        remote_accessible: FlagArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let addrs = addrs.addresses("addrs")?;
        let keys = cache_keys.keys()?;
        let access = remote_accessible.optional("remote_accessible")?;
        self.engine().register(cache_desc, CacheKind::Batch, &addrs, &keys, access)
    }

    fn register_blocks_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        addrs: AddressesArg<'_, '_>,
        blocks_cache_key: KeyArg<'_, '_>,
        remote_accessible: FlagArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let addrs = addrs.addresses("addrs")?;
        let key = blocks_cache_key.blocks_cache_key()?;
        let access = remote_accessible.optional("remote_accessible")?;
        self.engine().register(cache_desc, CacheKind::Blocks, &addrs, key.map(Some).as_slice(), access)
    }

    fn unregister_cache(&self, cache_id: IntArg<'_, '_>) -> PyResult<()> {
        let id = CacheId(cache_id.int("cache_id")?);
        self.engine().enter(cache_id.py(), |engine| engine.unregister(id))
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_cache(
        &self,
        cache_key: KeyArg<'_, '_>,
        cache: CacheArg<'_, '_>,
        batch_index: IntArg<'_, '_>,
        size: IntArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
    ) -> PyResult<()> {
        let (ends, slot) = ((cache_key, cache), (batch_index, size));
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let pull = pull_push_arguments::pull_cache(self.engine(), ends, slot, layers)?;
        self.engine().pull(cache.py(), pull)
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_blocks(
        &self,
        src_cache_key: KeyArg<'_, '_>,
        dst_cache: CacheArg<'_, '_>,
        src_blocks: BlocksArg<'_, '_>,
        dst_blocks: BlocksArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
    ) -> PyResult<()> {
        let (ends, blocks) = ((src_cache_key, dst_cache), (src_blocks, dst_blocks));
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let pull = pull_push_arguments::pull_blocks(self.engine(), ends, blocks, layers)?;
        self.engine().pull(dst_cache.py(), pull)
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn push_cache(
        &self,
        dst_cache_key: KeyArg<'_, '_>,
        src_cache: CacheArg<'_, '_>,
        src_batch_index: IntArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        size: IntArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
    ) -> PyResult<()> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let (ends, slot) = ((dst_cache_key, src_cache), (src_batch_index, size));
        let push = pull_push_arguments::push_cache(self.engine(), ends, slot, layers)?;
        self.engine().push(src_cache.py(), push)
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn push_blocks(
        &self,
        dst_cache_key: KeyArg<'_, '_>,
        src_cache: CacheArg<'_, '_>,
        src_blocks: BlocksArg<'_, '_>,
        dst_blocks: BlocksArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
    ) -> PyResult<()> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let (ends, blocks) = ((dst_cache_key, src_cache), (src_blocks, dst_blocks));
        let push = pull_push_arguments::push_blocks(self.engine(), ends, blocks, layers)?;
        self.engine().push(src_cache.py(), push)
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
        let numbers = (dst_batch_index, src_batch_index, offset, size);
        let (ends, args) = copy_arguments::copy_cache_args(self.engine(), (dst, src), numbers, req_id)?;
        self.engine().copy_cache(src.py(), ends, args, req_id.optional("req_id")?)
    }

    fn copy_blocks(&self, cache: CacheArg<'_, '_>, copy_block_info: BlocksArg<'_, '_>) -> PyResult<()> {
        let (end, pairs) = copy_arguments::copy_blocks_args(self.engine(), cache, copy_block_info)?;
        self.engine().run(cache.py(), |engine| engine.copy_blocks(&end, &pairs))
    }

    /// Every argument error of a swap is a `ValueError` as well.
    fn swap_blocks(
        &self,
        src_cache: CacheArg<'_, '_>,
        dst_cache: CacheArg<'_, '_>,
        src_to_dst: BlocksArg<'_, '_>,
    ) -> PyResult<()> {
        let py = src_cache.py();
        let args = copy_arguments::swap_args(self.engine(), src_cache, dst_cache, src_to_dst);
        let swapped = args.and_then(|(src, dst, pairs)| {
            self.engine().run(py, |engine| engine.swap_blocks(&src, &dst, &pairs))
        });
        swapped.map_err(|error| error::mismatch(py, error))
    }
}

impl CacheCalls {
    fn engine(&self) -> &Engine {
        self.datadist.get().engine()
    }
}
