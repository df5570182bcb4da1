//! The engine class that Python calls: links, layers and counters. `caches` has the calls of its caches.
//!
//! A method converts and checks its arguments in the order of the contract (§7), then calls the core through `engine`.

use llm_datadist_core::ClusterId;
use llm_datadist_core::bindings::options::config_from_texts;
use llm_datadist_core::bindings::{DataDist as CoreDataDist, End};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyString};

use crate::arguments::{FlagArg, IntArg, RoleArg, TextArg};
use crate::blocks::BlocksArg;
use crate::cache::TensorView;
use crate::convert;
use crate::engine::Engine;
use crate::error::{raise, raise_of};
use crate::keys::KeyArg;
use crate::layerwise_arguments::{self, CheckedArguments, ConfigsArg, RawArguments, SynchronizerArg};
use crate::links::{self, ClustersArg, Membership, RanksArg, by_rank};
use crate::local_cache::CacheArg;
use crate::native::{NativeCache, NativeEngine};
use crate::task::TransferTask;
use crate::{log, stats};

/// An engine. `close` ends it; later calls raise `LLMException(LLM_ENGINE_FINALIZED)`.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct DataDist {
    engine: Engine,
    /// The same engine in the native API, once it was asked for.
    native: PyOnceLock<Py<NativeEngine>>,
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
        Ok(DataDist { engine: engine?, native: PyOnceLock::new() })
    }

    #[getter]
    fn number(&self) -> u64 {
        self.engine.number()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let reported = log::drain(py);
        self.engine.close(py);
        if let Some(native) = self.native.get(py) {
            native.get().shared.end(py);
        }
        reported
    }

    /// Returns the engine of the native API over the same engine.
    fn native_engine(&self, py: Python<'_>) -> PyResult<Py<NativeEngine>> {
        self.engine.attached(py, |_| Ok(()))?;
        let native = self.native.get_or_try_init(py, || NativeEngine::of_original(py, &self.engine))?;
        Ok(native.clone_ref(py))
    }

    /// Returns the cache of the native API that a blocks cache of this engine is.
    fn native_cache(&self, cache: CacheArg<'_, '_>) -> PyResult<NativeCache> {
        let py = cache.py();
        let id = cache.blocks("cache")?.own_id(&self.engine)?;
        let made = self.engine.attached(py, |engine| engine.find(id))?;
        Ok(NativeCache::of_original(&self.native_engine(py)?.get().shared, &made))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = self.engine.enter(py, |engine| Ok(engine.stats()))?;
        log::drain(py)?;
        stats::dict(py, &snapshot.to_json())
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

    fn tensor_views(&self, cache: CacheArg<'_, '_>) -> PyResult<Vec<TensorView>> {
        cache.typed("cache")?;
        let end = cache.end("cache", &self.engine)?;
        self.engine.enter(cache.py(), |engine| match &end {
            End::Loose(loose) => TensorView::all(loose, raise),
            End::Managed(id) => TensorView::all(&engine.find(*id)?, raise),
        })
    }

    fn remap(&self, py: Python<'_>) -> PyResult<()> {
        self.engine.enter(py, CoreDataDist::remap)
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
}
