//! The engine class that Python calls: links, layers, messages and counters. `caches` has the calls of its caches.
//!
//! A method converts and checks its arguments in the order of the contract (§7), then calls the core through `engine`.

use std::sync::Arc;

use llm_datadist_core::bindings::options::config_from_texts;
use llm_datadist_core::{ClusterId, DataDist as CoreDataDist, End, Placement};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyList, PyString};

use crate::arguments::{FlagArg, IntArg, RoleArg, TextArg};
use crate::blocks::BlocksArg;
use crate::cache::TensorView;
use crate::convert;
use crate::engine::Engine;
use crate::error::{raise, raise_of};
use crate::events::PeerHandle;
use crate::keys::KeyArg;
use crate::layer_task::LayerTaskHandle;
use crate::layer_task_arguments::{self, DestinationsArg};
use crate::layerwise_arguments::{self, CheckedArguments, ConfigsArg, RawArguments, SynchronizerArg};
use crate::links::{self, ClustersArg, Membership, RanksArg, by_rank};
use crate::local_cache::CacheArg;
use crate::notify::NotifyArg;
use crate::task::TransferTask;
use crate::transfer::TransferHandles;
use crate::{log, stats};

/// An engine. `close` ends it; later calls raise `LLMException(LLM_ENGINE_FINALIZED)`.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct DataDist {
    engine: Engine,
    transfers: Arc<TransferHandles>,
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
            config_from_texts(role, cluster, &convert::texts(options)?).map_err(|error| raise(py, &error))?;
        let raises = raise_of(config.mode);
        let engine = Engine::open(py, config, raises);
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

    fn remove_cache_key(&self, cache_key: KeyArg<'_, '_>) -> PyResult<()> {
        let key = cache_key.cache_key()?;
        self.engine.enter(cache_key.py(), |engine| key.map_or(Ok(()), |key| engine.remove_key(key)))
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
        let CheckedArguments { from, args, to, layer_timeout } =
            layerwise_arguments::transfer(&self.engine, &given)?;
        let start = |engine: &CoreDataDist| engine.transfer_async(&from, &args, to, layer_timeout);
        self.engine.enter(src_cache.py(), start).map(|task| TransferTask::new(task, self.engine.codes()))
    }

    fn begin_layers(
        &self,
        cache: CacheArg<'_, '_>,
        destinations: DestinationsArg<'_, '_>,
        layer_timeout_ms: IntArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
    ) -> PyResult<LayerTaskHandle> {
        let py = cache.py();
        let numbers = (layer_timeout_ms, tensor_num_per_layer);
        let call = layer_task_arguments::begin(&self.engine, cache, destinations, numbers)?;
        let blocks = call.num_blocks() + call.to.len();
        let begin = |engine: &CoreDataDist| engine.begin_layers(&call.from, call.to, call.layer_timeout);
        let task = self.engine.start(py, blocks, begin)?;
        LayerTaskHandle::new(py, task, &self.transfers, self.engine.codes())
    }

    fn tensor_views(&self, cache: CacheArg<'_, '_>) -> PyResult<Vec<TensorView>> {
        cache.typed("cache")?;
        let end = cache.end(&self.engine)?;
        self.engine.enter(cache.py(), |engine| match &end {
            End::Loose(loose) => TensorView::all(loose),
            End::Managed(id) => TensorView::all(&engine.find(*id)?),
        })
    }

    fn remap(&self, py: Python<'_>) -> PyResult<()> {
        self.engine.enter(py, CoreDataDist::remap)
    }

    fn huge_page_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let measure = |engine: &CoreDataDist| {
            Ok(Placement::ALL.map(|placement| (placement.to_string(), engine.huge_bytes(placement))))
        };
        self.engine.enter(py, measure)?.into_py_dict(py)
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
}

impl DataDist {
    /// Returns the engine.
    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the handles of its asynchronous calls.
    pub(crate) fn transfers(&self) -> &Arc<TransferHandles> {
        &self.transfers
    }
}
