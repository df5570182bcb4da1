//! The engine as its users see it. Each operation takes a few lines over the modules below.
//!
//! Decisions are made elsewhere: `validate` decides what is legal, `plan` where bytes go, and `copy` how they
//! move.

mod asynchronous;
mod call_extras;
mod cpp;
mod ensure_link;
mod grants;
mod group;
mod layerwise;
mod links;
mod transfer;

pub use asynchronous::CallOptions;
pub use call_extras::CallExtras;
pub use cpp::CacheIndex;
pub use ensure_link::EnsureOptions;
pub use group::GroupMember;
pub use layerwise::LayerReceiver;
pub use transfer::RemoteName;

use std::sync::Arc;

use crate::cache::{Cache, unpinned};
use crate::config::{Config, HugeChoice, Mode, Role};
use crate::copy::Staging;
use crate::device::DeviceSet;
use crate::error::Result;
use crate::events::EventQueue;
use crate::memory::{self, Adopted, Tensors};
use crate::model::{
    CacheDesc, CacheId, CacheKey, CacheKind, CacheLayout, Deadline, Geometry, MixedSizes, Placement, SubRow,
};
use crate::plan::Moves;
use crate::pool::Arena;
use crate::resources::Resources;
use crate::session::{Links, Transports};
use crate::stats::{FabricState, Op, PoolReport, Snapshot};
use crate::sync::Mutex;
use crate::token_file;
use crate::transfer::{AsyncCalls, Executor, GrantClock, LocalCopy, LocalMoves};
use crate::validate::{self, CopyArgs, Pools};

/// Calls with fewer blocks skip the check whether there is memory for their lists.
const MANY_BLOCKS: usize = 1 << 20;
/// Bytes per block that the lists of a call take while it runs: the request, the plan and the rows to pin
/// (`lists_of_a_call_take_what_is_asked_for`).
const BYTES_OF_A_BLOCK: u64 = 128;

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
#[derive(Debug)]
pub struct DataDist {
    // Fields are dropped in order: the links end before the state with which they answer, and the lanes end
    // with the layers that they push over the links.
    links: Links,
    lanes: Executor,
    calls: AsyncCalls,
    /// The transfers of every `CacheTask`. They have no events, and `drain` does not wait for them.
    tasks: AsyncCalls,
    grant_clock: Arc<GrantClock>,
    resources: Arc<Resources>,
    role: Mutex<Role>,
    interrupted: Option<fn() -> bool>,
    #[cfg(feature = "testing")]
    over: Option<&'static std::sync::atomic::AtomicBool>,
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
        config.links.token = token_file::token(&config.links)?;
        config.links.token_file = None;
        let resources = Arc::new(Resources::open(config, devices)?);
        let links = Links::open(resources.clone(), transports)?;
        let lanes = Executor::new(resources.config.transfer_poll);
        let calls = AsyncCalls::new(resources.events.clone(), lanes.handle(), Arc::downgrade(&resources));
        let unpolled = Arc::new(EventQueue::new(usize::MAX));
        let tasks = AsyncCalls::new(unpolled, lanes.handle(), Arc::downgrade(&resources));
        Ok(DataDist {
            links,
            grant_clock: GrantClock::new(lanes.handle(), &resources.grants),
            lanes,
            calls,
            tasks,
            role: Mutex::new(resources.config.role),
            resources,
            interrupted: None,
            #[cfg(feature = "testing")]
            over: None,
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
        self.allocate_with(desc, kind, keys, Arena::allocate, Arena::allocate_mixed)
    }

    /// Allocates a cache as [`allocate`](Self::allocate) does, but all tensors are one range of bytes: they follow one
    /// another in order, without gaps. Only the first one starts on a page boundary.
    ///
    /// Returns `Err(OutOfMemory)` if no free run of the pool is long enough.
    pub fn allocate_contiguous(
        &self,
        desc: &CacheDesc,
        kind: CacheKind,
        keys: &[Option<CacheKey>],
    ) -> Result<Arc<Cache>> {
        self.allocate_with(desc, kind, keys, Arena::allocate_contiguous, |_, _| {
            Err(validate::contiguous_mixed())
        })
    }

    fn allocate_with(
        &self,
        desc: &CacheDesc,
        kind: CacheKind,
        keys: &[Option<CacheKey>],
        allocate: fn(&Arc<Arena>, &Geometry) -> Result<Tensors>,
        mixed: fn(&Arc<Arena>, &Arc<MixedSizes>) -> Result<Tensors>,
    ) -> Result<Arc<Cache>> {
        self.resources.stats.timed(Op::Allocate, || {
            let pools = Pools {
                host: self.resources.pool(Placement::Host).is_some(),
                device: self.resources.pool(Placement::Device).is_some(),
            };
            let request = validate::allocate(desc, kind, keys, pools)?;
            let arena = self.resources.arena(desc.placement)?;
            let tensors = match &request.mixed {
                Some(sizes) => mixed(arena, sizes),
                None => allocate(arena, &request.layout.geometry),
            };
            let tensors = tensors.map_err(|error| self.resources.with_released(error, desc.placement))?;
            self.resources.table.allocate(desc, request.layout, tensors, &request.keys)
        })
    }

    /// Releases a cache by its id (contract §7.2, §7.4). An unknown id is not an error.
    pub fn deallocate(&self, id: CacheId) -> Result<()> {
        self.resources.stats.timed(Op::Deallocate, || {
            self.resources.table.deallocate(id);
            self.end_grants(id);
            Ok(())
        })
    }

    /// Unbinds a key (contract §7.5). An unknown key is not an error.
    pub fn remove_key(&self, key: CacheKey) -> Result<()> {
        self.resources.stats.timed(Op::RemoveKey, || {
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
        self.resources.stats.timed(Op::Register, || {
            let (placement, one_sided) =
                (adopted.layout().placement, self.resources.config.remote_accessible);
            let access = validate::accessible(remote_accessible, placement, one_sided, self.links.ranked())?;
            if self.resources.config.huge_pages == HugeChoice::Eager {
                let deadline = self.deadline();
                adopted.merge(|| deadline.interruption("putting registered memory into huge pages"))?;
            }
            self.resources.table.register(adopted, &validate::bindings(keys)?, access)
        })
    }

    /// Removes a registered cache (contract §7.8), and waits for the copies and transfers of this process
    /// that use it. The caller may free the memory once this succeeds. An unknown id is not an error.
    ///
    /// After `Err(Timeout)`, no other call finds the cache, and the same call waits again
    /// (`unregister_waits_each_time_while_the_cache_is_in_use`).
    pub fn unregister(&self, id: CacheId) -> Result<()> {
        self.resources.stats.timed(Op::Register, || {
            let Some(cache) = self.resources.table.unregister(id)? else { return Ok(()) };
            self.end_grants(id);
            unpinned(&cache, self.deadline())?;
            self.resources.table.forget_unregistered(id);
            Ok(())
        })
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

    /// Copies one range of one batch slot, the same range in every tensor (contract §7.9).
    pub fn copy_cache(&self, dst: &End, src: &End, args: CopyArgs) -> Result<()> {
        let checked = match self.mode() {
            Mode::CacheManager => validate::copy_cache,
            Mode::KvCacheManager => validate::copy_on_device,
        };
        self.copy_range(src, dst, args, checked)
    }

    /// Does `CopyKvCache` of the original's documentation (`CopyKvCache.md`): as
    /// [`copy_cache`](Self::copy_cache), but only from device to device or host, and with the source as the
    /// first argument.
    pub fn copy_kv_cache(&self, src: &End, dst: &End, args: CopyArgs) -> Result<()> {
        self.copy_range(src, dst, args, validate::copy_kv_cache)
    }

    /// Copies blocks within one cache, with the result of copying the pairs in the given order (contract
    /// §7.10). Without pairs, it does nothing.
    pub fn copy_blocks(&self, cache: &End, pairs: &[(i64, i64)]) -> Result<()> {
        self.copy_sub_rows(cache, pairs, SubRow::default())
    }

    /// Copies a part of every block; otherwise like [`copy_blocks`](Self::copy_blocks). The byte ranges of a block that are
    /// read and written must be equal or disjoint.
    pub fn copy_sub_rows(&self, cache: &End, pairs: &[(i64, i64)], part: SubRow) -> Result<()> {
        self.resources.stats.timed(Op::CopyBlocks, || {
            let deadline = self.deadline();
            let (cache, moves) = self.checked_copy_blocks(cache, pairs, part)?;
            self.run(Op::CopyBlocks, (cache.clone(), cache), moves, Staging::DEFAULT, deadline)
        })
    }

    fn checked_copy_blocks(
        &self,
        cache: &End,
        pairs: &[(i64, i64)],
        part: SubRow,
    ) -> Result<(Arc<Cache>, LocalMoves)> {
        room_for_lists(pairs.len())?;
        let cache = self.resolve(cache)?;
        let check = match self.mode() {
            Mode::CacheManager => validate::copy_blocks,
            Mode::KvCacheManager => validate::copy_rows,
        };
        let moves = LocalMoves::checked(&cache, &cache, |cache, _| check(cache, pairs, part))?;
        Ok((cache, moves))
    }

    /// Copies blocks between a host cache and a device cache; the placements give the direction (contract
    /// §7.11). Without pairs, it does nothing.
    pub fn swap_blocks(&self, src: &End, dst: &End, pairs: &[(i64, i64)]) -> Result<()> {
        self.swap_sub_rows(src, dst, pairs, SubRow::default())
    }

    /// Swaps a part of every block; otherwise like [`swap_blocks`](Self::swap_blocks). With a part, the blocks of both caches
    /// may have different sizes.
    pub fn swap_sub_rows(&self, src: &End, dst: &End, pairs: &[(i64, i64)], part: SubRow) -> Result<()> {
        let deadline = self.deadline();
        let (src, dst) = (self.resolve(src), self.resolve(dst));
        // A call that names an unknown cache is counted as well, by the end that is known.
        let into_device = match (&src, &dst) {
            (Ok(src), _) => src.placement() == Placement::Host,
            (Err(_), Ok(dst)) => dst.placement() == Placement::Device,
            (Err(_), Err(_)) => false,
        };
        let op = if into_device { Op::SwapIn } else { Op::SwapOut };
        self.resources.stats.timed(op, || {
            let (src, dst) = (src?, dst?);
            let (moves, staging) = self.checked_swap((&src, &dst), pairs, part)?;
            self.run(op, (src, dst), moves, staging, deadline)
        })
    }

    fn checked_swap(
        &self,
        (src, dst): (&Cache, &Cache),
        pairs: &[(i64, i64)],
        part: SubRow,
    ) -> Result<(LocalMoves, Staging)> {
        room_for_lists(pairs.len())?;
        let check = match self.mode() {
            Mode::CacheManager => validate::swap_blocks,
            Mode::KvCacheManager => validate::swap_rows,
        };
        let moves = LocalMoves::checked(src, dst, |src, dst| check(src, dst, pairs, part))?;
        rows_alike(src, dst)?;
        let buffer_bytes = src.longest_row();
        Ok((moves, Staging { path: self.resources.config.swap_in, buffer_bytes }))
    }

    /// Returns every counter, and the state of the pools, the table and the links.
    pub fn stats(&self) -> Snapshot {
        let (swap_in_direct, swap_in_ring) = self.resources.stats.swap_ins();
        let (verified_blocks, mismatched_blocks) = self.resources.stats.verified();
        let (plain_bytes, streaming_bytes) = self.resources.copy_engine.tuner().bytes();
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
            copy_workers: self.resources.copy_engine.workers() as u64,
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

    /// Measures the bytes of a placement's pool that lie in huge pages; 0 without such a pool. This is slow
    /// (`Region::huge_bytes`).
    pub fn huge_bytes(&self, placement: Placement) -> u64 {
        self.resources.pool(placement).map_or(0, |arena| arena.region().huge_bytes())
    }

    /// Ends the grants of a cache, if it was released.
    fn end_grants(&self, id: CacheId) {
        if self.resources.grants.live() > 0 && self.resources.table.find(id).is_err() {
            self.resources.grants.end_of_cache(id);
        }
    }

    fn copy_range(
        &self,
        src: &End,
        dst: &End,
        args: CopyArgs,
        checked: fn(CacheLayout, CacheLayout, CopyArgs) -> Result<Moves>,
    ) -> Result<()> {
        self.resources.stats.timed(Op::CopyCache, || {
            let deadline = self.deadline();
            let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
            let moves = LocalMoves::of_slots(&src, &dst, args, checked)?;
            rows_alike(&src, &dst)?;
            self.run(Op::CopyCache, (src, dst), moves, Staging::DEFAULT, deadline)
        })
    }

    fn run(
        &self,
        op: Op,
        (src, dst): (Arc<Cache>, Arc<Cache>),
        moves: impl Into<LocalMoves>,
        staging: Staging,
        deadline: Deadline,
    ) -> Result<()> {
        let moves = moves.into();
        LocalCopy { resources: self.resources.clone(), op, src, dst, staging }.run(moves, deadline).map(drop)
    }

    fn resolve(&self, end: &End) -> Result<Arc<Cache>> {
        match end {
            End::Managed(id) => self.resources.table.find(*id),
            End::Loose(cache) => Ok(cache.clone()),
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

    fn mode(&self) -> Mode {
        self.resources.config.mode
    }

    fn deadline(&self) -> Deadline {
        let deadline = Deadline::after(self.resources.config.sync_timeout).watched(self.interrupted);
        #[cfg(feature = "testing")]
        let deadline = deadline.over_when(self.over);
        deadline
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

/// Checks that a copy or swap between caches of this engine keeps the meaning of the rows.
fn rows_alike(src: &Cache, dst: &Cache) -> Result<()> {
    validate::local_rows_alike(src.kv().map(|kv| &**kv), dst.kv().map(|kv| &**kv))
}

/// Returns `Err(OutOfMemory)` if the lists of a call with this many blocks need more memory than this process
/// may use now. Calls with few blocks skip the check, because it takes longer than copying them.
fn room_for_lists(blocks: usize) -> Result<()> {
    if blocks < MANY_BLOCKS {
        return Ok(());
    }
    memory::refuse_beyond_room("the lists of this call", (blocks as u64).saturating_mul(BYTES_OF_A_BLOCK))
}
