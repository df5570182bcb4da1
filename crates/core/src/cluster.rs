//! What one cluster owns: its pools, its table, its copy engine, its counters. Shared by its own calls and by those that
//! answer its peers.
//!
//! Not for: the operations users call (`datadist`) or peers ask for (`peer`).

use std::sync::Arc;

use crate::cache::{Cache, Origin, Table};
use crate::config::{Config, HugeChoice, PoolConfig};
use crate::copy::CopyEngine;
use crate::device::DeviceSet;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::huge_pages::Merger;
use crate::memory::{self, Generations, MapBudget};
use crate::model::Placement;
use crate::pool::Arena;
use crate::stats::Stats;

/// The state of one cluster.
#[derive(Debug)]
pub struct Cluster {
    /// What it was opened with.
    pub config: Config,
    /// Its caches and keys.
    pub table: Table,
    /// What moves its bytes.
    pub engine: CopyEngine,
    /// What it counts.
    pub stats: Stats,
    /// What puts its pools into huge pages.
    pub merger: Merger,
    /// What may be mapped of the memory of peers.
    pub remote_memory: Arc<MapBudget>,
    host: Option<Arc<Arena>>,
    device: Option<Arc<Arena>>,
    generations: Arc<Generations>,
}

/// Where the tensors of a cache lie, as far as another process can make use of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryLocation {
    /// At these offsets of the pool of this placement.
    Pool(Placement, Vec<u64>),
    /// At these addresses of this process.
    Process(Vec<u64>),
    /// Nowhere another process could look: memory of a device that the CPU cannot address.
    Hidden,
}

impl Cluster {
    /// Pools, table and workers of `config`, over `devices`. A device pool that is only a share gets its size here.
    pub fn open(mut config: Config, devices: DeviceSet) -> Result<Self> {
        if let (None, Some(share)) = (config.device_pool, config.device_share) {
            config.device_pool = Some(PoolConfig::about(share.of_bytes(memory::usable_bytes())));
        }
        let arena = |pool: Option<PoolConfig>, placement| {
            pool.map(|pool| Arena::open(devices.at(placement).as_ref(), pool, placement)).transpose()
        };
        let generations = Arc::new(Generations::new()?);
        let (host, device) =
            (arena(config.host_pool, Placement::Host)?, arena(config.device_pool, Placement::Device)?);
        let pools: Vec<_> = [&host, &device].into_iter().flatten().map(|arena| arena.shared()).collect();
        let engine = CopyEngine::new(&config, devices)?;
        let merger = match config.huge_pages {
            HugeChoice::Off => Merger::default(),
            HugeChoice::Auto => Merger::default().hinting(),
            HugeChoice::Merge => Merger::new(pools).hinting(),
            HugeChoice::MergeRegistered | HugeChoice::Eager => Merger::with_registered(pools),
        };
        if config.huge_pages == HugeChoice::Eager {
            merger.commit(&engine)?;
        }
        Ok(Cluster {
            host,
            device,
            table: Table::new(generations.clone()),
            engine,
            merger,
            stats: Stats::default(),
            remote_memory: MapBudget::new(config.links.remote_memory),
            generations,
            config,
        })
    }

    /// The pool of a placement, if there is one.
    #[must_use]
    pub fn pool(&self, placement: Placement) -> Option<&Arc<Arena>> {
        match placement {
            Placement::Host => self.host.as_ref(),
            Placement::Device => self.device.as_ref(),
        }
    }

    /// The pool of a placement.
    pub fn arena(&self, placement: Placement) -> Result<&Arc<Arena>> {
        let missing = || Error::new(ErrorKind::NotEnabled, format!("there is no {placement} pool"));
        self.pool(placement).ok_or_else(missing)
    }

    /// The generation of every place of the table.
    #[must_use]
    pub fn generations(&self) -> &Generations {
        &self.generations
    }

    /// `Err` if the memory of `cache` may have gone back to the caller, who has unregistered it meanwhile. Asked with its
    /// rows pinned, which `unregister` waits for.
    pub fn kept(&self, cache: &Cache) -> Result<()> {
        if cache.origin() == Origin::Registered { self.table.find(cache.id()).map(|_| ()) } else { Ok(()) }
    }

    /// Notes that a peer which can read what lies at `place` is told of it. If it reads through the kernel, and the memory
    /// is registered, huge pages double its speed: they are made, or hinted at, as `huge_pages` says.
    pub fn described_to_peer(&self, cache: &Cache, place: &MemoryLocation) {
        let through_kernel =
            cache.origin() == Origin::Registered && matches!(place, MemoryLocation::Process(_));
        if through_kernel && self.merger.lend(cache.id(), cache.tensors(), || self.kept(cache).is_ok()) {
            self.merger.look();
        }
    }

    /// Where another process finds the tensors of `cache`.
    pub fn memory_location(&self, cache: &Cache) -> Result<MemoryLocation> {
        /// What the list is for, should there be no memory for it.
        const TENSORS: &str = "the places of the tensors of a cache";
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
