//! The engine as its users see it: every operation, each a few lines over the rooms below.
//!
//! Not for: decisions. What is legal is decided in `check`, where bytes go in `plan`, how they move in `engine`.

mod cpp;
mod layerwise;
mod links;
mod transfer;

pub use transfer::{CacheIndex, RemoteName};

use std::sync::{Arc, Mutex, Weak};

use crate::cache::{Cache, pin, unpinned};
use crate::cluster::Cluster;
use crate::config::{Config, HugeChoice, Mode, Role};
use crate::copy::{Limit, Staging};
use crate::device::DeviceSet;
use crate::error::Result;
use crate::fallible;
use crate::memory::{self, Adopted};
use crate::model::{CacheDesc, CacheId, CacheKey, CacheKind, Deadline, Placement};
use crate::plan::{CopyPlan, CopyRange, Ends};
use crate::pool::Arena;
use crate::session::{Answers, Links, Transports};
use crate::stats::{Op, PoolReport, Snapshot};
use crate::token_file;
use crate::transfer::{Executor, Task};
use crate::validate::{self, CopyArgs, Pools};

/// Calls that name fewer blocks do not ask whether there is memory for their lists.
const MANY_BLOCKS: usize = 1 << 20;
/// Bytes that the lists of a call take for each block, while it runs: the request, the plan and the rows to pin
/// (`lists_of_a_call_take_what_is_asked_for`).
const BYTES_OF_A_BLOCK: u64 = 128;

/// One end of a copy as the caller names it.
#[derive(Clone, Debug)]
pub enum End {
    /// A cache of this engine.
    Managed(CacheId),
    /// A handle: a cache over the caller's memory that no engine knows, or, of a copy, one that was looked up already.
    Loose(Arc<Cache>),
}

/// An open engine. Shared by any number of threads; dropped, its links end, and it gives everything back once the last
/// copy has ended.
#[derive(Debug)]
pub struct DataDist {
    // First, so that links end before what they answer with goes, and lanes with what they carry over them.
    links: Links,
    lanes: Executor,
    /// Transfers that may be under way.
    tasks: Mutex<Vec<Weak<Task>>>,
    cluster: Arc<Cluster>,
    role: Mutex<Role>,
    interrupted: Option<fn() -> bool>,
    #[cfg(feature = "testing")]
    over: Option<&'static std::sync::atomic::AtomicBool>,
}

impl DataDist {
    /// Opens an engine over host memory, and a listener if the configuration names an address. The pools of `config`
    /// cost address space only until they are touched.
    pub fn open(config: Config) -> Result<Self> {
        Self::open_on(config, DeviceSet::host_only())
    }

    /// Opens an engine over `devices`.
    pub fn open_on(config: Config, devices: DeviceSet) -> Result<Self> {
        Self::open_with(config, devices, Transports::default())
    }

    /// Opens an engine over `devices` whose streams are those of `transports`.
    #[cfg(feature = "testing")]
    pub fn open_over(config: Config, devices: DeviceSet, transports: Transports) -> Result<Self> {
        Self::open_with(config, devices, transports)
    }

    fn open_with(mut config: Config, devices: DeviceSet, transports: Transports) -> Result<Self> {
        config.links.token = token_file::token(&config.links)?;
        config.links.token_file = None;
        let cluster = Arc::new(Cluster::open(config, devices)?);
        let links = Links::open(cluster.clone(), Box::new(Answers::new(cluster.clone())), transports)?;
        Ok(DataDist {
            links,
            lanes: Executor::default(),
            tasks: Mutex::default(),
            role: Mutex::new(cluster.config.role),
            cluster,
            interrupted: None,
            #[cfg(feature = "testing")]
            over: None,
        })
    }

    /// The same engine, whose calls ask `interrupted` now and then while they wait, on their own thread, whether they
    /// shall end early.
    #[must_use]
    pub fn interrupted_by(mut self, interrupted: fn() -> bool) -> Self {
        self.interrupted = Some(interrupted);
        self
    }

    /// The same engine, whose calls find their limit passed once `over` is set, and before that never early.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn over_when(mut self, over: &'static std::sync::atomic::AtomicBool) -> Self {
        self.over = Some(over);
        self
    }

    /// What it was opened with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.cluster.config
    }

    /// Takes memory for a cache from the pool of its placement, and binds `keys`, one per row; `None` leaves a row
    /// without a key (seed `deprecated.md`, `allocate_cache`).
    pub fn allocate(
        &self,
        desc: &CacheDesc,
        kind: CacheKind,
        keys: &[Option<CacheKey>],
    ) -> Result<Arc<Cache>> {
        self.cluster.stats.timed(Op::Allocate, || {
            let pools = Pools {
                host: self.cluster.pool(Placement::Host).is_some(),
                device: self.cluster.pool(Placement::Device).is_some(),
            };
            let request = validate::allocate(desc, kind, keys, pools)?;
            let tensors = self.cluster.arena(desc.placement)?.allocate(&request.side.geometry)?;
            // What was allocated before has been touched since, perhaps by the caller's own code.
            self.cluster.merger.moved(request.side.geometry.bytes());
            self.cluster.table.allocate(desc, request.side, tensors, &request.keys)
        })
    }

    /// Lets go of a cache by id (seed `deprecated.md`, `deallocate_cache`). Never fails for what is not there.
    pub fn deallocate(&self, id: CacheId) -> Result<()> {
        self.cluster.stats.timed(Op::Deallocate, || {
            self.cluster.table.deallocate(id);
            Ok(())
        })
    }

    /// Unbinds a key (seed `deprecated.md`, `remove_cache_key`). Never fails for what is not there.
    pub fn remove_key(&self, key: CacheKey) -> Result<()> {
        self.cluster.stats.timed(Op::RemoveKey, || {
            self.cluster.table.remove_key(key);
            Ok(())
        })
    }

    /// Enters the caller's memory as a cache (contract §7.6, §7.7). Whether peers may reach it follows from the mode
    /// where `remote_accessible` does not say.
    pub fn register(
        &self,
        adopted: Adopted,
        keys: &[Option<CacheKey>],
        remote_accessible: Option<bool>,
    ) -> Result<Arc<Cache>> {
        self.cluster.stats.timed(Op::Register, || {
            let (placement, one_sided) = (adopted.side().placement, self.cluster.config.remote_accessible);
            let access = validate::accessible(remote_accessible, placement, one_sided, self.links.ranked())?;
            if self.cluster.config.huge_pages == HugeChoice::Eager {
                let deadline = self.deadline();
                adopted.merge(|| deadline.interruption("putting registered memory into huge pages"))?;
            }
            self.cluster.table.register(adopted, &validate::bindings(keys)?, access)
        })
    }

    /// Removes a registered cache (contract §7.8), and waits for the copies and transfers of this process that use
    /// it: its memory may go away once this succeeds. After a timeout it has left for all other calls, and the same call
    /// waits again (`a_cache_that_is_still_used_is_waited_for_again`). Never fails for what is not there.
    pub fn unregister(&self, id: CacheId) -> Result<()> {
        self.cluster.stats.timed(Op::Register, || {
            let Some(cache) = self.cluster.table.unregister(id)? else { return Ok(()) };
            self.cluster.merger.give_back(id);
            unpinned(&cache, self.deadline())?;
            self.cluster.table.left(id);
            Ok(())
        })
    }

    /// The cache of an id.
    pub fn find(&self, id: CacheId) -> Result<Arc<Cache>> {
        self.cluster.table.find(id)
    }

    /// The cache and the row a key names.
    pub fn find_key(&self, key: CacheKey) -> Result<(Arc<Cache>, u32)> {
        self.cluster.table.find_key(key)
    }

    /// Copies one range of one batch slot, the same in every tensor (seed `copy_cache.md`).
    pub fn copy_cache(&self, dst: &End, src: &End, args: CopyArgs) -> Result<()> {
        let checked = match self.mode() {
            Mode::CacheManager => validate::copy_cache,
            Mode::KvCacheManager => validate::copy_on_device,
        };
        self.copy_range(src, dst, args, checked)
    }

    /// The seed's `CopyKvCache`: as [`copy_cache`](Self::copy_cache), device to device and device to host only, and the
    /// source first (seed `CopyKvCache.md`).
    pub fn copy_kv_cache(&self, src: &End, dst: &End, args: CopyArgs) -> Result<()> {
        self.copy_range(src, dst, args, validate::copy_kv_cache)
    }

    /// Copies blocks inside one cache, with the result of copying the pairs in the order given (seed `deprecated.md`,
    /// `copy_blocks`). No pairs: nothing to do.
    pub fn copy_blocks(&self, cache: &End, pairs: &[(i64, i64)]) -> Result<()> {
        self.cluster.stats.timed(Op::CopyBlocks, || {
            let deadline = self.deadline();
            room_for_lists(pairs.len())?;
            let cache = self.resolve(cache)?;
            let request = match self.mode() {
                Mode::CacheManager => validate::copy_blocks(cache.side(), pairs),
                Mode::KvCacheManager => validate::copy_rows(cache.side(), pairs),
            }?;
            let plan = CopyPlan::blocks(&request, Ends::OneCache)?;
            self.run(Op::CopyBlocks, (&cache, &cache), request.pairs, plan, Staging::DEFAULT, deadline)
        })
    }

    /// Moves blocks between a host and a device cache; the placements give the direction (seed `deprecated.md`,
    /// `swap_blocks`). No pairs: nothing to do.
    pub fn swap_blocks(&self, src: &End, dst: &End, pairs: &[(i64, i64)]) -> Result<()> {
        let deadline = self.deadline();
        let (src, dst) = (self.resolve(src), self.resolve(dst));
        // A call that names an unknown cache is counted as well, by the end that is known.
        let into_device = match (&src, &dst) {
            (Ok(src), _) => src.placement() == Placement::Host,
            (Err(_), Ok(dst)) => dst.placement() == Placement::Device,
            (Err(_), Err(_)) => false,
        };
        let op = if into_device { Op::SwapIn } else { Op::SwapOut };
        self.cluster.stats.timed(op, || {
            let (src, dst) = (src?, dst?);
            room_for_lists(pairs.len())?;
            let request = match self.mode() {
                Mode::CacheManager => validate::swap_blocks(src.side(), dst.side(), pairs),
                Mode::KvCacheManager => validate::swap_rows(src.side(), dst.side(), pairs),
            }?;
            let plan = CopyPlan::blocks(&request, Ends::TwoCaches)?;
            let staging = Staging { path: self.cluster.config.swap_in, buffer_bytes: request.block_bytes };
            self.run(op, (&src, &dst), request.pairs, plan, staging, deadline)
        })
    }

    /// Every counter, and the state of pools and table.
    #[must_use]
    pub fn stats(&self) -> Snapshot {
        let (swap_in_direct, swap_in_ring) = self.cluster.stats.swap_ins();
        let (plain_bytes, streaming_bytes) = self.cluster.engine.tuner().bytes();
        Snapshot {
            device_pool: self.cluster.pool(Placement::Device).map(|arena| self.report(arena)),
            host_pool: self.cluster.pool(Placement::Host).map(|arena| self.report(arena)),
            table: self.cluster.table.state(),
            ops: self.cluster.stats.ops(),
            swap_in_direct,
            swap_in_ring,
            ring_bytes: self.cluster.engine.ring_bytes(),
            registered_merged_bytes: self.cluster.merger.lent_bytes(),
            plain_bytes,
            streaming_bytes,
            copy_workers: self.cluster.engine.workers() as u64,
            links: self.links.states(),
        }
    }

    /// Bytes of the pool of a placement that lie in huge pages, measured now; 0 without such a pool. Slow: see
    /// [`Region::huge_bytes`](crate::memory::Region::huge_bytes).
    #[must_use]
    pub fn huge_bytes(&self, placement: Placement) -> u64 {
        self.cluster.pool(placement).map_or(0, |arena| arena.region().huge_bytes())
    }

    fn copy_range(
        &self,
        src: &End,
        dst: &End,
        args: CopyArgs,
        checked: fn(validate::Side, validate::Side, CopyArgs) -> Result<CopyRange>,
    ) -> Result<()> {
        self.cluster.stats.timed(Op::CopyCache, || {
            let deadline = self.deadline();
            let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
            let range = checked(src.side(), dst.side(), args)?;
            let plan = CopyPlan::range(&range, ends(&src, &dst))?;
            let rows = vec![(range.src_row, range.dst_row)];
            self.run(Op::CopyCache, (&src, &dst), rows, plan, Staging::DEFAULT, deadline)
        })
    }

    /// Pins both ends, moves the bytes, counts them.
    fn run(
        &self,
        op: Op,
        (src, dst): (&Arc<Cache>, &Arc<Cache>),
        rows: Vec<(u64, u64)>,
        plan: CopyPlan,
        staging: Staging,
        deadline: Deadline,
    ) -> Result<()> {
        if plan.waves().is_empty() {
            return Ok(());
        }
        let what = "the lists of a request";
        let reads = fallible::collect(what, rows.iter().map(|row| row.0))?;
        let writes = fallible::collect(what, rows.iter().map(|row| row.1))?;
        drop(rows);
        let _pins = pin((src, reads), (dst, writes), deadline)?;
        self.cluster.kept(src)?;
        self.cluster.kept(dst)?;
        let ends = ((src.tensors(), src.placement()), (dst.tensors(), dst.placement()));
        let outcome = self.cluster.engine.run(
            plan,
            ends.0,
            ends.1,
            staging,
            Limit::Start(deadline),
            &Arc::default(),
        )?;
        self.cluster.stats.moved(op, &outcome);
        self.cluster.merger.moved(outcome.bytes);
        Ok(())
    }

    fn resolve(&self, end: &End) -> Result<Arc<Cache>> {
        match end {
            End::Managed(id) => self.cluster.table.find(*id),
            End::Loose(cache) => Ok(cache.clone()),
        }
    }

    fn report(&self, arena: &Arena) -> PoolReport {
        let region = arena.region();
        let merged = self.cluster.merger.merged(region);
        PoolReport {
            pool: arena.state(),
            huge_pages: region.huge_pages().name(),
            committed_bytes: region.committed_bytes(),
            merged_bytes: merged.bytes,
            merge_errno: merged.errno,
        }
    }

    fn mode(&self) -> Mode {
        self.cluster.config.mode
    }

    fn deadline(&self) -> Deadline {
        let deadline = Deadline::after(self.cluster.config.sync_timeout).watched(self.interrupted);
        #[cfg(feature = "testing")]
        let deadline = deadline.over_when(self.over);
        deadline
    }
}

impl Drop for DataDist {
    fn drop(&mut self) {
        // Before anything is given back: no peer that still sees this memory trusts it any more.
        self.cluster.table.retire();
        self.close_tasks();
        self.cluster.merger.close();
    }
}

/// `Err` if a call that names so many blocks would take more memory for its lists than this process may use now. Few are
/// not asked about: the question takes longer than copying them.
fn room_for_lists(blocks: usize) -> Result<()> {
    if blocks < MANY_BLOCKS {
        return Ok(());
    }
    memory::refuse_beyond_room("the lists of this call", (blocks as u64).saturating_mul(BYTES_OF_A_BLOCK))
}

fn ends(src: &Arc<Cache>, dst: &Arc<Cache>) -> Ends {
    if Arc::ptr_eq(src, dst) { Ends::OneCache } else { Ends::TwoCaches }
}
