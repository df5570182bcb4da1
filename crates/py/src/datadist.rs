//! The engine class that Python calls: one short method per operation.
//!
//! A method converts and checks its arguments in the order of the contract (§7), then calls the core through `engine`.

use std::sync::Arc;

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{CacheId, CacheKind, ClusterId, End, Placement};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyList, PyString};

use crate::arguments::{AddressesArg, DescArg, FlagArg, IntArg, RoleArg, TextArg};
use crate::blocks::BlocksArg;
use crate::cache::{ManagedCache, TensorView};
use crate::call_extras::{self, GrantArg, VerifyArg};
use crate::convert;
use crate::engine::Engine;
use crate::error::{self, raise};
use crate::events::PeerHandle;
use crate::keys::{KeyArg, KeysArg};
use crate::layerwise_arguments::{self, CheckedArguments, ConfigsArg, RawArguments, SynchronizerArg};
use crate::links::{self, ClustersArg, Membership, RanksArg, by_rank};
use crate::local_cache::CacheArg;
use crate::notify::NotifyArg;
use crate::pull_push_arguments::{self, BlocksOptions, LayersArg};
use crate::selection::Selection;
use crate::sub_rows::SubRowArg;
use crate::task::TransferTask;
use crate::token_ranges::{RawArg, TokensArg};
use crate::transfer::Handles;
use crate::{copy_arguments, log, stats};

/// An engine. `close` ends it; later calls raise `LLMException(LLM_ENGINE_FINALIZED)`.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct DataDist {
    engine: Engine,
    transfers: Arc<Handles>,
}

#[pymethods]
impl DataDist {
    #[new]
    fn new(
        py: Python<'_>,
        role: RoleArg<'_, '_>,
        cluster_id: IntArg<'_, '_>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let cluster = ClusterId(cluster_id.int("cluster_id")?);
        let role = role.role()?;
        let config =
            validate::config(role, cluster, &convert::texts(options)?).map_err(|error| raise(py, &error))?;
        let engine = Engine::open(py, config);
        log::drain(py)?;
        Ok(DataDist { engine: engine?, transfers: Arc::default() })
    }

    #[getter]
    fn number(&self) -> u64 {
        self.engine.number()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let reported = log::drain(py);
        self.engine.close(py);
        self.transfers.clear();
        reported
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = self.engine.enter(py, |engine| Ok(engine.stats()))?;
        log::drain(py)?;
        stats::dict(py, &snapshot)
    }

    fn listening(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.engine.enter(py, |engine| Ok(engine.listening().map(|address| address.to_string())))
    }

    fn link_clusters<'py>(
        &self,
        clusters: ClustersArg<'_, 'py>,
        timeout: IntArg<'_, 'py>,
        needs_local: bool,
        one_local: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = clusters.py();
        let timeout = links::timeout(timeout)?;
        let infos = clusters.infos()?;
        if needs_local {
            infos.local_given()?;
        }
        let peers = infos.peers()?;
        let linked = self.engine.enter(py, |engine| Ok(links::link(engine, &peers, timeout, one_local)));
        log::drain(py)?;
        links::codes(py, &linked?, self.engine.codes())
    }

    fn unlink_clusters<'py>(
        &self,
        clusters: ClustersArg<'_, 'py>,
        timeout: IntArg<'_, 'py>,
        force: FlagArg<'_, 'py>,
        always_force: bool,
        strict: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = clusters.py();
        let timeout = links::timeout(timeout)?;
        let infos = clusters.infos()?;
        let force = force.optional("force")?.unwrap_or(false) || always_force;
        let peers = infos.peers()?;
        let call = |engine: &_| Ok(links::unlink(engine, &peers, timeout, force, strict));
        let unlinked = self.engine.enter(py, call);
        log::drain(py)?;
        links::codes(py, &unlinked?, self.engine.codes())
    }

    fn link(
        &self,
        comm_name: TextArg<'_, '_>,
        cluster_rank_info: RanksArg<'_, '_>,
        rank_table: TextArg<'_, '_>,
    ) -> PyResult<u64> {
        let py = comm_name.py();
        let given = Membership::new(self.engine.cluster(), comm_name, cluster_rank_info, rank_table)?;
        let Membership { name, clusters, rank_table } = given;
        let entered = self.engine.enter(py, |engine| by_rank(engine)?.link(&name, &clusters, &rank_table));
        log::drain(py)?;
        entered
    }

    fn unlink(&self, comm_id: IntArg<'_, '_>) -> PyResult<()> {
        let (py, comm) = (comm_id.py(), comm_id.int("comm_id")?);
        let left = self.engine.enter(py, |engine| by_rank(engine)?.unlink(comm));
        log::drain(py)?;
        left
    }

    fn comm_status(&self, comm_id: IntArg<'_, '_>) -> PyResult<i64> {
        let (py, comm) = (comm_id.py(), comm_id.int("comm_id")?);
        let status = self.engine.enter(py, |engine| by_rank(engine)?.comm_status(comm));
        log::drain(py)?;
        status.map(links::status_number)
    }

    fn switch_role(&self, role: RoleArg<'_, '_>, listen: Option<&Bound<'_, PyString>>) -> PyResult<()> {
        let py = role.py();
        let new = role.role()?;
        let listen = links::listen(listen)?;
        let switched = self.engine.enter(py, |engine| engine.switch_role(new, listen));
        log::drain(py)?;
        switched
    }

    fn check_link(&self, remote_cluster_id: IntArg<'_, '_>) -> PyResult<()> {
        let (py, cluster) = (remote_cluster_id.py(), ClusterId(remote_cluster_id.int("remote_cluster_id")?));
        let checked = self.engine.enter(py, |engine| engine.check_link(cluster));
        log::drain(py)?;
        checked
    }

    fn remap(&self, py: Python<'_>) -> PyResult<()> {
        self.engine.enter(py, llm_datadist_core::DataDist::remap)
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
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
    ) -> PyResult<()> {
        let (ends, slot) = ((cache_key, cache), (batch_index, size));
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let extras = (notify, verify, layout);
        let pull = pull_push_arguments::pull_cache(&self.engine, ends, slot, layers, extras)?;
        self.engine.pull(cache.py(), pull)
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
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
        grant: GrantArg<'_, '_>,
        grant_done: FlagArg<'_, '_>,
        src_tokens: TokensArg<'_, '_>,
        dst_tokens: TokensArg<'_, '_>,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<()> {
        let options = BlocksOptions {
            layers: (src_layer_range, dst_layer_range, tensor_num_per_layer),
            extras: (notify, verify, layout),
            grant: Some((grant, grant_done)),
            selected: (src_tokens, dst_tokens, part),
        };
        let (ends, blocks) = ((src_cache_key, dst_cache), (src_blocks, dst_blocks));
        let pull = pull_push_arguments::pull_blocks(&self.engine, ends, blocks, options)?;
        self.engine.pull(dst_cache.py(), pull)
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
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
    ) -> PyResult<()> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let slot = (src_batch_index, size);
        let push = pull_push_arguments::push_cache(&self.engine, (dst_cache_key, src_cache), slot, layers)?;
        self.engine.push(src_cache.py(), &push, call_extras::without_grant((notify, verify, layout))?)
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
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        src_tokens: TokensArg<'_, '_>,
        dst_tokens: TokensArg<'_, '_>,
        layout: RawArg<'_, '_>,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<()> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let (ends, blocks) = ((dst_cache_key, src_cache), (src_blocks, dst_blocks));
        let selected = Selection::of((src_tokens, dst_tokens, part))?;
        let push = pull_push_arguments::push_blocks(&self.engine, ends, blocks, layers, selected)?;
        self.engine.push(src_cache.py(), &push, call_extras::without_grant((notify, verify, layout))?)
    }

    fn transfer_cache_async(
        &self,
        src_cache: CacheArg<'_, '_>,
        layer_synchronizer: SynchronizerArg<'_, '_>,
        transfer_configs: ConfigsArg<'_, '_>,
        src_block_indices: BlocksArg<'_, '_>,
        dst_block_indices: BlocksArg<'_, '_>,
        dst_block_memory_size: IntArg<'_, '_>,
    ) -> PyResult<TransferTask> {
        let blocks = (src_block_indices, dst_block_indices, dst_block_memory_size);
        let given = RawArguments { src_cache, layer_synchronizer, transfer_configs, blocks };
        let CheckedArguments { from, args, to, patience } =
            layerwise_arguments::transfer(&self.engine, &given)?;
        let start = |engine: &llm_datadist_core::DataDist| engine.transfer_async(&from, &args, to, patience);
        self.engine.enter(src_cache.py(), start).map(|task| TransferTask::new(task, self.engine.codes()))
    }

    fn notify(&self, cluster_id: IntArg<'_, '_>, payload: NotifyArg<'_, '_>) -> PyResult<()> {
        let cluster = ClusterId(cluster_id.int("cluster_id")?);
        let message = payload.bytes("payload")?.ok_or_else(|| payload.missing("payload"))?;
        self.engine.enter(payload.py(), |engine| engine.notify(cluster, message))
    }

    fn set_metadata(&self, metadata: NotifyArg<'_, '_>) -> PyResult<()> {
        let bytes = metadata.bytes("metadata")?.ok_or_else(|| metadata.missing("metadata"))?;
        self.engine.enter(metadata.py(), |engine| engine.set_metadata(bytes))
    }

    fn peers(&self, py: Python<'_>) -> PyResult<Vec<Py<PeerHandle>>> {
        let peers = self.engine.enter(py, |engine| Ok(engine.peers()))?;
        peers.iter().map(|peer| PeerHandle::of(py, peer)).collect()
    }

    fn sync_kv_timeout(&self, py: Python<'_>) -> PyResult<u32> {
        let limit = self.engine.enter(py, |engine| Ok(engine.config().sync_timeout.as_millis()))?;
        Ok(limit.try_into().unwrap_or(u32::MAX))
    }

    fn huge_page_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let measure = |engine: &llm_datadist_core::DataDist| {
            Ok(Placement::ALL.map(|placement| (placement.to_string(), engine.huge_bytes(placement))))
        };
        self.engine.enter(py, measure)?.into_py_dict(py)
    }

    fn allocate_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        cache_keys: KeysArg<'_, '_>,
        contiguous: FlagArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let keys = cache_keys.keys()?;
        self.engine.allocate(cache_desc, CacheKind::Batch, &keys, contiguous.required("contiguous")?)
    }

    fn allocate_blocks_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        blocks_cache_key: KeyArg<'_, '_>,
        contiguous: FlagArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let key = blocks_cache_key.blocks_cache_key()?.map(Some);
        let contiguous = contiguous.required("contiguous")?;
        self.engine.allocate(cache_desc, CacheKind::Blocks, key.as_slice(), contiguous)
    }

    fn deallocate_cache(&self, cache: CacheArg<'_, '_>) -> PyResult<()> {
        cache.typed("cache")?;
        let id = cache.batch("cache")?.id(&self.engine)?;
        self.engine.deallocate(cache.py(), id)
    }

    fn deallocate_blocks_cache(&self, cache: CacheArg<'_, '_>) -> PyResult<()> {
        cache.typed("cache")?;
        let id = cache.blocks("cache")?.id(&self.engine)?;
        self.engine.deallocate(cache.py(), id)
    }

    fn remove_cache_key(&self, cache_key: KeyArg<'_, '_>) -> PyResult<()> {
        let key = cache_key.cache_key()?;
        self.engine.enter(cache_key.py(), |engine| key.map_or(Ok(()), |key| engine.remove_key(key)))
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
        self.engine.register(cache_desc, CacheKind::Batch, &addrs, &keys, access)
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
        self.engine.register(cache_desc, CacheKind::Blocks, &addrs, key.map(Some).as_slice(), access)
    }

    fn unregister_cache(&self, cache_id: IntArg<'_, '_>) -> PyResult<()> {
        let id = CacheId(cache_id.int("cache_id")?);
        self.engine.enter(cache_id.py(), |engine| engine.unregister(id))
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
        let (ends, args) = copy_arguments::copy_cache_args(&self.engine, (dst, src), numbers, req_id)?;
        let request: Option<u64> = req_id.optional("req_id")?;
        self.engine.copy(src.py(), &ends, args, request)
    }

    fn copy_blocks(
        &self,
        cache: CacheArg<'_, '_>,
        copy_block_info: BlocksArg<'_, '_>,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<()> {
        let (end, pairs) = copy_arguments::copy_blocks_args(&self.engine, cache, copy_block_info)?;
        let part = part.part()?;
        self.engine.enter(cache.py(), |engine| engine.copy_sub_rows(&end, &pairs, part))
    }

    /// Every argument error of a swap is a `ValueError` as well.
    fn swap_blocks(
        &self,
        src_cache: CacheArg<'_, '_>,
        dst_cache: CacheArg<'_, '_>,
        src_to_dst: BlocksArg<'_, '_>,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<()> {
        let args = copy_arguments::swap_args(&self.engine, src_cache, dst_cache, src_to_dst);
        let swapped = args.and_then(|(src, dst, pairs)| {
            let part = part.part()?;
            self.engine.enter(src_cache.py(), |engine| engine.swap_sub_rows(&src, &dst, &pairs, part))
        });
        swapped.map_err(|error| error::mismatch(src_cache.py(), error))
    }

    fn tensor_views(&self, cache: CacheArg<'_, '_>) -> PyResult<Vec<TensorView>> {
        cache.typed("cache")?;
        let end = cache.end(&self.engine)?;
        self.engine.enter(cache.py(), |engine| match &end {
            End::Loose(loose) => TensorView::all(loose),
            End::Managed(id) => TensorView::all(&engine.find(*id)?),
        })
    }
}

impl DataDist {
    /// Returns the engine.
    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the handles of its asynchronous calls.
    pub(crate) fn transfers(&self) -> &Arc<Handles> {
        &self.transfers
    }
}
