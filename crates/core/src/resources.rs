//! What one engine owns: its pools, cache table, copy engine and counters. The calls of the local program
//! and the threads that serve its peers share it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cache::{Cache, Origin, Resolved, Table};
use crate::config::{Config, HugeChoice, PoolConfig};
use crate::copy::CopyEngine;
use crate::device::DeviceSet;
use crate::error::{Error, ErrorKind, Result};
use crate::events::EventQueue;
use crate::fabric::{EngineFabric, Readable};
use crate::fallible;
use crate::grants::{self, Grants};
use crate::huge_pages::{Merged, SmallPageHint, commit_pools};
use crate::memory::{self, Generations, MapBudget};
use crate::model::{GrantEnd, Name, Placement};
use crate::pool::Arena;
use crate::stats::Stats;
use crate::threads::EngineNumber;

/// What one engine owns.
#[derive(Debug)]
pub struct Resources {
    pub(crate) engine: EngineNumber,
    pub config: Config,
    pub table: Table,
    pub copy_engine: CopyEngine,
    pub stats: Stats,
    /// Limit on the address space for memory of peers that is mapped here.
    pub remote_memory: Arc<MapBudget>,
    pub outgoing_calls: OutgoingCalls,
    pub events: Arc<EventQueue>,
    pub grants: Arc<Grants>,
    /// UCX, if links between hosts may use it. Dropped before the pools that it has mapped.
    pub fabric: Readable<EngineFabric>,
    host: Option<Arc<Arena>>,
    device: Option<Arc<Arena>>,
    /// What was merged of the host pool and of the device pool when they were committed.
    merged: [Merged; 2],
    /// Present if the engine leaves registered memory alone but may log a hint about it.
    small_page_hint: Option<SmallPageHint>,
    generations: Arc<Generations>,
}

/// Name of the lists of tensors in out-of-memory errors.
const TENSORS: &str = "the places of the tensors of a cache";

/// Location of the tensors of a cache, in a form that another process can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryLocation {
    /// At these offsets, in bytes, of the pool with this placement.
    Pool(Placement, Vec<u64>),
    /// At these addresses of this process.
    Process(Vec<u64>),
    /// In memory that another process cannot read: device memory that the CPU cannot address.
    Hidden,
}

/// Counts the calls of this engine to peers, from before they wait for a row until they end.
///
/// While there is one, requests of peers pass calls that only wait (see `cache::pins`).
#[derive(Clone, Debug, Default)]
pub struct OutgoingCalls(Arc<AtomicUsize>);

/// A call to a peer; it ends on drop.
#[derive(Debug)]
pub struct OutgoingCall(OutgoingCalls);

impl OutgoingCalls {
    /// Counts a call until the result is dropped.
    pub fn begin(&self) -> OutgoingCall {
        self.0.fetch_add(1, Ordering::SeqCst);
        OutgoingCall(self.clone())
    }

    /// Whether there is a call.
    pub fn any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

impl Drop for OutgoingCall {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Resources {
    /// Opens pools, table and workers for `config` on `devices`. If the device pool is given as a share, this
    /// computes its size.
    pub(crate) fn open(engine: EngineNumber, mut config: Config, devices: DeviceSet) -> Result<Self> {
        if let (None, Some(share)) = (config.device_pool, config.device_share) {
            config.device_pool = Some(PoolConfig::about(share.of_bytes(memory::usable_bytes())));
        }
        let arena = |pool: Option<PoolConfig>, placement| {
            pool.map(|pool| Arena::open(devices.at(placement).as_ref(), pool, placement)).transpose()
        };
        let generations = Arc::new(Generations::new()?);
        let (host, device) =
            (arena(config.host_pool, Placement::Host)?, arena(config.device_pool, Placement::Device)?);
        let regions = [&host, &device].map(|arena| arena.as_ref().map(|arena| arena.shared()));
        let copy_engine = CopyEngine::of_process(engine, &config, devices);
        let eager = config.huge_pages == HugeChoice::Eager;
        let merged =
            if eager { commit_pools(regions.clone(), &copy_engine)? } else { <[Merged; 2]>::default() };
        let small_page_hint = (config.huge_pages == HugeChoice::Auto).then(SmallPageHint::default);
        let fabric = EngineFabric::open(&config.links.fabric, config.links.token.is_some(), regions)?;
        let events = Arc::new(EventQueue::new(config.max_transfers));
        if config.native {
            events.keep_news();
        }
        Ok(Resources {
            engine,
            fabric,
            host,
            device,
            table: Table::new(generations.clone()),
            merged,
            small_page_hint,
            copy_engine,
            stats: Stats::default(),
            remote_memory: MapBudget::new(config.links.remote_memory),
            outgoing_calls: OutgoingCalls::default(),
            grants: Grants::new(generations.clone(), events.clone())?,
            events,
            generations,
            config,
        })
    }

    pub fn pool(&self, placement: Placement) -> Option<&Arc<Arena>> {
        match placement {
            Placement::Host => self.host.as_ref(),
            Placement::Device => self.device.as_ref(),
        }
    }

    /// Returns what was merged of the pool with a placement when it was committed.
    pub fn merged(&self, placement: Placement) -> Merged {
        let [host, device] = self.merged;
        match placement {
            Placement::Host => host,
            Placement::Device => device,
        }
    }

    /// Returns the pool with a placement; `Err(NotEnabled)` if there is none.
    pub fn arena(&self, placement: Placement) -> Result<&Arc<Arena>> {
        let missing = || Error::new(ErrorKind::NotEnabled, format!("there is no {placement} pool"));
        self.pool(placement).ok_or_else(missing)
    }

    /// Adds to an error of a pool without room how many bytes released caches still take, if there are any.
    pub fn with_released(&self, error: Error, placement: Placement) -> Error {
        let (bytes, count) = self.table.released(placement);
        if bytes == 0 || error.kind() != ErrorKind::OutOfMemory {
            return error;
        }
        let text = "; released caches are still used by arrays, views or running calls: delete the arrays and views to free \
                    their memory";
        error.with_text(text).with("released_bytes", bytes).with("released_caches", count)
    }

    /// Resolves a name that a peer sent to a cache and a row. Returns `Err(CacheNotFound)` if there is no such cache, key or
    /// row, and `Err(GrantEnded)` if the grant that it names has ended.
    pub fn resolve(&self, name: Name) -> Result<Resolved> {
        let Name::Grant(id) = name else { return self.table.describe(name) };
        let cache = self.grants.find(&id)?.cache();
        // A released cache leaves the table before its grants end.
        self.table.describe(Name::Row { cache, row: 0 }).map_err(|_| grants::ended(Some(GrantEnd::Released)))
    }

    /// Returns the generation numbers of all entries of the table.
    pub fn generations(&self) -> &Generations {
        &self.generations
    }

    /// Checks that the memory of `cache` still belongs to the engine. `Err` if the cache is registered memory
    /// that the program has unregistered in the meantime. The caller must hold pins on the rows, for which
    /// `unregister` waits.
    ///
    /// It is for calls that waited for their rows when the program unregistered the cache: they fail instead of
    /// using the memory (`unregistered_memory_is_not_touched_by_waiting_calls`). Calls that start later do not
    /// get the rows.
    pub fn still_registered(&self, cache: &Cache) -> Result<()> {
        if cache.origin() == Origin::Registered { self.table.find(cache.id()).map(|_| ()) } else { Ok(()) }
    }

    /// Records that the description of `cache` is sent to a peer that can read `location`.
    ///
    /// If the peer reads registered memory by process id, huge pages double its speed. The engine then logs a
    /// hint if `huge_pages` is `auto`.
    pub fn described_to_peer(&self, cache: &Cache, location: &MemoryLocation) {
        let through_kernel =
            cache.origin() == Origin::Registered && matches!(location, MemoryLocation::Process(_));
        if let Some(hint) = self.small_page_hint.as_ref().filter(|_| through_kernel) {
            hint.described_to_peer(cache.id(), cache.tensors());
        }
    }

    /// Returns where another process finds the tensors of `cache`. `Err(OutOfMemory)` if the list cannot be
    /// allocated.
    pub fn memory_location(&self, cache: &Cache) -> Result<MemoryLocation> {
        if !cache.tensors().host_addressable() {
            return Ok(MemoryLocation::Hidden);
        }
        Ok(match (cache.origin(), self.pool(cache.placement())) {
            (Origin::Allocated, Some(arena)) => {
                let base = arena.region().base();
                let offsets = fallible::collect(TENSORS, cache.addrs().iter().map(|addr| addr - base))?;
                MemoryLocation::Pool(cache.placement(), offsets)
            }
            _ => MemoryLocation::Process(fallible::copied(TENSORS, cache.addrs())?),
        })
    }
}
