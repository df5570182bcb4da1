//! The engine as its users see it. Each operation takes a few lines over the modules below.
//!
//! Decisions are made elsewhere: `validate` decides what is legal, `plan` where bytes go, and `copy` how they
//! move.

mod copies;
mod cpp;
mod grants;
mod group;
mod layerwise;
mod links;
mod named_caches;
mod operation;
mod remote_name;
mod transfer;

pub use cpp::CacheIndex;
pub use group::{CopyMember, GroupMember};
pub use layerwise::LayerReceiver;
pub use operation::Operation;
pub use remote_name::RemoteName;
pub use transfer::CallExtras;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::{Cache, CallRows, all_rows, unpinned};
use crate::config::{Config, HugeChoice, Mode, Role};
use crate::device::DeviceSet;
use crate::error::Result;
use crate::events::{Event, EventQueue, Transfer};
use crate::memory::Adopted;
use crate::model::{CacheDesc, CacheId, CacheKey, CacheKind, ClusterId, Deadline, Placement};
use crate::pool::Arena;
use crate::resources::Resources;
use crate::session::{Links, Transports, check_metadata, draw_instance};
use crate::stats::{FabricState, Op, PoolReport, Snapshot};
use crate::sync::Mutex;
use crate::threads::{EngineNumber, KnownEngine};
use crate::token_file;
use crate::transfer::{
    AsyncCalls, CallPurpose, Execution, Executor, GrantClock, JobClass, RunningCalls, Work,
};
use crate::validate;

/// One end of a copy, as the caller names it.
#[derive(Clone, Debug)]
pub enum End {
    /// A cache of this engine, by its id.
    Managed(CacheId),
    /// A handle: a cache over the caller's memory that is not registered with an engine. For a copy, it may
    /// also be a cache that was already looked up.
    Loose(Arc<Cache>),
}

/// An open engine. Any number of threads may share it. Drop ends its links; its memory is released once the
/// last copy has ended.
pub struct DataDist {
    // Fields are dropped in order: the links end before the state with which they answer, and the executor waits for the jobs that
    // push layers over the links.
    links: Links,
    executor: Executor,
    calls: AsyncCalls,
    /// Every `CacheTask` that runs. They have no events, and `drain` does not wait for them.
    tasks: Arc<RunningCalls>,
    grant_clock: Arc<GrantClock>,
    resources: Arc<Resources>,
    role: Mutex<Role>,
    interrupted: Option<fn() -> bool>,
    #[cfg(feature = "testing")]
    over: Option<&'static std::sync::atomic::AtomicBool>,
    // Dropped last, because the end of the other parts may be logged.
    _known: KnownEngine,
}

impl DataDist {
    /// Opens an engine over host memory, and a listener if `config` names an address. The pools of `config`
    /// use only address space until they are touched.
    pub fn open(config: Config) -> Result<Self> {
        Self::open_with(config, DeviceSet::host_only(), Transports::default())
    }

    /// Opens an engine over `devices` whose streams come from `transports`.
    #[cfg(feature = "testing")]
    pub fn open_over(config: Config, devices: DeviceSet, transports: Transports) -> Result<Self> {
        Self::open_with(config, devices, transports)
    }

    fn open_with(mut config: Config, devices: DeviceSet, transports: Transports) -> Result<Self> {
        validate::engine_name(&config.name)?;
        check_metadata(&config.metadata)?;
        let file_option = if config.native { "token_file" } else { "link_token_file" };
        config.links.token = token_file::token(&config.links, file_option)?;
        config.links.token_file = None;
        if config.native {
            config.cluster = ClusterId(draw_instance()?);
        } else if config.name.is_empty() {
            // By which peers with the native API can tell which engine it is.
            config.name = format!("cluster {}", config.cluster);
        }
        let number = EngineNumber::next();
        let known = number.named(&config.name);
        let _here = number.on_this_thread();
        let resources = Arc::new(Resources::open(number, config, devices)?);
        let links = Links::open(resources.clone(), transports)?;
        let executor = Executor::of_process(number, resources.config.transfer_poll);
        let calls = AsyncCalls::new(resources.events.clone(), executor.handle(), Arc::downgrade(&resources));
        Ok(DataDist {
            links,
            grant_clock: GrantClock::new(executor.handle(), &resources.grants),
            executor,
            calls,
            tasks: Arc::default(),
            role: Mutex::new(resources.config.role),
            resources,
            interrupted: None,
            #[cfg(feature = "testing")]
            over: None,
            _known: known,
        })
    }

    /// Sets `interrupted`, which calls check at intervals on their own thread while they wait. A call ends
    /// early once it returns `true`.
    #[must_use]
    pub fn interrupted_by(mut self, interrupted: fn() -> bool) -> Self {
        self.interrupted = Some(interrupted);
        self
    }

    /// Sets `over`: the deadline of every call passes when it becomes `true`, and not earlier.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn over_when(mut self, over: &'static std::sync::atomic::AtomicBool) -> Self {
        self.over = Some(over);
        self
    }

    /// Sets whether the copy engine behaves as if no thread could be started.
    #[cfg(feature = "testing")]
    pub fn refuse_copy_threads(&self, refuse: bool) {
        self.resources.copy_engine.refuse_threads(refuse);
    }

    /// Returns the configuration with which the engine was opened.
    pub fn config(&self) -> &Config {
        &self.resources.config
    }

    /// Allocates a cache from the pool of its placement, and binds `keys`, one per row (contract §7.1, §7.3).
    /// `None` leaves a row without a key.
    ///
    /// Returns `Err(OutOfMemory)` if the pool has no room, and `Err(KeyTaken)` if a key names another cache.
    pub fn allocate(
        &self,
        desc: &CacheDesc,
        kind: CacheKind,
        keys: &[Option<CacheKey>],
    ) -> Result<Arc<Cache>> {
        self.allocate_with(None, desc, kind, keys, false)
    }

    fn allocate_with(
        &self,
        name: Option<&str>,
        desc: &CacheDesc,
        kind: CacheKind,
        keys: &[Option<CacheKey>],
        contiguous: bool,
    ) -> Result<Arc<Cache>> {
        self.timed(Op::Allocate, || {
            let (layout, keys) = validate::allocate(desc, kind, keys, self.has_pool(desc.placement))?;
            let (table, arena) = (&self.resources.table, self.resources.arena(desc.placement)?);
            // Before memory is taken. The table checks it again, because another call may take the name meanwhile.
            name.map_or(Ok(()), |name| table.check_name(name))?;
            let sizes = &layout.geometry;
            let tensors = if contiguous { arena.allocate_contiguous(sizes) } else { arena.allocate(sizes) };
            let tensors = tensors.map_err(|error| self.resources.with_released(error, desc.placement))?;
            table.allocate(name, &keys, desc, layout, tensors)
        })
    }

    /// Releases a cache by its id (contract §7.2, §7.4). An unknown id is not an error.
    pub fn deallocate(&self, id: CacheId) -> Result<()> {
        self.timed(Op::Deallocate, || {
            self.resources.table.deallocate(id);
            self.end_grants(id);
            Ok(())
        })
    }

    /// Unbinds a key (contract §7.5). An unknown key is not an error.
    pub fn remove_key(&self, key: CacheKey) -> Result<()> {
        self.timed(Op::RemoveKey, || {
            self.resources.table.remove_key(key);
            Ok(())
        })
    }

    /// Registers the caller's memory as a cache (contract §7.6, §7.7). If `remote_accessible` is `None`, the
    /// mode, the placement and earlier calls of [`link`](Self::link) decide whether peers may use the cache.
    pub fn register(
        &self,
        adopted: Adopted,
        keys: &[Option<CacheKey>],
        remote_accessible: Option<bool>,
    ) -> Result<Arc<Cache>> {
        self.register_with(None, adopted, keys, remote_accessible)
    }

    fn register_with(
        &self,
        name: Option<&str>,
        adopted: Adopted,
        keys: &[Option<CacheKey>],
        remote_accessible: Option<bool>,
    ) -> Result<Arc<Cache>> {
        self.timed(Op::Register, || {
            let table = &self.resources.table;
            let (placement, one_sided) =
                (adopted.layout().placement, self.resources.config.remote_accessible);
            let access = validate::accessible(remote_accessible, placement, one_sided, self.links.ranked())?;
            name.map_or(Ok(()), |name| table.check_name(name))?;
            if self.resources.config.huge_pages == HugeChoice::Eager {
                let deadline = self.deadline();
                adopted.merge(|| deadline.interruption("putting registered memory into huge pages"))?;
            }
            table.register(name, &validate::bindings(keys)?, adopted, access)
        })
    }

    /// Removes a registered cache (contract §7.8), and waits for the copies and transfers of this process
    /// that use it. The caller may free the memory once this succeeds. An unknown id is not an error.
    ///
    /// After `Err(Timeout)`, no other call finds the cache, and the same call waits again
    /// (`unregister_waits_each_time_while_the_cache_is_in_use`).
    pub fn unregister(&self, id: CacheId) -> Result<()> {
        self.timed(Op::Register, || {
            let Some(cache) = self.resources.table.unregister(id)? else { return Ok(()) };
            self.end_grants(id);
            unpinned(&cache, self.deadline())?;
            self.resources.table.forget_unregistered(id);
            Ok(())
        })
    }

    /// Releases a cache, allocated or registered: from now on no call and no peer finds it. An unknown id is not an error.
    ///
    /// The memory of an allocated cache returns to the pool by itself, so the transfer has ended, and there is no event. The transfer
    /// of a registered cache ends once no copy or transfer of this process uses its memory, which the caller may free once the
    /// transfer has succeeded. It fails with `Timeout` after `limit`, by default `sync_kv_timeout`. After an error, also `Err(Busy)`
    /// of this call, the cache is gone nevertheless, and the same call waits again.
    pub fn start_free(&self, id: CacheId, limit: Option<Duration>) -> Result<Arc<Transfer>> {
        let Some(registered) = self.resources.table.unregister(id)? else {
            self.deallocate(id)?;
            return Ok(Transfer::succeeded());
        };
        self.end_grants(id);
        let rows = all_rows(&registered)?;
        let resources = Arc::downgrade(&self.resources);
        let work = move |execution: &Arc<Execution>, deadline| {
            execution.pin(deadline)?;
            if let Some(resources) = resources.upgrade() {
                resources.table.forget_unregistered(id);
            }
            Ok(0)
        };
        self.start_work(Op::Register, self.own_class(), limit, (rows, Box::new(work)))
    }

    /// Returns the cache with this id.
    pub fn find(&self, id: CacheId) -> Result<Arc<Cache>> {
        self.resources.table.find(id)
    }

    /// Returns the cache and the row that a key names.
    #[cfg(feature = "testing")]
    pub fn find_key(&self, key: CacheKey) -> Result<(Arc<Cache>, u32)> {
        self.resources.table.find_key(key)
    }

    /// Returns at most `most` outcomes of transfers that the program has not taken yet, in the order in which they ended, and
    /// removes them from the queue. Never waits.
    pub fn poll(&self, most: usize) -> Result<Vec<Event>> {
        self.calls.queue().poll(most)
    }

    /// Returns the queue of events.
    pub fn events(&self) -> &Arc<EventQueue> {
        self.calls.queue()
    }

    /// Waits until no asynchronous call runs. Returns `false` once `limit` has passed, and `Err` only if interrupted.
    pub fn drain(&self, limit: Duration) -> Result<bool> {
        self.calls.drain(Deadline::after(limit).named("timeout").watched(self.interrupted))
    }

    /// Ends all asynchronous calls and layer-wise transfers with an error of kind `Closed` and refuses new ones, because the
    /// engine is about to be dropped. Other threads may still be in calls of the engine.
    pub fn end_transfers(&self) {
        self.tasks.close();
        self.calls.close();
    }

    /// Returns every counter, and the state of the pools, the table and the links.
    pub fn stats(&self) -> Snapshot {
        let (swap_in_direct, swap_in_ring) = self.resources.stats.swap_ins();
        let (verified_blocks, mismatched_blocks) = self.resources.stats.verified();
        let (plain_bytes, streaming_bytes) = self.resources.copy_engine.counted().bytes();
        Snapshot {
            device_pool: self.resources.pool(Placement::Device).map(|arena| self.report(arena)),
            host_pool: self.resources.pool(Placement::Host).map(|arena| self.report(arena)),
            table: self.resources.table.state(),
            ops: self.resources.stats.ops(),
            swap_in_direct,
            swap_in_ring,
            verified_blocks,
            mismatched_blocks,
            ring_bytes: self.resources.copy_engine.ring_bytes(),
            plain_bytes,
            streaming_bytes,
            copy_workers: self.resources.copy_engine.workers().count() as u64,
            ucx: self.fabric(),
            links: self.links.states(),
        }
    }

    fn fabric(&self) -> FabricState {
        let fabric = match &self.resources.fabric {
            Ok(fabric) => fabric,
            Err(reason) => return FabricState { reason: Some(reason.to_string()), ..FabricState::default() },
        };
        let (version, counts) = fabric.state();
        FabricState {
            version: Some(version),
            reason: None,
            reads: counts.reads,
            bytes: counts.bytes,
            failures: counts.failures,
            forced_closes: counts.forced_closes,
            renewals: counts.renewals,
        }
    }

    /// Returns whether there is a pool for memory of this placement.
    pub fn has_pool(&self, placement: Placement) -> bool {
        self.resources.pool(placement).is_some()
    }

    /// Starts work that calls no peer. Its limit is `sync_kv_timeout` if there is no `limit`.
    fn start_work(
        &self,
        op: impl Into<Option<Op>>,
        class: JobClass,
        limit: Option<Duration>,
        (rows, work): (CallRows, Work),
    ) -> Result<Arc<Transfer>> {
        let purpose = CallPurpose::new(op.into(), class, self.limited(Instant::now(), limit));
        self.calls.start(purpose, rows, work)
    }

    /// Ends the grants of a cache, if it was released.
    fn end_grants(&self, id: CacheId) {
        if self.resources.grants.live() > 0 && self.resources.table.find(id).is_err() {
            self.resources.grants.end_of_cache(id);
        }
    }

    fn report(&self, arena: &Arena) -> PoolReport {
        let region = arena.region();
        let merged = self.resources.merged(arena.placement());
        PoolReport {
            pool: arena.state(),
            released_bytes: self.resources.table.released(arena.placement()).0,
            huge_pages: region.huge_pages().name(),
            committed_bytes: region.committed_bytes(),
            merged_bytes: merged.bytes,
            merge_errno: merged.errno,
        }
    }

    /// Runs a call, which is counted with its duration. Its log lines name the engine.
    fn timed<T>(&self, op: Op, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let _here = self.resources.engine.on_this_thread();
        self.resources.stats.timed(op, call)
    }

    fn mode(&self) -> Mode {
        self.resources.config.mode
    }

    /// Returns the class of the jobs of calls within this engine.
    fn own_class(&self) -> JobClass {
        JobClass::Calls(self.resources.config.cluster)
    }

    /// Returns the deadline of a call on the calling thread without a limit of its own.
    fn deadline(&self) -> Deadline {
        self.deadline_since(Instant::now(), None)
    }

    /// Returns the deadline of a call on the calling thread, whose limit counts from `begin`.
    fn deadline_since(&self, begin: Instant, limit: Option<Duration>) -> Deadline {
        let deadline = self.limited(begin, limit).watched(self.interrupted);
        #[cfg(feature = "testing")]
        let deadline = deadline.over_when(self.over);
        deadline
    }

    /// Returns the deadline of a call on a thread of the engine, whose limit counts from `begin`.
    fn limited(&self, begin: Instant, limit: Option<Duration>) -> Deadline {
        let Config { native, sync_timeout, .. } = &self.resources.config;
        let deadline = Deadline::since(begin, limit.unwrap_or(*sync_timeout));
        match limit {
            // Calls of the original's API have no limit of their own.
            None if !*native => deadline,
            _ => deadline.named("timeout"),
        }
    }
}

impl std::fmt::Debug for DataDist {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataDist").field("cluster", &self.resources.config.cluster).finish_non_exhaustive()
    }
}

impl Drop for DataDist {
    fn drop(&mut self) {
        // Before anything is released, so that a peer that still maps this memory no longer trusts it.
        self.resources.table.retire();
        self.resources.grants.close();
        self.tasks.close();
        self.calls.close();
    }
}
